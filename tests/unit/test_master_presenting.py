"""Takeover: tickets are presented to a new master, in time and by the highest claim."""

from __future__ import annotations

import pytest

from kvstore import limits
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master.tickets import TicketState
from master.tunables import Tunables
from tests.unit.master_rig import chain, failure
from tests.unit.replaced import replaced
from tests.unit.ticket_rig import Fleet


def present(
    fleet: Fleet,
    ticket: int,
    token: int = 0,
    tokens: tuple[int, ...] = (),
    worker: str = "p1",
    request: str = "one",
) -> wire.PresentTicket:
    """What a gateway tells the next master."""
    return wire.PresentTicket(
        ticket, fleet.space.id, request, chain(1, 2), 266, 100, 1.0, 30.0, token, worker,
        wire.TailRef(), tokens,
    )  # fmt: skip


def taken_over(fleet: Fleet) -> Fleet:
    """The same with the next master; pool worker and namespaces are back."""
    fleet.rig.takeover(fleet.rig.master.core.epoch + 1)
    fleet.rig.workers["w1"].join()
    return fleet


def refused(fleet: Fleet, message: wire.PresentTicket) -> str:
    """The code of the failure that answers it."""
    return failure(fleet.rig.ask(fleet.rig.engine, message)).code


def test_gateways_learn_of_a_takeover() -> None:
    fleet = Fleet()
    before = fleet.ask(wire.GetTerm(), wire.Term)
    assert fleet.ask(wire.GetTerm(), wire.Term) == before
    assert taken_over(fleet).ask(wire.GetTerm(), wire.Term).epoch > before.epoch


def test_a_request_that_decodes_goes_on_under_its_old_claim() -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, _ = fleet.install(fleet.wish(seed=1, request="one"))
    taken_over(fleet)
    unknown = wire.FinishTicket(ticket, claimed.token)
    fleet.ask(unknown, Done)
    again = present(fleet, ticket, claimed.token, (7, 8), "d1")
    fleet.ask(again, Done)
    fleet.ask(again, Done)
    assert fleet.ticket(ticket).state is TicketState.INSTALLED
    fleet.lives["d1"] = fleet.ask(fleet.joined["d1"], wire.FleetJoined).life
    assert fleet.beat("d1", (ticket, claimed.token, 268)) == ()
    assert fleet.ticket(ticket).slot is not None
    fleet.ask(wire.TicketInstalled(ticket, claimed.token), Done)
    fleet.ask(wire.FinishTicket(ticket, claimed.token), Done)
    fleet.assert_nothing_held()


def test_what_runs_takes_room_before_anybody_has_presented_it() -> None:
    fleet = taken_over(Fleet())
    fleet.join("p1", "prefill")
    fleet.lives["d1"] = 0
    fleet.join("d1", capacity=1000)
    old = (1 << 32) + 5
    assert fleet.beat("d1", (old, old + 1, 700)) == ()
    assert fleet.throttled().reason == "decode_occupancy"
    fleet.rig.tick(limits.TICKET_GRACE_S)
    assert fleet.beat("d1", (old, old + 1, 700)) == (old,)


@pytest.mark.parametrize("comes", [False, True])
def test_a_worker_that_has_restarted_or_gone_meanwhile_gives_it_up(*, comes: bool) -> None:
    fleet = Fleet()
    fleet.pair()
    ticket, claimed, _ = fleet.install(fleet.wish(seed=1, request="one"))
    taken_over(fleet)
    fleet.ask(present(fleet, ticket, claimed.token, (7,), "d1"), Done)
    fleet.join("d2")
    if comes:
        fleet.join("d1")
        fleet.beat("d1")
        fleet.beat("d1")
    else:
        for _ in range(8):
            fleet.rig.pass_time(0.5)
            fleet.beat("d2")
    route = fleet.route(ticket)
    assert route.decode == "d2"
    assert fleet.claim(ticket, route).token > claimed.token


def test_what_was_staged_before_the_takeover_is_so_once_its_gateway_knows() -> None:
    """It was presented while its prefill worker's answer was under way, and waited for for ever."""
    fleet = Fleet()
    fleet.pair()
    opened = fleet.stage(fleet.wish(seed=1, request="one"))
    taken_over(fleet)
    fleet.join("d1")
    fleet.ask(present(fleet, opened.ticket), Done)
    assert fleet.ticket(opened.ticket).state is TicketState.PREFILLING
    other = replaced(present(fleet, opened.ticket, tokens=(7,)), "keys", chain(2, 2))
    assert refused(fleet, other) == "bad_value"
    for _ in range(2):
        fleet.ask(present(fleet, opened.ticket, tokens=(7,)), Done)
        assert fleet.ticket(opened.ticket).state is TicketState.STAGED
    assert fleet.route(opened.ticket).decode == "d1"
    fleet.ask(wire.CancelTicket(opened.ticket), Done)
    fleet.assert_nothing_held()


def test_one_that_a_worker_runs_alone_can_be_presented_as_staged() -> None:
    fleet = Fleet(Tunables(cluster="test", replicas=1, colocation="always"))
    fleet.join("b1", "both")
    opened = fleet.open(fleet.wish(seed=1, request="one"))
    fleet.begin(opened)
    fleet.ask(present(fleet, opened.ticket, tokens=(7,), worker="b1"), Done)
    ticket = fleet.ticket(opened.ticket)
    assert (ticket.state, ticket.alone, ticket.slot) == (TicketState.STAGED, "", None)
    assert ticket.staged_bytes == ticket.staging()


def test_what_a_worker_runs_alone_goes_on_after_a_takeover() -> None:
    fleet = Fleet(Tunables(cluster="test", replicas=1, colocation="always"))
    fleet.join("b1", "both")
    opened = fleet.open(fleet.wish(seed=1, request="one"))
    fleet.begin(opened)
    taken_over(fleet)
    fleet.join("b1", "both")
    fleet.join("b2", "both")
    runs = opened.ticket, 0, 400
    assert fleet.beat("b1", runs) == ()  # somebody may still present it
    fleet.ask(present(fleet, opened.ticket, worker="b1"), Done)
    assert fleet.beat("b1", runs) == ()
    assert fleet.beat("b2", runs) == (opened.ticket,)
    assert fleet.ticket(opened.ticket).credit_tokens == 400


def test_only_the_highest_claim_counts() -> None:
    fleet = taken_over(Fleet())
    old = (1 << 32) + 5
    fleet.ask(present(fleet, old, old + 1, (7,), "d1"), Done)
    fleet.ask(present(fleet, old, old + 3, (7, 8), "d2"), Done)
    slot = fleet.ticket(old).slot
    assert slot is not None
    assert slot.name == "d2"
    assert refused(fleet, present(fleet, old, old + 1, (7,), "d1")) == "access_denied"
    assert refused(fleet, present(fleet, old + 9, old + 10, (7,), "d1")) == "access_denied"
    assert refused(fleet, present(fleet, old, 9 << 32, (7,), "d1")) == "access_denied"
    assert len(fleet.rig.master.core.tickets) == 1


def test_a_later_claim_that_is_malformed_ends_nothing() -> None:
    fleet = taken_over(Fleet())
    old = (1 << 32) + 5
    fleet.ask(present(fleet, old, old + 1, (7,), "d1"), Done)
    later = replaced(present(fleet, old, old + 3, (7, 8), "d2"), "tail.key", b"x")
    assert refused(fleet, later) == "bad_value"
    assert fleet.ticket(old).token == old + 1


def test_what_is_presented_holds_no_more_pages_than_what_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = taken_over(Fleet())
    monkeypatch.setattr(limits, "TICKET_PAGES_MAX", 3)
    old = (1 << 32) + 5
    fleet.ask(present(fleet, old, request="one"), Done)
    assert refused(fleet, present(fleet, old + 1, request="two")) == "out_of_space"
    fleet.ask(present(fleet, old, request="one"), Done)


def test_what_needs_an_adapter_goes_to_who_has_it() -> None:
    fleet = taken_over(Fleet())
    old = (1 << 32) + 5
    fleet.ask(replaced(present(fleet, old, tokens=(7,)), "adapter", "lora"), Done)
    fleet.join("d1")
    fleet.join("d2", adapters=("lora",))
    assert fleet.route(old).decode == "d2"


def test_presented_too_late_nobody_waits_for_it() -> None:
    fleet = taken_over(Fleet())
    fleet.rig.tick(limits.TICKET_GRACE_S)
    assert refused(fleet, present(fleet, (1 << 32) + 5)) == "access_denied"


def test_a_number_that_no_earlier_master_gave_is_refused() -> None:
    fleet = Fleet()
    assert refused(fleet, present(fleet, 5 << 32)) == "access_denied"


def test_staged_and_unfinished_prefills_go_on() -> None:
    fleet = taken_over(Fleet())
    old = (1 << 32) + 5
    fleet.ask(present(fleet, old, request="one"), Done)
    fleet.ask(present(fleet, old + 1, 0, (7,), request="two"), Done)
    fleet.pair()
    assert fleet.ticket(old).state is TicketState.PREFILLING
    assert fleet.route(old + 1).decode == "d1"
    life = fleet.lives["p1"]
    stage = wire.StageTicket(old, "p1", life, chain(1, 2), wire.TailRef(), (7,))
    fleet.ask(stage, Done)
    assert fleet.route(old).decode == "d1"
    for ticket in (old, old + 1):
        fleet.ask(wire.CancelTicket(ticket), Done)
    fleet.assert_nothing_held()


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", (-1,)), ("keys", b"x"), ("tail.key", b"x"), ("worker", "x" * 600)],
)
def test_what_is_presented_has_to_be_well_formed(field: str, value: object) -> None:
    fleet = taken_over(Fleet())
    message = replaced(present(fleet, (1 << 32) + 5), field, value)
    assert refused(fleet, message) == "bad_value"
    fleet.assert_nothing_held()


def test_another_tenant_presents_nothing() -> None:
    fleet = taken_over(Fleet())
    stranger = fleet.rig.open("engine", "other", "engine")
    reply = fleet.rig.ask(stranger, present(fleet, (1 << 32) + 5))
    assert failure(reply).code == "access_denied"
