"""Guards of tickets, switched off: see mutants.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from master import claims, fleet_membership, parts_ahead, room
from master.admitting import Choice
from master.gateways import Gateways
from master.pins import Pins
from master.ticket_pins import TicketPins
from master.tickets import Tickets
from tests.simulation.pd_gateway import PdGateway
from tests.simulation.world import FAIR

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from master.core import Core
    from master.fleets import Fleet, FleetWorker
    from master.plans import OwnerKey
    from master.run import Run
    from master.tickets import Ticket

    Patch = pytest.MonkeyPatch

TICKETS: Final[dict[str, object]] = {
    "tickets": 4.0, "crashes": 0.1, "pauses": 0.8, "fault_kinds": ("decode",), "cuts": 0.0,
    "workers": 1, "clients": 1, "disks": 0, "segments": 1, "seconds": 25.0, "weather": FAIR,
    "slow_copy": 0.3, "slow_copy_max_s": 6.0, "roles": False, "both": 0,
}  # fmt: skip
ASLEEP: Final[dict[str, object]] = {**TICKETS, "crashes": 0.0, "pauses": 2.0}
READING: Final[dict[str, object]] = {**TICKETS, "pauses": 2.0, "slow_copy": 0.8}
STAGED: Final = {**TICKETS, "page_ttl_s": 1.5, "flips": 0.0}
RESTLESS: Final[dict[str, object]] = {**TICKETS, "roles": True}
ALONE: Final[dict[str, object]] = {**TICKETS, "both": 1}
GONE: Final[dict[str, object]] = {**TICKETS, "crashes": 0.5, "fault_kinds": ("gateway",)}


def tokens_of_old_claims_are_streamed(patch: Patch) -> None:
    """A gateway takes tokens from whoever sends some."""
    patch.setattr(PdGateway, "is_current", lambda self, request, claim: True)


def old_claims_are_heard(patch: Patch) -> None:
    """A decode worker whose ticket went to another installs it all the same."""
    patch.setattr(claims, "require_claim", lambda ticket, token: None)


def parts_are_told_to_old_claims(patch: Patch) -> None:
    """Whoever once had a ticket reads parts of its pages."""
    patch.setattr(parts_ahead, "require_claim", lambda ticket, token: None)


def credit_is_not_returned(patch: Patch) -> None:
    """What a ticket was promised stays promised after its end."""
    count = Tickets._count  # noqa: SLF001 -- what is switched off is private

    def keep_credit(self: Tickets, ticket: Ticket, sign: int) -> None:
        count(self, ticket, sign)
        ticket.fleet.credit_tokens += (sign < 0) * ticket.credit_tokens

    patch.setattr(Tickets, "_count", keep_credit)


def pins_outlive_their_ticket(patch: Patch) -> None:
    """Pages that were staged once are kept for ever."""
    patch.setattr(TicketPins, "let_go", lambda self, namespace, keys: None)


def staged_pages_are_not_kept(patch: Patch) -> None:
    """Pages of tickets are evicted and expire like all others."""
    for name in ("is_hard", "kept", "kept_if_possible"):
        patch.setattr(Pins, name, _without_tickets(getattr(Pins, name)))


def _without_tickets(method: Callable[[Pins, Run], object]) -> Callable[[Pins, Run], object]:
    def of_clients_alone(self: Pins, run: Run) -> object:
        held, self.tickets = self.tickets, TicketPins()
        try:
            return method(self, run)
        finally:
            self.tickets = held

    return of_clients_alone


def routes_outlive_their_worker(patch: Patch) -> None:
    """Tickets of a decode worker that has gone wait for it."""

    def lose(core: Core, worker: FleetWorker) -> None:
        core.tickets.fleets.take_out(worker)

    patch.setattr(fleet_membership, "lose", lose)


def requests_are_not_known_again(patch: Patch) -> None:
    """Each opening makes a ticket of its own."""
    patch.setattr(Tickets, "of_request", lambda self, tenant, request: None)


def room_stays_where_nobody_takes_requests(patch: Patch) -> None:
    """A worker that changes its role keeps room for tickets that it will not have."""

    def settle(book: Tickets, fleet: Fleet) -> None:
        room.keep_anew(book, fleet, fleet.roomless)

    patch.setattr(room, "settle", settle)


def gateways_that_have_gone_are_waited_for(patch: Patch) -> None:
    """Tickets whose gateway has died stay until their deadline."""

    def went(self: Gateways, key: OwnerKey, now_s: float) -> None:
        """Nothing comes of it."""

    patch.setattr(Gateways, "went", went)


def who_runs_alone_has_no_slot(patch: Patch) -> None:
    """Its tokens count nowhere, and nobody hears of it when it dies."""
    fields = Choice.fields

    def without(self: Choice) -> dict[str, object]:
        return {**fields(self), "slot": None}

    patch.setattr(Choice, "fields", without)


GUARDS: Final[tuple[tuple[Callable[[Patch], None], str, dict[str, object]], ...]] = (
    (tokens_of_old_claims_are_streamed, "I40", ASLEEP),
    (old_claims_are_heard, "I40", TICKETS),
    (parts_are_told_to_old_claims, "I40", READING),
    (credit_is_not_returned, "I39", TICKETS),
    (pins_outlive_their_ticket, "I39", TICKETS),
    (staged_pages_are_not_kept, "I31", STAGED),
    (routes_outlive_their_worker, "I41", TICKETS),
    (requests_are_not_known_again, "I42", TICKETS),
    (who_runs_alone_has_no_slot, "I41", ALONE),
    (gateways_that_have_gone_are_waited_for, "I43", GONE),
    (room_stays_where_nobody_takes_requests, "I44", RESTLESS),
)
