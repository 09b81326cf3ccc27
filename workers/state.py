"""The pool worker as a pure state machine: `handle(event, now) -> actions`, the only mutator.

Dispatch only; the work is in `pulls`, `commands` and `membership`, over the extents in `holdings`.
No clock, socket, thread or random number inside: the shell (workers.service) and the simulation
drive the same object. Illegal events are our bugs and raise; peers' input never raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from kvstore import limits
from kvstore.errors import BadValue, InvariantBroken
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.membership import (
    CheckExtents,
    FenceExtents,
    FreeExtents,
    ReleaseChunks,
    RetireExtents,
)
from kvstore.wire.messages.stripes import HashParity
from workers import events
from workers.commands import Commands
from workers.event_ring import EventRing
from workers.events import Action, AnswerCommand, Event
from workers.holdings import Holdings
from workers.membership import Link, Membership
from workers.pull_requests import parity_asked
from workers.pulls import UNREPORTED_MAX, Pulls
from workers.rounds import DAMAGED_MAX, Rounds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.wire.messages.common import Outcome
    from kvstore.wire.messages.puts import Ingest
    from workers.extent_table import SegmentTable
    from workers.membership import Profile


class WorkerState:
    """Everything that a worker knows. Mutate only through `handle`."""

    def __init__(
        self, profile: Profile, segments: Iterable[SegmentTable], scrub_bytes_per_s: int = 0
    ) -> None:
        """Hold these segments, offered to nobody yet and fenced until a leader is heard.

        So many bytes a second of each are verified unasked.
        """
        self.holdings = Holdings(segments)
        self.membership = Membership(profile, self.holdings)
        self.pulls = Pulls(self.holdings, self._gate, self.membership.is_paused)
        self.commands = Commands(self.holdings)
        self.rounds = Rounds(self.holdings, self.membership.has_failed, scrub_bytes_per_s)
        self.ring = EventRing()
        self._now = 0.0

    def _gate(self, message: Ingest) -> Outcome | None:
        return self.membership.gate(message, self._now)

    @property
    def epoch(self) -> int:
        """The highest epoch that a leader has shown; lower ones are refused."""
        return self.membership.epoch

    @property
    def is_serving(self) -> bool:
        """Whether a leader has taken the whole inventory."""
        return self.membership.link is Link.SERVING

    def is_fenced(self, now: float) -> bool:
        """Whether the worker has fenced itself: no ingest, no overwriting, reads go on."""
        return self.membership.is_fenced(now)

    def next_wakeup(self) -> float:
        """When `Tick` is due at the latest, on the clock of `now`."""
        return min(self.membership.next_wakeup(), self.rounds.next_wakeup())

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in; what the shell has to do about it, in order."""
        self.ring.append(now, event)
        self._now = now
        match event:
            case events.IngestRequested(request, session, message):
                return self.pulls.request(request, session, message)
            case events.PullEnded(pull, outcomes, stored_max):
                ended = self.holdings.works.pop(pull)
                return self._settled(self.pulls.ended(ended, outcomes, stored_max))
            case events.MasterAnswered():
                return self._answered(event)
            case events.WorkEnded(work, outcomes):
                done = self.holdings.works.pop(work)
                return self._settled(self.commands.ended(done, outcomes))
            case events.Scrubbed(look, outcomes):
                self.rounds.ended(look, outcomes)
                return self.rounds.report() if self.is_serving else []
            case events.CommandReceived():
                return self._command(event)
            case events.LinkOpened():
                self.commands.forget()
                return self.membership.opened(now)
            case events.LeaveWanted():
                return self._leave()
            case events.LinkClosed():
                self.commands.forget()
                self.membership.closed()
                return self.pulls.forget_session(events.MOVER) + self.pulls.resume()
            case events.SessionClosed(session):
                return self.pulls.forget_session(session)
            case events.MediumChanged(segment, state, reason):
                return self.membership.medium_changed(segment, (state, reason), now)
            case events.Tick():
                return self._tick()
            case _:
                assert_never(event)

    def _settled(self, actions: list[Action]) -> list[Action]:
        """A work has ended in these actions: see who has waited for it."""
        # Commands first: a fence must take hold before a waiting request is looked at again.
        actions += self.commands.resume()
        actions += self.pulls.resume()
        return actions + self.membership.offer(self._now)

    def _answered(self, event: events.MasterAnswered) -> list[Action]:
        if event.call in self.pulls.reports:
            return self.pulls.noted(event.call, event.reply)
        if event.call in self.rounds.calls:
            self.rounds.noted(event.call, event.reply)
            return []
        if event.call not in self.membership.calls:
            return []  # of a link that is gone
        member = self.membership
        link, paused = member.link, len(member.unanswered)
        actions = member.answered(event.call, event.reply, self._now)
        if member.link is Link.OFFERING and link is Link.REGISTERING:
            # No pull may run from before the inventory is offered until that is answered.
            actions += self.pulls.cancel(self.holdings.pulls())
            actions += member.offer(self._now)
        if len(member.unanswered) < paused:
            actions += self.pulls.resume()
        if member.link is Link.SERVING and link is Link.OFFERING:
            actions += self.pulls.report_again()
        if member.link is Link.SERVING and link is not Link.SERVING:
            self.rounds.tell_anew()
            actions += self.rounds.report()
        return actions

    def _command(self, event: events.CommandReceived) -> list[Action]:
        message = event.message
        if isinstance(message, FenceExtents | FreeExtents | RetireExtents | CheckExtents):
            self.membership.epoch = max(self.membership.epoch, message.epoch)
            return self.commands.receive(event.command, message, self.membership.epoch)
        if isinstance(message, ReleaseChunks):
            self.membership.epoch = max(self.membership.epoch, message.epoch)
            return self.commands.release(event.command, message, self.membership.epoch)
        if isinstance(message, HashParity):
            return self._parity(event.command, message)
        error = BadValue("command", type(message).__name__, "a command to a worker")
        return [AnswerCommand(event.command, Failure(error.code, str(error)))]

    def _parity(self, command: int, message: HashParity) -> list[Action]:
        """Nothing here changes by it, so a new leader need not wait for what an old one asked."""
        try:
            if message.epoch < self.membership.epoch:  # I10
                raise BadValue("epoch", message.epoch, f"at least {self.membership.epoch}")
            parity_asked(message)
        except BadValue as error:
            return [AnswerCommand(command, Failure(error.code, str(error)))]
        return [events.ComputeParity(command, message)]

    def _leave(self) -> list[Action]:
        """Take nothing any more, whoever asks, and tell the leader."""
        actions = self.membership.leave(self._now)
        actions += self.pulls.cancel(self.holdings.pulls())
        return actions + self.pulls.resume()  # the gate now answers them

    def _tick(self) -> list[Action]:
        actions = self.membership.tick(self._now)
        if actions and self.is_serving:  # a heartbeat is due: the pace for another try
            actions += self.pulls.report_again() + self.rounds.report()
        actions += self.rounds.look(self._now)
        if self.is_fenced(self._now):
            actions += self.pulls.cancel(self.holdings.pulls())
            actions += self.pulls.resume()  # the gate now answers them
        return actions

    def check_invariants(self) -> None:
        """Raise InvariantBroken, with its number, unless every rule of this file's parts holds."""
        self.holdings.check_invariants()
        running = {work.id for work in self.holdings.pulls()}
        if running != set(self.pulls.running):
            raise InvariantBroken(f"I6 pulls {running} but requests {set(self.pulls.running)}")
        if len(self.pulls.waiting) > limits.WAITING_PUTS_MAX:
            raise InvariantBroken(f"I7 {len(self.pulls.waiting)} requests wait")
        if len(self.pulls.unreported) > UNREPORTED_MAX:
            raise InvariantBroken(f"I7 {len(self.pulls.unreported)} reports without an answer")
        if len(self.rounds.damaged) > DAMAGED_MAX:
            raise InvariantBroken(f"I7 {len(self.rounds.damaged)} damaged extents are remembered")
        offered = [call.segment for call in self.membership.calls.values() if call.segment]
        for segment in self.membership.unanswered & set(offered):
            if any(work.table.segment == segment for work in self.holdings.pulls()):
                raise InvariantBroken(f"a pull runs in {segment} while its inventory is offered")
