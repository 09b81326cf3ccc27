"""One master for the life of its process: stands by, leads for a term, stands by again.

Carries out what Leadership decides: asks the metadata store, loads from it, begins and ends terms.
Owns the order of the end: no more requests, what is to be stored is stored, then the leadership is
given up. Must not know what a term does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from kvstore.errors import OutOfSpace, StaleEpoch, Unavailable
from kvstore.standing import Standing
from master.leadership import (
    BeginTerm,
    Campaign,
    CampaignEnded,
    Deposed,
    EndTerm,
    EpochSeen,
    GiveUp,
    Leadership,
    Load,
    Loaded,
    Prolong,
    Renew,
    Renewal,
    RenewEnded,
    Resign,
    StandingTick,
    StopAsked,
)
from master.metrics import ShellCounts
from master.reception import standby_status
from master.service import EpochOutrun, TermService

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kvstore.clock import Clock
    from kvstore.coordination.metadata_store import (
        Candidate,
        Entry,
        Leader,
        MetadataStore,
        Term,
    )
    from kvstore.ids import Epoch
    from kvstore.wire.messages.reads import Status
    from master.leadership import LeadershipAction, LeadershipEvent
    from master.reception import Reception
    from master.service import Core

    MakeCore = Callable[[Epoch, Sequence[Entry], float], Core]
    """The core of a term: its epoch, what is durable, and until when its lease is good."""

NO_ANSWER: Final = (TimeoutError, Unavailable, OutOfSpace)
"""Of the store: it may be asked again."""
LOAD_RETRY_S: Final = 0.1
DRAIN_TIMEOUT_S: Final = 2.0

_LOG = logging.getLogger(__name__)


class Office:
    """All methods belong to the loop's thread."""

    def __init__(
        self,
        reception: Reception,
        store: MetadataStore,
        clock: Clock,
        candidate: Candidate,
        make_core: MakeCore,
        on_standing: Callable[[Leadership], None],
    ) -> None:
        """`on_standing` is told of each change; `store` is opened before it is asked for anything,
        closing it is the caller's part.
        """
        self.leadership = Leadership()
        self.counts = ShellCounts()
        self._reception = reception
        self._store = store
        self._clock = clock
        self._candidate = candidate
        self._make_core = make_core
        self._on_standing = on_standing
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        """Done once this master has to end: with a result when asked to, else with the reason."""
        self._alarm: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        """The last question about who leads."""
        self._loading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """These two, and terms on their way out."""
        self._is_open = False
        """Whether the store is."""
        self._restored: Sequence[Entry] = ()
        self._term: TermService | None = None
        self._must_resign = False
        self._leader_told: Leader | None = None
        """Who was logged as leading last."""
        self._is_in_doubt = False
        """Whether it was logged that this master's lease is."""
        self._doubt: str | None = None
        """Why the store did not say who leads, the last time; None when it did."""

    def stop(self) -> None:
        """Make `run` return soon."""
        if not self._end.done():
            self._end.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Make `run` raise this soon: the master cannot go on."""
        if not self._end.done():
            self._end.set_exception(error)
        else:
            _LOG.error("while ending: %r", error)

    async def run(self) -> None:
        """Lead whenever the store lets this candidate, until `stop`.

        StaleEpoch when another master has taken over a store without leases; ConfigError,
        AccessDenied when the store cannot be used; anything else that is raised is our bug.
        """
        self._show()
        self._feed(StandingTick())
        try:
            await self._end
            await self._reception.close()
            if self._term is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_TIMEOUT_S):
                        await self._term.drain()
        finally:
            await self._give_back()

    def look(self) -> tuple[Status, ShellCounts]:
        """What this master is and has, and what the shell counted, at this moment."""
        leadership, counts = self.leadership, self.counts
        counts.terms = leadership.terms
        counts.renewals_failed = leadership.renewals_failed
        counts.lease_left_s = leadership.leads_until_s - self._clock.now_s()
        if self._term is not None:
            return self._term.look(), counts
        counts.persist_pending, counts.is_persisting = 0, True  # nothing waits that could fail
        return self._reception.status, counts

    def _show(self) -> None:
        """Let the reception tell what this master is, and who leads, as far as it knows."""
        leadership, me, known = self.leadership, self._candidate, self._reception.status
        leader = leadership.leader
        # It may be an earlier life of this master that is still in the books.
        where = leader.where if leader is not None and leader.where != me.where else ()
        standing = leadership.standing.value
        shown = standby_status(known.cluster, leadership.epoch, me.name, standing, where)
        if leader is not None and leader != self._leader_told:
            self._leader_told = leader
            at = ", ".join(leader.where)
            whose = "" if where else ": an earlier life of this master, or another with its address"
            _LOG.info("%s leads in epoch %d, at %s%s", leader.name, leader.epoch, at, whose)
        if shown != known:
            self._reception.show(shown)

    def _tell_doubt(self, now: float) -> None:
        """Log once that the lease may have ended, and once that it has not."""
        leadership, was_in_doubt = self.leadership, self._is_in_doubt
        leads = leadership.standing is Standing.LEADING
        self._is_in_doubt = leads and not leadership.leads(now)
        if self._is_in_doubt and not was_in_doubt:
            _LOG.warning("the lease of epoch %d is in doubt: lookups only", leadership.epoch)
        elif was_in_doubt and leads and not self._is_in_doubt:
            _LOG.warning("the lease of epoch %d is sure again", leadership.epoch)

    # Events in, actions out.

    def _feed(self, event: LeadershipEvent) -> None:
        """Let the leadership take an event in and carry its actions out."""
        before = self.leadership.standing
        try:
            now = self._clock.now_s()
            actions = self.leadership.handle(event, now)
            self._show()
            self._tell_doubt(now)
            for action in actions:
                self._carry_out(action)
            if self.leadership.standing is not before:
                self._on_standing(self.leadership)
            self._set_alarm()
        except Exception as error:  # a core that cannot be made, or a bug of ours
            self.fail(error)

    def _carry_out(self, action: LeadershipAction) -> None:
        match action:
            case Campaign(timeout_s):
                self._asking = self._start(self._campaign(timeout_s))
            case Renew(epoch, timeout_s):
                self._asking = self._start(self._renew(epoch, timeout_s))
            case Load(epoch):
                self._loading = self._start(self._load(epoch))
            case BeginTerm(epoch, until_s):
                self._begin_term(epoch, until_s)
            case Prolong(until_s):
                assert self._term is not None, "Prolong comes between BeginTerm and EndTerm"
                self._term.prolong(until_s)
            case EndTerm():
                self._end_term()
            case Resign():
                self._must_resign = True
            case GiveUp(epoch):
                self.fail(StaleEpoch(f"epoch {epoch} is over: another master leads"))
            case _:
                assert_never(action)

    def _begin_term(self, epoch: Epoch, until_s: float) -> None:
        restored, self._restored = self._restored, ()
        core = self._make_core(epoch, restored, until_s)

        def over(error: BaseException) -> None:
            if isinstance(error, EpochOutrun):
                _LOG.warning("epoch %d ends: %s", epoch, error)
                self._loop.call_soon(self._feed, EpochSeen(epoch, error.seen))
            elif isinstance(error, StaleEpoch):
                self._loop.call_soon(self._feed, Deposed(epoch))
            else:
                self.fail(error)

        self._term = TermService(core, self._store, self._clock, self.counts, over)
        self._reception.admit(self._term)

    def _end_term(self) -> None:
        self._reception.dismiss()
        self._restored = ()
        if self._loading is not None:
            self._loading.cancel()
        term, self._term = self._term, None
        if term is not None:
            term.cut_off()
            self._start(term.ended())

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at_s = self.leadership.wakeup_s
        if at_s < math.inf:
            delay_s = max(0.0, at_s - self._clock.now_s())
            self._alarm = self._loop.call_later(delay_s, self._feed, StandingTick())

    # Questions to the store.

    async def _campaign(self, timeout_s: float) -> None:
        answer: Term | Leader | None = None
        sent_s = self._clock.now_s()
        try:
            if not self._is_open:
                await self._store.open()
                self._is_open = True
            sent_s = self._clock.now_s()  # I9: before the question leaves
            async with asyncio.timeout(timeout_s):
                above = self.leadership.epoch
                candidate = msgspec.structs.replace(self._candidate, above=above)
                answer = await self._store.campaign(candidate)
        except NO_ANSWER as error:
            self._note(error)
        else:
            self._note(None)
        self._feed(CampaignEnded(sent_s, answer))

    async def _renew(self, epoch: Epoch, timeout_s: float) -> None:
        renewal = Renewal.UNKNOWN
        sent_s = self._clock.now_s()  # I9: before the question leaves
        try:
            async with asyncio.timeout(timeout_s):
                await self._store.renew()
        except StaleEpoch:
            renewal = Renewal.OVER
        except NO_ANSWER as error:
            self._note(error)
        else:
            renewal = Renewal.HELD
            self._note(None)
        self._feed(RenewEnded(epoch, sent_s, renewal))

    async def _load(self, epoch: Epoch) -> None:
        while True:
            try:
                self._restored = [entry async for page in self._store.load("") for entry in page]
            except StaleEpoch:
                self._feed(Deposed(epoch))
                return
            except NO_ANSWER as error:
                self._note(error)
                await asyncio.sleep(LOAD_RETRY_S)
            else:
                self._feed(Loaded(epoch))
                return

    def _note(self, error: Exception | None) -> None:
        """Say once that the store does not answer, and once that it does again."""
        if error is not None and self._doubt is None:
            _LOG.warning("the metadata store does not say who leads: %s", str(error) or "no answer")
        elif error is None and self._doubt is not None:
            _LOG.warning("the metadata store says who leads again")
        self._doubt = None if error is None else str(error)

    # The end.

    async def _give_back(self) -> None:
        """End the term, let go of the store, and close the doors."""
        self._feed(StopAsked())
        for task in (self._asking, self._loading):
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._must_resign and self._is_open:
            await self._store.resign()
        await self._reception.close()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
