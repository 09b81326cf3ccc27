"""A simulated worker's two connections to the leader: the control link, and the report line.

The order of registration, inventory and commands is the control link's to keep in any weather.

As in the real worker, seals are reported on a connection of their own, which goes where the control
link goes and lives no longer. So a report and an inventory may overtake each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.errors import DeadlineExceeded, NotLeader, StaleEpoch, Unavailable
from kvstore.rpc.failure import error_of
from kvstore.rpc.search import SILENT_PATIENCE_S, Search
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.membership import Heartbeat, WorkerAccepted
from kvstore.wire.messages.puts import Sealed
from tests.simulation.channel import HANDSHAKE_TIMEOUT_S, Dial, dial
from tests.simulation.rpc import Endpoint
from tests.simulation.sim_link import address_of, name_of
from workers import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.errors import KVStoreError
    from tests.simulation.channel import Channel
    from tests.simulation.sim_worker import SimWorker

CALL_TIMEOUT_S: Final = 5.0
BEAT_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True)
class Greeting:
    """What a dialler says first."""

    role: str
    name: str
    token: bytes
    host: str = ""


class WorkerLinks:
    """Both connections of one life of a worker."""

    def __init__(self, worker: SimWorker) -> None:
        """Neither stands."""
        self._worker = worker
        self._control: Endpoint | None = None
        self._reports: Endpoint | None = None
        self._waiting: list[tuple[int, Message]] = []
        """Reports that wait for the report line."""
        addresses = [address_of(name) for name in worker.masters]
        self._search = Search(addresses, worker.world.random)
        self._address = ""
        """Of the master that the control link goes to, or went to last."""
        self._is_looking = False

    # --- the control link ---------------------------------------------------------------------

    def dial(self) -> None:
        """Look for the leader until somebody greets who may be it."""
        link = self._endpoint(self._control_ended)
        address = self._address = self._search.next()

        def connected(channel: Channel | None) -> None:
            if channel is None:
                self._dial_later(DeadlineExceeded("it does not greet"))
                return
            link.use(channel)
            self._search.greeted(address)
            self._control = link
            self._worker.feed(events.LinkOpened())

        timeout_s = self._search.patience_s(address, HANDSHAKE_TIMEOUT_S)
        self._dial(address, link, connected, timeout_s, is_stream=True)

    def _endpoint(self, ended: Callable[[Endpoint], None]) -> Endpoint:
        worker = self._worker
        return Endpoint(worker.world, worker.name, worker.commanded, ended)

    def _dial(
        self,
        address: str,
        link: Endpoint,
        connected: Callable[[Channel | None], None],
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        *,
        is_stream: bool = False,
    ) -> None:
        worker = self._worker
        master = worker.masters[name_of(address)]
        life = worker.world.nodes[worker.name].life
        token = f"{worker.name}/{life}".encode().ljust(16, b".")
        greeting = Greeting("worker", worker.name, token)
        call = Dial(
            worker.name, master.name, greeting, link.receive, link.ended, connected,
            timeout_s=timeout_s, is_stream=is_stream,
        )  # fmt: skip
        dial(worker.world, call, master.accept)

    def _dial_later(self, why: KVStoreError) -> None:
        self._search.failed(self._address, why)
        delay_s = self._search.next_s(0.0)
        self._worker.world.after_on(self._worker.name, delay_s, self.dial)

    def _control_ended(self, link: Endpoint) -> None:
        if self._control is link:
            self._control = None
            self._drop_reports()
            self._worker.feed(events.LinkClosed())
            self._dial_later(Unavailable("the connection broke"))

    def look_elsewhere(self) -> None:
        """See, beside a connection that keeps silent, whether another master leads by now."""
        if self._control is None or self._is_looking or not self._search.has_others:
            return
        self._is_looking = True
        self._look(self._search.others(self._address))

    def _look(self, addresses: list[str]) -> None:
        present = self._control
        if not addresses or present is None:
            self._is_looking = False
            return
        link = self._endpoint(lambda _: None)

        def connected(channel: Channel | None) -> None:
            assert self._worker.core is not None
            if channel is not None:
                link.use(channel)
                link.close()
            if channel is not None and channel.welcome > self._worker.core.epoch:
                self._is_looking = False
                if self._control is present:
                    self.close(NotLeader((addresses[0],)))
            else:
                self._look(addresses[1:])

        self._dial(addresses[0], link, connected, SILENT_PATIENCE_S)

    def close(self, why: KVStoreError | None = None) -> None:
        """End the control link; the core hears of it in a step of its own."""
        link, self._control = self._control, None
        if link is not None:
            link.close()
            self._drop_reports()
            world, name = self._worker.world, self._worker.name
            world.after_on(name, 0.0, lambda: self._worker.feed(events.LinkClosed()))
            self._dial_later(why or Unavailable("the connection broke"))

    # --- calls --------------------------------------------------------------------------------

    def call(self, number: int, message: Message) -> None:
        """Ask the master; the core is fed the reply."""
        if isinstance(message, Sealed):
            self._report(number, message)
        elif self._control is not None:
            timeout_s = BEAT_TIMEOUT_S if isinstance(message, Heartbeat) else CALL_TIMEOUT_S
            self._control.call(message, timeout_s, lambda reply: self._answered(number, reply))
        else:
            self._fail_soon(number)

    def _answered(self, number: int, reply: object | None) -> None:
        assert reply is None or isinstance(reply, Message), reply
        error = error_of(reply) if isinstance(reply, Failure) else None
        if isinstance(error, StaleEpoch):
            self.close(error)
        if isinstance(error, StaleEpoch | Unavailable):
            reply = None
        elif isinstance(reply, WorkerAccepted):
            self._search.succeeded()
        self._worker.feed(events.MasterAnswered(number, reply))

    def _fail_soon(self, number: int) -> None:
        world, name = self._worker.world, self._worker.name
        world.after_on(name, 0.0, lambda: self._answered(number, None))

    # --- the report line ----------------------------------------------------------------------

    def _report(self, number: int, message: Message) -> None:
        if self._control is None:
            self._fail_soon(number)
        elif self._reports is not None and self._reports.is_open:
            self._send_report(number, message)
        else:
            self._waiting.append((number, message))
            if len(self._waiting) == 1:
                self._dial_reports()

    def _dial_reports(self) -> None:
        line = self._endpoint(lambda _: None)

        def connected(channel: Channel | None) -> None:
            waiting, self._waiting = self._waiting, []
            if channel is not None:
                line.use(channel)
                self._reports = line
            for number, message in waiting:
                if channel is None:
                    self._fail_soon(number)
                else:
                    self._send_report(number, message)

        self._dial(self._address, line, connected)

    def _send_report(self, number: int, message: Message) -> None:
        assert self._reports is not None
        self._reports.call(message, CALL_TIMEOUT_S, lambda reply: self._answered(number, reply))

    def _drop_reports(self) -> None:
        line, self._reports = self._reports, None
        if line is not None:
            line.close()
