"""Which master leads: one master's own standing, as a table and the times that go with it.

`handle(event, now) -> actions`, without clock, store or await. It asks the metadata store one
question at a time and counts each lease from before the question left, so that a master that was
paused at any point knows by its clock alone that it must not act (I10). Must not know what a
master that leads does.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import Final

import msgspec

from kvstore import limits
from kvstore.coordination.metadata_store import Leader, Term
from kvstore.errors import IllegalTransition
from kvstore.ids import Epoch
from kvstore.standing import Standing

CAMPAIGN_TIMEOUT_S: Final = 3.0
"""Longer than a store should need, which has deadlines of its own: a try that is given up in the
middle may have been won, and is then waited out."""
RENEWALS_PER_LEASE: Final = 4
NOT_YET: Final = -inf


class Turn(StrEnum):
    """What can happen to a standing."""

    WON = "won"
    ANOTHER_LEADS = "another leads"
    UNDECIDED = "nobody knows who leads"
    LOADED = "metadata loaded"
    HELD = "lease renewed"
    DOUBTFUL = "no answer to a renewal"
    OVER = "lease over"
    OUTRUN = "a higher epoch was seen"
    REPLACED = "replaced where nobody stands by"
    STOP = "stop asked"


LEADERSHIP_TRANSITIONS: Final[dict[tuple[Standing, Turn], Standing]] = {
    (Standing.STANDBY, Turn.WON): Standing.LOADING,
    (Standing.STANDBY, Turn.ANOTHER_LEADS): Standing.STANDBY,
    (Standing.STANDBY, Turn.UNDECIDED): Standing.STANDBY,
    (Standing.STANDBY, Turn.STOP): Standing.STOPPED,
    (Standing.LOADING, Turn.LOADED): Standing.LEADING,
    (Standing.LOADING, Turn.HELD): Standing.LOADING,
    (Standing.LOADING, Turn.DOUBTFUL): Standing.LOADING,
    (Standing.LOADING, Turn.OVER): Standing.STANDBY,
    (Standing.LOADING, Turn.REPLACED): Standing.STOPPED,
    (Standing.LOADING, Turn.STOP): Standing.STOPPED,
    (Standing.LEADING, Turn.HELD): Standing.LEADING,
    (Standing.LEADING, Turn.DOUBTFUL): Standing.LEADING,
    (Standing.LEADING, Turn.OVER): Standing.STANDBY,
    (Standing.LEADING, Turn.OUTRUN): Standing.STANDBY,
    (Standing.LEADING, Turn.REPLACED): Standing.STOPPED,
    (Standing.LEADING, Turn.STOP): Standing.STOPPED,
}


class Renewal(StrEnum):
    """What became of a renewal."""

    HELD = "held"
    OVER = "over"
    UNKNOWN = "unknown"


class CampaignEnded(msgspec.Struct, frozen=True):
    """The store answered a Campaign that left at `sent_s`; None when nobody knows who leads."""

    sent_s: float
    answer: Term | Leader | None


class RenewEnded(msgspec.Struct, frozen=True):
    """A Renew of this epoch, which left at `sent_s`, has ended."""

    epoch: Epoch
    sent_s: float
    renewal: Renewal


class Deposed(msgspec.Struct, frozen=True):
    """The store said to another call that this epoch is over."""

    epoch: Epoch


class EpochSeen(msgspec.Struct, frozen=True):
    """A worker has met a leader of the higher epoch `seen`.

    Another leads by now, as the store will say; or the store was put back to an earlier state. Then
    this leader would give out generations that have been, and be refused by all who remember.
    """

    epoch: Epoch
    seen: Epoch


class Loaded(msgspec.Struct, frozen=True):
    """What Load asked for in this epoch is there."""

    epoch: Epoch


class StandingTick(msgspec.Struct, frozen=True):
    """Time has come to `wakeup_s`, or has simply passed."""


class StopAsked(msgspec.Struct, frozen=True):
    """This master is to end; what it had to store is stored."""


LeadershipEvent = (
    CampaignEnded | RenewEnded | Deposed | EpochSeen | Loaded | StandingTick | StopAsked
)


class Campaign(msgspec.Struct, frozen=True):
    """Try to lead, above the epoch that is known of; CampaignEnded follows, after `timeout_s` at
    the latest.
    """

    timeout_s: float


class Renew(msgspec.Struct, frozen=True):
    """Renew the lease of this epoch; RenewEnded follows, after `timeout_s` at the latest."""

    epoch: Epoch
    timeout_s: float


class Load(msgspec.Struct, frozen=True):
    """Read the metadata for this epoch; Loaded follows, unless EndTerm comes first."""

    epoch: Epoch


class BeginTerm(msgspec.Struct, frozen=True):
    """Lead in this epoch, with a core of its own whose lease is good until then."""

    epoch: Epoch
    until_s: float


class Prolong(msgspec.Struct, frozen=True):
    """The lease of the term in force is good until then."""

    until_s: float


class EndTerm(msgspec.Struct, frozen=True):
    """Stop loading or leading at once; nothing of this epoch may be done any more."""

    epoch: Epoch


class Resign(msgspec.Struct, frozen=True):
    """Give up at the store whatever this master may hold there; nothing follows."""


class GiveUp(msgspec.Struct, frozen=True):
    """End this master: its store knows no leases, so that it could only depose who replaced it."""

    epoch: Epoch


LeadershipAction = Campaign | Renew | Load | BeginTerm | Prolong | EndTerm | Resign | GiveUp


class Leadership:
    """The standing of one master. Mutated by `handle` alone."""

    def __init__(self) -> None:
        """Start as a standby that knows of no leader; the first tick campaigns."""
        self.standing = Standing.STANDBY
        self.epoch = Epoch(0)
        """Of the term that it loads or leads in, else the highest that it knows of."""
        self.leader: Leader | None = None
        """Who leads, as the store said last; None for itself, or where it did not say."""
        self.leads_until_s = NOT_YET
        """When the lease may end: from then on nothing that changes state is done (I10)."""
        self.terms = 0
        """How often it won."""
        self.renewals_failed = 0
        self._lease_s = inf
        self._is_asking = False
        """Whether the store has a question of ours."""
        self._due_s = NOT_YET
        """When the next question is to leave."""

    @property
    def wakeup_s(self) -> float:
        """When a StandingTick is wanted; infinity while an answer is waited for."""
        waits = self._is_asking or self.standing is Standing.STOPPED
        return inf if waits else self._due_s

    def leads(self, now: float) -> bool:
        """Whether it may change anything: it leads, and its lease cannot have ended (I10)."""
        return self.standing is Standing.LEADING and now < self.leads_until_s

    def handle(self, event: LeadershipEvent, now: float) -> list[LeadershipAction]:
        """Change the standing by one event; what is to be done about it, in order.

        Events of an earlier term, and those that come after the stop, change nothing.
        """
        if isinstance(event, CampaignEnded | RenewEnded):
            self._is_asking = False
        done: list[LeadershipAction] = []
        if self._concerns(event):
            match event:
                case CampaignEnded(sent_s, answer):
                    done = self._campaign_ended(sent_s, answer)
                case RenewEnded(_, sent_s, renewal):
                    done = self._renew_ended(sent_s, renewal)
                case Deposed():
                    done = self._over()
                case EpochSeen(_, seen):
                    done = self._outrun(seen)
                case Loaded():
                    done = self._loaded()
                case StopAsked():
                    done = self._stop()
        return done + self._ask(now)

    def _concerns(self, event: LeadershipEvent) -> bool:
        """Whether the event is of the life, and of the term, that this master is in."""
        if isinstance(event, RenewEnded | Deposed | EpochSeen | Loaded):
            in_term = self.standing in (Standing.LOADING, Standing.LEADING)
            return in_term and event.epoch == self.epoch
        return self.standing is not Standing.STOPPED

    def _turn(self, turn: Turn) -> None:
        after = LEADERSHIP_TRANSITIONS.get((self.standing, turn))
        if after is None:
            raise IllegalTransition("this master", self.standing, turn, f"epoch {self.epoch}")
        self.standing = after

    def _campaign_ended(
        self, sent_s: float, answer: Term | Leader | None
    ) -> list[LeadershipAction]:
        match answer:
            case Term(epoch, lease_s):
                self._turn(Turn.WON)
                self.epoch, self.leader, self._lease_s = epoch, None, lease_s
                self.terms += 1
                self._hold(sent_s)
                self._due_s = sent_s + lease_s / RENEWALS_PER_LEASE
                return [Load(epoch)]
            case Leader(epoch):
                self._turn(Turn.ANOTHER_LEADS)
                self.epoch, self.leader = max(epoch, self.epoch), answer
            case None:
                self._turn(Turn.UNDECIDED)
        return []

    def _renew_ended(self, sent_s: float, renewal: Renewal) -> list[LeadershipAction]:
        match renewal:
            case Renewal.HELD:
                self._turn(Turn.HELD)
                self._hold(sent_s)
                leads = self.standing is Standing.LEADING
                return [Prolong(self.leads_until_s)] if leads else []
            case Renewal.UNKNOWN:
                self._turn(Turn.DOUBTFUL)
                self.renewals_failed += 1
                return []
            case Renewal.OVER:
                self.renewals_failed += 1
                return self._over()

    def _hold(self, sent_s: float) -> None:
        """The lease began no sooner than `sent_s` (I9, I10)."""
        self.leads_until_s = sent_s + self._lease_s - limits.LEADER_MARGIN_S

    def _loaded(self) -> list[LeadershipAction]:
        self._turn(Turn.LOADED)
        return [BeginTerm(self.epoch, self.leads_until_s)]

    def _over(self) -> list[LeadershipAction]:
        """Another may lead: stand by, and ask at once who does."""
        self.leads_until_s = NOT_YET
        if self._lease_s == inf:
            self._turn(Turn.REPLACED)
            return [EndTerm(self.epoch), GiveUp(self.epoch)]
        self._turn(Turn.OVER)
        self._due_s = NOT_YET
        return [EndTerm(self.epoch)]

    def _outrun(self, seen: Epoch) -> list[LeadershipAction]:
        """Lead again, above that (I10): at once, or when the lease of this term has ended."""
        ended = EndTerm(self.epoch)
        self._turn(Turn.OUTRUN)
        self.leads_until_s = self._due_s = NOT_YET
        self.epoch = seen
        return [ended]

    def _stop(self) -> list[LeadershipAction]:
        held = self.standing is not Standing.STANDBY
        self._turn(Turn.STOP)
        self.leads_until_s = NOT_YET
        # Even a standby: a campaign of its own may be under way, and be won.
        return [EndTerm(self.epoch), Resign()] if held else [Resign()]

    def _ask(self, now: float) -> list[LeadershipAction]:
        """The question that is due, if the store has none of ours."""
        if now < self.wakeup_s:
            return []
        self._is_asking = True
        if self.standing is Standing.STANDBY:
            self._due_s = now + limits.LEADER_POLL_S
            return [Campaign(CAMPAIGN_TIMEOUT_S)]
        wait_s = self._lease_s / RENEWALS_PER_LEASE
        self._due_s = now + wait_s
        return [Renew(self.epoch, wait_s)]
