"""Tickets: one request's passage from prefill to decode, and the workers that carry it out.

A gateway opens a ticket, the prefill worker that it names stages pages, a decode worker claims it
and installs them. Tickets are not durable: whoever holds one presents it to the next master.
"""

from __future__ import annotations

import msgspec

from kvstore.wire.messages.base import Message


class JoinFleet(Message, frozen=True, tag=176):
    """An inference worker: this is what I run and can hold -> FleetJoined. Repeat to change it.

    A fleet is all inference workers of a namespace: of one tenant, model and revision.
    """

    namespace: bytes
    worker: str
    """Unique in the fleet. A second life of a worker takes the name over; the first is fenced."""
    role: str
    """prefill, decode or both."""
    where: str
    """HOST:PORT of its own server, for the gateway."""
    host: str
    rack: str
    zone: str
    capacity_tokens: int
    """KV tokens that fit its memory; 0 for prefill alone."""
    batch_max: int
    """Requests that it decodes at once."""
    adapters: tuple[str, ...] = ()
    switches: bool = False
    """Whether it may be asked to change between prefill and decode."""


class FleetJoined(Message, frozen=True, tag=177):
    """Master to inference worker."""

    life: int
    """Of this worker under this name: later beats and claims of an earlier life are refused."""
    beat_every_s: float
    lost_after_s: float


class Running(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One ticket on a decode worker."""

    ticket: int
    token: int
    tokens: int
    """KV tokens that it holds now, prompt and generated."""


class FleetBeat(Message, frozen=True, tag=178):
    """Inference worker to master, every `beat_every_s` -> FleetNoted."""

    namespace: bytes
    worker: str
    life: int
    queued_tokens: int
    """Of prompts that wait or are being computed."""
    tokens_per_s: float
    """Prefill speed measured lately; 0: not yet."""
    step_s: float
    """Time of a decode step measured lately; 0: not yet."""
    link_bytes_per_s: float
    """Speed of pulls measured lately; 0: not yet."""
    rtt_s: float
    running: tuple[Running, ...]
    """Every ticket that it has claimed, or runs alone (token 0), and not finished. One missing in
    two beats is finished."""
    is_draining: bool = False
    """Takes nothing new: it is about to leave."""


class FleetNoted(Message, frozen=True, tag=179):
    """Master to inference worker."""

    fenced: tuple[int, ...]
    """Of the tickets named: those that are not its own any more. It stops them."""
    role: str = ""
    """That this worker is to have: it hands over what it runs, leaves, and joins again in that
    role. Empty: the one that it has."""


class LeaveFleet(Message, frozen=True, tag=180):
    """This worker has ended -> Done. Its tickets are routed anew."""

    namespace: bytes
    worker: str
    life: int


class OpenTicket(Message, frozen=True, tag=181):
    """Gateway: may this request begin, and where? -> TicketOpened or Throttled.

    Safe to repeat: the same request of the same tenant gets the same ticket. That is of whoever
    asked last, and is cancelled where no connection with that one's token has been there for
    GATEWAY_LOST_AFTER_S.
    """

    namespace: bytes
    request: str
    keys: bytes
    """Of the prompt's full pages."""
    prompt_tokens: int
    new_tokens: int
    """Expected output."""
    first_token_s: float
    """Time from now within which the first token should come."""
    deadline_s: float
    """Time from now after which nobody wants the answer."""
    adapter: str = ""
    avoid: tuple[str, ...] = ()
    """Prefill workers that have failed this request."""


class TicketOpened(Message, frozen=True, tag=182):
    """Admitted: decode credit is taken, the prefix that the pool has is pinned."""

    ticket: int
    prefix_tokens: int
    """Of the prompt, in whole pages that the pool has."""
    prefill: str
    """Name of the prefill worker."""
    where: str
    alone: str = ""
    """Why that worker should run the whole request; empty: hand over to decode."""


class Throttled(Message, frozen=True, tag=183):
    """Not now. Nothing is held."""

    retry_after_s: float
    reason: str
    """decode_occupancy, staging, migration, ttft, no_prefill or no_decode."""
    text: str


class TailRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The private object with the KV of the tokens behind the last full page; the master removes
    it with the ticket.
    """

    namespace: bytes = b""
    """The tenant's of tickets."""
    key: bytes = b""
    """Empty where there is none: those tokens are computed again."""
    size_bytes: int = 0


class BeginPrefill(Message, frozen=True, tag=184):
    """Prefill worker: I compute this, and have come so far -> Done. Repeated as it goes on."""

    ticket: int
    worker: str
    life: int
    tokens_left: int = 0
    """Of the prompt, where its pages are put while the rest is computed: a decode worker may be
    chosen ahead once computing these takes no longer than moving the KV. 0: not before all is
    staged."""


class StageTicket(Message, frozen=True, tag=185):
    """Prefill worker: the prompt's pages are in the pool -> Done. Safe to repeat.

    They are pinned from now on.
    """

    ticket: int
    worker: str
    life: int
    keys: bytes
    tail: TailRef
    tokens: tuple[int, ...]
    """Generated so far: at least the first one."""


class AwaitRoute(Message, frozen=True, tag=186):
    """Gateway: tell me when a decode worker is chosen -> TicketRouted; held back until then."""

    ticket: int
    above: int
    """Routes up to this one are known already, and have failed; 0 at first."""
    timeout_s: float


class TicketRouted(Message, frozen=True, tag=187):
    """The present route. `route` grows with each; 0: none within the timeout."""

    route: int
    decode: str
    where: str
    is_ahead: bool = False
    """The prompt is still being computed: its worker may pull what there is, by a claim ahead."""


class ClaimTicket(Message, frozen=True, tag=188):
    """Decode worker: I take it -> TicketClaimed. Who claimed it before is fenced."""

    ticket: int
    route: int
    worker: str
    life: int
    is_ahead: bool = False
    """To pull what there is while the prompt is being computed; Fenced once it is staged, as a
    claim that is not ahead is before."""


class TicketClaimed(Message, frozen=True, tag=189):
    """The descriptor: what lies where. `token` is this claim's, higher than any before."""

    token: int
    namespace: bytes
    page_tokens: int
    prompt_tokens: int
    keys: bytes
    tail: TailRef
    tokens: tuple[int, ...]
    """Generated so far, by all who had it before; none in a claim ahead."""


class AwaitParts(Message, frozen=True, tag=201):
    """Decode worker with a claim: which parts of its pages are sealed -> PartsSealed.

    Held back until there are more than it has, or the ticket is staged.
    """

    ticket: int
    token: int
    have: tuple[int, ...]
    """Leading pages of the ticket of which it has each part."""
    timeout_s: float


class PartsSealed(Message, frozen=True, tag=202):
    """Leading pages of the ticket of which each part can be read, whatever else they lack."""

    pages: tuple[int, ...]
    is_staged: bool
    """Nobody computes any more: what is lacking now is to be computed by who has the claim."""


class LocateParts(Message, frozen=True, tag=203):
    """Decode worker with a claim: where this part of those pages is -> Located, leased.

    Nobody else may read parts of pages that are not complete. Pages that lack it are left out.
    """

    ticket: int
    token: int
    part: int
    first: int
    """Page of the ticket."""
    count: int


class TicketInstalled(Message, frozen=True, tag=190):
    """Decode worker: I hold its KV -> Done. Its pins end."""

    ticket: int
    token: int


class ShedTicket(Message, frozen=True, tag=191):
    """Decode worker: somebody else has to go on, from these pages -> Done. It is routed anew."""

    ticket: int
    token: int
    keys: bytes
    tail: TailRef
    tokens: tuple[int, ...]
    """Generated so far, all of them."""


class FinishTicket(Message, frozen=True, tag=192):
    """Decode worker, or the gateway with the highest token that it has seen -> Done."""

    ticket: int
    token: int


class CancelTicket(Message, frozen=True, tag=193):
    """Gateway: nobody wants it any more -> Done. Safe to repeat; also for an unknown one."""

    ticket: int


class FailPrefill(Message, frozen=True, tag=194):
    """Gateway: this prefill worker did not do it -> TicketOpened (another) or Throttled."""

    ticket: int
    worker: str


class RunAlone(Message, frozen=True, tag=200):
    """Gateway: routes up to this one have failed; may one worker do all of it? -> TicketOpened, or
    Fenced where it is to be routed anew. Safe to repeat.
    """

    ticket: int
    route: int
    """The present one, or the last."""


class PresentTicket(Message, frozen=True, tag=195):
    """Gateway to a new master: I hold this ticket -> Done, or AccessDenied where it is not wanted.

    Only the highest token that is presented within the grace counts.
    """

    ticket: int
    namespace: bytes
    request: str
    keys: bytes
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    deadline_s: float
    token: int
    """The highest that it has seen; 0 before any claim."""
    worker: str
    """The prefill or decode worker that has it."""
    tail: TailRef
    tokens: tuple[int, ...]
    adapter: str = ""


class GetTerm(Message, frozen=True, tag=198):
    """Gateway: who leads? -> Term. Asked several times a second."""


class Term(Message, frozen=True, tag=199):
    """A master of another epoch knows no ticket before it is presented."""

    epoch: int


class ListTickets(Message, frozen=True, tag=196):
    """Operator, or engine for its own tenant -> TicketList."""


class TicketRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One ticket."""

    ticket: int
    request: str
    tenant: str
    model: str
    state: str
    prefill: str
    decode: str
    prompt_tokens: int
    new_tokens: int
    credit_tokens: int
    staged_bytes: int
    routes: int
    age_s: float
    left_s: float


class FleetRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One inference worker."""

    worker: str
    tenant: str
    model: str
    revision: str
    role: str
    state: str
    host: str
    queued_tokens: int
    used_tokens: int
    capacity_tokens: int
    running: int
    batch_max: int


class TicketList(Message, frozen=True, tag=197):
    """Oldest first; at most `limits.TICKETS_LISTED_MAX`, `tickets` says how many there are."""

    tickets: int
    rows: tuple[TicketRow, ...]
    workers: tuple[FleetRow, ...]
    staging_bytes: int
    staging_budget_bytes: int
