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

if TYPE_CHECKING:
    from collections.abc import Container

    from kvstore.client.locations import Found
    from kvstore.wire.messages.common import SegmentRef
    from kvstore.wire.messages.reads import LocatedCopy


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

    Named objects are runs of one page each.
    """
    pieces = []
    for piece in found.pieces:
        runs = tuple([run for run in piece.located.runs if piece.first + run.first in wanted])
        located = msgspec.structs.replace(piece.located, runs=runs)
        pieces.append(msgspec.structs.replace(piece, located=located))
    return msgspec.structs.replace(found, pieces=tuple(pieces))


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
