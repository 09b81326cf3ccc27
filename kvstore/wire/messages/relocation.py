"""An operator and the master: pages that change their place because somebody wishes it.

A relocation is copies between workers, one after the other, until nothing is left to do: it goes on
under the next master, and ends by itself or by CancelRelocation. Names are what StartRelocation
calls `kind`: copy (one more replica on a worker), move (and then one replica less elsewhere),
drain (nothing stays on a worker, nor comes to it, until the drain is cancelled), rebalance.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvstore.wire.messages.base import Message


class RelocationKind(StrEnum):
    """What relocations there are."""

    COPY = "copy"
    MOVE = "move"
    DRAIN = "drain"
    REBALANCE = "rebalance"


class RelocationState(StrEnum):
    """Life of a relocation."""

    PLANNED = "planned"
    """What it would be: nobody has begun it."""
    RUNNING = "running"
    DONE = "done"
    """Of a drain: nothing is left on its worker, which is kept empty."""
    CANCELLED = "cancelled"
    UNDONE = "undone"
    """Of a drain that was done, and then cancelled: its worker is filled again."""


class StartRelocation(Message, frozen=True, tag=144):
    """Operator to master: begin this -> Relocations with one row, once it is durable.

    Safe to repeat: the same wish, while it is under way, is the same relocation.
    """

    kind: str
    source: str = ""
    """The worker whose pages go; copy and move may name none, if they name a namespace."""
    target: str = ""
    """The worker that they go to, of copy and move."""
    namespace: bytes = b""
    """Only pages of this one; empty for all."""
    keys: bytes = b""
    """Only these pages of it, 32 bytes each; empty for all."""
    tier: str = ""
    """Where they are to lie on the target; empty for the tier that each lies in now, or the next
    that has room."""
    dry_run: bool = False
    """Begin nothing, and say what it would be."""


class GetRelocations(Message, frozen=True, tag=145):
    """Operator to master: how far are they? -> Relocations."""

    id: str = ""
    """Of one; empty for all that are known."""


class CancelRelocation(Message, frozen=True, tag=146):
    """Operator to master: end this one -> Relocations with its row, once that is durable.

    What was copied stays. A worker whose drain is cancelled is filled again. Safe to repeat.
    """

    id: str


class RelocationRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One relocation. Pages count once for each of their parts, bytes are those of extents."""

    id: str
    kind: str
    source: str
    target: str
    namespace: bytes
    keys: int
    """How many were named."""
    tier: str
    state: str
    by_operator: bool
    """Else the master began it of its own accord."""
    done_pages: int
    done_bytes: int
    """Copied, or let go because they lie elsewhere, under the master that answers."""
    left_pages: int
    left_bytes: int
    """At most: what was named and is not there any more counts, until it was looked for."""
    stuck_pages: int
    stuck_bytes: int
    """Of those, what the last look at all of them found no place for."""
    bytes_per_s: float
    """Done lately."""
    eta_s: float
    """Until nothing is left, at that rate; infinity where nothing gets on."""
    reason: str
    """What it waits for, for people; empty where it gets on."""


class Relocations(Message, frozen=True, tag=147):
    """Master to operator: oldest first; some of those that have ended are among them."""

    rows: tuple[RelocationRow, ...]
