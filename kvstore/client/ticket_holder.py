"""What a gateway holds, told to each new master: tickets are not stored anywhere.

Belongs to one gateway. Its plans are run as those of kvstore.client.tickets; `keep` every
KEEP_EVERY_S at the least, also while nothing else is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.checks import check_timeout
from kvstore.client.steps import Steps, ask
from kvstore.client.tickets import TIMEOUT_S, HandOver, TicketRequest, await_route
from kvstore.errors import CallerError, UnknownTicket
from kvstore.ids import GENERATION_COUNTER_BITS
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.tickets import (
    GetTerm,
    PresentTicket,
    Term,
    TicketOpened,
    TicketRouted,
)

if TYPE_CHECKING:
    from kvstore.clock import Clock

KEEP_EVERY_S: Final = limits.LEASE_MARGIN_S / 2
"""A new master takes tickets in for TICKET_GRACE_S."""


class _Held(msgspec.Struct):
    """One ticket, as far as its gateway has followed it."""

    request: TicketRequest
    begun_s: float
    worker: str
    epoch: int
    """Of the master that knows it."""
    token: int = 0
    done: HandOver | None = None
    is_behind: bool = False
    """It was presented as one that is being computed still, and was not routed since."""


class TicketHolder:
    """The tickets of one gateway. One plan of `keep` at a time; the rest may run beside it."""

    def __init__(self, clock: Clock) -> None:
        """Hold none."""
        self._clock = clock
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        """How many tickets are held."""
        return len(self._held)

    def hold(self, request: TicketRequest, opened: TicketOpened) -> None:
        """A ticket was opened, by the master whose epoch is in its number."""
        epoch = opened.ticket >> GENERATION_COUNTER_BITS
        self._held[opened.ticket] = _Held(request, self._clock.now_s(), opened.prefill, epoch)

    def note(
        self, ticket: int, *, worker: str = "", token: int = 0, done: HandOver | None = None
    ) -> None:
        """Something is known of a ticket: who has it, its highest claim, what it generated.

        No error where it is not held any more, as when a new master has refused it meanwhile.
        """
        held = self._held.get(ticket)
        if held is None:
            return
        held.worker = worker or held.worker
        held.token = max(held.token, token)
        held.done = done or held.done

    def runs_alone(self, ticket: int, worker: str) -> None:
        """One worker begins to do all of it: whoever had it before has nothing of it any more."""
        held = self._held.get(ticket)
        if held is not None:
            held.worker, held.token, held.done = worker, 0, None

    def drop(self, ticket: int) -> None:
        """It has ended; no error where it is not held."""
        self._held.pop(ticket, None)

    def keep(self, *, timeout_s: float = TIMEOUT_S) -> Steps[list[int]]:
        """Present all that is held where another master leads by now: which ones it refuses.

        Those are not held any more, and their requests have to begin anew.
        """
        deadline_s = self._clock.now_s() + check_timeout(timeout_s)
        term = yield from ask(GetTerm(), Term, timeout_s)
        refused: list[int] = []
        unknown = [ticket for ticket, held in self._held.items() if held.epoch != term.epoch]
        for ticket in unknown:
            try:
                yield from self._present(ticket, deadline_s)
            except CallerError:
                self.drop(ticket)
                refused.append(ticket)
            else:
                self._known(ticket, term.epoch)
        return refused

    def await_route(
        self, ticket: int, above: int, *, timeout_s: float = TIMEOUT_S
    ) -> Steps[TicketRouted | None]:
        """As kvstore.client.tickets.await_route, also across masters: presented where unknown.

        UnknownTicket where a new master refuses it: its request has to begin anew. Presented once
        more where it was staged only after that: its prefill worker has told the master before.
        Not so where this one has routed it, also ahead: it hears of the rest itself, and refused a
        ticket without the claim that there may be by now.
        """
        routed = yield from self._await_route(ticket, above, timeout_s)
        if routed is not None and ticket in self._held:
            self._held[ticket].is_behind = False
            self._known(ticket, routed.route >> GENERATION_COUNTER_BITS)
        return routed

    def _await_route(self, ticket: int, above: int, timeout_s: float) -> Steps[TicketRouted | None]:
        deadline_s = self._clock.now_s() + check_timeout(timeout_s)
        held = self._held.get(ticket)
        if held is not None and held.is_behind and held.done is not None:
            yield from self._insist(ticket, deadline_s)
        try:
            return (yield from await_route(ticket, above, timeout_s=timeout_s))
        except UnknownTicket:
            if ticket not in self._held:
                raise
        yield from self._insist(ticket, deadline_s)
        left_s = deadline_s - self._clock.now_s()
        return (yield from await_route(ticket, above, timeout_s=left_s)) if left_s > 0 else None

    def _known(self, ticket: int, epoch: int) -> None:
        if ticket in self._held:
            self._held[ticket].epoch = epoch

    def _insist(self, ticket: int, deadline_s: float) -> Steps[None]:
        try:
            yield from self._present(ticket, deadline_s)
        except CallerError as error:  # nothing that the request could do better
            raise UnknownTicket(f"a new master refuses it: {error}") from error

    def _present(self, ticket: int, deadline_s: float) -> Steps[None]:
        held = self._held.get(ticket)
        if held is None:  # ended while another was presented
            return
        request, now_s = held.request, self._clock.now_s()
        done = held.done or HandOver(request.chain, ())
        passed_s = now_s - held.begun_s
        message = PresentTicket(
            ticket, request.opened.namespace.id, request.request, done.chain.packed,
            request.prompt_tokens, request.new_tokens,
            max(0.0, request.first_token_s - passed_s), max(0.0, request.deadline_s - passed_s),
            held.token, held.worker, done.tail, done.tokens, request.adapter,
        )  # fmt: skip
        yield from ask(message, Done, max(0.0, deadline_s - now_s))
        held.is_behind = held.done is None and not held.token
