"""NVMe segments on disks that fail: misses, a clear state, and starts that say what is wrong."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.codec import Codec
from kvstore.errors import ConfigError, OutOfSpace, SegmentInUse
from kvstore.ids import SegmentId
from kvstore.segment import HEADER_BYTES, check_geometry
from kvstore.wire.messages.common import Outcome
from tests.fake_disk import FakeDisk
from tests.fakes import ManualClock, adopted_records
from tests.unit.nvme_parts import (
    CLUSTER,
    NAME,
    OFFSETS,
    OK,
    PATH,
    compressible,
    opened,
    outcomes,
    part,
    parts_at,
    payload_place,
    read_back,
    reading,
    stretch,
)
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE, key
from workers.tiers import part_io
from workers.tiers.guarded_file import ServiceState
from workers.tiers.io_threads import IoThreads
from workers.tiers.nvme import open_nvme

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.tiers.nvme import NvmeSegment

STALE, CHECKSUM, TRANSPORT = Outcome.STALE, Outcome.CHECKSUM, Outcome.TRANSPORT


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def segment(disk: FakeDisk) -> Iterator[NvmeSegment]:
    made, _ = opened(disk)
    yield made
    made.close()


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4_PLANES, Codec.ZSTD])
def test_a_flipped_bit_is_a_miss_and_its_neighbours_are_not(disk: FakeDisk, codec: Codec) -> None:
    segment, _ = opened(disk, codec)
    size = 4 * PAGE
    parts = [part(i, (i - 1) * size, data=compressible(key(i), size)) for i in range(1, 4)]
    segment.write(parts)
    disk.names[PATH].flip((payload_place(size) + 1000) * 8)
    assert read_back(segment, parts) == [OK, CHECKSUM, OK]
    assert segment.counts.misses == {"checksum": 1}
    assert segment.service is ServiceState.SERVING
    segment.close()


def test_a_misdirected_write_is_a_miss_at_both_places(disk: FakeDisk, segment: NvmeSegment) -> None:
    victim, lost = part(1, 2 * PAGE), part(2, 0)
    segment.write([victim])
    disk.misdirect_bytes = 2 * PAGE
    assert outcomes(segment.write([lost])) == [OK]  # the disk said so
    assert read_back(segment, [lost, victim]) == [CHECKSUM, CHECKSUM]


def test_short_moves_are_gone_on_with(disk: FakeDisk, segment: NvmeSegment) -> None:
    disk.move_bytes_max = PAGE + 100
    parts = parts_at(0, PAGE, 2 * PAGE, 5 * PAGE)
    assert outcomes(segment.write(parts)) == [OK] * 4
    assert read_back(segment, parts) == [OK] * 4


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.ENODEV])
def test_a_write_that_fails_leaves_a_segment_that_is_read(
    disk: FakeDisk, segment: NvmeSegment, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = parts_at(0, CHUNK)
    segment.write([old])
    disk.write_error = number
    assert outcomes(segment.write([new])) == [TRANSPORT]
    disk.write_error = None
    assert outcomes(segment.write([new])) == [TRANSPORT]  # it does not come back by itself
    assert segment.write_free([stretch(0)], PAGE) is TRANSPORT
    assert segment.write_removed([stretch(0)], PAGE) is TRANSPORT
    assert read_back(segment, [old, new]) == [OK, STALE]
    assert segment.service is ServiceState.READ_ONLY
    assert segment.errors == 1
    assert "write at" in segment.reason
    assert caplog.text.count("read_only from now on") == 1


def test_a_read_that_fails_makes_everything_a_miss(disk: FakeDisk, segment: NvmeSegment) -> None:
    old, new = parts_at(0, CHUNK)
    segment.write([old])
    disk.read_error = errno.EIO
    assert read_back(segment, [old]) == [TRANSPORT]
    disk.read_error = None
    assert read_back(segment, [old]) == [TRANSPORT]
    assert outcomes(segment.write([new])) == [TRANSPORT]
    assert segment.service is ServiceState.FAILED
    assert "read at" in segment.reason


def test_without_aligned_memory_parts_are_misses_and_refused(
    segment: NvmeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, new = part(1, 0, data=bytes(100)), part(2, PAGE, data=bytes(100))
    segment.write([odd])

    def none(_: IoThreads, size_bytes: int) -> memoryview:
        raise OutOfSpace(f"no memory for {size_bytes} bytes")

    monkeypatch.setattr(IoThreads, "aligned", none)
    assert read_back(segment, [odd]) == [TRANSPORT]
    assert outcomes(segment.write([new])) == [Outcome.OUT_OF_SPACE]
    monkeypatch.undo()
    assert read_back(segment, [odd, new]) == [OK, STALE]
    assert outcomes(segment.write([new])) == [OK]


def test_bytes_that_nobody_vouches_for_are_wiped_even_by_a_fault_of_ours(
    segment: NvmeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (written,) = parts_at(0)
    segment.write([written])

    def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(part_io, "payload_checksum", broken)
    asked = reading(written.record)
    with pytest.raises(ZeroDivisionError):
        segment.read([asked])
    assert not any(asked.into)


def test_a_file_that_was_cut_short_is_a_miss(disk: FakeDisk, segment: NvmeSegment) -> None:
    first, last = parts_at(0, 3 * CHUNK)
    segment.write([first, last])
    del disk.names[PATH].data[payload_place(3 * CHUNK) + 100 :]
    # One after the other: asked for together, the disk's two threads may read the first in time.
    assert read_back(segment, [last]) == [TRANSPORT]
    assert read_back(segment, [first]) == [TRANSPORT]
    assert segment.service is ServiceState.FAILED


def test_a_sync_that_fails_is_said(disk: FakeDisk, segment: NvmeSegment) -> None:
    (old,) = parts_at(0)
    segment.write([old])
    disk.sync_error = errno.EIO
    assert segment.write_removed([stretch(0)], PAGE) is TRANSPORT
    assert segment.service is ServiceState.READ_ONLY


def test_a_disk_that_fills_up_has_no_room_for_records_and_serves_on(
    disk: FakeDisk, segment: NvmeSegment
) -> None:
    old, new = parts_at(0, CHUNK)
    segment.write([old])
    disk.capacity_bytes = 0
    assert outcomes(segment.write([new])) == [Outcome.OUT_OF_SPACE]
    assert segment.write_free([stretch(CHUNK), stretch(0)], PAGE) is OK
    assert read_back(segment, [old]) == [STALE]
    assert segment.service is ServiceState.SERVING
    disk.capacity_bytes = 1 << 30
    assert outcomes(segment.write([new])) == [OK]


def test_a_file_whose_name_is_gone_takes_no_more_pages(
    disk: FakeDisk, segment: NvmeSegment
) -> None:
    old, new = parts_at(0, PAGE)
    segment.write([old])
    segment.check_name()
    assert not segment.reason
    disk.vanish(Path("/d"))
    segment.check_name()
    assert segment.service is ServiceState.READ_ONLY
    assert "removed from the directory" in segment.reason
    assert outcomes(segment.write([new])) == [TRANSPORT]
    assert read_back(segment, [old]) == [OK]


def test_a_slow_disk_is_waited_for() -> None:
    clock = ManualClock(0)
    disk = FakeDisk(clock=clock)
    segment, _ = opened(disk)
    disk.seconds_a_call = 2.0
    (slow,) = parts_at(0)
    assert outcomes(segment.write([slow])) == [OK]
    assert clock.now_s() == 6.0
    segment.close()


# --- starts -----------------------------------------------------------------------------------


def test_a_restart_finds_its_parts_under_a_new_life(disk: FakeDisk) -> None:
    first, found = opened(disk)
    assert not found.adopted
    parts = parts_at(*OFFSETS)
    first.write(parts)
    first.close()
    second, found = opened(disk)
    assert second.incarnation == first.incarnation + 1
    assert sorted(record.offset for record in found.adopted) == sorted(OFFSETS)
    records = adopted_records(second.records, found)
    assert {record.incarnation for record in records} == {second.incarnation}
    assert read_back(second, parts) == [OK] * 5
    second.close()


def test_removed_and_freed_parts_do_not_come_back(disk: FakeDisk) -> None:
    segment, _ = opened(disk)
    parts = parts_at(0, PAGE, 2 * PAGE)
    segment.write(parts)
    assert segment.write_removed([stretch(0)], PAGE) is OK
    assert segment.write_free([stretch(PAGE)], PAGE) is OK
    assert read_back(segment, parts) == [STALE, STALE, OK]
    assert not disk.names[PATH].unsynced
    segment.close()
    again, found = opened(disk)
    assert (found.removed, [r.offset for r in found.adopted]) == (1, [2 * PAGE])
    again.close()


def test_a_second_owner_is_refused(disk: FakeDisk, segment: NvmeSegment) -> None:
    with pytest.raises(SegmentInUse):
        opened(disk)


def test_another_size_is_a_new_file(disk: FakeDisk, caplog: pytest.LogCaptureFixture) -> None:
    segment, _ = opened(disk)
    segment.write(parts_at(0))
    segment.close()
    other, found = opened(disk, geometry=check_geometry(8 * CHUNK, CHUNK))
    assert not found.adopted
    assert f"has {4 * CHUNK} bytes for pages, {8 * CHUNK} are asked for" in caplog.text
    other.close()


@pytest.mark.parametrize(("cluster", "name"), [("other", NAME), (CLUSTER, SegmentId("w-nvme1"))])
def test_another_clusters_or_workers_segment_is_refused(
    disk: FakeDisk, cluster: str, name: SegmentId
) -> None:
    opened(disk)[0].close()
    with pytest.raises(ConfigError, match=f"holds segment {NAME} of cluster {CLUSTER}"):
        open_nvme(PATH, cluster, name, GEOMETRY, codec=Codec.NONE, clock=ManualClock(), disk=disk)
    opened(disk)[0].close()  # and the ownership was given up


def test_another_version_is_not_a_segment_of_ours(disk: FakeDisk) -> None:
    opened(disk)[0].close()
    disk.names[PATH].data[:8] = b"KVHSEG99"
    with pytest.raises(ConfigError, match="is not a segment"):
        opened(disk)


def test_a_damaged_header_makes_an_empty_segment(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    segment, _ = opened(disk)
    segment.write(parts_at(0))
    segment.close()
    disk.names[PATH].flip(100 * 8)
    again, found = opened(disk)
    assert not found.adopted
    assert again.incarnation not in (segment.incarnation, segment.incarnation + 1)
    assert "checksum differs" in caplog.text
    again.close()


def test_a_directory_that_does_not_do_is_refused(disk: FakeDisk) -> None:
    with pytest.raises(ConfigError, match="/absent: cannot hold a segment: No such file"):
        open_nvme(
            Path("/absent/segment"), CLUSTER, NAME, GEOMETRY,
            codec=Codec.NONE, clock=ManualClock(), disk=disk,
        )  # fmt: skip
    disk.is_read_only = True
    with pytest.raises(ConfigError, match="/d: cannot hold a segment: Read-only file system"):
        opened(disk)


def test_a_segment_on_a_disk_turned_read_only_is_refused(disk: FakeDisk) -> None:
    opened(disk)[0].close()
    disk.is_read_only = True
    with pytest.raises(ConfigError, match="cannot be opened: Read-only file system"):
        opened(disk)


def test_a_disk_that_is_too_small_is_refused_with_both_numbers() -> None:
    disk = FakeDisk(capacity_bytes=CHUNK)
    with pytest.raises(OutOfSpace) as refused:
        opened(disk)
    want = HEADER_BYTES + GEOMETRY.payload_bytes
    assert f"has {CHUNK} bytes free, the segment needs {want}" in str(refused.value)
    assert not disk.names


@pytest.mark.parametrize("field", ["read_error", "write_error", "sync_error"])
def test_a_start_that_meets_a_failing_disk_says_so(disk: FakeDisk, field: str) -> None:
    opened(disk)[0].close()
    setattr(disk, field, errno.EIO)
    with pytest.raises(ConfigError, match="Input/output error"):
        opened(disk)
    setattr(disk, field, None)
    opened(disk)[0].close()  # and the ownership was given up


def test_a_file_system_without_direct_reads_works_and_says_so(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.has_direct = False
    segment, _ = opened(disk)
    assert not segment.is_direct
    assert "has no O_DIRECT" in caplog.text
    parts = parts_at(*OFFSETS)
    segment.write(parts)
    assert read_back(segment, parts) == [OK] * 5
    segment.close()
