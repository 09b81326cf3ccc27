"""What a lookup of named objects says of each of them: its size, its replicas.

Pure. Sizes are not in a layout, so they are taken from where objects lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore.connectors.mooncake.values import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    ReplicaDescriptor,
)
from kvstore.replica import Tier
from kvstore.transfer.transport import column
from kvstore.wire.messages.reads import LocatedCopy, LocatedRun

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from kvstore.client.locations import Found
    from kvstore.wire.messages.common import SegmentRef


def sizes_of(found: Found, part: int = 0) -> list[int]:
    """Bytes of each object; 0 where it was not found."""
    sizes = [0] * len(found.chain)
    for piece in found.pieces:
        for run in piece.located.runs:
            for copy in run.copies:
                if copy.part == part:
                    first = piece.first + run.first
                    sizes[first : first + run.count] = [copy.part_bytes] * run.count
                    break
    return sizes


def only(found: Found, wanted: Container[int]) -> Found:
    """The same answer without the other objects: reads pass them over, whatever place they have.

    Named objects are runs of one page each; neighbours that lie alike become one, which is one
    transfer.
    """
    pieces = []
    for piece in found.pieces:
        runs = [run for run in piece.located.runs if piece.first + run.first in wanted]
        located = msgspec.structs.replace(piece.located, runs=tuple(_joined(runs)))
        pieces.append(msgspec.structs.replace(piece, located=located))
    return msgspec.structs.replace(found, pieces=tuple(pieces))


def _joined(runs: list[LocatedRun]) -> Iterator[LocatedRun]:
    """The same runs, those in one that follow each other and have replicas in the same places."""
    places = [_places(run) for run in runs]
    first = 0
    while first < len(runs):
        stop = first + 1
        while (
            stop < len(runs)
            and runs[stop].first == runs[stop - 1].first + 1
            and places[stop] is not None
            and places[stop] == places[first]
        ):
            stop += 1
        yield runs[first] if stop == first + 1 else _one(runs[first:stop])
        first = stop


def _places(run: LocatedRun) -> list[tuple[int, int, int]] | None:
    """Where its replicas lie, in order; None where an object is decoded from others."""
    if any(copy.stripes for copy in run.copies):
        return None
    return [(copy.part, copy.segment, copy.part_bytes) for copy in run.copies]


def _one(runs: list[LocatedRun]) -> LocatedRun:
    """Runs of one page each, and with replicas in the same places, as one."""
    copies = [
        LocatedCopy(
            same[0].part, same[0].segment, same[0].part_bytes,
            b"".join([copy.offsets for copy in same]),
            b"".join([copy.generations for copy in same]),
            b"".join([copy.checksums for copy in same]),
        )
        for same in zip(*[run.copies for run in runs], strict=True)
    ]  # fmt: skip
    return LocatedRun(runs[0].first, len(runs), tuple(copies))


def replicas_of(found: Found) -> list[list[ReplicaDescriptor]]:
    """The replicas of each object that can be read."""
    replicas: list[list[ReplicaDescriptor]] = [[] for _ in range(len(found.chain))]
    for piece in found.pieces:
        for run in piece.located.runs:
            replicas[piece.first + run.first] = [
                _replica(piece.located.segments[copy.segment], copy)
                for copy in run.copies
                if copy.part == 0 and not copy.stripes
            ]
    return replicas


def _replica(segment: SegmentRef, copy: LocatedCopy) -> ReplicaDescriptor:
    if segment.tier == Tier.NVME:
        return ReplicaDescriptor(DiskDescriptor(segment.segment, copy.part_bytes))
    endpoint = segment.addresses[0].where if segment.addresses else segment.worker
    place = Descriptor(copy.part_bytes, column(copy.offsets)[0], endpoint)
    return ReplicaDescriptor(MemoryDescriptor(place))
