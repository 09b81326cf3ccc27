"""A segment on a device, opened by a client of the same machine: copies out of it, verified.

Its records lie in shared memory, its payload in blocks of one chunk each. A copying reader is kept
by its lease alone: there are no locks and no views here. Must not know connections or leases.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import BadValue, Unavailable
from kvstore.page import seeded_checksum
from kvstore.transfer.bounce import checksums, wipe
from kvstore.transfer.device import Block, Move
from kvstore.transfer.mapped_segment import SpanCheck
from kvstore.transfer.mapping import Mapping
from kvstore.transfer.transport import all_of
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping as ByNumber

    from kvstore.segment import Geometry
    from kvstore.transfer.bounce import Bounces
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.transport import ReadSpan


class DeviceSegment:
    """Thread-safe, but for `close`. `blocks` are the chunks that the worker has, by number."""

    def __init__(
        self, geometry: Geometry, records_fd: int, blocks: ByNumber[int, Block], bounces: Bounces
    ) -> None:
        """Own the opened blocks; the descriptor stays the caller's. Unavailable if too short."""
        self._geometry = geometry
        self._records = Mapping(records_fd, geometry.payload_base).view()
        self._blocks = blocks
        self._bounces = bounces

    def read(self, span: ReadSpan, into: Memory | Block) -> bytes:
        """Copy and verify; one Outcome byte a page; places of pages that are not OK are zeroed.

        Into host memory, or into a block of the same device: then no byte of a page leaves it but
        to be hashed.
        """
        outcomes = bytearray(all_of(Outcome.STALE, len(span)))
        # The rest is not here: the worker has given those chunks back.
        with suppress(BadValue):
            check = SpanCheck(self._geometry, span, self._records)
            chunks = [offset // self._geometry.chunk_bytes for offset in check.offsets]
            there = [i for i, chunk in enumerate(chunks) if chunk in self._blocks]
            try:
                self._copy(check, there, into)
                for i, digest in zip(there, self._digests(check, there, into), strict=True):
                    outcomes[i] = check.outcome(i, digest)
            except Unavailable:
                outcomes[:] = all_of(Outcome.TRANSPORT, len(span))
        self._wipe(into, [p for p, o in zip(span.places, outcomes, strict=True) if o], span)
        return bytes(outcomes)

    def close(self) -> None:
        """Close the blocks and let the records go. Safe to repeat."""
        for block in self._blocks.values():
            block.close()
        self._records = memoryview(b"")

    def _copy(self, check: SpanCheck, pages: list[int], into: Memory | Block) -> None:
        size, places = check.span.part_bytes, check.span.places
        moves: dict[int, list[Move]] = {}
        for i in pages:
            chunk, at = divmod(check.offsets[i], self._geometry.chunk_bytes)
            moves.setdefault(chunk, []).append(Move(places[i], at, size))
        for chunk, each in moves.items():
            if isinstance(into, Block):
                into.copy_from(self._blocks[chunk], each)
            else:
                self._blocks[chunk].copy_to(into, each)

    def _digests(self, check: SpanCheck, pages: list[int], into: Memory | Block) -> list[int]:
        """What lies in the destination now (never what lay in the segment a moment ago)."""
        size = check.span.part_bytes
        places = [check.span.places[i] for i in pages]
        seeds = [check.seeds[i] for i in pages]
        if isinstance(into, Block):
            return checksums(into, places, size, seeds, self._bounces)
        rows = zip(places, seeds, strict=True)
        return [seeded_checksum(into.view[at : at + size], seed) for at, seed in rows]

    def _wipe(self, into: Memory | Block, bad: list[int], span: ReadSpan) -> None:
        if not isinstance(into, Block):
            into.wipe(bad, span.part_bytes)
            return
        with suppress(Unavailable):  # A device that fails gives these bytes to nobody.
            wipe(into, bad, span.part_bytes, self._bounces)
