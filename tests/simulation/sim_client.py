"""A client process of the simulation: drives the real plans of `kvstore.client` in virtual time.

Owns the connections of one life and the calls that run in it. What the calls are about is
`workload`'s to choose; how bytes move is in `client_moves` and
`reader_moves`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.client import steps as plans
from kvstore.client.namespaces import OpenedNamespace
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from tests.simulation.channel import HANDSHAKE_TIMEOUT_S, Channel, Dial, dial
from tests.simulation.pages import HALVES, NAMED, WHOLE
from tests.simulation.rpc import Endpoint
from tests.simulation.sim_link import SimLink
from tests.simulation.tasks import Signal, Steps
from tests.simulation.worker_links import Greeting

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.namespace import Namespace
    from kvstore.wire.messages.base import Message
    from tests.simulation.checks import Checks
    from tests.simulation.client_moves import Moves
    from tests.simulation.sim_master import SimMaster
    from tests.simulation.sim_worker import SimWorker
    from tests.simulation.world import World

T = TypeVar("T")
OPEN_TIMEOUT_S: Final = 5.0


class SimClient:
    """One client process, in all its lives."""

    role = "engine"
    """As which it greets masters and workers."""

    def __init__(
        self,
        world: World,
        name: str,
        masters: dict[str, SimMaster],
        workers: dict[str, SimWorker],
        checks: Checks,
    ) -> None:
        """Not started."""
        self.world = world
        self.name = name
        self.masters = masters
        self.workers = workers
        self.checks = checks
        self.random = world.random
        self.buffers: dict[int, bytearray] = {}
        self.opened: dict[bytes, OpenedNamespace] = {}
        self.last_number = 0
        self._link = SimLink(self)
        self._idle: dict[str, list[Endpoint]] = {}

    # --- lives ------------------------------------------------------------------------------

    @property
    def token(self) -> bytes:
        """The session of this life."""
        return f"{self.name}/{self.world.nodes[self.name].life}".encode().ljust(16, b".")

    @property
    def host(self) -> str:
        """The host that the process runs on."""
        return self.world.nodes[self.name].host

    def crash(self) -> None:
        """kill -9: the kernel ends connections and locks."""
        self.checks.client_died(self)
        self.world.crash(self.name)
        for worker in self.workers.values():
            for memory in worker.mapped.values():
                memory.drop_locks(self.name)
        self.buffers = {}
        self.opened = {}
        self._link = SimLink(self)
        self._idle = {}

    def next_number(self) -> int:
        """A number never used before by this client."""
        self.last_number += 1
        return self.last_number

    def new_request_id(self) -> bytes:
        """16 bytes that name a BeginPut."""
        return self.next_number().to_bytes(16, "little")

    # --- connections ----------------------------------------------------------------------------

    def ask(self, message: Message, timeout_s: float) -> Steps[Message]:
        """The leading master's reply, in time; else its error, or DeadlineExceeded."""
        return self._link.ask(message, timeout_s)

    def new_endpoint(self) -> Endpoint:
        """This side of a connection, on which nobody else may ask anything."""
        return Endpoint(self.world, self.name, _unasked, lambda _: None)

    def dial(
        self,
        target: str,
        link: Endpoint,
        accept: Callable[[Channel, object], bool],
        deadline_s: float,
    ) -> Steps[Channel | None]:
        """Connect an end of ours; None when nobody greets in time."""
        connected: Signal[Channel | None] = Signal()
        greeting = Greeting(self.role, self.name, self.token, self.host)
        timeout_s = min(HANDSHAKE_TIMEOUT_S, deadline_s - self.world.now)
        call = Dial(
            self.name, target, greeting, link.receive, link.ended, connected.fire, timeout_s
        )
        dial(self.world, call, accept)
        yield connected
        channel = connected.value
        if channel is not None:
            link.use(channel)
        return channel

    def take_data_link(self, worker: str, deadline_s: float) -> Steps[Endpoint | None]:
        """A connection to a worker for this thread alone; None when there is no way."""
        idle = self._idle.setdefault(worker, [])
        while idle:
            link = idle.pop()
            if link.is_open:
                return link
        link = self.new_endpoint()
        channel = yield from self.dial(worker, link, self.workers[worker].accept, deadline_s)
        return None if channel is None else link

    def give_data_link(self, worker: str, link: Endpoint) -> None:
        """Put a connection back that nothing is under way on."""
        self._idle.setdefault(worker, []).append(link)

    # --- running plans --------------------------------------------------------------------------

    def open_namespaces(self) -> Steps[None]:
        """Make the namespaces of this simulation known; again and again until that is done."""
        for namespace in (WHOLE, HALVES, NAMED):
            while namespace.id not in self.opened:
                message = OpenNamespace(namespace.content, namespace.layout)
                try:
                    reply = yield from self.ask(message, OPEN_TIMEOUT_S)
                except DeadlineExceeded:
                    continue
                assert isinstance(reply, NamespaceOpened), reply
                self.checks.opened(namespace, reply)
                self.opened[namespace.id] = OpenedNamespace(namespace, reply.ordinal)

    def namespace(self, namespace: Namespace) -> OpenedNamespace:
        """An opened namespace."""
        return self.opened[namespace.id]

    def run(self, plan: plans.Steps[T], moves: Moves | None = None) -> Steps[T]:
        """Carry out a plan, like kvstore.client.steps.drive, in virtual time."""
        try:
            step = next(plan)
            while True:
                try:
                    answer = yield from self._perform(step, moves)
                except KVStoreError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _perform(self, step: plans.Step, moves: Moves | None) -> Steps[plans.Answer]:
        match step:
            case plans.Ask(message, timeout_s):
                return (yield from self.ask(message, timeout_s))
            case plans.Pause(seconds):
                yield seconds
                return None
        assert moves is not None, step
        match step:
            case plans.IngestPages(spans, timeout_s):
                return (yield from moves.ingest(spans, timeout_s))
            case plans.ReadPages(reads, timeout_s):
                return (yield from moves.read(reads, timeout_s))
            case plans.WipePages(places, size_bytes):
                moves.wipe(places, size_bytes)
        return None


def _unasked(endpoint: Endpoint, number: int, message: object) -> None:
    raise AssertionError(f"{message!r} to {endpoint.node}, which serves nothing ({number})")
