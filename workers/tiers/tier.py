"""What the rest of the worker may ask of a segment, by the medium that holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from workers.tiers.hbm import HbmSegment
from workers.tiers.nvme import NvmeSegment

if TYPE_CHECKING:
    from kvstore.ids import Incarnation, SegmentId
    from kvstore.replica import Tier
    from kvstore.segment import Geometry
    from workers.events import Stretch
    from workers.record_table import RecordTable


class Locks(Protocol):
    """The owner's side of the locks by which readers keep extents."""

    def try_lock(self, stretch: Stretch, size_class: int) -> bytes:
        """Take neighbours for writing: one byte an extent, 0 where a reader has it."""
        ...

    def unlock(self, stretch: Stretch, size_class: int) -> None:
        """Give them back."""
        ...


class ExtentSegment(Protocol):
    """One segment that this process owns, its records mapped, its parts lying as they are.

    Offsets are of the payload area.
    """

    @property
    def id(self) -> SegmentId:
        """Its name, the same in all its lives."""
        ...

    @property
    def incarnation(self) -> Incarnation:
        """This life of it."""
        ...

    @property
    def tier(self) -> Tier:
        """The medium."""
        ...

    @property
    def geometry(self) -> Geometry:
        """Its sizes."""
        ...

    @property
    def records(self) -> RecordTable:
        """Its record tables."""
        ...

    @property
    def locks(self) -> Locks:
        """What a writer takes first."""
        ...

    def open_for_reader(self) -> int:
        """A read-only descriptor of its own open file description; the caller's to close."""
        ...

    def close(self) -> None:
        """Give the ownership up; nothing may use the segment any more."""
        ...


class MemorySegment(ExtentSegment, Protocol):
    """One that this process has mapped whole."""

    @property
    def payload(self) -> memoryview:
        """The payload area, writable, as unsigned bytes."""
        ...

    @property
    def payload_address(self) -> int:
        """Where the payload area lies in this process."""
        ...

    @property
    def ownership(self) -> int:
        """The descriptor whose flock makes this process the owner.

        A child process that serves or fills the segment inherits it, so that no other owner, and
        no other life, can begin before the child is gone. Never handed to a client.
        """
        ...


Segment: TypeAlias = HbmSegment | MemorySegment | NvmeSegment
