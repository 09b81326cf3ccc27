"""Admission by places in decode batches: whoever computes a prompt finds somebody to go on with it.

More tickets than there are places wait for one, now or once their prompts are computed. How fast
places come free is known from how long those that have finished lately had theirs, for each token
that was expected of them, and from what is expected of those under way. One more may come if it is
its turn by when its prompt is computed, or so soon after that it waits no longer than its answer
takes: a token then takes twice as long, on the average. Must not know of KV tokens. Nothing of it
is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from master.tickets import TicketEvent
from policies.routing.estimates import UNMEASURED_STEP_S, UNMEASURED_TOKENS_PER_S

if TYPE_CHECKING:
    from master.core import Core
    from master.fleets import Fleet, FleetWorker
    from master.tickets import Ticket

KEPT: Final = 0.95
"""Of what was measured before, with each answer that finishes: half of it after 14."""
STAGING_SHARE: Final = 0.5
"""Of the time that a computed prompt is kept, the longest wait that is admitted: estimates err."""


def note_end(core: Core, ticket: Ticket, event: TicketEvent) -> None:
    """An answer has finished where it began: how long it had its place."""
    is_whole = ticket.routes == (0 if ticket.alone else 1)
    if event is not TicketEvent.FINISHED or not is_whole:
        return
    since_s, pace = ticket.opened_s if ticket.alone else ticket.routed_s, ticket.fleet.pace
    pace.held_s = pace.held_s * KEPT + core.now - since_s
    pace.tokens = pace.tokens * KEPT + ticket.wish.new_tokens


def excess_s(core: Core, worker: FleetWorker, fresh_tokens: int, new_tokens: int) -> float:
    """How much longer than admitted a request would wait for a place once `worker` has computed its
    prompt; at most 0: it may come.
    """
    fleet = worker.fleet
    over, token_s = fleet.taken_places + 1 - fleet.places, _token_s(fleet)
    if over <= 0:
        return 0.0
    expected = fleet.answer_tokens / fleet.tickets if fleet.tickets else new_tokens
    wait_s = over * token_s * expected / fleet.places
    speed = worker.tokens_per_s or UNMEASURED_TOKENS_PER_S
    computed_s = (worker.queued_tokens + fresh_tokens) / speed
    return wait_s - computed_s - min(token_s * new_tokens, core.tunables.staging_s * STAGING_SHARE)


def _token_s(fleet: Fleet) -> float:
    """So long an answer has a place, for each token that is expected of it."""
    if fleet.pace.tokens:
        return fleet.pace.held_s / fleet.pace.tokens
    steps = [worker.beat.step_s for worker in fleet.decoders() if worker.beat is not None]
    return max(steps, default=0.0) or UNMEASURED_STEP_S
