"""One term of a simulated master: the real core; sessions, timers and durable writes around it.

Does for `master.state.MasterState` what the shell of a leading master does, in virtual time. When
the term ends nothing of it goes on, whatever it still had under way.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import StaleEpoch
from kvstore.wire.messages.base import Message
from master.events import (
    Action,
    CloseSession,
    Command,
    CommandAnswered,
    CommandId,
    Event,
    Note,
    Persist,
    Persisted,
    Prolonged,
    RaiseEpoch,
    Reply,
    Request,
    SessionClosed,
    SessionId,
    SessionOpened,
    Tick,
)
from master.state import MasterState
from tests.simulation.pages import TENANT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.coordination.metadata_store import Entry
    from kvstore.errors import KVStoreError
    from kvstore.ids import Epoch
    from tests.simulation.rpc import Endpoint
    from tests.simulation.sim_master import SimMaster
    from tests.simulation.worker_links import Greeting

RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 0.5


class SimTerm:
    """What a master does while it leads."""

    def __init__(
        self, master: SimMaster, epoch: Epoch, restored: Sequence[Entry], until_s: float
    ) -> None:
        """Lead in this epoch, with what is durable, until then unless it is prolonged."""
        self.epoch = epoch
        self.core = MasterState(master.tunables, epoch, restored, until_s)
        self.is_over = False
        self.sure_since_s = master.world.now
        """Since when it has led without a doubt."""
        self._master = master
        self._world = master.world
        self._sessions: dict[SessionId, Endpoint] = {}
        self._ids: dict[Endpoint, SessionId] = {}
        self._asked: dict[tuple[SessionId, int], Message] = {}
        self._first: deque[Persist] = deque()
        self._behind: deque[Persist] = deque()
        """What is written when nothing else waits."""
        self._is_writing = False
        self._last_session = 0
        self._alarm_at_s = math.inf

    @property
    def until_s(self) -> float:
        """When the lease that it leads under may end."""
        return self.core.core.leads_until_s

    def prolong(self, until_s: float) -> None:
        """The lease was renewed."""
        if self._world.now >= self.until_s:
            self.sure_since_s = self._world.now
        self.feed(Prolonged(until_s))

    def end(self) -> None:
        """Nothing of this term may happen any more; its connections end with it."""
        self.is_over = True

    # --- the core ---------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Have the core handle an event, and carry its actions out."""
        if self.is_over:
            return
        checks = self._master.checks
        checks.master_hears(self._master, event)
        actions = self.core.handle(event, self._world.now)
        for action in actions:
            checks.master_acts(self._master, action)
            self._check(action)
        for action in actions:
            self._carry_out(action)
        self._set_alarm()

    def _check(self, action: Action) -> None:
        match action:
            case Reply(session, request_id, message):
                asked = self._asked.pop((session, request_id), None)
                assert asked is not None, f"nobody waits for {message!r}"
                self._master.checks.master_replies(self._master, asked, message)
            case Command(_, _, message):
                self._master.checks.master_commands(self._master, message)

    def _set_alarm(self) -> None:
        at_s = self.core.wakeup_s
        if at_s < self._alarm_at_s:
            self._alarm_at_s = at_s
            delay_s = max(0.0, at_s - self._world.now)
            self._world.after_on(self._master.name, delay_s, partial(self._ring, at_s))

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
                (self._behind if action.behind else self._first).append(action)
                self._write_next()
            case Note():
                pass
            case RaiseEpoch(above):
                self.is_over = True
                self._world.after_on(
                    self._master.name, 0.0, partial(self._master.outrun, self.epoch, above)
                )
            case CloseSession(session):
                endpoint = self._sessions.get(session)
                if endpoint is not None:
                    endpoint.close()
                    self._world.after_on(self._master.name, 0.0, lambda: self.closed(endpoint))

    # --- sessions ---------------------------------------------------------------------------

    def opened(self, endpoint: Endpoint, greeting: Greeting) -> None:
        """A peer has passed the handshake."""
        self._last_session += 1
        session = SessionId(self._last_session)
        self._sessions[session] = endpoint
        self._ids[endpoint] = session
        who = greeting.role, TENANT, greeting.name, greeting.token, greeting.host
        self.feed(SessionOpened(session, *who))

    def closed(self, endpoint: Endpoint) -> None:
        """Its connection has ended."""
        session = self._ids.pop(endpoint, None)
        if session is not None:
            del self._sessions[session]
            self.feed(SessionClosed(session))

    def serve(self, endpoint: Endpoint, number: int, message: Message) -> None:
        """It asks for something."""
        session = self._ids.get(endpoint)
        if session is not None and not self.is_over:
            self._asked[session, number] = message
            self.feed(Request(session, number, message))

    def _command(self, command: CommandId, session: SessionId, message: Message) -> None:
        def done(reply: object | None) -> None:
            assert reply is None or isinstance(reply, Message), reply
            self.feed(CommandAnswered(command, reply))

        endpoint = self._sessions.get(session)
        if endpoint is None:
            self._world.after_on(self._master.name, 0.0, lambda: done(None))
        else:
            endpoint.call(message, limits.CALL_TIMEOUT_S, done)

    # --- durable writes ---------------------------------------------------------------------

    def _write_next(self) -> None:
        waiting = self._first or self._behind
        if waiting and not self._is_writing:
            self._is_writing = True
            self._write(waiting.popleft(), RETRY_MIN_S)

    def _write(self, action: Persist, retry_s: float) -> None:
        """Again and again until it is durable or the term is over."""

        def ended(error: KVStoreError | None) -> None:
            if self.is_over:
                return
            if error is None:
                self._is_writing = False
                self._write_next()
                self.feed(Persisted(action.write))
            elif isinstance(error, StaleEpoch):
                self._master.deposed(self.epoch)
            else:
                self._world.note(f"{self._master.name} is not durable: {error.code}")
                again = partial(self._write, action, min(2 * retry_s, RETRY_MAX_S))
                self._world.after_on(self._master.name, retry_s, again)

        if not self.is_over:
            self._master.store.write(action.puts, action.deletes, ended)
