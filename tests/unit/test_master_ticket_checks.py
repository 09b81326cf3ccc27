"""The full check of tickets notices each way in which sums and tickets can disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import InvariantBroken
from kvstore.wire.messages.tickets import AwaitRoute
from master import room
from master.sessions import ENGINE
from master.ticket_checks import check_tickets
from master.tickets import TicketState
from tests.unit.master_rig import chain
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from master.core import Core
    from master.plans import OwnerKey
    from master.tickets import Ticket


def staged(core: Core) -> Ticket:
    """The one that waits."""
    return next(t for t in core.tickets.all() if t.state is TicketState.STAGED)


def routed(core: Core) -> Ticket:
    """The one that is routed."""
    return next(t for t in core.tickets.all() if t.state is TicketState.ROUTED)


def credit_is_kept(core: Core) -> None:
    staged(core).fleet.credit_tokens += 1


def answers_are_kept(core: Core) -> None:
    staged(core).fleet.answer_tokens += 1


def tickets_are_miscounted(core: Core) -> None:
    staged(core).fleet.tickets += 1


def staging_is_kept(core: Core) -> None:
    core.tickets.staged_bytes += 1


def source_is_kept(core: Core) -> None:
    core.tickets.source_bytes["elsewhere"] += 1


def pin_is_kept(core: Core) -> None:
    core.pins.tickets.hold(staged(core).known.ordinal, chain(5, 1))


def pages_are_miscounted(core: Core) -> None:
    core.pins.tickets.pages += 1


def slot_is_kept(core: Core) -> None:
    slot = routed(core).slot
    assert slot is not None
    slot.used_tokens += 1


def prefix_is_kept(core: Core) -> None:
    slot = routed(core).slot
    assert slot is not None
    slot.prefixes[b"other"] += 1


def slot_of_one_that_has_gone(core: Core) -> None:
    ticket = routed(core)
    assert ticket.slot is not None
    del ticket.fleet.workers[ticket.slot.name]


def slot_without_a_route(core: Core) -> None:
    staged(core).slot = routed(core).slot


def claim_without_a_slot(core: Core) -> None:
    staged(core).token = 5


def nobody_routes_it(core: Core) -> None:
    staged(core).fleet.waiting.clear()


def it_never_ends(core: Core) -> None:
    core.tickets.deadlines.discard(staged(core))


def nobody_waits(core: Core) -> None:
    wait = staged(core).wait
    assert wait is not None
    del core.sessions[wait.caller.session.id]


def silence_is_not_heard(core: Core) -> None:
    slot = routed(core).slot
    assert slot is not None
    core.tickets.fleets.silence.discard(slot)


def two_of_one_request(core: Core) -> None:
    staged(core).wish = routed(core).wish


def tokens_wait_for_nobody(core: Core) -> None:
    staged(core).fleet.waiting_tokens += 1


def no_room_is_kept(core: Core) -> None:
    room.let_go(staged(core))


def room_is_kept_for_nobody(core: Core) -> None:
    (fleet,) = core.tickets.fleets
    fleet.workers["d1"].kept[5] = 1


def room_is_miscounted(core: Core) -> None:
    (fleet,) = core.tickets.fleets
    fleet.workers["d1"].kept_tokens += 1


def room_where_it_cannot_be(core: Core) -> None:
    room.let_go(staged(core))
    staged(core).fleet.roomless[staged(core).id] = None


def gateway_of(core: Core) -> OwnerKey:
    """Who has all tickets here."""
    return next(owner for owner in core.owners if owner[0] == ENGINE)


def nobody_answers_for_it(core: Core) -> None:
    core.tickets.gateways.drop(staged(core).id)


def a_gateway_has_what_has_ended(core: Core) -> None:
    core.tickets.gateways.answers_for(gateway_of(core), 5)


def a_gateway_is_away_for_ever(core: Core) -> None:
    core.owners.clear()


def who_is_there_is_given_up(core: Core) -> None:
    core.tickets.gateways.went(gateway_of(core), core.now)


BROKEN: dict[Callable[[Core], None], str] = {
    credit_is_kept: "I39: .* tokens of credit",
    answers_are_kept: "I39: .* tokens of answers",
    tickets_are_miscounted: "I39",
    staging_is_kept: "I39: .* bytes are staged",
    source_is_kept: "I39: .* on their way",
    pin_is_kept: "I39: .* pages are held",
    pages_are_miscounted: "I39: .* pages are held",
    slot_is_kept: "I39: d1 counts",
    prefix_is_kept: "I39: d1 counts prefixes",
    slot_of_one_that_has_gone: "I41",
    slot_without_a_route: "I41",
    claim_without_a_slot: "I40",
    nobody_routes_it: "I39: .* routed or forgotten",
    it_never_ends: "I18",
    nobody_waits: "I18: nobody waits",
    silence_is_not_heard: "I18: d1 is never given up",
    two_of_one_request: "I42",
    tokens_wait_for_nobody: "I39: .* tokens wait",
    no_room_is_kept: "I44: no room",
    room_is_kept_for_nobody: "I44: d1 keeps",
    room_is_miscounted: "I44: d1 keeps",
    room_where_it_cannot_be: "I44: no room",
    nobody_answers_for_it: "I43: no gateway",
    a_gateway_has_what_has_ended: "I43: .* has ended",
    a_gateway_is_away_for_ever: "I43: .* for ever",
    who_is_there_is_given_up: "I43",
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda each: each.__name__)
def test_what_is_broken_on_purpose_is_noticed(breaks: Callable[[Core], None]) -> None:
    fleet = Fleet()
    fleet.pair()
    fleet.route(fleet.stage().ticket)
    waits = fleet.stage(fleet.wish(seed=2)).ticket
    assert fleet.rig.ask(fleet.rig.engine, AwaitRoute(waits, 0, 9.0)) is None
    core = fleet.rig.master.core
    check_tickets(core)
    breaks(core)
    with pytest.raises(InvariantBroken, match=BROKEN[breaks]):
        check_tickets(core)


def test_too_many_tickets_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    fleet.pair()
    fleet.open()
    monkeypatch.setattr(limits, "TICKETS_MAX", 0)
    with pytest.raises(InvariantBroken, match="I7"):
        check_tickets(fleet.rig.master.core)
