"""Who leads: every event in every standing, the times of a lease, and masters over one store."""

from __future__ import annotations

from math import inf
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import limits
from kvstore.coordination.metadata_store import Leader, Term
from kvstore.errors import IllegalTransition
from kvstore.ids import Epoch
from kvstore.standing import Standing
from master.leadership import (
    CAMPAIGN_TIMEOUT_S,
    LEADERSHIP_TRANSITIONS,
    BeginTerm,
    Campaign,
    CampaignEnded,
    Deposed,
    EndTerm,
    EpochSeen,
    GiveUp,
    Leadership,
    LeadershipAction,
    LeadershipEvent,
    Load,
    Loaded,
    Prolong,
    Renew,
    Renewal,
    RenewEnded,
    Resign,
    StandingTick,
    StopAsked,
    Turn,
)

NOW: Final = 1000.0
LEASE_S: Final = 2.0
GOOD_S: Final = LEASE_S - limits.LEADER_MARGIN_S
"""How long a lease is counted on from when the question left."""
RENEW_S: Final = LEASE_S / 4
E1, E2, E3 = Epoch(1), Epoch(2), Epoch(3)
OTHER: Final = Leader(E2, "m2", ("10.0.0.2:7700",))


def campaigning() -> Leadership:
    """A standby whose first question is under way since NOW."""
    machine = Leadership()
    assert machine.handle(StandingTick(), NOW) == [Campaign(CAMPAIGN_TIMEOUT_S)]
    return machine


def loading(lease_s: float = LEASE_S) -> Leadership:
    """It has won E1 by a question of NOW."""
    machine = campaigning()
    assert machine.handle(CampaignEnded(NOW, Term(E1, lease_s)), NOW + 0.1) == [Load(E1)]
    return machine


def leading(lease_s: float = LEASE_S) -> Leadership:
    """It leads in E1 since a question of NOW."""
    machine = loading(lease_s)
    until_s = NOW + lease_s - limits.LEADER_MARGIN_S
    assert machine.handle(Loaded(E1), NOW + 0.2) == [BeginTerm(E1, until_s)]
    return machine


def stopped() -> Leadership:
    """It was told to stop while it stood by."""
    machine = campaigning()
    assert machine.handle(StopAsked(), NOW) == [Resign()]
    return machine


MAKERS: Final = {
    Standing.STANDBY: campaigning,
    Standing.LOADING: loading,
    Standing.LEADING: leading,
    Standing.STOPPED: stopped,
}
LATER: Final = NOW + 0.3
"""No question is due by then."""
EVENTS: Final[dict[str, LeadershipEvent]] = {
    "won": CampaignEnded(NOW, Term(E1, LEASE_S)),
    "another": CampaignEnded(NOW, OTHER),
    "undecided": CampaignEnded(NOW, None),
    "held": RenewEnded(E1, NOW + 0.1, Renewal.HELD),
    "unknown": RenewEnded(E1, NOW + 0.1, Renewal.UNKNOWN),
    "over": RenewEnded(E1, NOW + 0.1, Renewal.OVER),
    "deposed": Deposed(E1),
    "outrun": EpochSeen(E1, E3),
    "loaded": Loaded(E1),
    "tick": StandingTick(),
    "stop": StopAsked(),
}
AGAIN: Final = Campaign(CAMPAIGN_TIMEOUT_S)
ILLEGAL: Final = None
GRID: Final[dict[Standing, dict[str, tuple[Standing, list[LeadershipAction]] | None]]] = {
    Standing.STANDBY: {
        "won": (Standing.LOADING, [Load(E1)]),
        "another": (Standing.STANDBY, [AGAIN]),
        "undecided": (Standing.STANDBY, [AGAIN]),
        "held": (Standing.STANDBY, [AGAIN]),
        "unknown": (Standing.STANDBY, [AGAIN]),
        "over": (Standing.STANDBY, [AGAIN]),
        "deposed": (Standing.STANDBY, []),
        "outrun": (Standing.STANDBY, []),
        "loaded": (Standing.STANDBY, []),
        "tick": (Standing.STANDBY, []),
        "stop": (Standing.STOPPED, [Resign()]),
    },
    Standing.LOADING: {
        "won": ILLEGAL,
        "another": ILLEGAL,
        "undecided": ILLEGAL,
        "held": (Standing.LOADING, []),
        "unknown": (Standing.LOADING, []),
        "over": (Standing.STANDBY, [EndTerm(E1), AGAIN]),
        "deposed": (Standing.STANDBY, [EndTerm(E1), AGAIN]),
        "outrun": ILLEGAL,
        "loaded": (Standing.LEADING, [BeginTerm(E1, NOW + GOOD_S)]),
        "tick": (Standing.LOADING, []),
        "stop": (Standing.STOPPED, [EndTerm(E1), Resign()]),
    },
    Standing.LEADING: {
        "won": ILLEGAL,
        "another": ILLEGAL,
        "undecided": ILLEGAL,
        "held": (Standing.LEADING, [Prolong(NOW + 0.1 + GOOD_S)]),
        "unknown": (Standing.LEADING, []),
        "over": (Standing.STANDBY, [EndTerm(E1), AGAIN]),
        "deposed": (Standing.STANDBY, [EndTerm(E1), AGAIN]),
        "outrun": (Standing.STANDBY, [EndTerm(E1), AGAIN]),
        "loaded": ILLEGAL,
        "tick": (Standing.LEADING, []),
        "stop": (Standing.STOPPED, [EndTerm(E1), Resign()]),
    },
    Standing.STOPPED: dict.fromkeys(EVENTS, (Standing.STOPPED, [])),
}


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("standing", Standing)
def test_every_event_in_every_standing(standing: Standing, name: str) -> None:
    machine = MAKERS[standing]()
    expected = GRID[standing][name]
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"in state {standing}"):
            machine.handle(EVENTS[name], LATER)
    else:
        actions = machine.handle(EVENTS[name], LATER)
        assert (machine.standing, actions) == expected


def test_every_line_of_the_table_is_walked() -> None:
    turns = {
        "won": Turn.WON, "another": Turn.ANOTHER_LEADS, "undecided": Turn.UNDECIDED,
        "held": Turn.HELD, "unknown": Turn.DOUBTFUL, "over": Turn.OVER, "loaded": Turn.LOADED,
        "stop": Turn.STOP, "outrun": Turn.OUTRUN,
    }  # fmt: skip
    walked = {
        (standing, turns[name]): cell[0]
        for standing, row in GRID.items()
        for name, cell in row.items()
        if name in turns and cell is not None and standing is not Standing.STOPPED
    }
    late = {(Standing.STANDBY, Turn[t]) for t in ["HELD", "DOUBTFUL", "OVER", "OUTRUN", "LOADED"]}
    ending = Standing.LOADING, Standing.LEADING
    seldom = {(standing, Turn.REPLACED): Standing.STOPPED for standing in ending}
    seldom.update({at: after for at, after in walked.items() if at not in late})
    assert seldom == LEADERSHIP_TRANSITIONS


def test_a_standby_tries_to_lead_again_and_again_and_remembers_who_does() -> None:
    machine = campaigning()
    assert machine.wakeup_s == inf  # an answer is waited for
    assert machine.handle(CampaignEnded(NOW, OTHER), NOW + 0.05) == []
    assert (machine.leader, machine.epoch) == (OTHER, E2)
    assert machine.wakeup_s == NOW + limits.LEADER_POLL_S
    assert machine.handle(StandingTick(), machine.wakeup_s) == [AGAIN]
    # Who led is still the best answer while nobody knows.
    machine.handle(CampaignEnded(machine.wakeup_s, None), NOW + 0.3)
    assert (machine.leader, machine.epoch) == (OTHER, E2)


def test_a_lease_counts_from_before_the_question_left() -> None:
    machine = leading()
    assert machine.leads(NOW + GOOD_S - 0.001)
    assert not machine.leads(NOW + GOOD_S)
    assert machine.wakeup_s == NOW + RENEW_S
    assert machine.handle(StandingTick(), NOW + RENEW_S) == [Renew(E1, RENEW_S)]
    # The answer took its time: what counts is when the question left.
    answered = machine.handle(RenewEnded(E1, NOW + RENEW_S, Renewal.HELD), NOW + 0.9)
    assert answered == [Prolong(NOW + RENEW_S + GOOD_S)]
    assert machine.wakeup_s == NOW + 2 * RENEW_S


def test_who_was_paused_knows_by_the_clock_alone() -> None:
    machine = leading()
    machine.handle(StandingTick(), NOW + RENEW_S)
    woken_s = NOW + 60.0
    assert not machine.leads(woken_s)  # before it has handled anything
    answered = machine.handle(RenewEnded(E1, NOW + RENEW_S, Renewal.HELD), woken_s)
    assert answered == [Prolong(NOW + RENEW_S + GOOD_S), Renew(E1, RENEW_S)]
    assert not machine.leads(woken_s)
    machine.handle(RenewEnded(E1, woken_s, Renewal.HELD), woken_s + 0.01)
    assert machine.leads(woken_s + 0.01)


def test_who_was_paused_in_its_campaign_renews_before_it_leads() -> None:
    machine = campaigning()
    woken_s = NOW + 60.0
    won = machine.handle(CampaignEnded(NOW, Term(E1, LEASE_S)), woken_s)
    assert won == [Load(E1), Renew(E1, RENEW_S)]
    machine.handle(Loaded(E1), woken_s)
    assert not machine.leads(woken_s)
    over = machine.handle(RenewEnded(E1, woken_s, Renewal.OVER), woken_s)
    assert over == [EndTerm(E1), AGAIN]


def test_a_doubtful_lease_is_asked_for_until_the_store_answers() -> None:
    machine = leading()
    machine.handle(StandingTick(), NOW + RENEW_S)
    asked_s = NOW + RENEW_S
    for count in range(1, 9):
        asked_s += RENEW_S
        unknown = RenewEnded(E1, asked_s - RENEW_S, Renewal.UNKNOWN)
        assert machine.handle(unknown, asked_s) == [Renew(E1, RENEW_S)]
        assert machine.renewals_failed == count
    assert machine.standing is Standing.LEADING
    assert not machine.leads(asked_s)
    held = machine.handle(RenewEnded(E1, asked_s, Renewal.HELD), asked_s + 0.1)
    assert held == [Prolong(asked_s + GOOD_S)]
    assert machine.leads(asked_s + 0.1)


def test_a_store_that_refuses_at_once_is_not_asked_all_the_time() -> None:
    machine = leading()
    machine.handle(StandingTick(), NOW + RENEW_S)
    refused = machine.handle(RenewEnded(E1, NOW + RENEW_S, Renewal.UNKNOWN), NOW + RENEW_S + 0.001)
    assert refused == []
    assert machine.wakeup_s == NOW + 2 * RENEW_S


def test_one_question_at_a_time_is_asked_over_the_end_of_a_term() -> None:
    machine = leading()
    machine.handle(StandingTick(), NOW + RENEW_S)
    assert machine.handle(Deposed(E1), NOW + RENEW_S) == [EndTerm(E1)]
    assert machine.wakeup_s == inf
    late = machine.handle(RenewEnded(E1, NOW + RENEW_S, Renewal.HELD), NOW + 0.7)
    assert late == [AGAIN]
    assert not machine.leads(NOW + 0.7)


def test_what_is_late_of_an_earlier_term_changes_nothing() -> None:
    machine = leading()
    machine.handle(Deposed(E1), NOW + 0.3)
    machine.handle(CampaignEnded(NOW + 0.3, Term(E3, LEASE_S)), NOW + 0.4)
    assert machine.handle(Loaded(E1), NOW + 0.4) == []
    assert machine.handle(Deposed(E1), NOW + 0.4) == []
    assert (machine.standing, machine.epoch, machine.terms) == (Standing.LOADING, E3, 2)


@pytest.mark.parametrize("make", [loading, leading])
def test_where_leases_are_unknown_nobody_deposes_his_successor(make: object) -> None:
    assert callable(make)
    machine = make(inf)
    assert machine.wakeup_s == inf  # nothing is to be renewed
    assert machine.handle(Deposed(E1), NOW + 1e6) == [EndTerm(E1), GiveUp(E1)]
    assert machine.standing is Standing.STOPPED


@pytest.mark.parametrize("lease_s", [LEASE_S, inf])
def test_a_leader_that_was_outrun_leads_again_above_what_was_seen(lease_s: float) -> None:
    machine = leading(lease_s)
    assert machine.handle(EpochSeen(E1, E3), NOW + 0.3) == [EndTerm(E1), AGAIN]
    # Its own lease of before may still run; what counts is what was seen.
    machine.handle(CampaignEnded(NOW + 0.3, Leader(E1, "m1", ())), NOW + 0.4)
    assert (machine.standing, machine.epoch) == (Standing.STANDBY, E3)
    assert machine.handle(EpochSeen(E1, E2), NOW + 0.4) == []


def test_a_campaign_that_is_won_after_the_stop_is_not_entered() -> None:
    machine = stopped()
    assert machine.handle(CampaignEnded(NOW, Term(E1, LEASE_S)), NOW + 0.1) == []
    assert machine.wakeup_s == inf


class World:
    """Masters over one simulated store: slow, lossy, with masters that pause at any point."""

    def __init__(self, masters: int, choose: st.DataObject) -> None:
        self.choose = choose
        self.is_healed = False
        """From now on every question is answered at once."""
        self.now = NOW
        self.epoch = 0
        self.holder = -1
        self.ends_s = -inf
        """When the store ends the holder's lease; a lease is never ended sooner."""
        self.machines = [Leadership() for _ in range(masters)]
        self.paused_until_s = [NOW] * masters
        self.questions: list[tuple[float, int, float, LeadershipAction]] = []
        """(when it reaches the store, master, when it left, question), not there yet."""
        self.answers: list[tuple[float, int, LeadershipEvent]] = []
        """(when it reaches its master, master, answer)."""

    def delay(self) -> float:
        if self.is_healed:
            return 0.0
        return self.choose.draw(st.sampled_from([0.0, 0.01, 0.3, 0.6, 2.5]))

    def is_lost(self) -> bool:
        return not self.is_healed and self.choose.draw(st.booleans())

    def feed(self, master: int, event: LeadershipEvent) -> None:
        for action in self.machines[master].handle(event, self.now):
            match action:
                case Campaign() | Renew():
                    self.questions.append((self.now + self.delay(), master, self.now, action))
                case Load(epoch):
                    self.answers.append((self.now + self.delay(), master, Loaded(epoch)))

    def reach_store(self, master: int, sent_s: float, question: LeadershipAction) -> None:
        """Answer one question at the moment at which it is there; the answer may be lost."""
        is_held = self.now < self.ends_s
        event: LeadershipEvent
        if isinstance(question, Campaign):
            if is_held:
                answer: Term | Leader = Leader(Epoch(self.epoch), f"m{self.holder}", ())
            else:
                self.epoch += 1
                self.holder, self.ends_s = master, self.now + LEASE_S
                answer = Term(Epoch(self.epoch), LEASE_S)
            event = CampaignEnded(sent_s, None if self.is_lost() else answer)
        else:
            assert isinstance(question, Renew)
            is_mine = is_held and question.epoch == self.epoch
            if is_mine:
                self.ends_s = self.now + LEASE_S
            known = Renewal.HELD if is_mine else Renewal.OVER
            told = Renewal.UNKNOWN if self.is_lost() else known
            event = RenewEnded(question.epoch, sent_s, told)
        self.answers.append((self.now + self.delay(), master, event))

    def check(self) -> None:
        leaders = [n for n, machine in enumerate(self.machines) if machine.leads(self.now)]
        assert len(leaders) <= 1, (self.now, leaders)
        for master in leaders:
            assert master == self.holder, (self.now, master, self.holder)
            assert self.machines[master].epoch == self.epoch

    def step(self) -> None:
        """Let the next thing happen, or a master pause, and look at all of them meanwhile."""
        if not self.is_healed and self.choose.draw(st.integers(0, 9)) == 0:
            master = self.choose.draw(st.integers(0, len(self.machines) - 1))
            self.paused_until_s[master] = self.now + self.choose.draw(st.sampled_from([0.5, 5.0]))
        due = [(at, n, "question") for n, (at, *_) in enumerate(self.questions)]
        due += [
            (max(at, self.paused_until_s[m]), n, "answer")
            for n, (at, m, _) in enumerate(self.answers)
        ]
        due += [
            (max(machine.wakeup_s, self.paused_until_s[m]), m, "tick")
            for m, machine in enumerate(self.machines)
        ]
        at, number, kind = min(due)
        for share in (0.5, 0.999):
            self.now, before = self.now + share * max(0.0, at - self.now), self.now
            self.check()
            self.now = max(before, self.now)
        self.now = max(self.now, at)
        if kind == "question":
            _, master, sent_s, question = self.questions.pop(number)
            self.reach_store(master, sent_s, question)
        elif kind == "answer":
            _, master, event = self.answers.pop(number)
            self.feed(master, event)
        else:
            self.feed(number, StandingTick())
        self.check()


@given(st.integers(2, 3), st.data())
def test_no_two_masters_lead_at_the_same_moment(masters: int, choose: st.DataObject) -> None:
    world = World(masters, choose)
    for _ in range(60):
        world.step()
    world.is_healed = True
    while world.now < world.ends_s + 20.0:
        world.step()
        if any(machine.leads(world.now) for machine in world.machines):
            break
    else:
        raise AssertionError("nobody leads")
