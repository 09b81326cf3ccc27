"""A prefill worker begins, and stages what it has computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import AccessDenied, BadValue, Fenced
from kvstore.ids import KEY_BYTES
from kvstore.namespace import tails
from kvstore.wire.messages.hello import Done
from master import tightening
from master.ticket_changes import change, require, require_ticket
from master.tickets import AHEAD, MOVING, Tail, TicketEvent, TicketState
from policies.routing.estimates import UNMEASURED_LINK_BYTES_PER_S, UNMEASURED_TOKENS_PER_S

if TYPE_CHECKING:
    from kvstore.wire.messages.tickets import (
        BeginPrefill,
        PresentTicket,
        ShedTicket,
        StageTicket,
    )
    from master.core import Core
    from master.fleets import FleetWorker
    from master.sessions import Caller
    from master.tickets import Ticket

TOKEN_MAX: Final = 1 << 31


def begin_prefill(core: Core, caller: Caller, message: BeginPrefill) -> None:
    """Answer Done; Fenced when another worker was named meanwhile.

    From when computing what is left takes no longer than moving the KV, it may be routed ahead.
    """
    ticket = require_ticket(core, caller, message.ticket)
    worker = _require_prefill(core, ticket, message)
    if not 0 <= message.tokens_left <= ticket.wish.prompt_tokens:
        want = f"0 to the prompt's {ticket.wish.prompt_tokens}"
        raise BadValue("tokens_left", message.tokens_left, want)
    if ticket.state not in {TicketState.PREFILLING, *AHEAD}:
        require(ticket, TicketEvent.BEGUN)
        change(core, ticket, TicketEvent.BEGUN)
    is_early = ticket.state is TicketState.PREFILLING and not ticket.is_nearly_done
    if is_early and not ticket.alone and _is_nearly_done(core, ticket, worker, message.tokens_left):
        values = {"is_nearly_done": True, "ready_s": core.now}
        change(core, ticket, TicketEvent.NEARLY_DONE, **values)
    core.reply(caller, Done())


def _is_nearly_done(core: Core, ticket: Ticket, worker: FleetWorker, tokens_left: int) -> bool:
    """Whether these take no longer to compute than its KV takes to the nearest decode worker, or
    so many times that.
    """
    if not tokens_left:
        return False
    speed = 0.0 if worker.beat is None else worker.beat.tokens_per_s
    left_s = tokens_left / (speed or UNMEASURED_TOKENS_PER_S)
    decoders = ticket.fleet.decoders(ticket.wish.adapter)
    beats = [each.beat for each in decoders if each.beat is not None]
    moves_s = [
        beat.rtt_s + ticket.kv_bytes / (beat.link_bytes_per_s or UNMEASURED_LINK_BYTES_PER_S)
        for beat in beats
    ]
    return left_s <= core.tunables.route_ahead * min(moves_s, default=0.0)


def stage_ticket(core: Core, caller: Caller, message: StageTicket) -> None:
    """Answer Done; from now on the ticket may be routed, and pins what lies behind its pages."""
    ticket = require_ticket(core, caller, message.ticket)
    worker = _require_prefill(core, ticket, message)
    keys, tail = check_pages(core, ticket.tenant, message)
    same = (ticket.keys, ticket.tail, ticket.tokens) == (keys, tail, message.tokens)
    is_repeated = same and ticket.state in {TicketState.STAGED, *MOVING}
    if not is_repeated:
        was_alone = bool(ticket.alone)
        stage(core, ticket, keys, tail, message.tokens)
        if not was_alone:  # else its first token was there long before
            tightening.note_staged(core, ticket, worker)
    core.reply(caller, Done())


def stage(
    core: Core, ticket: Ticket, keys: bytes, tail: Tail | None, tokens: tuple[int, ...]
) -> None:
    """Its prompt is computed. BadValue for pages of another one, Fenced where that is too late."""
    if not ticket.wish.keys.startswith(keys):
        raise BadValue("keys", len(keys) // KEY_BYTES, "the prompt's first pages, in order")
    if not tokens:
        raise BadValue("tokens", 0, "at least the first one")
    require(ticket, TicketEvent.STAGED)
    values: dict[str, object] = {"keys": keys, "tail": tail, "tokens": tokens}
    values |= {"is_confirmed": False, "missed": 0}
    if ticket.alone:  # it has thought better of running all of it
        values |= {"slot": None, "alone": "", "staged_bytes": ticket.staging()}
    change(core, ticket, TicketEvent.STAGED, ready_s=core.now, **values)


def _require_prefill(
    core: Core, ticket: Ticket, message: BeginPrefill | StageTicket
) -> FleetWorker:
    """The worker that speaks: AccessDenied to one of the fleet that was never named, Fenced to one
    of another life.
    """
    worker = core.tickets.fleets.worker(ticket.known, message.worker, message.life)
    if ticket.prefill == message.worker:
        return worker
    if message.worker in {name for name, _ in ticket.failed_prefills}:
        raise Fenced(f"ticket {ticket.id} is computed by {ticket.prefill} by now")
    raise AccessDenied(f"ticket {ticket.id} is for {ticket.prefill}, not {message.worker}")


def check_pages(
    core: Core, tenant: str, message: StageTicket | ShedTicket | PresentTicket
) -> tuple[bytes, Tail | None]:
    """Pages and tail that a peer names; BadValue where they cannot be a ticket's."""
    keys, pages = message.keys, len(message.keys) // KEY_BYTES
    if len(keys) % KEY_BYTES or pages > limits.BATCH_PAGES_MAX:
        raise BadValue("keys", len(keys), f"at most {limits.BATCH_PAGES_MAX} whole keys")
    if len(message.tokens) > limits.TICKET_TOKENS_MAX:
        most = f"at most {limits.TICKET_TOKENS_MAX}"
        raise BadValue("tokens", len(message.tokens), most)
    for token in message.tokens:
        if not 0 <= token < TOKEN_MAX:
            raise BadValue("tokens", token, f"0 to {TOKEN_MAX - 1}")
    tail = message.tail
    if not tail.key:
        return keys, None
    own = tails(tenant).id
    if tail.namespace != own:
        raise BadValue("tail.namespace", tail.namespace.hex(), own.hex())
    if len(tail.key) != KEY_BYTES:
        raise BadValue("tail.key", tail.key.hex(), f"one of {KEY_BYTES} bytes")
    if not 0 < tail.size_bytes <= limits.CHUNK_BYTES:
        raise BadValue("tail.size_bytes", tail.size_bytes, f"1 to {limits.CHUNK_BYTES}")
    return keys, Tail(core.namespaces.get(own), tail.key, tail.size_bytes)
