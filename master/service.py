"""The shell around the master's core in one term: peers in, events to the core, its actions out.

Owns sessions, timers, commands under way and the queue of durable writes; decides nothing. Each
event is handled and its actions are carried out in one step of the loop, so the core never sees
half of one. Must not look into the core's state but by what it answers, nor know who leads next.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from kvstore import limits
from kvstore.errors import BadValue, KVStoreError, StaleEpoch, Unavailable
from kvstore.rpc.identity import SESSION_BYTES, Role
from kvstore.wire.messages.reads import GetStatus, Status
from master.events import (
    CloseSession,
    Command,
    CommandAnswered,
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
from master.persistence import Persistence

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, KeysView

    from kvstore.clock import Clock
    from kvstore.coordination.metadata_store import MetadataStore
    from kvstore.ids import Epoch
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.hello import Hello
    from master.events import Action, CommandId, Event, WriteId
    from master.metrics import ShellCounts

INSIDE: Final = SessionId(0)
"""The session in which this process itself asks its core."""
LAG_PROBE_S: Final = 0.1
"""So long after a request, and not more often, the loop's lag is noted (I27)."""

_LOG = logging.getLogger(__name__)


class Core(Protocol):
    """What the shell needs of the master's state machine."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in; what is to be done about it, in order."""
        ...

    @property
    def wakeup_s(self) -> float:
        """When a Tick is wanted at the latest, on the clock of `now`; infinity for never.

        Asked after every event. A Tick makes it later; whatever makes it sooner is an event.
        """
        ...


class EpochOutrun(StaleEpoch):
    """A worker has met a higher epoch than this term's: another master leads, or the metadata
    store has forgotten that one did.
    """

    def __init__(self, seen: Epoch) -> None:
        """`seen` is the higher one."""
        super().__init__(f"a worker has met a leader of epoch {seen}")
        self.seen = seen


class TermService:
    """A master's work in one term, around one core. All methods belong to the loop's thread.

    Ends by `cut_off`, or tells `over` why it cannot go on: StaleEpoch when another master leads
    (EpochOutrun: or did); anything else is our bug.
    """

    def __init__(
        self,
        state: Core,
        store: MetadataStore,
        clock: Clock,
        counts: ShellCounts,
        over: Callable[[BaseException], None],
    ) -> None:
        """Begin at once; `store` is in the term whose epoch `state` was made with."""
        self._state = state
        self._clock = clock
        self._counts = counts
        self._over = over
        self._persistence = Persistence(store, self._persisted)
        self._session_ids = itertools.count(INSIDE + 1)
        self._peers: dict[SessionId, Peer] = {}
        self._sessions: dict[Peer, SessionId] = {}
        self._inside: list[Message] = []
        """Answers to what this process asked itself."""
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.Handle | None = None
        """Rings at `_alarm_at_s`."""
        self._alarm_at_s = math.inf
        self._is_lag_due = False
        """Whether `_note_lag` will run soon."""
        self._is_over = False
        """The core is not asked anything from now on."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The durable writes, and commands under way."""
        self._feed(SessionOpened(INSIDE, Role.OPERATOR, "", "master", bytes(SESSION_BYTES)))
        self._start(self._persistence.run())

    @property
    def peers(self) -> KeysView[Peer]:
        """Whose sessions are of this term."""
        return self._sessions.keys()

    def prolong(self, until_s: float) -> None:
        """The lease that this term has is good until then."""
        self._feed(Prolonged(until_s))

    async def drain(self) -> None:
        """Until all is stored that is to be stored."""
        await self._persistence.drain()

    def cut_off(self) -> None:
        """Do nothing any more: what is not stored or ordered by now never will be."""
        self._is_over = True
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        """Until nothing of this term is under way; it was cut off."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self) -> Status:
        """The pool at this moment."""
        self._feed(Request(INSIDE, 0, GetStatus()))
        answer = self._inside.pop()
        assert isinstance(answer, Status), answer
        counts, persistence = self._counts, self._persistence
        counts.persist_pending = persistence.pending
        counts.persist_writes = persistence.writes
        counts.persist_failures = persistence.failures
        counts.is_persisting = persistence.failing is None
        return answer

    # What the sockets tell.

    def opened(self, peer: Peer, hello: Hello) -> None:
        """A peer has passed the greeting."""
        session = SessionId(next(self._session_ids))
        self._peers[session] = peer
        self._sessions[peer] = session
        who = hello.role, hello.tenant, hello.name, hello.session, hello.host
        self._feed(SessionOpened(session, *who))

    def requested(self, peer: Peer, request_id: int, message: Message) -> None:
        """A peer of this term asks."""
        began_s = self._feed(Request(self._sessions[peer], request_id, message))
        ended_s = self._clock.now_s()
        self._counts.note_request(type(message).__name__, ended_s - began_s)
        if not self._is_lag_due:
            self._is_lag_due = True
            self._loop.call_later(LAG_PROBE_S, self._note_lag, ended_s + LAG_PROBE_S)

    def closed(self, peer: Peer) -> None:
        """The connection of a peer of this term has ended."""
        session = self._sessions.pop(peer)
        del self._peers[session]
        self._feed(SessionClosed(session))

    def _persisted(self, write: WriteId) -> None:
        self._feed(Persisted(write))

    # Events in, actions out.

    def _feed(self, event: Event) -> float:
        """Let the core handle an event and carry its actions out; when that began."""
        now = self._clock.now_s()
        if self._is_over:
            return now
        try:
            for action in self._state.handle(event, now):
                if isinstance(action, Reply):  # most are
                    self._reply(action)
                else:
                    self._carry_out(action)
            at_s = self._state.wakeup_s
        except Exception as error:  # a bug in the core must end the master, not one connection
            self._break(error)
            return now
        if at_s < self._alarm_at_s:
            self._set_alarm(at_s, at_s - now)
        return now

    def _carry_out(self, action: Command | Persist | CloseSession | RaiseEpoch | Note) -> None:
        match action:
            case Command():
                peer = self._peers.get(action.session)
                self._start(self._ask(action.command, peer, action.message))
            case Persist():
                self._persistence.submit(action)
            case CloseSession():
                if (peer := self._peers.get(action.session)) is not None:
                    peer.close(Unavailable("the master ended this session"))
            case Note(text):
                # Some of it is peers' text, which must not look like lines of ours.
                _LOG.info("".join(each if each.isprintable() else "?" for each in text))
            case RaiseEpoch(above):
                self._break(EpochOutrun(above))
            case _:
                assert_never(action)

    def _reply(self, reply: Reply) -> None:
        peer = self._peers.get(reply.session)
        if peer is not None:
            try:
                peer.reply(reply.request_id, reply.message)
            except BadValue as error:
                # Many parts and replicas of many pages: the caller can ask for fewer.
                peer.fail(reply.request_id, error)
        elif reply.session == INSIDE:
            self._inside.append(reply.message)

    async def _ask(self, command: CommandId, peer: Peer | None, message: Message) -> None:
        """Send a command; feed its answer back, or None when there will be none."""
        answer: Message | None = None
        if peer is not None:
            try:
                answer = await peer.call(message, limits.CALL_TIMEOUT_S)
            except KVStoreError as error:
                self._counts.commands_failed += 1
                _LOG.warning("%s was not carried out: %s", type(message).__name__, error)
        self._feed(CommandAnswered(command, answer))

    def _set_alarm(self, at_s: float, delay_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at_s = at_s
        if delay_s > 0:
            self._alarm = self._loop.call_later(delay_s, self._ring)
        else:
            # After the turn's answers have gone out, and once for all its events.
            self._alarm = self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._alarm_at_s = math.inf
        self._feed(Tick())

    def _note_lag(self, due_s: float) -> None:
        self._is_lag_due = False
        self._counts.lag.note(self._clock.now_s() - due_s)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)  # whatever it is, this term cannot go on

    def _break(self, error: BaseException) -> None:
        """End for this reason; the core is not asked anything from now on."""
        self._is_over = True
        self._over(error)
