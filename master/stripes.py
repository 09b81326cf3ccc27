"""The book of stripes: which parts of which pages, and which parity, stand for each other.

Owns the keys `stripes/<number>`, and the place in which pages lie for the directory that only their
stripe can give any more. A member is known by key and checksum, not by where it lies: wherever
those bytes are sealed, they are its shard. Must not know trees, time, or why stripes are made.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.checksummed import checked, checksummed
from kvstore.errors import CorruptPage, InvariantBroken
from kvstore.namespace import opaque
from kvstore.page import name_key
from kvstore.replica import Tier
from kvstore.segment import Geometry
from kvstore.wire.messages.common import SegmentRef
from master.packed import split_keys
from master.segments import Segment, SegmentState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.ids import PageKey
    from master.events import CommandId
    from master.stripe_making import Making
    from master.wheel import Wakeup

PREFIX: Final = "stripes/"
LAYOUT: Final = 0x3153564B  # "KVS1", little-endian
STRIPES_MAX: Final = 65_536
PARITY: Final = opaque("(pool)", "(parity)")
"""The namespace of parity: objects of the pool's own, which no tenant can name."""
PLACE: Final = "(stripes)"
_HEAD: Final = struct.Struct("<IHHIQ")
_ROW: Final = struct.Struct("<IH32sQ")


class Member(msgspec.Struct, frozen=True, gc=False):
    """A shard: data, or a page of the namespace of parity."""

    namespace: int
    """Its ordinal."""
    part: int
    key: bytes
    checksum: int


class Stripe(msgspec.Struct, eq=False):
    """k parts of pages and m of parity, as long as each other."""

    number: int
    """A generation: never that of another stripe, or of an extent."""
    k: int
    m: int
    part_bytes: int
    members: tuple[Member, ...]
    """By number: data, then parity."""
    spare: int = 0
    """How many more hosts its pages may lose; 0 until all parity was sealed."""
    rebuild_at_s: float = 0.0
    """What was lost may come back by then."""
    is_durable: bool = False

    def number_of(self, key: bytes, part: int, namespace: int) -> int:
        """Which of its shards this is."""
        wanted = namespace, part, key
        found = ((each.namespace, each.part, each.key) for each in self.members)
        return next(number for number, each in enumerate(found) if each == wanted)


def parity_key(stripe: int, number: int) -> PageKey:
    """Key of the shard `number` of this stripe."""
    return name_key(PARITY.id, b"%d.%d" % (stripe, number))


def pack(stripe: Stripe) -> bytes:
    """Its durable value."""
    head = _HEAD.pack(LAYOUT, stripe.k, stripe.m, stripe.part_bytes, stripe.number)
    rows = [_ROW.pack(m.namespace, m.part, m.key, m.checksum) for m in stripe.members]
    return checksummed(head + b"".join(rows))


def unpack(value: bytes) -> Stripe:
    """The stripe of a durable value; CorruptPage when it is none."""
    body = checked(value)
    try:
        layout, k, m, part_bytes, number = _HEAD.unpack_from(body)
        members = tuple(Member(*row) for row in _ROW.iter_unpack(body[_HEAD.size :]))
    except struct.error as error:
        raise CorruptPage(f"value of a stripe: {error}") from error
    if (
        layout != LAYOUT
        or len(members) != k + m
        or not 2 <= k + m <= limits.SHARDS_MAX
        or not k * m
    ):
        raise CorruptPage(f"value of a stripe: {k} + {m} of layout {layout:#x}")
    return Stripe(number, k, m, part_bytes, members, is_durable=True)


class Stripes:
    """All stripes, those that want to be looked at, and those that are being made."""

    __slots__ = (
        "_members", "_numbers", "_wakeup", "by_number", "candidates", "in_vain", "lacks",
        "look_at_s", "making", "parity", "parity_bytes", "pending", "place", "roomy", "search_at_s",
        "turn",
    )  # fmt: skip

    def __init__(self, wakeup: Wakeup) -> None:
        """None; `wakeup` hears of looks."""
        self._wakeup = wakeup
        self.parity_bytes = 0
        """Of all stripes together."""
        self.by_number: dict[int, Stripe] = {}
        self._members: dict[tuple[int, int], dict[bytes, Stripe]] = {}
        """By namespace and part, then by key."""
        self._numbers: list[int] = []
        """What is left of this round through all of them."""
        self.place = _place()
        """Where a page lies that is decoded from others: for the directory a segment as any."""
        self.parity = 0
        """Ordinal of the namespace of parity, once it is known."""
        self.pending: dict[Stripe, None] = {}
        """To be looked at soon."""
        self.making: dict[CommandId, Making] = {}
        self.candidates: dict[tuple[str, int], dict[str, dict[tuple[int, int, bytes], None]]] = {}
        """Cold parts of pages by tenant and size, then by host: namespace, part and key."""
        self.roomy: tuple[float, dict[int, list[Segment]]] = (-1.0, {})
        """Drives with room by size class, as of when."""
        self.search_at_s = 0.0
        """When drives are looked through again for cold pages."""
        self.in_vain = 0
        """Drives that were, one after the other, without any being found."""
        self.turn = 0
        """Which drive is looked through next."""
        self.lacks = ""
        """Why no stripes are made although they are wanted."""
        self.look_at_s = float("inf")

    def __len__(self) -> int:
        return len(self.by_number)

    def look(self, at_s: float) -> None:
        """A look is wanted at `at_s`, if not sooner."""
        self.look_at_s = min(self.look_at_s, at_s)
        self._wakeup.by(at_s)

    def want(self, stripe: Stripe, at_s: float) -> None:
        """Look at this stripe at `at_s`, or soon after."""
        self.pending[stripe] = None
        self.look(at_s)

    def find(self, namespace: int, part: int, key: bytes) -> Stripe | None:
        """The stripe of this part of a page."""
        keys = self._members.get((namespace, part))
        return None if keys is None else keys.get(key)

    def has_part(self, namespace: int, part: int) -> bool:
        """Whether some page of that namespace is in a stripe by that part."""
        return bool(self._members.get((namespace, part)))

    def spare(self, namespace: int, part: int, keys: bytes) -> bytes:
        """One byte a page: how many more hosts it may lose for its stripe's sake; empty where none
        may.
        """
        stripes = self._members.get((namespace, part))
        if not stripes:
            return b""
        found = [stripes.get(key) for key in split_keys(keys)]
        return bytes([0 if stripe is None else stripe.spare for stripe in found])

    def add(self, stripe: Stripe) -> None:
        """Enter it; none of its members is in another."""
        self.by_number[stripe.number] = stripe
        self.parity_bytes += stripe.m * stripe.part_bytes
        self.parity = stripe.members[stripe.k].namespace
        for member in stripe.members:
            keys = self._members.setdefault((member.namespace, member.part), {})
            assert member.key not in keys, (stripe.number, member)
            keys[member.key] = stripe

    def remove(self, stripe: Stripe) -> None:
        """Forget it."""
        del self.by_number[stripe.number]
        self.parity_bytes -= stripe.m * stripe.part_bytes
        self.pending.pop(stripe, None)
        for member in stripe.members:
            del self._members[member.namespace, member.part][member.key]

    def next_of_round(self, count: int) -> Iterator[Stripe]:
        """The next so many of a round through all; after its end another begins."""
        if not self._numbers:
            self._numbers = list(self.by_number)
        for _ in range(min(count, len(self._numbers))):
            stripe = self.by_number.get(self._numbers.pop())
            if stripe is not None:
                yield stripe

    def restore(self, key: str, value: bytes) -> None:
        """Take in one durable value; CorruptPage when it is not ours, or is another's."""
        stripe = unpack(value)
        if key != PREFIX + str(stripe.number):
            raise CorruptPage(f"metadata value {key}: holds stripe {stripe.number}")
        if any(self.find(m.namespace, m.part, m.key) for m in stripe.members):
            raise CorruptPage(f"metadata value {key}: some of it is in another stripe")
        self.add(stripe)

    def check(self) -> None:
        """Raise InvariantBroken unless the index says what the stripes do (I37)."""
        listed = {
            (m.namespace, m.part, m.key): stripe
            for stripe in self.by_number.values()
            for m in stripe.members
        }
        indexed = {
            (namespace, part, key): stripe
            for (namespace, part), keys in self._members.items()
            for key, stripe in keys.items()
        }
        if listed != indexed:
            raise InvariantBroken(f"I37: {len(indexed)} parts are in stripes, not {len(listed)}")


def _place() -> Segment:
    ref = SegmentRef(PLACE, 0, Tier.NVME, Geometry(limits.CHUNK_BYTES), "", "", ())
    place = Segment(ref)
    place.state, place.readable = SegmentState.LIVE, True
    return place
