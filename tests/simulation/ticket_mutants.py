"""Guards of tickets, switched off: see mutants.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from master import claims, fleet_membership, parts_ahead
from master.pins import Pins
from master.ticket_pins import TicketPins
from master.tickets import Tickets
from tests.simulation.pd_gateway import PdGateway
from tests.simulation.world import FAIR

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from master.core import Core
    from master.fleets import FleetWorker
    from master.run import Run
    from master.tickets import Ticket

    Patch = pytest.MonkeyPatch

TICKETS: Final[dict[str, object]] = {
    "tickets": 4.0, "crashes": 0.1, "pauses": 0.8, "fault_kinds": ("decode",), "cuts": 0.0,
    "workers": 1, "clients": 1, "disks": 0, "segments": 1, "seconds": 25.0, "weather": FAIR,
    "slow_copy": 0.3, "slow_copy_max_s": 6.0,
}  # fmt: skip
ASLEEP: Final[dict[str, object]] = {**TICKETS, "crashes": 0.0, "pauses": 1.0}
STAGED: Final = {**TICKETS, "page_ttl_s": 1.5, "flips": 0.0}


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
