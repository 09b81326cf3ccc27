"""Phase 1: may a request begin, and where? Everything that it will need is taken in one step.

Decode credit first, for which one worker must have room, then a place in a batch by when the
prompt is computed, so that a finished prefill has a place to go; then staging, then what a
hand-over costs. Who is refused holds nothing, and is told when to come again (I39).
"""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue, OutOfSpace
from kvstore.ids import KEY_BYTES
from kvstore.replica import Tier
from kvstore.require import require_text
from kvstore.wire.messages import tickets as wire
from master import decode_places, room, tightening
from master.fleet_membership import TOKENS_MAX, own_namespace
from master.fleets import BOTH, Fleet, FleetWorker
from master.reads import asked_namespace
from master.ticket_changes import change, hold, require, require_ticket
from master.tickets import Ticket, TicketEvent
from policies.routing.estimates import UNMEASURED_LINK_BYTES_PER_S, UNMEASURED_STEP_S
from policies.routing.protocol import Alone, Case, Place, PrefillOffer, Wish

if TYPE_CHECKING:
    from collections.abc import Iterable

    from master.core import Core
    from master.directory import Stretch
    from master.namespaces import KnownNamespace
    from master.sessions import Caller

RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 30.0
AVOIDED_MAX: Final = 64
"""Prefill workers that are known to have failed a request."""
STAGING_SHARE: Final = 0.25
"""Of readable memory, or of all that is lent where there is none; unless staging_bytes is set."""


class Refused(Exception):
    """Not now; `answer` says when."""

    def __init__(self, answer: wire.Throttled) -> None:
        """With what the caller is told."""
        super().__init__(answer.text)
        self.answer = answer


class Found(msgspec.Struct, frozen=True):
    """What the pool has of a prompt."""

    pages: int
    tokens_by_host: Counter[str]
    places: dict[str, Place]
    """Of those hosts."""

    @property
    def place(self) -> Place:
        """Where most of it lies."""
        most = self.tokens_by_host.most_common(1)
        return self.places[most[0][0]] if most else Place()


class Asked(msgspec.Struct, frozen=True):
    """What a prefill worker is chosen for."""

    ticket: Ticket
    found: Found
    failed: tuple[tuple[str, int], ...] = ()
    """Workers that have not done it since it was opened, by name and life."""
    failed_routes: int = 0
    """Decode workers that have not done it: whoever is chosen is to run it alone."""


class Choice(msgspec.Struct, frozen=True):
    """Who computes a prompt."""

    worker: FleetWorker
    prefix_tokens: int
    fresh_tokens: int
    alone: Alone | None
    """Why it runs the whole request."""

    def fields(self) -> dict[str, object]:
        """Of the ticket."""
        slot = None if self.alone is None else self.worker
        return {
            "prefill": self.worker.name,
            "prefill_life": self.worker.life,
            "prefix_tokens": self.prefix_tokens,
            "alone": "" if self.alone is None else str(self.alone),
            "slot": slot,
            "is_confirmed": False,
            "missed": 0,
        }


def find(core: Core, known: KnownNamespace, keys: bytes) -> Found:
    """The leading pages that are readable, and the hosts that have them."""
    stretches = known.tree.leading(keys, core.version)
    by_host: Counter[str] = Counter()
    places: dict[str, Place] = {}
    for stretch in stretches:
        tokens = stretch.count * known.namespace.layout.page_tokens
        here = {place.host: place for place in _places(core, stretch)}
        by_host.update(dict.fromkeys(here, tokens))
        places.update(here)
    return Found(sum(stretch.count for stretch in stretches), by_host, places)


def _places(core: Core, stretch: Stretch) -> Iterable[Place]:
    for copy in stretch.run.copies_of(0):
        worker = core.workers.get(copy.segment.worker)
        if worker is not None and copy.segment.readable:
            yield Place(worker.host, worker.rack, worker.zone)


def open_ticket(core: Core, caller: Caller, message: wire.OpenTicket) -> None:
    """Answer TicketOpened or Throttled; the same answer to the same request (I42)."""
    known, book = check_wish(core, caller, message), core.tickets
    _check_keys(known, message)
    same = book.of_request(known.namespace.content.tenant, message.request)
    if same is not None:
        if _content(same.wish) != _content(message):
            raise BadValue("request", message.request, "an id that no other open request has")
        book.gateways.answers_for(caller.session.owner.key, same.id)  # it may have restarted
        core.reply(caller, opened(same))
        return
    book.require_room()
    fleet = book.fleets.find(known)
    try:
        if fleet is None:
            raise _throttled(limits.FLEET_LOST_AFTER_S, "no_decode", "no inference worker joined")
        ticket = _admit(core, fleet, message)
    except Refused as refusal:
        _answer_refused(core, caller, refusal)
        return
    book.add(ticket, caller.session.owner.key)
    assert ticket.room is None or room.fits(ticket.room, ticket), ticket.id  # I44
    hold(core, ticket)
    core.counters["tickets_opened"] += 1
    core.reply(caller, opened(ticket))


def _content(message: wire.OpenTicket) -> tuple[object, ...]:
    """What a repetition may not differ in: times pass meanwhile, workers fail."""
    return message.namespace, message.keys, message.prompt_tokens, message.adapter


def opened(ticket: Ticket) -> wire.TicketOpened:
    """The answer to whoever has asked for it to be computed."""
    worker = ticket.fleet.workers.get(ticket.prefill)
    where = "" if worker is None else worker.wish.where
    return wire.TicketOpened(ticket.id, ticket.prefix_tokens, ticket.prefill, where, ticket.alone)


def check_wish(core: Core, caller: Caller, message: wire.OpenTicket) -> KnownNamespace:
    """The request's namespace; BadValue names the field that cannot be right."""
    known = own_namespace(core, caller, message.namespace)
    asked_namespace(core, caller, message.namespace, message.keys)
    require_text("request", message.request)
    if not message.request:
        raise BadValue("request", "", "a name")
    for field in ("prompt_tokens", "new_tokens"):
        value = getattr(message, field)
        if not 1 <= value <= TOKENS_MAX:
            raise BadValue(field, value, f"1 to {TOKENS_MAX}")
    for field in ("first_token_s", "deadline_s"):
        value = getattr(message, field)
        if not (isfinite(value) and value >= 0):
            raise BadValue(field, value, "seconds, at least 0")
    require_text("adapter", message.adapter)
    if len(message.avoid) > AVOIDED_MAX:
        raise BadValue("avoid", len(message.avoid), f"at most {AVOIDED_MAX} names")
    for name in message.avoid:
        require_text("avoid", name)
    return known


def _check_keys(known: KnownNamespace, message: wire.OpenTicket) -> None:
    pages = message.prompt_tokens // known.namespace.layout.page_tokens
    if len(message.keys) != pages * KEY_BYTES:
        want = f"the {pages} full pages of {message.prompt_tokens} tokens"
        raise BadValue("keys", len(message.keys) // KEY_BYTES, want)


def _answer_refused(core: Core, caller: Caller, refusal: Refused) -> None:
    """Throttled; why is counted."""
    core.counters[f"throttled_{refusal.answer.reason}"] += 1
    core.reply(caller, refusal.answer)


def _throttled(after_s: float, reason: str, text: str) -> Refused:
    bounded_s = round(min(max(after_s, RETRY_MIN_S), RETRY_MAX_S), 3)
    return Refused(wire.Throttled(bounded_s, reason, text))


def _admit(core: Core, fleet: Fleet, wish: wire.OpenTicket) -> Ticket:
    """A ticket that takes what it needs; Refused where there is not enough now."""
    credit_tokens = wish.prompt_tokens + wish.new_tokens
    _check_credit(core, fleet, wish, credit_tokens)
    if not core.pins.tickets.has_room(wish.keys):
        text = f"{core.pins.tickets.pages} pages are held by tickets"
        raise _throttled(RETRY_MIN_S, "staging", text)
    found = find(core, fleet.known, wish.keys)
    deadline_s = core.now + min(wish.deadline_s, limits.TICKET_S_MAX)
    ticket = Ticket(
        core.tickets.new_number(), wish, fleet.known, fleet, core.now, deadline_s, credit_tokens,
        keys=wish.keys, ready_s=core.now,
    )  # fmt: skip
    choice = choose_prefill(core, fleet, Asked(ticket, found))
    for name, value in choice.fields().items():
        setattr(ticket, name, value)
    _check_first_token(core, choice.worker, wish.first_token_s)
    _check_place(core, fleet, wish, choice)
    ticket.staged_bytes = _staged_bytes(ticket, choice, found)
    if choice.alone is None:
        _check_staging(core, fleet, ticket)
        _check_migration(fleet, ticket)
    name_worker(core, choice)
    return ticket


def _staged_bytes(ticket: Ticket, choice: Choice, found: Found) -> int:
    """Nothing where one worker runs all of it."""
    return ticket.staging(found.pages) if choice.alone is None else 0


def _check_credit(core: Core, fleet: Fleet, wish: wire.OpenTicket, tokens: int) -> None:
    workers = fleet.decoders(wish.adapter)
    if not workers:
        text = "no decode worker is live" + " that has the adapter" * bool(wish.adapter)
        raise _throttled(limits.FLEET_LOST_AFTER_S, "no_decode", text)
    able = [worker for worker in fleet.workers.values() if worker.has(wish.adapter)]
    largest = max(worker.wish.capacity_tokens for worker in able)
    if tokens > largest and core.now < core.started_s + limits.TICKET_GRACE_S:
        text = f"{largest} KV tokens are the most that fit a worker which has joined so far"
        raise _throttled(limits.TICKET_GRACE_S, "no_decode", text)
    if tokens > largest:
        field = "new_tokens" if wish.prompt_tokens < largest else "prompt_tokens"
        room_for = largest - tokens + getattr(wish, field)
        want = f"at most {room_for}: {tokens} in all, and the largest decode worker has {largest}"
        raise BadValue(field, getattr(wish, field), want)
    if not room.spread(core.tickets, fleet):
        text = "room is found first for those that were admitted before"
        raise _throttled(RETRY_MIN_S, "decode_occupancy", text)
    taken, most = fleet.taken_tokens, core.tunables.decode_occupancy_max * fleet.capacity_tokens
    over, text = taken + tokens - most, f"{taken} of {most:.0f} KV tokens are promised"
    if not taken or over <= 0:
        left = max(worker.open_tokens for worker in workers)
        over, text = tokens - left, f"{left} KV tokens are the most that one worker has left"
    if over > 0:
        step_s = max(w.beat.step_s for w in workers if w.beat is not None) or UNMEASURED_STEP_S
        after_s = step_s * wish.new_tokens * over / max(taken, over)
        raise _throttled(after_s, "decode_occupancy", f"{text}, {tokens} more are wanted")


def staging_budget(core: Core) -> int:
    """Bytes that staged pages of all tickets may take together."""
    if core.tunables.staging_bytes:
        return core.tunables.staging_bytes
    readable = [segment for segment in core.segments.values() if segment.readable]
    memory = [segment for segment in readable if segment.tier is Tier.DRAM]
    lent_bytes = sum(segment.geometry.payload_bytes for segment in memory or readable)
    return int(lent_bytes * STAGING_SHARE)


def _check_staging(core: Core, fleet: Fleet, ticket: Ticket) -> None:
    budget, staged = staging_budget(core), core.tickets.staged_bytes
    if ticket.staged_bytes > budget > 0:
        raise OutOfSpace(f"staging takes {budget} bytes, {ticket.staged_bytes} are wanted")
    over = staged + ticket.staged_bytes - budget
    if over > 0:
        text = f"{staged} of {budget} bytes are staged, {ticket.staged_bytes} more are wanted"
        raise _throttled(over / _bytes_per_s(fleet), "staging", text)


def _bytes_per_s(fleet: Fleet) -> float:
    measured = [w.beat.link_bytes_per_s for w in fleet.decoders() if w.beat is not None]
    return max(measured, default=0.0) or UNMEASURED_LINK_BYTES_PER_S


def _check_migration(fleet: Fleet, ticket: Ticket) -> None:
    """The hand-over alone must leave time for the first token, where links were measured."""
    beats = [w.beat for w in fleet.decoders() if w.beat is not None]
    times = [
        beat.rtt_s + ticket.kv_bytes / beat.link_bytes_per_s
        for beat in beats
        if beat.link_bytes_per_s > 0
    ]
    if len(times) == len(beats) and min(times) > ticket.wish.first_token_s:
        text = f"{ticket.kv_bytes} bytes take {min(times):.3f} s"
        raise _throttled(min(times) - ticket.wish.first_token_s, "migration", text)


def _check_first_token(core: Core, worker: FleetWorker, wished_s: float) -> None:
    """What waits before it must leave time for the first token."""
    over_s = tightening.excess_s(core, worker, wished_s)
    if over_s > 0:
        text = f"{worker.queued_tokens} tokens wait at {worker.name}, {over_s:.3f} s too long"
        # Many come again then: not all of them at once, for a moment's room.
        raise _throttled(max(over_s, wished_s / 10), "ttft", text)


def _check_place(core: Core, fleet: Fleet, wish: wire.OpenTicket, choice: Choice) -> None:
    """Once its prompt is computed somebody has to have a place for it in a batch."""
    over_s = decode_places.excess_s(core, choice.worker, choice.fresh_tokens, wish.new_tokens)
    if over_s > 0:
        text = f"{fleet.taken_places} requests want {fleet.places} places, {over_s:.3f} s too long"
        raise _throttled(max(over_s, wish.first_token_s / 10), "decode_occupancy", text)


def choose_prefill(core: Core, fleet: Fleet, case: Asked) -> Choice:
    """A prefill worker, and whether it runs all of it. Refused: there is none."""
    wish, found = case.ticket.wish, case.found
    able = [w for w in fleet.workers.values() if w.prefills and w.name not in wish.avoid]
    workers = [w for w in able if (w.name, w.life) not in case.failed]
    if case.failed_routes:
        workers = [w for w in workers if _may_run_alone(w, case)]
    namespace = fleet.known.namespace
    page_tokens = namespace.layout.page_tokens
    prefix = found.pages * page_tokens
    asked = Wish(
        wish.prompt_tokens, wish.new_tokens,
        wish.prompt_tokens * namespace.page_bytes // page_tokens, core.now,
        core.now + wish.first_token_s, found.place, prefix_tokens=prefix,
        needs_adapter=bool(wish.adapter),
    )  # fmt: skip
    offers = [_offer(worker, found, wish.adapter) for worker in workers]
    at = core.prefill_routing.policy.choose(asked, offers)
    if at is None:
        text = "no prefill worker is live" if not offers else "none has the adapter"
        raise _throttled(limits.FLEET_LOST_AFTER_S, "no_prefill", text)
    worker, fresh = workers[at], wish.prompt_tokens - prefix
    reason = None
    if _may_run_alone(worker, case):
        others = sum(each is not worker for each in fleet.decoders(wish.adapter))
        failures = len(wish.avoid) + len(case.failed) + case.failed_routes
        reason = core.colocation.policy.alone(Case(fresh, failures, others))
    return Choice(worker, prefix, fresh, reason)


def _may_run_alone(worker: FleetWorker, case: Asked) -> bool:
    return worker.wish.role == BOTH and room.takes(worker, case.ticket)


def name_worker(core: Core, choice: Choice) -> None:
    """It is to be computed there; the policy counts that until the worker says it itself."""
    choice.worker.given_tokens += choice.fresh_tokens
    if choice.alone is not None:
        core.counters[f"alone_{choice.alone}"] += 1


def _offer(worker: FleetWorker, found: Found, adapter: str) -> PrefillOffer:
    wish, beat = worker.wish, worker.beat
    assert beat is not None, worker.name
    return PrefillOffer(
        worker.name, wish.host, wish.rack, wish.zone, found.tokens_by_host[wish.host],
        worker.queued_tokens, beat.tokens_per_s,
        worker.has(adapter), beat.link_bytes_per_s,
    )  # fmt: skip


def fail_prefill(core: Core, caller: Caller, message: wire.FailPrefill) -> None:
    """Answer TicketOpened with another prefill worker, or Throttled, which ends the ticket."""
    ticket = require_ticket(core, caller, message.ticket)
    if ticket.prefill != message.worker:  # said before, and answered with another one
        core.reply(caller, opened(ticket))
        return
    require(ticket, TicketEvent.PREFILL_FAILED)
    failed = (*ticket.failed_prefills, (message.worker, ticket.prefill_life))[-AVOIDED_MAX:]
    found = find(core, ticket.known, ticket.wish.keys)
    try:
        asked = Asked(ticket, found, failed)
        choice = choose_prefill(core, ticket.fleet, asked)
    except Refused as refusal:
        change(core, ticket, TicketEvent.CANCELLED)
        _answer_refused(core, caller, refusal)
        return
    fields = choice.fields() | {"staged_bytes": _staged_bytes(ticket, choice, found)}
    fields |= {"is_nearly_done": False, "token": 0, "missed": 0}
    change(core, ticket, TicketEvent.PREFILL_FAILED, failed_prefills=failed, **fields)
    name_worker(core, choice)
    core.reply(caller, opened(ticket))
