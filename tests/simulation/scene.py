"""A simulation under direction: no random calls and no random faults, but those that a test wants.

All checkers run as in any other simulation. A call runs until the scene has it finished; messages
can be kept back by type and let go later, so that a test decides who is first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from kvstore.client.locations import Query, lookup_steps, match_steps, probe_steps, remove_steps
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.replicas import replica_steps
from kvstore.client.writes import PartSource, PutRequest, put_steps
from kvstore.page import PageChain
from kvstore.wire.messages.membership import ExtentsConfirmed
from tests.simulation import master_view
from tests.simulation.client_moves import Put
from tests.simulation.options import CALM
from tests.simulation.pages import PAGE_TOKENS, WHOLE, page_bytes, part_bytes
from tests.simulation.reader_moves import Read, View, rank_for
from tests.simulation.rpc import Answer, Call
from tests.simulation.scans import at_rest, scan
from tests.simulation.simulation import Simulation
from tests.simulation.tasks import Steps, spawn
from tests.simulation.workload import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client import steps as plans
    from kvstore.client.locations import Found, Locations, Match
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.namespace import Namespace
    from kvstore.replica import ExtentState
    from master.core import Core
    from tests.simulation.client_moves import Moves
    from tests.simulation.rpc import Endpoint
    from tests.simulation.sim_client import SimClient
    from tests.simulation.sim_master import SimMaster
    from tests.simulation.sim_worker import SimWorker
    from workers.state import WorkerState

T = TypeVar("T")
PATIENCE_S = 60.0


@dataclass
class Pending(Generic[T]):
    """A call under way."""

    value: list[T] = field(default_factory=list)
    error: list[Exception] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self.value or self.error)


class Scene:
    """A small pool, all up and running, and its clients."""

    def __init__(
        self, *, workers: int = 1, clients: int = 1, hosts: int = 1, chunks: int = 1,
        lease_ttl_s: float = 10.0, page_ttl_s: float = 600.0, **more: object,
    ) -> None:  # fmt: skip
        """Start everything; with one host all bytes move through shared memory.

        `more` are other fields of Options.
        """
        options = replace(
            CALM, workers=workers, clients=clients, hosts=hosts, chunks=chunks,
            lease_ttl_s=lease_ttl_s, page_ttl_s=page_ttl_s,
        )  # fmt: skip
        options = replace(options, **more)  # type: ignore[arg-type]  # fields of Options
        self.simulation = Simulation(1, options)
        self.world = self.simulation.world
        self.checks = self.simulation.checks
        self._held_messages: list[object] = []
        self.simulation.start()
        for client in self.simulation.clients.values():
            self.finish(self.start(client, client.open_namespaces()))
        self.settle()

    # --- who is who ---------------------------------------------------------------------------

    @property
    def leader(self) -> SimMaster:
        """The master that leads."""
        leader = self.checks.leader
        assert leader is not None, "nobody leads"
        return leader

    @property
    def core(self) -> Core:
        """What the leader knows."""
        return master_view.core_of(self.leader)

    def worker(self, number: int = 0) -> SimWorker:
        """A worker."""
        return self.simulation.workers[f"worker{number}"]

    def worker_core(self, number: int = 0) -> WorkerState:
        """What a worker knows."""
        core = self.worker(number).core
        assert core is not None
        return core

    def client(self, number: int = 0) -> SimClient:
        """A client."""
        return self.simulation.clients[f"client{number}"]

    def bytes_in(self, state: ExtentState, worker: int = 0) -> int:
        """Bytes of a worker's segment that are in this state for the master."""
        return self.core.segments[f"worker{worker}-dram"].allocator.bytes_in[state]

    @staticmethod
    def chain(length: int, number: int = 0, namespace: Namespace = WHOLE) -> PageChain:
        """A chain of pages; chains of different numbers share nothing."""
        tokens = [number * 1000 + i for i in range(length * PAGE_TOKENS)]
        return PageChain.of_tokens(namespace.id, tokens, PAGE_TOKENS)

    @staticmethod
    def names(keys: Sequence[bytes]) -> PageChain:
        """Named objects, in no order."""
        return PageChain(b"".join(keys))

    # --- time and messages --------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.world.run(seconds)

    def run_until(self, done: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        """Let time pass until something holds."""
        assert self.world.run_until(done, seconds, step_s=0.01), "it never came"

    def hold(self, *kinds: type, source: str = "", target: str = "") -> None:
        """Keep back calls and answers of these types, between nodes of these names if given."""

        def holds(sender: str, receiver: str, message: object) -> bool:
            inner = message.message if isinstance(message, Call | Answer) else message
            is_wanted = isinstance(inner, kinds) and sender.startswith(source)
            if is_wanted and receiver.startswith(target):
                self._held_messages.append(inner)
                return True
            return False

        self.world.holds = holds

    def release(self) -> None:
        """Keep nothing back any more, and let go of what was kept."""
        self.world.holds = None
        held, self.world.held = self.world.held, []
        self._held_messages.clear()
        for let_go in held:
            let_go()

    def lose_held(self) -> None:
        """What was kept back never arrives."""
        self.world.holds = None
        self.world.held = []
        self._held_messages.clear()

    def held_messages(self, kind: type) -> list[object]:
        """Messages of a type that are kept back, oldest first."""
        return [message for message in self._held_messages if isinstance(message, kind)]

    def command(self, message: object) -> bytes:
        """Have the first worker carry a command out, whoever may have sent it; its outcomes."""
        answers: list[ExtentsConfirmed] = []

        class Sender:
            """Stands in for the end of a connection."""

            def answer(self, number: int, reply: object) -> None:
                """Keep the answer."""
                assert number == 1
                assert isinstance(reply, ExtentsConfirmed)
                answers.append(reply)

        self.worker().commanded(cast("Endpoint", Sender()), 1, message)
        self.run(0.2)
        return answers[0].outcomes

    def cut_off(self, one: str, other: str = "master0") -> None:
        """Nothing passes between two nodes."""
        self.world.cut |= {(one, other), (other, one)}

    def settle(self) -> None:
        """Every worker that runs is registered and compared, also those just started."""
        self.run(0.1)
        up = [name for name in self.simulation.workers if self.world.is_up(name)]

        def is_settled() -> bool:
            if self.checks.leader is None:
                return False
            names = [name for each in up for name in self.simulation.workers[each].memories]
            segments = [self.core.segments.get(name) for name in names]
            return all(each is not None and each.takes_orders for each in segments)

        self.run_until(is_settled)

    def replace_master(self) -> None:
        """Kill the master and start the next."""
        name = self.leader.name
        self.simulation.crash(name)
        self.simulation.restart(name)

    def take_over(self) -> None:
        """Another master leads, and has compared every inventory."""
        self.replace_master()
        self.settle()

    def rest(self) -> None:
        """Nothing is left under way, and everything adds up."""
        self.world.run_until(lambda: not at_rest(self.checks), PATIENCE_S, step_s=0.5)
        assert at_rest(self.checks) == []
        scan(self.checks)

    # --- calls --------------------------------------------------------------------------------

    def start(self, client: SimClient, steps: Steps[T]) -> Pending[T]:
        """Begin a call in a thread of its own."""
        pending: Pending[T] = Pending()

        def run() -> Steps[None]:
            try:
                pending.value.append((yield from steps))
            except Exception as error:  # the test asks for it
                pending.error.append(error)

        spawn(self.world, client.name, run())
        return pending

    def finish(self, pending: Pending[T], seconds: float = PATIENCE_S) -> T:
        """Let time pass until a call has ended; its result, or its error raised."""
        self.run_until(lambda: pending.is_over, seconds)
        if pending.error:
            raise pending.error[0]
        return pending.value[0]

    def _plan(self, client: int, plan: plans.Steps[T], moves: Moves | None = None) -> Pending[T]:
        caller = self.client(client)
        return self.start(caller, caller.run(plan, moves))

    def put(  # noqa: PLR0913 -- each is a wish of its own
        self, chain: PageChain, *, client: int = 0, namespace: Namespace = WHOLE,
        parts: tuple[int, ...] | None = None, timeout_s: float = 6.0, wait: bool = True,
        ttl_s: float | None = None, replicas: int = 0, strict: bool = False,
        replicas_now: bool = False,
    ) -> Pending[list[PutOutcome]]:  # fmt: skip
        """Begin to put a chain."""
        caller = self.client(client)
        data = bytearray()
        sources: list[PartSource] = []
        every = range(1 if namespace.is_opaque else len(namespace.parts))
        for part in every if parts is None else parts:
            size = part_bytes(namespace, chain.key(0), part)
            places = tuple(len(data) + page * size for page in range(len(chain)))
            data += b"".join(page_bytes(key, part, size) for key in chain)
            sources.append(PartSource(part, size, places))
        request = PutRequest(
            caller.namespace(namespace), chain, tuple(sources), self.world.now + timeout_s,
            wait=wait, ttl_s=ttl_s, replicas=replicas, strict=strict, replicas_now=replicas_now,
        )  # fmt: skip
        return self._plan(client, _whole_put(request, caller), Put(caller, bytes(data)))

    def stored(self, chain: PageChain, **how: object) -> list[PutOutcome]:
        """Put a chain and wait for the end."""
        return self.finish(self.put(chain, **how))  # type: ignore[arg-type]  # as of `put`

    def _query(self, chain: PageChain, client: int, namespace: Namespace, lease: bool) -> Query:
        opened = self.client(client).namespace(namespace)
        return Query(opened, chain, self.world.now + 6.0, lease=lease)

    def match(
        self, chain: PageChain, *, client: int = 0, namespace: Namespace = WHOLE, lease: bool = True
    ) -> Match:
        """The longest prefix."""
        query = self._query(chain, client, namespace, lease)
        return self.finish(self._plan(client, match_steps(query, self._clock(client))))

    def start_match(self, chain: PageChain, *, client: int = 0) -> Pending[Match]:
        """Begin to ask for the longest prefix."""
        query = self._query(chain, client, WHOLE, lease=True)
        return self._plan(client, match_steps(query, self._clock(client)))

    def lookup(
        self, chain: PageChain, *, client: int = 0, namespace: Namespace = WHOLE, lease: bool = True
    ) -> Found:
        """Every page that is there."""
        query = self._query(chain, client, namespace, lease)
        return self.finish(self._plan(client, lookup_steps(query, self._clock(client))))

    def probe(
        self, chain: PageChain, *, client: int = 0, namespace: Namespace = WHOLE
    ) -> list[bool]:
        """Which pages are there."""
        query = self._query(chain, client, namespace, lease=False)
        return self.finish(self._plan(client, probe_steps(query, self._clock(client))))

    def remove(
        self, chain: PageChain, *, client: int = 0, namespace: Namespace = WHOLE
    ) -> Pending[list[bool]]:
        """Begin to remove pages."""
        began_s = self.world.now
        history = self.checks.history
        for key in chain:
            history.remove_begins(key, began_s)
        query = self._query(chain, client, namespace, lease=False)
        pending = self._plan(client, remove_steps(query, self._clock(client)))

        def note() -> None:
            if pending.value:
                for key in chain:
                    history.removed(key, began_s)
            elif not pending.error:
                self.world.after(0.001, note)

        self.world.after(0.001, note)
        return pending

    def removed(self, chain: PageChain, **how: object) -> list[bool]:
        """Remove pages and wait for the end."""
        return self.finish(self.remove(chain, **how))  # type: ignore[arg-type]  # as of `remove`

    def read(
        self, found: Locations, *, client: int = 0, part: int = 0, timeout_s: float = 30.0
    ) -> tuple[Pending[list[ReadOutcome]], Read]:
        """Begin to copy located pages out."""
        size = found.part_bytes(part)
        places = tuple(page * size for page in range(sum(found.readable)))
        moves = Read(self.client(client), size * len(places))
        request = ReadRequest(found, part, places, self.world.now + timeout_s)
        rank = rank_for(self.client(client), views=False)
        plan = read_steps(request, self._clock(client), rank)
        return self._plan(client, plan, moves), moves

    def read_all(self, chain: PageChain, *, client: int = 0) -> list[ReadOutcome]:
        """Match and read; the bytes of hits are checked."""
        found = self.match(chain, client=client)
        pending, moves = self.read(found, client=client)
        outcomes = self.finish(pending)
        self.check(found, outcomes, moves)
        return outcomes

    def check(self, found: Locations, outcomes: list[ReadOutcome], moves: Read) -> None:
        """Hits have the right bytes, misses have none."""
        size = found.part_bytes(0)
        for page, outcome in enumerate(outcomes):
            data = bytes(moves.into[page * size : (page + 1) * size])
            key = found.chain.key(page)
            if type(outcome).__name__ == "Hit":
                self.checks.delivered(key, 0, data)
            else:
                self.checks.withheld(key, data)

    def view(self, found: Locations, *, client: int = 0) -> tuple[list[ReadOutcome], View]:
        """Look at located pages where they lie; end the view with `end`."""
        places = tuple(range(sum(found.readable)))
        moves = View(self.client(client))
        request = ReadRequest(found, 0, places, self.world.now + 6.0, needs_lease=True)
        rank = rank_for(self.client(client), views=True)
        plan = read_steps(request, self._clock(client), rank)
        return self.finish(self._plan(client, plan, moves)), moves

    def _clock(self, client: int) -> VirtualClock:
        return VirtualClock(self.client(client))


def _whole_put(request: PutRequest, caller: SimClient) -> plans.Steps[list[PutOutcome]]:
    """What a store does for a put."""
    clock = VirtualClock(caller)
    outcomes = yield from put_steps(request, clock, caller.new_request_id)
    if request.awaits_replicas:
        outcomes = yield from replica_steps(request, outcomes, clock)
    return outcomes
