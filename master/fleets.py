"""Inference workers: who there is of each namespace, what each can hold, what it has of tickets.

A fleet is all of one namespace. Must not know what becomes of the tickets of one that goes.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import Fenced, OutOfSpace
from kvstore.wire.messages.tickets import FleetBeat, JoinFleet
from master.namespaces import KnownNamespace
from master.plans import OwnerKey
from master.room import Openings
from master.wheel import NOWHERE, Wakeup, Wheel

if TYPE_CHECKING:
    from collections.abc import Iterator


PREFILL: Final = "prefill"
DECODE: Final = "decode"
BOTH: Final = "both"
ROLES: Final = (PREFILL, DECODE, BOTH)
GRAIN_S: Final = 0.1
FIRST_TOKENS_MAX: Final = 1024
"""That are remembered; with more in the window, the latest."""


class FleetWorker(msgspec.Struct, eq=False):
    """One inference worker. What tickets take of it is counted by master.tickets alone."""

    name: str
    fleet: Fleet
    life: int
    owner: OwnerKey | None
    """Who has joined; nobody while it is only expected, since somebody presents its tickets."""
    wish: JoinFleet
    heard_s: float
    beat: FleetBeat | None = None
    """The last one; before the first nothing new is given to it."""
    tokens_per_s: float = 0.0
    """At which it computes prompts; 0: not measured. Short ones measure less than it can do, so
    that the best is believed for a while."""
    given_tokens: int = 0
    """Of prompts that it was named for since its last beat."""
    strange_tokens: int = 0
    """Of tickets that it runs and that nobody has presented yet."""
    strange_tickets: int = 0
    """How many those are."""
    used_tokens: int = 0
    """Credit of the tickets that have a slot on it."""
    link_bytes: int = 0
    """KV of those that are on their way to it."""
    prefixes: Counter[bytes] = msgspec.field(default_factory=Counter)
    """First pages of the prompts that have a slot on it."""
    tickets: dict[int, None] = {}
    """Those that have a slot on it, by id."""
    kept: dict[int, int] = {}
    """Tokens that are kept here for others, by id, in the order in which they came."""
    kept_tokens: int = 0
    """Of those, together."""
    bucket: int = NOWHERE

    @property
    def wanted_role(self) -> str:
        """That it was asked to change to; empty: none."""
        turn = self.fleet.roles.turn
        return turn.role if turn is not None and turn.worker is self else ""

    @property
    def queued_tokens(self) -> int:
        """Of prompts that it has, or was just named for."""
        return self.given_tokens + (0 if self.beat is None else self.beat.queued_tokens)

    @property
    def is_open(self) -> bool:
        """Whether it takes anything new."""
        return self.beat is not None and not self.beat.is_draining and not self.wanted_role

    @property
    def prefills(self) -> bool:
        """Whether it may compute a prompt."""
        return self.is_open and self.wish.role != DECODE

    @property
    def decodes(self) -> bool:
        """Whether it may go on from a prompt's KV."""
        return self.is_open and self.wish.role != PREFILL

    def has(self, adapter: str) -> bool:
        """Whether it has that adapter loaded; none is needed where none is named."""
        return not adapter or adapter in self.wish.adapters

    @property
    def free_tokens(self) -> int:
        """Credit that it can still take; negative where outputs were longer than expected."""
        return self.wish.capacity_tokens - self.used_tokens - self.strange_tokens

    @property
    def open_tokens(self) -> int:
        """Of those, what is kept for nobody; negative where somebody waits for room here."""
        return self.free_tokens - self.kept_tokens

    @property
    def free_places(self) -> int:
        """Of its batch; negative where more has come to light than it was given."""
        return self.wish.batch_max - len(self.tickets) - self.strange_tickets

    @property
    def state(self) -> str:
        """What to call it."""
        if self.beat is None:
            return "joining" if self.owner else "expected"
        if self.wanted_role:
            return "changing"
        return "draining" if self.beat.is_draining else "live"


class Turn(msgspec.Struct, frozen=True, eq=False):
    """A worker was asked to change its role. It may have left since, and not come back yet."""

    worker: FleetWorker
    role: str
    asked_s: float


class FirstTokens(msgspec.Struct, eq=False):
    """How long first tokens of a fleet took lately. Changed by master.tightening alone."""

    recent: deque[tuple[float, float]] = msgspec.field(
        default_factory=lambda: deque(maxlen=FIRST_TOKENS_MAX)
    )
    """When one was there, and how long it took in parts of what was wished for."""
    share: float = 1.0
    """Of the waiting that is admitted at most, what is admitted now."""
    look_at_s: float = 0.0


class Pace(msgspec.Struct, eq=False):
    """How long answers of a fleet had places lately. Changed by master.decode_places alone."""

    held_s: float = 0.0
    tokens: float = 0.0
    """That were expected of those."""


class Roles(msgspec.Struct, eq=False):
    """What is known of the roles of a fleet. Changed by master.roles alone."""

    look_at_s: float = 0.0
    busy: float = 0.0
    """Share of those who compute prompts that had one, lately."""
    want: str | None = None
    """What the policy wants."""
    want_s: float = 0.0
    """Since when."""
    turn: Turn | None = None
    changed_s: float = 0.0
    """When a worker was asked last, or had changed."""


class Fleet(msgspec.Struct, eq=False):
    """The inference workers of a namespace, and what its tickets take."""

    known: KnownNamespace
    workers: dict[str, FleetWorker] = {}
    credit_tokens: int = 0
    """Of all tickets, with a slot or without."""
    tickets: int = 0
    answer_tokens: int = 0
    """That are expected of those, each as long as it was expected to be at first."""
    waiting: dict[int, None] = {}
    """Tickets that want a decode worker, by id, in the order in which they came to wait."""
    waiting_tokens: int = 0
    """Credit of those."""
    roomless: dict[int, None] = {}
    """Tickets without a slot that no worker could hold if it had nothing else, by id."""
    openings: Openings | None = None
    """While many of them are given room at once. Changed by master.room alone."""
    roles: Roles = msgspec.field(default_factory=Roles)
    first_tokens: FirstTokens = msgspec.field(default_factory=FirstTokens)
    pace: Pace = msgspec.field(default_factory=Pace)

    def decoders(self, adapter: str = "") -> list[FleetWorker]:
        """Those that take requests, of this adapter if one is named."""
        return [each for each in self.workers.values() if each.decodes and each.has(adapter)]

    @property
    def capacity_tokens(self) -> int:
        """KV tokens that those hold."""
        return sum(each.wish.capacity_tokens for each in self.decoders())

    @property
    def taken_tokens(self) -> int:
        """Of that, what is promised: to tickets with a slot there, and to those without any."""
        elsewhere = sum(w.used_tokens for w in self.workers.values() if not w.decodes)
        strange = sum(worker.strange_tokens for worker in self.decoders())
        return self.credit_tokens - elsewhere + strange

    @property
    def places(self) -> int:
        """In the batches of those who decode."""
        return sum(each.wish.batch_max for each in self.decoders())

    @property
    def taken_places(self) -> int:
        """Those that tickets have there, or will want."""
        elsewhere = sum(len(w.tickets) for w in self.workers.values() if not w.decodes)
        strange = sum(worker.strange_tickets for worker in self.decoders())
        return self.tickets - elsewhere + strange


class Fleets:
    """All of them, by namespace."""

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of deadlines."""
        self.silence: Wheel[FleetWorker] = Wheel(GRAIN_S, wakeup)
        self._by_namespace: dict[bytes, Fleet] = {}

    def __iter__(self) -> Iterator[Fleet]:
        return iter(self._by_namespace.values())

    def of(self, known: KnownNamespace) -> Fleet:
        """The fleet of a namespace, whose first worker or ticket comes now."""
        return self._by_namespace.setdefault(known.namespace.id, Fleet(known))

    def find(self, known: KnownNamespace) -> Fleet | None:
        """The fleet of a namespace, if it has workers or tickets."""
        return self._by_namespace.get(known.namespace.id)

    def worker(self, known: KnownNamespace, name: str, life: int) -> FleetWorker:
        """The worker that speaks; Fenced unless that life of it is the present one."""
        fleet = self.find(known)
        worker = None if fleet is None else fleet.workers.get(name)
        if worker is None or worker.life != life:
            raise Fenced(f"inference worker {name}: life {life} is over, join again")
        return worker

    def require_room(self) -> None:
        """OutOfSpace where one more worker would be too many (I7)."""
        if len(self.silence) >= limits.FLEET_WORKERS_MAX:
            raise OutOfSpace(f"{limits.FLEET_WORKERS_MAX} inference workers have joined")

    def add(self, worker: FleetWorker) -> None:
        """Take in a worker, or one that is expected."""
        worker.fleet.workers[worker.name] = worker
        self.heard(worker, worker.heard_s)

    def heard(self, worker: FleetWorker, now_s: float) -> None:
        """It lives."""
        worker.heard_s = now_s
        self.silence.place(worker, now_s + limits.FLEET_LOST_AFTER_S)

    def forgive_silence(self, since_s: float, now_s: float) -> None:
        """Nobody could be heard between then and now: of anybody's silence this does not count."""
        for worker in list(self.silence):
            self.heard(worker, now_s - max(0.0, since_s - worker.heard_s))

    def take_out(self, worker: FleetWorker) -> None:
        """It has ended, or is given up."""
        self.silence.discard(worker)
        if worker.fleet.workers.get(worker.name) is worker:
            del worker.fleet.workers[worker.name]
        self.drop_empty(worker.fleet)

    def drop_empty(self, fleet: Fleet) -> None:
        """Forget it once it has neither workers nor tickets."""
        if not fleet.workers and not fleet.tickets:
            self._by_namespace.pop(fleet.known.namespace.id, None)
