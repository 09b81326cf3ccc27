"""A real DRAM segment of a few chunks, and pages to put into it. Not a test."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import tempfile
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.ids import SegmentId
from kvstore.page import payload_checksum
from kvstore.record import Record, unpack_record
from kvstore.segment import size_class_of
from kvstore.wire.messages.puts import BufferSource, ExtentSource, Ingest, PeerSource
from tests.fakes import payload
from tests.unit.worker_scripts import EPOCH, GEOMETRY, PAGE, generation, key
from workers.events import StartPull
from workers.extent_table import SegmentTable
from workers.ingest import BufferSource as CopySource
from workers.ingest import Pull
from workers.sharing import ClientBuffer
from workers.tiers.dram import DramSegment, open_dram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.segment import Geometry
    from workers.ingest import Source
    from workers.record_table import Found
    from workers.tiers.tier import Segment

CLUSTER: Final = "testing"
NAME: Final = SegmentId("w-dram0")
FLOCK: Final = struct.Struct("@hhqqi0q")


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder of a memory file system, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvharbor-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def opened(
    path: Path, geometry: Geometry = GEOMETRY, name: SegmentId = NAME
) -> tuple[DramSegment, Found]:
    """The segment at `path`, made or taken over."""
    return open_dram(path, CLUSTER, name, geometry)


def sealed_memfd(data: bytes, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """A client's buffer as it comes over a socket."""
    fd = os.memfd_create("buffer-of-a-test", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Pages:
    """Pages with consecutive keys and computable bytes, put at given offsets."""

    def __init__(
        self,
        offsets: Sequence[int],
        *,
        size: int = PAGE,
        first_key: int = 1,
        size_class: int | None = None,
        data: Callable[[bytes, int], bytes] = lambda key, size: payload(key, 0, size),
    ) -> None:
        """Compute payloads and the writer's checksums."""
        self.offsets = array("Q", offsets)
        self.size = size
        self.size_class = size_class or size_class_of(size)
        self.keys = [key(first_key + i) for i in range(len(offsets))]
        self.payloads = [data(each, size) for each in self.keys]
        self.checksums = array(
            "Q", (payload_checksum(p, k, 0) for p, k in zip(self.payloads, self.keys, strict=True))
        )

    @property
    def source(self) -> bytes:
        """The client's buffer."""
        return b"".join(self.payloads)

    def places(self) -> array[int]:
        """Where each page lies in it."""
        return array("Q", range(0, len(self.keys) * self.size, self.size))

    def ingest(
        self, segment: Segment, counter: int = 5, source: ExtentSource | PeerSource | None = None
    ) -> Ingest:
        """The client's request, or the leader's for pages that lie in these extents."""
        return Ingest(
            EPOCH, segment.id, segment.incarnation, generation(counter), 1, 0, self.size,
            self.size_class, 64,
            bytes(32), b"".join(self.keys), self.offsets.tobytes(), self.checksums.tobytes(),
            source or BufferSource(1, self.places().tobytes()),
        )  # fmt: skip

    def start(
        self, segment: Segment, counter: int = 5, source: ExtentSource | PeerSource | None = None
    ) -> StartPull:
        """What the machine answers when everything may be pulled."""
        table = SegmentTable(segment.id, segment.incarnation, segment.geometry)
        stretches = table.stretches(self.size_class, self.offsets)
        message = self.ingest(segment, counter, source)
        return StartPull(1, 1, 1, message, self.size_class, stretches)

    def pull(self, segment: DramSegment, source: Source, counter: int = 5) -> Pull:
        """A pull of all pages."""
        return Pull(segment, self.start(segment, counter), source)

    def put(self, segment: DramSegment, counter: int = 5) -> bytes:
        """Pull everything out of a buffer; the outcomes."""
        buffer = ClientBuffer(sealed_memfd(self.source), len(self.source))
        try:
            source = CopySource(buffer, self.places(), self.size)
            return self.pull(segment, source, counter).run()
        finally:
            buffer.close()

    def stored(self, segment: DramSegment) -> list[bytes]:
        """The bytes that lie in the extents now."""
        return [bytes(segment.payload[at : at + self.size]) for at in self.offsets]

    def records(self, segment: Segment) -> list[Record | None]:
        """The extents' records now."""
        rows = (bytes(segment.records.read(at, self.size_class)) for at in self.offsets)
        return [unpack_record(row) for row in rows]


@contextlib.contextmanager
def reader_lock(segment: DramSegment, offset: int, length: int = PAGE) -> Iterator[None]:
    """A reader of views holds these bytes, through a descriptor of its own."""
    fd = segment.open_for_reader()
    try:
        start = segment.geometry.payload_base + offset
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_RDLCK, 0, start, length, 0))
        yield
    finally:
        os.close(fd)
