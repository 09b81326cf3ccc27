"""Who would wait too long for a first token is not admitted; fewer are while those are late."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master import ticket_requests
from master.tightening import FEW, GROWS, LOOK_S, SHARE_MIN, SHRINKS
from master.tunables import Tunables
from tests.unit.ticket_rig import Fleet

SPEED = 1000.0
"""Tokens a second, as beats of the rig say."""


def fleet_of(over: float = 1.5) -> Fleet:
    fleet = Fleet(Tunables("test", replicas=1, colocation="never", first_token_over=over))
    fleet.pair()
    return fleet


def queue(fleet: Fleet, name: str, tokens: int, speed: float = SPEED) -> None:
    """That one has so much to compute."""
    message = fleet.beat_message(name, queued=tokens)
    fleet.ask(msgspec.structs.replace(message, tokens_per_s=speed), wire.FleetNoted)


def share(fleet: Fleet) -> float:
    """What status says of it, and what is in force."""
    status = ticket_requests.totals(fleet.rig.master.core)
    (of_fleet,) = [each.first_tokens.share for each in fleet.rig.master.core.tickets.fleets]
    assert status.admitted_share == of_fleet
    return of_fleet


def serve(fleet: Fleet, seconds: float, took_s: float, wished_s: float = 1.0) -> None:
    """One request after another whose first token takes so long, for that time."""
    for _ in range(round(seconds / took_s)):
        wish = fleet.wish(seed=fleet.opened, pages=1, first_token_s=wished_s)
        opened = fleet.open(wish)
        fleet.begin(opened)
        fleet.rig.pass_time(took_s)
        for name in ("p1", "d1"):
            fleet.beat(name)
        fleet.ask(fleet.stage_message(opened), Done)
        fleet.ask(wire.CancelTicket(opened.ticket), Done)


def test_who_would_wait_for_more_than_half_of_its_time_comes_again_later() -> None:
    fleet = fleet_of()
    queue(fleet, "p1", 2500)
    fleet.open(fleet.wish(first_token_s=5.0, pages=0, behind=1))
    refused = fleet.throttled(fleet.wish(first_token_s=5.0))
    assert refused.reason == "ttft"
    assert refused.text == "2501 tokens wait at p1, 0.001 s too long"
    assert refused.retry_after_s == pytest.approx(0.5)  # a tenth of its time at least
    assert fleet.throttled(fleet.wish(first_token_s=1.0)).retry_after_s == pytest.approx(2.001)
    fleet.open(fleet.wish(first_token_s=5.1))


def test_what_others_were_just_named_for_counts() -> None:
    fleet = fleet_of()
    fleet.open(fleet.wish(seed=1, pages=4, behind=0, first_token_s=1.0))  # 512 tokens
    assert fleet.throttled(fleet.wish(seed=2, first_token_s=1.0)).reason == "ttft"


def test_an_idle_worker_takes_what_takes_long_by_itself() -> None:
    fleet = fleet_of()
    opened = fleet.open(fleet.wish(pages=20, first_token_s=0.1))
    fleet.begin(opened)
    fleet.rig.pass_time(2.0)
    fleet.ask(fleet.stage_message(opened), Done)
    (known,) = fleet.rig.master.core.tickets.fleets
    assert not known.first_tokens.recent  # and is no sign of load


def test_without_a_speed_nothing_is_refused() -> None:
    fleet = fleet_of()
    fleet.join("p2", "prefill")
    for name in ("p1", "p2"):
        message = fleet.beat_message(name, queued=1 << 30)
        fleet.rig.master.core.tickets.fleets.worker(
            fleet.ticket(fleet.open(fleet.wish()).ticket).known, name, fleet.lives[name]
        ).tokens_per_s = 0.0
        fleet.ask(msgspec.structs.replace(message, tokens_per_s=0.0), wire.FleetNoted)
    fleet.open(fleet.wish(first_token_s=0.1))


def test_the_best_speed_of_late_is_believed() -> None:
    fleet = fleet_of()
    queue(fleet, "p1", 2000, speed=10.0)  # a short prompt was measured
    fleet.open(fleet.wish(first_token_s=5.0))
    for _ in range(100):
        queue(fleet, "p1", 2000, speed=10.0)
    assert fleet.throttled(fleet.wish(first_token_s=5.0)).reason == "ttft"


def test_less_is_admitted_while_first_tokens_are_late_and_slowly_more_again() -> None:
    fleet = fleet_of()
    serve(fleet, 10.0, took_s=1.4)
    assert share(fleet) == 1.0
    serve(fleet, 16.0, took_s=1.6)
    tight = share(fleet)
    assert 0.4 < tight < 1.0
    assert fleet.rig.master.core.counters["admission_tightened"] >= 1
    queue(fleet, "p1", 480)
    assert fleet.throttled(fleet.wish(first_token_s=1.0)).reason == "ttft"
    queue(fleet, "p1", 0)
    serve(fleet, 2 * LOOK_S, took_s=0.5)  # late ones were among the last of them
    tight = share(fleet)
    serve(fleet, 2 * LOOK_S, took_s=0.5)
    assert share(fleet) == pytest.approx(tight + 2 * 0.05)


@pytest.mark.parametrize(
    ("took", "after"),
    [
        ((), 0.5 + GROWS),
        ((1.4,), 0.5 + GROWS),
        ((1.4,) * (FEW - 1), 0.5 + GROWS),
        ((1.6,), 0.5),
        ((1.6,) * (FEW - 1), 0.5),
        ((1.4,) * (FEW - 2) + (1.6,), 0.5),
        ((1.4,) * FEW, 0.5 + GROWS),
        ((1.4,) * (FEW - 1) + (1.6,), 0.5 * SHRINKS),
        ((1.6,) * FEW, 0.5 * SHRINKS),
    ],
)
def test_few_first_tokens_let_it_grow_but_make_nothing_tighter(
    took: tuple[float, ...], after: float
) -> None:
    fleet = fleet_of()
    (known,) = fleet.rig.master.core.tickets.fleets
    known.first_tokens.share = 0.5
    known.first_tokens.recent.extend((fleet.rig.now, share) for share in took)
    fleet.open()
    assert share(fleet) == pytest.approx(after)


def test_a_prompt_that_another_worker_began_is_no_sign_of_load() -> None:
    fleet = fleet_of()
    opened = fleet.open(fleet.wish(first_token_s=1.0))
    fleet.begin(opened)
    fleet.rig.pass_time(2.0)
    fleet.join("p2", "prefill")
    again = fleet.ask(wire.FailPrefill(opened.ticket, "p1"), wire.TicketOpened)
    fleet.begin(again)
    fleet.ask(fleet.stage_message(again), Done)
    (known,) = fleet.rig.master.core.tickets.fleets
    assert not known.first_tokens.recent


def test_a_prompt_that_an_earlier_master_let_in_is_no_sign_of_load() -> None:
    fleet = fleet_of()
    opened = fleet.open(fleet.wish(first_token_s=1.0))
    held = fleet.ticket(opened.ticket).wish
    fleet.rig.takeover(fleet.rig.master.core.epoch + 1)
    fleet.rig.workers["w1"].join()
    fleet.pair()
    presented = wire.PresentTicket(
        opened.ticket, held.namespace, held.request, held.keys, held.prompt_tokens,
        held.new_tokens, 0.3, 60.0, 0, opened.prefill, wire.TailRef(), (), "",
    )  # fmt: skip
    fleet.ask(presented, Done)
    fleet.rig.pass_time(1.0)
    fleet.ask(fleet.stage_message(opened), Done)
    (known,) = fleet.rig.master.core.tickets.fleets
    assert not known.first_tokens.recent


def test_it_never_admits_nothing() -> None:
    fleet = fleet_of()
    serve(fleet, 150.0, took_s=2.0)
    assert share(fleet) == SHARE_MIN
    queue(fleet, "p1", 50)
    fleet.open(fleet.wish(first_token_s=1.0))


def test_how_late_is_late_is_set() -> None:
    fleet = fleet_of(over=3.0)
    serve(fleet, 30.0, took_s=2.5)
    assert share(fleet) == 1.0


def test_who_is_named_in_place_of_another_is_not_asked_again() -> None:
    fleet = fleet_of()
    fleet.join("p2", "prefill")
    opened = fleet.open(fleet.wish(first_token_s=1.0))
    other = "p2" if opened.prefill == "p1" else "p1"
    queue(fleet, other, 5000)
    failed = wire.FailPrefill(opened.ticket, opened.prefill)
    assert fleet.ask(failed, wire.TicketOpened).prefill == other
