"""A segment on a fake disk, and the staging of its pages in real shared memory. Not a test."""

from __future__ import annotations

import threading
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.codec import Codec
from kvstore.ids import SegmentId
from kvstore.page import payload_checksum
from kvstore.segment import check_geometry
from kvstore.transfer.mapped_segment import MappedSegment
from kvstore.transfer.memory import Memory
from kvstore.transfer.transport import ReadSpan
from kvstore.wire.messages.common import SegmentRef
from kvstore.wire.messages.transfers import ReleaseStaged, StageExtents
from tests.fake_disk import FakeDisk
from tests.fakes import ManualClock, payload
from tests.unit.nvme_parts import CLUSTER, opened, part
from tests.unit.worker_scripts import CHUNK, GEOMETRY, generation, key, packed
from workers.extent_table import SegmentTable
from workers.staging import Staging
from workers.tiers.dram import nameless_dram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.ids import Incarnation
    from kvstore.wire.messages.transfers import Staged
    from workers.record_table import RecordTable
    from workers.tiers.nvme import NvmeSegment
    from workers.tiers.part_io import PartRead, PartToRead

SLOTS: Final = 4
SIZE: Final = CHUNK // SLOTS
PAGES: Final = 12
"""Pages 1 to PAGES lie on the disk, one after another."""


class Gate:
    """A segment on a disk whose reads are counted, and wait while the gate is shut."""

    def __init__(self, segment: NvmeSegment) -> None:
        """Open."""
        self.segment = segment
        self.loaded: list[bytes] = []
        """Keys of the pages that were read."""
        self.entered = threading.Event()
        self.open = threading.Event()
        self.open.set()

    @property
    def incarnation(self) -> Incarnation:
        """See Source."""
        return self.segment.incarnation

    @property
    def records(self) -> RecordTable:
        """See Source."""
        return self.segment.records

    def read(self, parts: Sequence[PartToRead]) -> list[PartRead]:
        """See Source."""
        self.loaded += [each.key for each in parts]
        self.entered.set()
        self.open.wait()
        return self.segment.read(parts)


class StagingRig:
    """Twelve pages on a disk, and room for four of them in memory."""

    def __init__(self, clock: Clock | None = None, codec: Codec = Codec.NONE) -> None:
        """With a codec the pages lie in extents of a smaller class than their own."""
        self.disk = FakeDisk()
        self.nvme, _ = opened(self.disk, codec)
        size_class = SIZE if codec is Codec.NONE else SIZE * 3 // 4
        data = payload_of if codec is Codec.NONE else half_empty
        self.payloads = {number: data(number) for number in range(1, PAGES + 1)}
        slots = GEOMETRY.chunk_slots(size_class)
        self.offsets = {
            number: (number - 1) // slots * CHUNK + (number - 1) % slots * size_class
            for number in self.payloads
        }
        parts = [
            part(number, self.offsets[number], data=bytes_, size_class=size_class)
            for number, bytes_ in self.payloads.items()
        ]
        assert not any(each.outcome for each in self.nvme.write(parts))
        table = SegmentTable(self.nvme.id, self.nvme.incarnation, GEOMETRY, holds_encoded=True)
        table.adopt(each.record for each in parts)
        self.memory = nameless_dram(
            Path("/dev/shm"), CLUSTER, SegmentId("w-staging"), check_geometry(CHUNK, CHUNK)
        )
        self.source = Gate(self.nvme)
        self.clock = clock or ManualClock()
        self.staging = Staging(
            self.memory, {self.nvme.id: self.source}, {self.nvme.id: table}, self.clock
        )
        reader = self.memory.open_for_reader()
        memory = self.memory
        self.mapped = MappedSegment(memory.id, memory.incarnation, memory.geometry, reader)

    def close(self) -> None:
        """Free everything."""
        self.mapped.close()
        self.memory.close()
        self.nvme.close()

    def message(self, *numbers: int, timeout_s: float = 0.0) -> StageExtents:
        """Ask for these pages."""
        keys = b"".join(key(number) for number in numbers)
        offsets = packed(self.offsets[number] for number in numbers)
        generations = packed([generation(5)] * len(numbers))
        return StageExtents(
            self.nvme.id, self.nvme.incarnation, 0, SIZE, keys, offsets, generations, timeout_s
        )

    def stage(self, *numbers: int, session: int = 1, timeout_s: float = 0.0) -> Staged:
        """Stage these pages."""
        return self.staging.stage(session, self.message(*numbers, timeout_s=timeout_s))

    def release(self, staged: Staged, session: int = 1) -> None:
        """Be done with all of them."""
        self.staging.release(session, ReleaseStaged(staged.offsets, staged.generations))

    def span(self, staged: Staged, *numbers: int) -> ReadSpan:
        """What a reader asks of its mapping."""
        place = SegmentRef(
            staged.segment, staged.incarnation, "nvme", self.memory.geometry, "w", "h", ()
        )
        keys = [key(number) for number in numbers]
        rows = zip(numbers, keys, strict=True)
        sums = array("Q", [payload_checksum(self.payloads[n], each, 0) for n, each in rows])
        places = tuple(range(0, len(numbers) * SIZE, SIZE))
        return ReadSpan(
            place, 0, SIZE, b"".join(keys), staged.offsets, staged.generations, sums.tobytes(),
            places,
        )  # fmt: skip

    def read(self, staged: Staged, *numbers: int) -> bytes:
        """Copy them out as a reader does; every one that is OK is right."""
        into = Memory.of("into", bytearray(len(numbers) * SIZE), writable=True)
        outcomes = self.mapped.read(self.span(staged, *numbers), into)
        for i, number in enumerate(numbers):
            found = bytes(into.view[i * SIZE : (i + 1) * SIZE])
            assert found == (bytes(SIZE) if outcomes[i] else self.payloads[number]), number
        return outcomes


def payload_of(number: int) -> bytes:
    """A page's bytes."""
    return payload(key(number), 0, SIZE)


def half_empty(number: int) -> bytes:
    """Bytes that any codec makes shorter by almost half."""
    return payload_of(number)[: SIZE // 2] + bytes(SIZE // 2)
