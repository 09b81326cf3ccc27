"""Stripes: parts of k pages and m parts of parity, of which any k give every other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.common import SegmentRef

if TYPE_CHECKING:
    from collections.abc import Sequence


class Shard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard that can be read: a sealed part of some page, or of parity, as long as all others."""

    number: int
    """Data 0 to k - 1, then parity."""
    segment: int
    """Index into the segments that come along."""
    part: int
    key: bytes
    offset: int
    generation: int
    checksum: int


class StripedPage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the shard `number` of a stripe is decoded from: any k of these others (I37)."""

    k: int
    m: int
    number: int
    shards: tuple[Shard, ...]


class HashParity(Message, frozen=True, tag=152):
    """Master to worker: what are the checksums of the parity of these k data shards?

    Answered by ParityHashed. The worker reads the shards, which the master has leased, verifies
    them, and computes; it stores nothing. Safe to repeat.
    """

    epoch: int
    part_bytes: int
    m: int
    keys: bytes
    """Of the parity, m of them: a checksum depends on the key."""
    segments: tuple[SegmentRef, ...]
    shards: tuple[Shard, ...]
    """All data, in order."""


class ParityHashed(Message, frozen=True, tag=153):
    """Worker to master. `outcomes`: one byte a data shard, as it was read."""

    outcomes: bytes
    checksums: bytes
    """Packed u64, one a shard of parity; empty unless all data was read."""


def require_shards(page: StripedPage, segments: Sequence[SegmentRef]) -> None:
    """BadValue unless these are shards of one stripe, each once, and none is the page itself."""
    for field, value in (("k", page.k), ("m", page.m)):
        if not 1 <= value < limits.SHARDS_MAX:
            raise BadValue(f"stripe.{field}", value, f"1 to {limits.SHARDS_MAX - 1}")
    if page.k + page.m > limits.SHARDS_MAX:
        raise BadValue("stripe k + m", page.k + page.m, f"at most {limits.SHARDS_MAX}")
    numbers = [page.number, *(shard.number for shard in page.shards)]
    if len(set(numbers)) != len(numbers) or not 0 <= min(numbers) <= max(numbers) < page.k + page.m:
        want = f"different shards, 0 to {page.k + page.m - 1}"
        raise BadValue("stripe shards", numbers, want)
    for shard in page.shards:
        if len(shard.key) != KEY_BYTES:
            raise BadValue("shard.key", shard.key, f"{KEY_BYTES} bytes")
        if not 0 <= shard.segment < len(segments):
            raise BadValue("shard.segment", shard.segment, f"0 to {len(segments) - 1}")
