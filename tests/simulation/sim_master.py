"""The master of the simulation: the real core; sessions, timers and durable writes in virtual time.

Does for `master.state.MasterState` what `master.service` does. What is durable outlives a crash;
a write that was not finished by then is lost.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.ids import Epoch
from kvstore.wire.messages.base import Message
from master.events import (
    Action,
    CloseSession,
    Command,
    CommandAnswered,
    CommandId,
    Event,
    Persist,
    Persisted,
    Reply,
    Request,
    SessionClosed,
    SessionId,
    SessionOpened,
    Tick,
)
from master.state import MasterState
from tests.simulation.pages import TENANT
from tests.simulation.rpc import Endpoint
from tests.simulation.worker_links import Greeting

if TYPE_CHECKING:
    from master.tunables import Tunables
    from tests.simulation.channel import Channel
    from tests.simulation.checks import Checks
    from tests.simulation.world import World

NAME: Final = "master"


class SimMaster:
    """One master process, in all its lives."""

    def __init__(self, world: World, tunables: Tunables, checks: Checks) -> None:
        """Not started; nothing is durable."""
        self.world = world
        self.tunables = tunables
        self.checks = checks
        self.core: MasterState | None = None
        self.epoch = Epoch(0)
        self.durable: dict[str, bytes] = {}
        self.persist_delay_max_s = 0.02
        self._sessions: dict[SessionId, Endpoint] = {}
        self._ids: dict[Endpoint, SessionId] = {}
        self._asked: dict[tuple[SessionId, int], Message] = {}
        self._writing: deque[Persist] = deque()
        self._last_session = 0
        self._alarm_at_s = math.inf

    # --- lives ------------------------------------------------------------------------------

    def start(self) -> None:
        """Lead in the next epoch, with what is durable."""
        self.epoch = Epoch(self.epoch + 1)
        self._alarm_at_s = math.inf
        self.core = MasterState(self.tunables, self.epoch, list(self.durable.items()))
        self.checks.leads(self)
        self.feed(Tick())

    def crash(self) -> None:
        """kill -9."""
        self.world.crash(NAME)
        self.core = None
        self._sessions.clear()
        self._ids.clear()
        self._asked.clear()
        self._writing.clear()

    # --- the core ---------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Have the core handle an event, and carry its actions out."""
        core = self.core
        if core is None:
            return
        self.checks.master_hears(event)
        actions = core.handle(event, self.world.now)
        for action in actions:
            self._check(action)
        for action in actions:
            self._carry_out(action)
        self._set_alarm()

    def _check(self, action: Action) -> None:
        match action:
            case Reply(session, request_id, message):
                asked = self._asked.pop((session, request_id), None)
                assert asked is not None, f"nobody waits for {message!r}"
                self.checks.master_replies(self, asked, message)
            case Command(_, _, message):
                self.checks.master_commands(self, message)

    def _set_alarm(self) -> None:
        assert self.core is not None
        at_s = self.core.wakeup_s
        if at_s < self._alarm_at_s:
            self._alarm_at_s = at_s
            delay_s = max(0.0, at_s - self.world.now)
            self.world.after_on(NAME, delay_s, partial(self._ring, at_s))

    def _ring(self, at_s: float) -> None:
        if at_s == self._alarm_at_s:
            self._alarm_at_s = math.inf
            self.feed(Tick())

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply(session, request_id, message):
                endpoint = self._sessions.get(session)
                if endpoint is not None:
                    endpoint.answer(request_id, message)
            case Command(command, session, message):
                self._command(command, session, message)
            case Persist():
                self._writing.append(action)
                if len(self._writing) == 1:
                    self._write_next()
            case CloseSession(session):
                endpoint = self._sessions.get(session)
                if endpoint is not None:
                    endpoint.close()
                    self.world.after_on(NAME, 0.0, lambda: self._ended(endpoint))

    # --- sessions ---------------------------------------------------------------------------

    def accept(self, channel: Channel, greeting: object) -> bool:
        """A peer has passed the handshake."""
        assert isinstance(greeting, Greeting), greeting
        if self.core is None:
            return False
        endpoint = Endpoint(self.world, NAME, self._serve, self._ended)
        channel.attach(NAME, endpoint.receive, endpoint.ended)
        endpoint.use(channel)
        self._last_session += 1
        session = SessionId(self._last_session)
        self._sessions[session] = endpoint
        self._ids[endpoint] = session
        self.feed(SessionOpened(session, greeting.role, TENANT, greeting.name, greeting.token))
        return True

    def _ended(self, endpoint: Endpoint) -> None:
        session = self._ids.pop(endpoint, None)
        if session is not None:
            del self._sessions[session]
            self.feed(SessionClosed(session))

    def _serve(self, endpoint: Endpoint, number: int, message: object) -> None:
        session = self._ids.get(endpoint)
        if session is None:
            return
        assert isinstance(message, Message), message
        self._asked[session, number] = message
        self.feed(Request(session, number, message))

    def _command(self, command: CommandId, session: SessionId, message: Message) -> None:
        def done(reply: object | None) -> None:
            assert reply is None or isinstance(reply, Message), reply
            self.feed(CommandAnswered(command, reply))

        endpoint = self._sessions.get(session)
        if endpoint is None:
            self.world.after_on(NAME, 0.0, lambda: done(None))
        else:
            endpoint.call(message, limits.CALL_TIMEOUT_S, done)

    # --- durable writes ---------------------------------------------------------------------

    def _write_next(self) -> None:
        delay_s = self.world.random.uniform(0.0005, self.persist_delay_max_s)
        self.world.after_on(NAME, delay_s, self._written)

    def _written(self) -> None:
        action = self._writing.popleft()
        for key in action.deletes:
            self.durable.pop(key, None)
        self.durable.update(action.puts)
        if self._writing:
            self._write_next()
        self.feed(Persisted(action.ticket))
