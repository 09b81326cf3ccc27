"""The plans of tickets: what gateways and inference workers ask the master about a request.

`KVStore.carry_out(plan)` runs one, `await AsyncKVStore.carry_out(plan)` as well. Every question is
safe to repeat, so that a store asks the next leader within the deadline where one goes away.
UnknownTicket then says that the ticket has to be presented first: see kvstore.client.ticket_holder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.checks import check_pages, check_timeout
from kvstore.client.locations import Found, Piece, check_located
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.steps import Ask, Steps, ask
from kvstore.errors import BadValue, MalformedMessage, Throttled
from kvstore.page import PageChain, name_key
from kvstore.require import require, require_text
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Located

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.ids import NamespaceId, PageKey
    from kvstore.wire.messages.base import Message

TIMEOUT_S: Final = limits.CALL_TIMEOUT_S
PATIENCE: Final = 0.8
"""Share of a deadline for which the master keeps a question back; the rest is for the answer."""


class TicketRequest(msgspec.Struct, frozen=True):
    """What a gateway knows of a request before anything is computed. Times count from the call."""

    opened: OpenedNamespace
    request: str
    """Its id: the same one of the same tenant gets the same ticket."""
    chain: PageChain
    """The prompt's full pages."""
    prompt_tokens: int
    new_tokens: int
    """Expected output."""
    first_token_s: float
    deadline_s: float
    adapter: str = ""
    avoid: tuple[str, ...] = ()
    """Prefill workers that have failed this request."""


class HandOver(msgspec.Struct, frozen=True):
    """What somebody else needs to go on: pages in the pool, and every token generated so far."""

    chain: PageChain
    tokens: tuple[int, ...]
    tail: wire.TailRef = wire.TailRef()
    """See `tail_key`."""


class Member(msgspec.Struct, frozen=True):
    """One life of an inference worker in its fleet."""

    namespace: bytes
    worker: str
    life: int
    beat_every_s: float
    lost_after_s: float


def tail_key(namespace: NamespaceId, ticket: int, counter: int) -> PageKey:
    """Of the tail that a ticket leaves for the `counter`-th time, in kvstore.namespace.tails."""
    return name_key(namespace, b"%d/%d" % (ticket, counter))


# A gateway's side.


def open_ticket(
    request: TicketRequest, *, timeout_s: float = TIMEOUT_S
) -> Steps[wire.TicketOpened]:
    """Ask for admission. Throttled when the request cannot begin now: nothing is held then.

    Repeat it with the same content only: BadValue names the request id otherwise.
    """
    check_request(request)
    message = wire.OpenTicket(
        request.opened.namespace.id, request.request, request.chain.packed,
        request.prompt_tokens, request.new_tokens, request.first_token_s, request.deadline_s,
        request.adapter, request.avoid,
    )  # fmt: skip
    return (yield from _admitted(message, timeout_s))


def fail_prefill(
    ticket: int, worker: str, *, timeout_s: float = TIMEOUT_S
) -> Steps[wire.TicketOpened]:
    """Say that this prefill worker has not done it: another one, or Throttled."""
    return (yield from _admitted(wire.FailPrefill(ticket, worker), timeout_s))


def run_alone(ticket: int, route: int, *, timeout_s: float = TIMEOUT_S) -> Steps[wire.TicketOpened]:
    """Ask whether one worker should go on with all of it, after this route has failed.

    Fenced where it should not: await another route.
    """
    return (yield from _admitted(wire.RunAlone(ticket, route), timeout_s))


def await_route(
    ticket: int, above: int, *, timeout_s: float = TIMEOUT_S
) -> Steps[wire.TicketRouted | None]:
    """Wait until a decode worker is chosen; None when none is within the time.

    `above` is the highest route that is known to have failed, 0 at first: whoever claimed that one
    is fenced, and the ticket goes to another worker.
    """
    question = wire.AwaitRoute(ticket, above, check_timeout(timeout_s) * PATIENCE)
    reply = yield from ask(question, wire.TicketRouted, timeout_s)
    return reply if reply.route > above else None


def cancel_ticket(ticket: int, *, timeout_s: float = TIMEOUT_S) -> Steps[None]:
    """Say that nobody wants the answer any more; no error where the ticket has ended."""
    yield from _done(wire.CancelTicket(ticket), timeout_s)


# An inference worker's side.


def join_fleet(wish: wire.JoinFleet, *, timeout_s: float = TIMEOUT_S) -> Steps[Member]:
    """Be there for requests of a namespace. An earlier life of that name is fenced."""
    reply = yield from ask(wish, wire.FleetJoined, check_timeout(timeout_s))
    times = reply.beat_every_s, reply.lost_after_s
    return Member(wish.namespace, wish.worker, reply.life, *times)


def beat(message: wire.FleetBeat, *, timeout_s: float = TIMEOUT_S) -> Steps[wire.FleetNoted]:
    """Say what runs here: tickets that are somebody else's by now, to be stopped at once, and the
    role that this worker is asked to have.

    Fenced when another life has the name, this one was given up, or a new master has not met it
    yet: join again and go on, for the next beat tells what was lost.
    """
    return (yield from ask(message, wire.FleetNoted, check_timeout(timeout_s)))


def leave_fleet(member: Member, *, timeout_s: float = TIMEOUT_S) -> Steps[None]:
    """End it: what it had goes to others."""
    yield from _done(wire.LeaveFleet(member.namespace, member.worker, member.life), timeout_s)


def begin_prefill(
    ticket: int, member: Member, tokens_left: int = 0, *, timeout_s: float = TIMEOUT_S
) -> Steps[None]:
    """Say that the prompt is being computed here. Fenced when that is somebody else's.

    Repeat it as the prompt's pages come into the pool, with the tokens that are still to be
    computed: a decode worker may then be chosen ahead. 0: not before all is staged.
    """
    message = wire.BeginPrefill(ticket, member.worker, member.life, tokens_left)
    yield from _done(message, timeout_s)


def stage_ticket(
    ticket: int, member: Member, done: HandOver, *, timeout_s: float = TIMEOUT_S
) -> Steps[None]:
    """Say that the prompt's pages are in the pool: from now on the ticket pins them."""
    message = wire.StageTicket(ticket, member.worker, member.life, *_columns(done))
    yield from _done(message, timeout_s)


def claim_ticket(
    ticket: int, route: int, member: Member, *, is_ahead: bool = False, timeout_s: float = TIMEOUT_S
) -> Steps[wire.TicketClaimed]:
    """Take a ticket. What comes back is to be checked: kvstore.client.descriptor.

    Fenced when the route is not the present one; whoever claimed before is fenced otherwise. A
    claim ahead is for `await_parts` and `locate_parts`, and must be followed by another one once
    the ticket is staged.
    """
    message = wire.ClaimTicket(ticket, route, member.worker, member.life, is_ahead)
    return (yield from ask(message, wire.TicketClaimed, check_timeout(timeout_s)))


def await_parts(
    ticket: int, token: int, have: Sequence[int], *, timeout_s: float = TIMEOUT_S
) -> Steps[wire.PartsSealed]:
    """Wait until more than `have` leading pages have some part in the pool, or all is staged.

    `have` counts pages for each part of the namespace. After the time: what there is.
    """
    time_s = check_timeout(timeout_s)
    question = wire.AwaitParts(ticket, token, tuple(have), time_s * PATIENCE)
    return (yield from ask(question, wire.PartsSealed, time_s))


def locate_parts(
    opened: OpenedNamespace,
    chain: PageChain,
    question: wire.LocateParts,
    clock: Clock,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Steps[Found]:
    """Where one part of these pages of a claimed ticket is, complete or not; leased, to be read.

    `chain` are the pages that the question names. `clock` is the system's.
    """
    sent_at_s = clock.now_s()
    located = yield from ask(question, Located, check_timeout(timeout_s))
    readable = check_located(located, len(chain), opened.namespace)
    piece = Piece.of(0, located, sent_at_s, leased=True)
    return Found(opened, chain, (question.part,), (piece,), readable)


def install_ticket(ticket: int, token: int, *, timeout_s: float = TIMEOUT_S) -> Steps[None]:
    """Say that the KV is in this worker's memory, before the first token is shown to anybody."""
    yield from _done(wire.TicketInstalled(ticket, token), timeout_s)


def shed_ticket(
    ticket: int, token: int, done: HandOver, *, timeout_s: float = TIMEOUT_S
) -> Steps[None]:
    """Give a ticket up to whoever has room, with what was computed so far."""
    yield from _done(wire.ShedTicket(ticket, token, *_columns(done)), timeout_s)


def finish_ticket(ticket: int, token: int, *, timeout_s: float = TIMEOUT_S) -> Steps[None]:
    """Say that the last token is there."""
    yield from _done(wire.FinishTicket(ticket, token), timeout_s)


# Anybody's.


def list_tickets(*, timeout_s: float = TIMEOUT_S) -> Steps[wire.TicketList]:
    """The tenant's tickets, oldest first, and the inference workers of its fleets."""
    return (yield from ask(wire.ListTickets(), wire.TicketList, check_timeout(timeout_s)))


def check_request(request: TicketRequest) -> None:
    """BadValue names the field that cannot be right."""
    require("request", request, TicketRequest, "a TicketRequest")
    check_pages(request.opened, request.chain)
    require_text("request", request.request)
    if not request.request:
        raise BadValue("request", request.request, "a name")
    page_tokens = request.opened.namespace.layout.page_tokens
    for field in ("prompt_tokens", "new_tokens"):
        value = getattr(request, field)
        require(field, value, int, "a whole number")
        if value < 1:
            raise BadValue(field, value, "at least 1")
    if len(request.chain) != request.prompt_tokens // page_tokens:
        want = f"the {request.prompt_tokens // page_tokens} full pages of the prompt"
        raise BadValue("chain", request.chain, want)
    for field in ("first_token_s", "deadline_s"):
        value = getattr(request, field)
        require(field, value, int | float, "seconds")
        if not 0 < value < float("inf"):
            raise BadValue(field, value, "more than 0 seconds")


def _columns(done: HandOver) -> tuple[bytes, wire.TailRef, tuple[int, ...]]:
    return done.chain.packed, done.tail, done.tokens


def _admitted(message: Message, timeout_s: float) -> Steps[wire.TicketOpened]:
    reply = yield Ask(message, check_timeout(timeout_s))
    if isinstance(reply, wire.Throttled):
        raise Throttled(reply.retry_after_s, reply.reason, reply.text)
    if not isinstance(reply, wire.TicketOpened):
        text = f"{type(reply).__name__} in answer to {type(message).__name__}"
        raise MalformedMessage(text)
    return reply


def _done(message: Message, timeout_s: float) -> Steps[None]:
    yield from ask(message, Done, check_timeout(timeout_s))
