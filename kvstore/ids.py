"""Identifiers shared by every process. Values only: no arithmetic beyond packing lives here."""

from __future__ import annotations

from typing import Final, NewType

PageKey = NewType("PageKey", bytes)
"""32 bytes: SHA-256 chain over namespace, parent page and tokens (kvstore.page)."""

NamespaceId = NewType("NamespaceId", bytes)
"""32 bytes: SHA-256 of content and layout (kvstore.namespace). Only equal ids share pages."""

SegmentId = NewType("SegmentId", str)
"""Name of one stretch of memory that a worker lends; stable across the worker's restarts."""

WorkerId = NewType("WorkerId", str)
"""Name of a pool worker; stable across its restarts."""

Epoch = NewType("Epoch", int)
"""Leadership number of a master. Workers refuse lower ones."""

Incarnation = NewType("Incarnation", int)
"""One life of a segment. A reference to another incarnation is a miss."""

Generation = NewType("Generation", int)
"""Number of one allocation of an extent: epoch << 32 | counter, never repeated."""

KEY_BYTES: Final = 32
ROOT_PARENT: Final = PageKey(bytes(KEY_BYTES))
"""Parent of the first page of every chain."""
NO_PARENT: Final = b""
"""In the place of the first page's parent: these are named objects, of which none is another's."""

GENERATION_COUNTER_BITS: Final = 32
RESTART_BITS: Final = 20
"""Of an incarnation: they count the restarts of one segment file."""


def generation_of(epoch: Epoch, counter: int) -> Generation:
    """The generation that `epoch` hands out as its `counter`-th (counter < 2**32)."""
    assert 0 < counter < 1 << GENERATION_COUNTER_BITS, counter
    return Generation(epoch << GENERATION_COUNTER_BITS | counter)


def epoch_of(generation: Generation) -> Epoch:
    """The epoch in which `generation` was handed out."""
    return Epoch(generation >> GENERATION_COUNTER_BITS)


def first_incarnation(lineage: int) -> Incarnation:
    """The first life of a new segment file, which has drawn this number."""
    return Incarnation((lineage << RESTART_BITS) + 1)


def lineage_of(incarnation: int) -> int:
    """What all lives of one segment file share. It was drawn: there is no order among them."""
    return incarnation >> RESTART_BITS


def short(identifier: bytes) -> str:
    """16 hex digits, for display only: never compare these."""
    return identifier[:8].hex()
