"""Put plans: extents reserved for pages about to be written, the put and the owner of both.

Owns which pages of a plan are still open. Must not know the tree or time.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.puts import PutPlans
from master.chunks import Span
from master.events import SessionId
from master.packed import WORD, index_of
from master.segments import Segment
from master.waiting import Waiting
from master.wheel import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.sessions import Caller  # noqa: TC004 (it knows owners, and so puts)


class PlanPage(IntEnum):
    """State of one page of a plan, one byte a page."""

    OPEN = 0
    SEALED = 1
    FAILED = 2


OPEN: Final = int(PlanPage.OPEN)


OwnerKey = tuple[str, str, bytes]
"""Role, tenant and token: nobody shares another's puts by knowing its token alone."""


class Owner(msgspec.Struct, eq=False):
    """A peer, known by the token of its Hello. Everything it holds goes when it is gone (I18)."""

    key: OwnerKey
    sessions: dict[SessionId, None] = {}
    puts: dict[bytes, Put] = {}
    """Puts with open plans, by request id."""
    waits: dict[bytes, Waiting] = {}
    """Puts whose answer is held back, by request id."""


class Put(msgspec.Struct, eq=False):
    """One BeginPut that was granted something, or a move; its plans fail together when it stops
    (I18).
    """

    owner: Owner
    request: bytes
    timeout_s: float
    progress_s: float
    plans: dict[int, Plan]
    """Those with open pages, by generation."""
    asker: Caller | None = None
    """Who asked last, while the put is being planned and nobody was answered."""
    reply: PutPlans | None = None
    """What was answered; kept while plans are open."""
    bucket: int = NOWHERE


class Plan(msgspec.Struct, eq=False):
    """Extents of one segment for one part of consecutive pages of a chain, or of named objects.

    The collector has to know it: it and its put refer to each other when a term ends.
    """

    generation: int
    put: Put
    namespace: int
    keys: bytes
    part: int
    part_bytes: int
    size_class: int
    """Bytes of each extent; less than the part's where pages lie encoded."""
    segment: Segment
    offsets: bytes
    spans: tuple[Span, ...]
    states: bytearray
    """PlanPage of each page."""
    open: int
    """Pages in state OPEN; the plan is closed at 0."""
    page_in_chain: int
    """Position of its first page in the chain that was asked for."""
    parent: bytes
    """Parent's key of its first page; every later page's parent is the page before it. Empty: they
    are named objects, without parents."""
    token_count: int
    """Of each page."""
    checksums: bytes = b""
    """Packed, one entry a page, where they are known beforehand: of pages that are moved."""

    def __len__(self) -> int:
        return len(self.states)

    def page_of(self, key: bytes) -> int:
        """Position of `key`, or packed.NOT_THERE."""
        return index_of(self.keys, key)

    def is_open(self, key: bytes) -> bool:
        """Whether this page of the plan is still to be sealed."""
        page = index_of(self.keys, key)
        return page >= 0 and self.states[page] == OPEN

    def all_open(self, first: int, count: int) -> bool:
        """Whether these pages are all open."""
        return self.states.count(OPEN, first, first + count) == count

    def close(self, first: int, count: int, state: PlanPage) -> None:
        """Settle these open pages."""
        assert self.all_open(first, count), (self.generation, first, count)
        self.states[first : first + count] = state.to_bytes(1, "little") * count
        self.open -= count

    def pieces(self, first: int, count: int) -> Iterator[Span]:
        """The extents of pages [first, first + count), in order."""
        for span in self.spans:
            if first < span.count:
                taken = min(count, span.count - first)
                yield span if taken == span.count else span.part(first, taken)
                count -= taken
                if not count:
                    return
                first = 0
            else:
                first -= span.count

    def open_stretches(self) -> Iterator[tuple[int, int]]:
        """(first, count) of every stretch of open pages."""
        first = self.states.find(OPEN)
        while first >= 0:
            rest = self.states[first:]
            count = len(rest) - len(rest.lstrip(b"\0"))
            yield first, count
            first = self.states.find(OPEN, first + count)

    def matches(self, first: int, keys: bytes, offsets: bytes) -> bool:
        """Whether these are the keys and offsets that were planned from page `first` on."""
        return self.keys.startswith(keys, first * KEY_BYTES) and self.offsets.startswith(
            offsets, first * WORD
        )

    def has_parents(self, first: int, parents: bytes) -> bool:
        """Whether these are the parents of the pages from `first` on."""
        if not self.parent:
            return not any(parents)
        if first:
            return self.keys.startswith(parents, (first - 1) * KEY_BYTES)
        own = parents[:KEY_BYTES] == self.parent
        return own and self.keys.startswith(parents[KEY_BYTES:])

    def has_checksums(self, first: int, checksums: bytes) -> bool:
        """Whether these may be the checksums of the pages from `first` on."""
        return not self.checksums or self.checksums.startswith(checksums, first * WORD)

    def __repr__(self) -> str:
        return f"Plan({self.generation:#x}, part {self.part}, {self.open} of {len(self)} open)"


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """What extents are planned for."""

    namespace: int
    part: int
    part_bytes: int
    size_class: int
    token_count: int


def reserve(
    put: Put,
    generation: int,
    wanted: Wanted,
    segment: Segment,
    parent: bytes,
    keys: bytes,
    page_in_chain: int = 0,
) -> Plan:
    """A plan of `put` for as many of the leading `keys` as the segment has room for."""
    spans = segment.allocator.plan(wanted.size_class, generation, wanted.namespace, keys)
    count = sum([span.count for span in spans])
    plan = put.plans[generation] = Plan(
        generation,
        put,
        wanted.namespace,
        keys[: count * KEY_BYTES],
        wanted.part,
        wanted.part_bytes,
        wanted.size_class,
        segment,
        b"".join([span.offsets() for span in spans]),
        tuple(spans),
        bytearray(count),
        open=count,
        page_in_chain=page_in_chain,
        parent=parent,
        token_count=wanted.token_count,
    )
    return plan


class Incomplete(msgspec.Struct, eq=False):
    """Pages of which some parts are sealed and others are not, once their plans are closed."""

    namespace: int
    keys: bytes
    timeout_s: float
    """How long after the last progress of a page its sealed parts are kept."""
    bucket: int = NOWHERE
