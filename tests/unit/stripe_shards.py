"""Stripes of made-up pages whose shards lie in a segment each, for tests of who reads them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvstore.erasure import encode
from kvstore.ids import KEY_BYTES
from kvstore.page import payload_checksum
from kvstore.replica import Tier
from kvstore.segment import check_geometry
from kvstore.transfer.transport import ReadSpan, all_of, verified
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.stripes import Shard, StripedPage

if TYPE_CHECKING:
    from kvstore.transfer.memory import Memory

PART_BYTES = 1000


def segment_of(number: int) -> SegmentRef:
    """The segment that holds this shard of every stripe."""
    geometry = check_geometry(64 << 20)
    return SegmentRef(f"s{number}", 1, Tier.NVME, geometry, f"w{number}", f"h{number}", ())


class Stripes:
    """Some stripes of one code, and a worker for each shard that can be asked for it."""

    def __init__(self, k: int, m: int, stripes: int = 1, seed: int = 1) -> None:
        draw = random.Random(seed)
        self.k, self.m = k, m
        self.segments = tuple(segment_of(number) for number in range(k + m))
        self.lost: set[str] = set()
        """Segments of which nothing comes."""
        self.damaged: set[str] = set()
        """Segments whose bytes are others by now."""
        self.reads: list[str] = []
        """Segments that were asked."""
        self.payloads: dict[tuple[str, int], bytes] = {}
        """By segment and offset."""
        self.shards: list[list[Shard]] = []
        for stripe in range(stripes):
            data = [draw.randbytes(PART_BYTES) for _ in range(k)]
            parity = [bytearray(PART_BYTES) for _ in range(m)]
            encode(k, m, [memoryview(d) for d in data], [memoryview(p) for p in parity])
            row = [*data, *map(bytes, parity)]
            self.shards.append([self._shard(stripe, n, each) for n, each in enumerate(row)])

    def _shard(self, stripe: int, number: int, payload: bytes) -> Shard:
        key = bytes([stripe, number]) * (KEY_BYTES // 2)
        self.payloads[f"s{number}", stripe * 4096] = payload
        checksum = payload_checksum(payload, key, 0)
        return Shard(number, number, 0, key, stripe * 4096, 7, checksum)

    def payload(self, stripe: int, number: int) -> bytes:
        """What this shard is."""
        return self.payloads[f"s{number}", stripe * 4096]

    def page(self, stripe: int, number: int) -> StripedPage:
        """How this shard is decoded from all others."""
        others = tuple(shard for shard in self.shards[stripe] if shard.number != number)
        return StripedPage(self.k, self.m, number, others)

    def span(self, number: int, places: tuple[int, ...]) -> ReadSpan:
        """This shard of the first stripes, to these places."""
        mine = [row[number] for row in self.shards[: len(places)]]
        return ReadSpan(
            self.segments[0], 0, PART_BYTES, b"".join(each.key for each in mine),
            bytes(8 * len(mine)), bytes(8 * len(mine)),
            b"".join(each.checksum.to_bytes(8, "little") for each in mine), places,
            tuple(self.page(stripe, number) for stripe in range(len(places))), self.segments,
        )  # fmt: skip

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """As a transport reads."""
        assert timeout_s > 0
        segment = span.segment.segment
        self.reads.append(segment)
        if segment in self.lost:
            return all_of(Outcome.TRANSPORT, len(span))
        for at, place in enumerate(span.places):
            offset = int.from_bytes(span.offsets[at * 8 : at * 8 + 8], "little")
            payload = self.payloads[segment, offset]
            if segment in self.damaged:
                payload = bytes(reversed(payload))
            into.view[place : place + PART_BYTES] = payload
        return verified(span, into.view, bytes(len(span)))

    def rank(self, segment: SegmentRef, timeout_s: float) -> int | None:
        """All ways are alike."""
        assert timeout_s >= 0
        return 0 if segment in self.segments else None
