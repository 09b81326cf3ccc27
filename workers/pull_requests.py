"""What somebody asks to be pulled: an Ingest, checked against itself.

A part of the worker's state machine, used by `workers.pulls`. A client brings the bytes; the leader
names sealed extents of this worker, which are then moved, or of another, which are copied. Must not
know what lies at the targets.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES, Generation, epoch_of
from kvstore.record import RecordState
from kvstore.wire.messages.puts import ExtentSource, Ingest, PeerSource, StripeSource
from kvstore.wire.messages.stripes import HashParity, StripedPage, require_shards
from workers.events import MOVER
from workers.holdings import Holdings, Place

if TYPE_CHECKING:
    from collections.abc import Container

UNDECIDED: Final = 255
U64_BYTES: Final = 8
U32_MAX: Final = 0xFFFF_FFFF


class MoveSources(msgspec.Struct, frozen=True, gc=False):
    """Where the pages of one request lie, as who asked believes."""

    segment: str
    incarnation: int
    offsets: array[int]
    generations: array[int]

    def places(self, holdings: Holdings, checksums: array[int]) -> list[Place | None]:
        """The extent of each page; None where not that page is sealed there."""
        table = holdings.find(self.segment, self.incarnation)
        if table is None:  # I11
            return [None] * len(self.offsets)
        rows = zip(self.offsets, self.generations, checksums, strict=True)
        found: list[Place | None] = []
        for offset, generation, checksum in rows:
            chunk, slot = table.slot_at(offset) or (None, 0)
            is_there = (
                chunk is not None
                and chunk.states[slot] == RecordState.SEALED
                and (chunk.generations[slot], chunk.checksums[slot]) == (generation, checksum)
            )
            found.append(Place(chunk, slot) if chunk is not None and is_there else None)
        return found


class Request(msgspec.Struct, gc=False):
    """An Ingest on its way: waiting, being pulled, or being reported."""

    id: int
    session: int
    message: Ingest
    offsets: array[int]
    checksums: array[int]
    outcomes: bytearray
    """An Outcome a page, UNDECIDED while the page is still to be pulled."""
    sources: MoveSources | None = None
    """Of a move."""
    stored_max: int = 0


def opened(number: int, session: int, message: Ingest, own: Container[str]) -> Request:
    """The request in `message`, to the worker that has the segments `own`; BadValue where its
    columns do not fit each other.
    """
    count, rest = divmod(len(message.keys), KEY_BYTES)
    if rest or not 0 < count <= limits.BATCH_PAGES_MAX:
        want = f"1 to {limits.BATCH_PAGES_MAX} keys of {KEY_BYTES} bytes"
        raise BadValue("keys", len(message.keys), want)
    if not len(message.offsets) == len(message.checksums) == count * U64_BYTES:
        sizes = len(message.offsets), len(message.checksums)
        raise BadValue("offsets, checksums", sizes, f"{count * U64_BYTES} bytes for {count} keys")
    if len(message.parent) not in (0, KEY_BYTES):
        raise BadValue("parent", len(message.parent), f"{KEY_BYTES} bytes, or none of objects")
    if not 0 <= message.part < limits.PARTS_MAX:
        raise BadValue("part", message.part, f"0 to {limits.PARTS_MAX - 1}")
    if not 0 <= message.token_count <= limits.TOKENS_PER_PAGE_MAX:
        raise BadValue("token_count", message.token_count, f"0 to {limits.TOKENS_PER_PAGE_MAX}")
    if not 0 <= message.namespace_ordinal <= U32_MAX:
        raise BadValue("namespace_ordinal", message.namespace_ordinal, f"0 to {U32_MAX}")
    if epoch_of(Generation(message.generation)) != message.epoch:
        raise BadValue("generation", message.generation, f"one of epoch {message.epoch}")
    offsets, checksums = array("Q", message.offsets), array("Q", message.checksums)
    sources = _sources(message, session, count, own)
    undecided = bytearray((UNDECIDED,)) * count
    return Request(number, session, message, offsets, checksums, undecided, sources)


def _sources(message: Ingest, session: int, pages: int, own: Container[str]) -> MoveSources | None:
    """The sources of a move; None for what is brought from elsewhere.

    BadValue for columns that do not fit, for a client that names extents, for a leader that names
    anything else, and for a copy of what lies here: that would be a move.
    """
    source = message.source
    if isinstance(source, ExtentSource | PeerSource | StripeSource) is not (session == MOVER):
        want = "extents" if session == MOVER else "what the client itself can reach"
        raise BadValue("source", type(source).__name__, want)
    if isinstance(source, StripeSource):
        _check_stripes(source, pages)
    if not isinstance(source, ExtentSource | PeerSource):
        return None
    if not len(source.offsets) == len(source.generations) == pages * U64_BYTES:
        sizes = len(source.offsets), len(source.generations)
        raise BadValue("source columns", sizes, f"{pages * U64_BYTES} bytes for {pages} keys")
    offsets = array("Q", source.offsets)
    if len(set(offsets)) != pages:
        raise BadValue("source.offsets", list(offsets), "distinct extents")
    if isinstance(source, PeerSource):
        if source.segment.segment in own:
            raise BadValue("source.segment", source.segment.segment, "one of another worker")
        return None
    return MoveSources(source.segment, source.incarnation, offsets, array("Q", source.generations))


def parity_asked(message: HashParity) -> StripedPage:
    """The first shard of the parity, which all data gives. BadValue where fields do not fit."""
    k = len(message.shards)
    page = StripedPage(k, message.m, k, message.shards)
    require_shards(page, message.segments)
    if [shard.number for shard in message.shards] != list(range(k)):
        raise BadValue("shards", [shard.number for shard in message.shards], "all data, in order")
    if len(message.keys) != message.m * KEY_BYTES:
        raise BadValue("keys", len(message.keys), f"{message.m} keys of {KEY_BYTES} bytes")
    if not 0 < message.part_bytes <= limits.CHUNK_BYTES:
        raise BadValue("part_bytes", message.part_bytes, f"1 to {limits.CHUNK_BYTES}")
    return page


def _check_stripes(source: StripeSource, pages: int) -> None:
    """BadValue unless each page has shards of a stripe of its own. Some may lie here, too."""
    if len(source.pages) != pages:
        raise BadValue("source.pages", len(source.pages), f"{pages}, one for each key")
    for page in source.pages:
        require_shards(page, source.segments)
