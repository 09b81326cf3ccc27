"""The book of tickets: each one's state, and what it takes: credit, a slot, pins, staging, a tail.

A ticket is withdrawn before it changes and enters again after it: all that it counts for leaves the
sums, and what it counts for then is put in, so that they return to nothing, whatever ends (I39).
Must not know who asks for a change, nor why.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvstore import limits
from kvstore.errors import OutOfSpace
from kvstore.ids import KEY_BYTES, Epoch, generation_of
from kvstore.wire.messages.tickets import OpenTicket, TailRef
from master import room
from master.fleets import Fleet, Fleets, FleetWorker
from master.gateways import Gateways
from master.namespaces import KnownNamespace
from master.part_waits import PartWaits
from master.sessions import Caller
from master.wheel import NOWHERE, Wakeup, Wheel

if TYPE_CHECKING:
    from master.events import SessionId
    from master.plans import OwnerKey
    from master.sessions import Session

K = TypeVar("K", str, bytes)
GRAIN_S: Final = 0.05
WAIT_GRAIN_S: Final = 0.02


class TicketState(StrEnum):
    """How far a request has come."""

    OPENED = "opened"
    """Admitted; a prefill worker is named."""
    PREFILLING = "prefilling"
    """Being computed; or, by one worker alone, all of it."""
    STAGED = "staged"
    """Its pages are in the pool; no decode worker is named."""
    ROUTED_AHEAD = "routed ahead"
    """As routed, while its prompt is being computed."""
    CLAIMED_AHEAD = "claimed ahead"
    """That one pulls what there is of it."""
    ROUTED = "routed"
    """A decode worker is named, and has a slot kept for it."""
    CLAIMED = "claimed"
    """That one pulls."""
    INSTALLED = "installed"
    """That one holds its KV, and generates."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class TicketEvent(StrEnum):
    """What can happen to a ticket."""

    BEGUN = "prefill begun"
    NEARLY_DONE = "prefill nearly done"
    PREFILL_FAILED = "prefill failed"
    STAGED = "pages staged"
    ROUTED = "decode chosen"
    CLAIMED_AHEAD = "claimed ahead"
    CLAIMED = "claimed"
    INSTALLED = "installed"
    UNROUTED = "decode refused or lost"
    SHED = "shed"
    ALONE = "to be run alone"
    GROWN = "tokens counted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_S, _E = TicketState, TicketEvent
AHEAD: Final = (_S.ROUTED_AHEAD, _S.CLAIMED_AHEAD)
"""A decode worker is named before the prompt is computed."""
LIVE: Final = (
    _S.OPENED, _S.PREFILLING, *AHEAD, _S.STAGED, _S.ROUTED, _S.CLAIMED, _S.INSTALLED,
)  # fmt: skip
HOLDING: Final = frozenset(LIVE) - {_S.INSTALLED}
"""Those in which pages are pinned and count as staged."""
MOVING: Final = frozenset({*AHEAD, _S.ROUTED, _S.CLAIMED})
ROUTES: Final = MOVING | {_S.INSTALLED}
CLAIMS: Final = frozenset({_S.CLAIMED_AHEAD, _S.CLAIMED, _S.INSTALLED})
"""Those with a token."""
_ENDS: Final = {_E.CANCELLED: _S.CANCELLED, _E.EXPIRED: _S.EXPIRED}

TICKET_TRANSITIONS: Final[dict[tuple[TicketState, TicketEvent], TicketState]] = {
    (_S.OPENED, _E.BEGUN): _S.PREFILLING,
    (_S.OPENED, _E.PREFILL_FAILED): _S.OPENED,
    (_S.PREFILLING, _E.PREFILL_FAILED): _S.OPENED,
    (_S.PREFILLING, _E.NEARLY_DONE): _S.PREFILLING,
    (_S.PREFILLING, _E.ROUTED): _S.ROUTED_AHEAD,
    (_S.PREFILLING, _E.STAGED): _S.STAGED,
    (_S.PREFILLING, _E.GROWN): _S.PREFILLING,
    (_S.PREFILLING, _E.FINISHED): _S.FINISHED,
    (_S.ROUTED_AHEAD, _E.CLAIMED_AHEAD): _S.CLAIMED_AHEAD,
    (_S.ROUTED_AHEAD, _E.STAGED): _S.ROUTED,
    (_S.ROUTED_AHEAD, _E.UNROUTED): _S.PREFILLING,
    (_S.ROUTED_AHEAD, _E.PREFILL_FAILED): _S.OPENED,
    (_S.CLAIMED_AHEAD, _E.CLAIMED_AHEAD): _S.CLAIMED_AHEAD,
    (_S.CLAIMED_AHEAD, _E.STAGED): _S.CLAIMED,
    (_S.CLAIMED_AHEAD, _E.UNROUTED): _S.PREFILLING,
    (_S.CLAIMED_AHEAD, _E.PREFILL_FAILED): _S.OPENED,
    (_S.CLAIMED_AHEAD, _E.GROWN): _S.CLAIMED_AHEAD,
    (_S.STAGED, _E.ROUTED): _S.ROUTED,
    (_S.STAGED, _E.ALONE): _S.OPENED,
    (_S.ROUTED, _E.CLAIMED): _S.CLAIMED,
    (_S.ROUTED, _E.UNROUTED): _S.STAGED,
    (_S.CLAIMED, _E.CLAIMED): _S.CLAIMED,
    (_S.CLAIMED, _E.INSTALLED): _S.INSTALLED,
    (_S.CLAIMED, _E.UNROUTED): _S.STAGED,
    (_S.CLAIMED, _E.GROWN): _S.CLAIMED,
    (_S.INSTALLED, _E.GROWN): _S.INSTALLED,
    (_S.INSTALLED, _E.SHED): _S.STAGED,
    (_S.INSTALLED, _E.UNROUTED): _S.STAGED,
    (_S.INSTALLED, _E.FINISHED): _S.FINISHED,
} | {(state, event): _ENDS[event] for state, event in product(LIVE, _ENDS)}


class Tail(msgspec.Struct, frozen=True):
    """The object with the KV of the tokens behind the last full page."""

    known: KnownNamespace
    key: bytes
    size_bytes: int

    @property
    def ref(self) -> TailRef:
        """As peers name it."""
        return TailRef(self.known.namespace.id, self.key, self.size_bytes)


class Wait(msgspec.Struct, eq=False):
    """One AwaitRoute that is held back."""

    caller: Caller
    ticket: Ticket
    bucket: int = NOWHERE


class PartsWait(msgspec.Struct, eq=False):
    """One AwaitParts that is held back."""

    caller: Caller
    ticket: Ticket
    token: int
    """Of the claim that asks."""
    have: tuple[int, ...]
    blocked_on: tuple[tuple[int, bytes], ...] = ()
    """The next page of each part, by its namespace."""
    bucket: int = NOWHERE


class Ticket(msgspec.Struct, eq=False):
    """One request's passage. Changed by master.ticket_changes alone."""

    id: int
    wish: OpenTicket
    known: KnownNamespace
    fleet: Fleet
    opened_s: float
    deadline_s: float
    credit_tokens: int
    state: TicketState = TicketState.OPENED
    keys: bytes = b""
    """Pages that it pins while it holds any."""
    tokens: tuple[int, ...] = ()
    """Generated so far."""
    tail: Tail | None = None
    staged_bytes: int = 0
    prefill: str = ""
    prefill_life: int = 0
    """Of that worker, when it was named; 0: an earlier master has named it."""
    failed_prefills: tuple[tuple[str, int], ...] = ()
    """Those that were named before and have not done it; another life of one may."""
    is_nearly_done: bool = False
    """Computing the rest takes no longer than moving the KV: it may be routed ahead."""
    prefix_tokens: int = 0
    alone: str = ""
    slot: FleetWorker | None = None
    """The decode worker that has a slot for it."""
    room: FleetWorker | None = None
    """Where room is kept for it until then; changed by master.room alone."""
    host: str = ""
    """Where most of its pages lay when it was routed."""
    route: int = 0
    token: int = 0
    """Of the present claim; 0: there is none."""
    shed_token: int = 0
    """Of the claim that was given up last."""
    routes: int = 0
    sheds: int = 0
    """Of those, how many were given up by a worker that did not fail it."""
    ready_s: float = 0.0
    routed_s: float = 0.0
    """When its last decode worker was named."""
    failed: tuple[str, ...] = ()
    """Decode workers that did not do it: others are preferred."""
    is_confirmed: bool = False
    """Whether its decode worker itself has told this master that it holds its KV."""
    missed: int = 0
    """Beats in a row that should have named it and did not."""
    wait: Wait | None = None
    parts_wait: PartsWait | None = None
    held: tuple[tuple[KnownNamespace, bytes], ...] = ()
    """What it pins now."""
    bucket: int = NOWHERE

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.known.namespace.content.tenant

    def staging(self, present: int = 0) -> int:
        """Bytes that staging takes where the pool has so many of the prompt's pages already."""
        namespace, page_tokens = self.known.namespace, self.known.namespace.layout.page_tokens
        behind = self.wish.prompt_tokens % page_tokens
        fresh = len(self.wish.keys) // KEY_BYTES - present
        return fresh * namespace.page_bytes + behind * namespace.page_bytes // page_tokens

    @property
    def wants_route(self) -> bool:
        """Whether a decode worker is to be chosen for it."""
        is_ahead = self.state is TicketState.PREFILLING and self.is_nearly_done
        return self.state is TicketState.STAGED or is_ahead

    @property
    def kv_tokens(self) -> int:
        """Of prompt and output, those that there are."""
        return self.wish.prompt_tokens + len(self.tokens)

    @property
    def kv_bytes(self) -> int:
        """Of their KV."""
        namespace = self.known.namespace
        return self.kv_tokens * namespace.page_bytes // namespace.layout.page_tokens


class Tickets:
    """All that have not ended, by id and by request."""

    def __init__(self, epoch: Epoch, staging_s: float, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of deadlines. One waits `staging_s` for a route."""
        self.fleets = Fleets(wakeup)
        self.gateways = Gateways(wakeup)
        self.deadlines: Wheel[Ticket] = Wheel(GRAIN_S, wakeup)
        self.waits: Wheel[Wait] = Wheel(WAIT_GRAIN_S, wakeup)
        self.part_waits = PartWaits(wakeup)
        self.staged_bytes = 0
        self.source_bytes: Counter[str] = Counter()
        """On their way to a decode worker, by the host they come from."""
        self.to_route: dict[Fleet, None] = {}
        """Those where something has changed since they were looked at."""
        self._epoch = epoch
        self._staging_s = staging_s
        self._wakeup = wakeup
        self._numbers = 0
        self._by_id: dict[int, Ticket] = {}
        self._by_request: dict[tuple[str, str], Ticket] = {}
        self._waits_of: dict[SessionId, dict[Wait, None]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Ticket]:
        """Every ticket, oldest first."""
        return list(self._by_id.values())

    def new_number(self) -> int:
        """Higher than any before it, of any master: for tickets, routes, claims and lives."""
        self._numbers += 1
        return generation_of(self._epoch, self._numbers)

    def find(self, ticket: int) -> Ticket | None:
        """The ticket of this id, unless it has ended."""
        return self._by_id.get(ticket)

    def of_request(self, tenant: str, request: str) -> Ticket | None:
        """That of this tenant's request, unless it has ended."""
        return self._by_request.get((tenant, request))

    def require_room(self) -> None:
        """OutOfSpace where one more would be too many (I7)."""
        if len(self) >= limits.TICKETS_MAX:
            raise OutOfSpace(f"{limits.TICKETS_MAX} tickets are open")

    def look_at(self, fleet: Fleet) -> None:
        """Waiting tickets of this fleet may find room now."""
        if fleet.waiting:
            self.to_route[fleet] = None
            self._wakeup.by(float("-inf"))

    def add(self, ticket: Ticket, gateway: OwnerKey) -> None:
        """Take in a new one, for which that one answers."""
        self.gateways.answers_for(gateway, ticket.id)
        self._by_id[ticket.id] = ticket
        self._by_request[ticket.tenant, ticket.wish.request] = ticket
        ticket.fleet.tickets += 1
        self.enter(ticket)

    def enter(self, ticket: Ticket) -> None:
        """It counts for what it is."""
        self._count(ticket, 1)
        room.keep(ticket, wanted=ticket.state in LIVE and ticket.slot is None)
        if ticket.state not in LIVE:
            self._forget(ticket)
            return
        at_s = ticket.deadline_s
        if ticket.wants_route:
            ticket.fleet.waiting[ticket.id] = None
        if ticket.state is TicketState.STAGED and not ticket.shed_token:
            # Else somebody has been reading the answer already.
            at_s = min(at_s, ticket.ready_s + self._staging_s)
        self.deadlines.place(ticket, at_s)
        self.look_at(ticket.fleet)

    def withdraw(self, ticket: Ticket) -> None:
        """It counts for nothing until it enters again."""
        self._count(ticket, -1)
        ticket.fleet.waiting.pop(ticket.id, None)

    def _count(self, ticket: Ticket, sign: int) -> None:
        state, slot = ticket.state, ticket.slot
        if state not in LIVE:
            return
        ticket.fleet.credit_tokens += sign * ticket.credit_tokens
        ticket.fleet.answer_tokens += sign * ticket.wish.new_tokens
        if state in HOLDING:
            self.staged_bytes += sign * ticket.staged_bytes
        if ticket.wants_route:
            ticket.fleet.waiting_tokens += sign * ticket.credit_tokens
        if slot is None:
            return
        slot.used_tokens += sign * ticket.credit_tokens
        _add(slot.prefixes, ticket.keys[:KEY_BYTES], sign)
        if sign > 0:
            slot.tickets[ticket.id] = None
        else:
            del slot.tickets[ticket.id]
        if state in MOVING:
            slot.link_bytes += sign * ticket.kv_bytes
            _add(self.source_bytes, ticket.host, sign * ticket.kv_bytes)

    def _forget(self, ticket: Ticket) -> None:
        del self._by_id[ticket.id]
        del self._by_request[ticket.tenant, ticket.wish.request]
        self.deadlines.discard(ticket)
        self.gateways.drop(ticket.id)
        ticket.fleet.tickets -= 1
        self.look_at(ticket.fleet)
        self.fleets.drop_empty(ticket.fleet)

    # Held-back answers.

    def park(self, wait: Wait, until_s: float) -> None:
        """Keep an answer back until there is a route, or until then."""
        wait.ticket.wait = wait
        self.waits.place(wait, until_s)
        self._waits_of.setdefault(wait.caller.session.id, {})[wait] = None

    def unpark(self, wait: Wait) -> None:
        """It is answered, or nobody wants it."""
        wait.ticket.wait = None
        self.waits.discard(wait)
        session = wait.caller.session.id
        del self._waits_of[session][wait]
        if not self._waits_of[session]:
            del self._waits_of[session]

    def drop_waits(self, session: Session) -> None:
        """Nobody is there any more who could be answered (I18)."""
        for wait in list(self._waits_of.get(session.id, ())):
            self.unpark(wait)
        self.part_waits.drop_session(session)


def _add(counts: Counter[K], key: K, number: int) -> None:
    """What has come down to nothing is forgotten."""
    counts[key] += number
    if not counts[key]:
        del counts[key]
