"""What the rest of the worker may ask of a segment, by the medium that holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from workers.tiers.nvme import NvmeSegment

if TYPE_CHECKING:
    from kvstore.ids import Incarnation, SegmentId
    from kvstore.replica import Tier
    from kvstore.segment import Geometry
    from workers.locks import ExtentLocks
    from workers.record_table import RecordTable


class MemorySegment(Protocol):
    """One segment that this process owns and has mapped. Offsets are of the payload area."""

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
    def payload(self) -> memoryview:
        """The payload area, writable, as unsigned bytes."""
        ...

    @property
    def payload_address(self) -> int:
        """Where the payload area lies in this process."""
        ...

    @property
    def records(self) -> RecordTable:
        """Its record tables."""
        ...

    @property
    def locks(self) -> ExtentLocks:
        """The owner's side of the readers' locks."""
        ...

    @property
    def ownership(self) -> int:
        """The descriptor whose flock makes this process the owner.

        A child process that serves or fills the segment inherits it, so that no other owner, and
        no other life, can begin before the child is gone. Never handed to a client.
        """
        ...

    def open_for_reader(self) -> int:
        """A read-only descriptor of its own open file description; the caller's to close."""
        ...

    def close(self) -> None:
        """Unmap and give the ownership up; nothing may use the segment any more."""
        ...


Segment: TypeAlias = MemorySegment | NvmeSegment
