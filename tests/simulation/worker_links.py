"""A simulated worker's two connections to the master: the control link, and the report line.

The order of registration, inventory and commands is the control link's to keep in any weather.

As in the real worker, seals are reported on a connection of their own, which goes where the control
link goes and lives no longer. So a report and an inventory may overtake each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.wire.messages.base import Message
from kvstore.wire.messages.membership import Heartbeat
from kvstore.wire.messages.puts import Sealed
from tests.simulation.channel import Dial, dial
from tests.simulation.rpc import Endpoint
from workers import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.channel import Channel
    from tests.simulation.sim_worker import SimWorker

CALL_TIMEOUT_S: Final = 5.0
BEAT_TIMEOUT_S: Final = 2.0
REDIAL_MAX_S: Final = 0.3


@dataclass(frozen=True)
class Greeting:
    """What a dialler says first."""

    role: str
    name: str
    token: bytes


class WorkerLinks:
    """Both connections of one life of a worker."""

    def __init__(self, worker: SimWorker) -> None:
        """Neither stands."""
        self._worker = worker
        self._control: Endpoint | None = None
        self._reports: Endpoint | None = None
        self._waiting: list[tuple[int, Message]] = []
        """Reports that wait for the report line."""

    # --- the control link ---------------------------------------------------------------------

    def dial(self) -> None:
        """Look for the master until it answers."""
        link = self._endpoint(self._control_ended)

        def connected(channel: Channel | None) -> None:
            if channel is None:
                self._dial_later()
                return
            link.use(channel)
            self._control = link
            self._worker.feed(events.LinkOpened())

        self._dial(link, connected, is_stream=True)

    def _endpoint(self, ended: Callable[[Endpoint], None]) -> Endpoint:
        worker = self._worker
        return Endpoint(worker.world, worker.name, worker.commanded, ended)

    def _dial(
        self,
        link: Endpoint,
        connected: Callable[[Channel | None], None],
        *,
        is_stream: bool = False,
    ) -> None:
        worker = self._worker
        assert worker.master is not None
        life = worker.world.nodes[worker.name].life
        token = f"{worker.name}/{life}".encode().ljust(16, b".")
        greeting = Greeting("worker", worker.name, token)
        call = Dial(
            worker.name, "master", greeting, link.receive, link.ended, connected,
            is_stream=is_stream,
        )  # fmt: skip
        dial(worker.world, call, worker.master.accept)

    def _dial_later(self) -> None:
        world = self._worker.world
        delay_s = world.random.uniform(0.01, REDIAL_MAX_S)
        world.after_on(self._worker.name, delay_s, self.dial)

    def _control_ended(self, link: Endpoint) -> None:
        if self._control is link:
            self._control = None
            self._drop_reports()
            self._worker.feed(events.LinkClosed())
            self._dial_later()

    def close(self) -> None:
        """End the control link, as the core asked; the core hears of it in a step of its own."""
        link, self._control = self._control, None
        if link is not None:
            link.close()
            self._drop_reports()
            world, name = self._worker.world, self._worker.name
            world.after_on(name, 0.0, lambda: self._worker.feed(events.LinkClosed()))
            self._dial_later()

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

        self._dial(line, connected)

    def _send_report(self, number: int, message: Message) -> None:
        assert self._reports is not None
        self._reports.call(message, CALL_TIMEOUT_S, lambda reply: self._answered(number, reply))

    def _drop_reports(self) -> None:
        line, self._reports = self._reports, None
        if line is not None:
            line.close()
