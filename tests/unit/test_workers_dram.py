"""Segment files: made whole, owned by one, never reused under an old life."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ConfigError, OutOfSpace, SegmentInUse
from kvstore.ids import Incarnation, SegmentId
from kvstore.record import RecordState
from kvstore.segment import HEADER_BYTES, SegmentHeader, check_geometry, pack_header, unpack_header
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE
from tests.unit.worker_segments import CLUSTER, NAME, Pages, memory_folder, opened
from workers.tiers import dram
from workers.tiers.dram import nameless_dram, open_dram

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OFFSETS = (0, PAGE, 3 * PAGE, CHUNK, 3 * CHUNK)


@pytest.fixture
def path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder / "segment"


def test_a_nameless_segment_leaves_nothing_behind(path: Path) -> None:
    first = nameless_dram(path.parent, CLUSTER, NAME, GEOMETRY)
    second = nameless_dram(path.parent, CLUSTER, NAME, GEOMETRY)
    assert list(path.parent.iterdir()) == []
    assert first.incarnation != second.incarnation
    first.payload[0] = 7
    reader = first.open_for_reader()
    assert os.pread(reader, 2, GEOMETRY.payload_base) == b"\7\0"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader, b"x", 0)
    first.close()
    second.close()
    # Whoever has it open may go on reading.
    assert os.pread(reader, 1, GEOMETRY.payload_base) == b"\7"
    os.close(reader)


def test_a_nameless_segment_needs_room_too(path: Path) -> None:
    with pytest.raises(OutOfSpace, match="bytes free, the segment needs"):
        nameless_dram(path.parent, CLUSTER, NAME, check_geometry(1 << 50))


def test_a_new_file_is_private_whole_and_allocated(path: Path) -> None:
    segment, found = opened(path)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == GEOMETRY.file_bytes
    assert status.st_blocks * 512 >= GEOMETRY.payload_bytes
    assert not found.adopted
    header = unpack_header(path.read_bytes()[:HEADER_BYTES])
    assert (header.cluster, header.segment, header.geometry) == (CLUSTER, NAME, GEOMETRY)
    assert header.incarnation == segment.incarnation
    assert len(segment.payload) == GEOMETRY.payload_bytes
    assert os.listdir(path.parent) == ["segment"]  # nothing else is left beside it
    segment.close()


def test_a_restart_finds_its_pages_under_a_new_life(path: Path) -> None:
    pages = Pages(OFFSETS)
    first, _ = opened(path)
    assert not any(pages.put(first))
    was = first.incarnation
    first.close()
    second, found = opened(path)
    assert second.incarnation == was + 1
    assert sorted(record.offset for record in found.adopted) == sorted(OFFSETS)
    assert pages.stored(second) == pages.payloads
    for record, page_key in zip(pages.records(second), pages.keys, strict=True):
        assert record is not None
        assert record.state is RecordState.SEALED
        assert (record.incarnation, record.key) == (was + 1, page_key)
    second.close()


def test_a_kill_between_header_and_records_loses_nothing(path: Path) -> None:
    pages = Pages(OFFSETS)
    segment, _ = opened(path)
    pages.put(segment)
    was = segment.incarnation
    segment.close()
    with path.open("r+b") as file:  # a start that got no further than the header
        header = unpack_header(file.read(HEADER_BYTES))
        file.seek(0)
        raised = SegmentHeader(CLUSTER, NAME, Incarnation(was + 1), header.geometry)
        file.write(pack_header(raised))
    again, found = opened(path)
    assert again.incarnation == was + 2
    assert len(found.adopted) == len(OFFSETS)
    again.close()


def test_a_second_owner_is_refused(path: Path) -> None:
    segment, _ = opened(path)
    with pytest.raises(SegmentInUse, match="another process owns this segment"):
        opened(path)
    segment.close()
    again, _ = opened(path)
    again.close()


def test_the_owner_may_be_another_process(path: Path) -> None:
    opened(path)[0].close()
    program = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1])\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('owned', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"owned\n"
        with pytest.raises(SegmentInUse):
            opened(path)
        owner.kill()
    opened(path)[0].close()


def test_a_child_that_inherits_the_ownership_keeps_others_out(path: Path) -> None:
    segment, _ = opened(path)
    inherited = os.dup(segment.ownership)
    segment.close()
    with pytest.raises(SegmentInUse):
        opened(path)
    os.close(inherited)
    opened(path)[0].close()


def test_a_folder_that_is_too_small_is_refused_with_both_numbers(path: Path) -> None:
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    geometry = check_geometry((free // CHUNK + 1024) * CHUNK, CHUNK)
    with pytest.raises(OutOfSpace) as refused:
        opened(path, geometry)
    assert str(HEADER_BYTES + geometry.payload_bytes) in str(refused.value)
    assert " bytes free" in str(refused.value)
    assert os.listdir(path.parent) == []


def test_too_large_a_size_leaves_the_pages_of_the_old_one(path: Path) -> None:
    pages = Pages(OFFSETS)
    segment, _ = opened(path)
    pages.put(segment)
    segment.close()
    with pytest.raises(OutOfSpace):
        opened(path, check_geometry(1 << 50, CHUNK))
    again, found = opened(path)
    assert len(found.adopted) == len(OFFSETS)
    again.close()


def test_another_size_is_a_new_file_and_old_mappings_stay_whole(path: Path) -> None:
    pages = Pages(OFFSETS)
    segment, _ = opened(path)
    pages.put(segment)
    was = segment.incarnation
    reader = segment.open_for_reader()
    segment.close()
    other, found = opened(path, check_geometry(8 * CHUNK, CHUNK))
    assert not found.adopted
    assert other.incarnation != was + 1
    assert os.fstat(reader).st_size == GEOMETRY.file_bytes  # never truncated
    with mmap.mmap(reader, GEOMETRY.file_bytes, prot=mmap.PROT_READ) as old:
        start = GEOMETRY.payload_base
        assert old[start : start + PAGE] == pages.payloads[0]
    os.close(reader)
    other.close()


def test_two_new_files_never_share_a_life(path: Path) -> None:
    lives = set()
    for _ in range(4):
        segment, _ = opened(path)
        lives.add(segment.incarnation)
        segment.close()
        path.unlink()
    assert len(lives) == 4


@pytest.mark.parametrize("data", [b"", b"something of yours", bytes(HEADER_BYTES)])
def test_a_strange_file_is_left_alone(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is not a segment"):
        opened(path)
    assert path.read_bytes() == data


def test_a_link_in_its_place_is_not_followed(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"precious")
    path.symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be opened"):
        opened(path)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize(("cluster", "name"), [("other", NAME), (CLUSTER, "v-dram0")])
def test_another_clusters_or_workers_segment_is_refused(
    path: Path, cluster: str, name: str
) -> None:
    opened(path)[0].close()
    with pytest.raises(ConfigError, match=f"holds segment {NAME} of cluster {CLUSTER}"):
        open_dram(path, cluster, SegmentId(name), GEOMETRY)
    opened(path)[0].close()  # and the ownership was given up


def test_a_damaged_header_makes_an_empty_segment(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment, _ = opened(path)
    Pages(OFFSETS).put(segment)
    was = segment.incarnation
    segment.close()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    again, found = opened(path)
    assert not found.adopted
    assert again.incarnation not in (was, was + 1)
    assert "checksum differs" in caplog.text
    again.close()


def test_a_folder_that_cannot_hold_segments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold a segment"):
        opened(tmp_path / "absent" / "segment")


def test_each_reader_gets_a_description_of_its_own_and_cannot_write(path: Path) -> None:
    segment, _ = opened(path)
    first, second = segment.open_for_reader(), segment.open_for_reader()
    os.lseek(first, 100, os.SEEK_SET)
    assert os.lseek(second, 0, os.SEEK_CUR) == 0  # a shared description would share the offset
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(first, b"x")
    assert not os.get_inheritable(first)
    os.close(first)
    os.close(second)
    segment.close()


def test_populating_works_without_the_kernels_help(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(OFFSETS)
    segment, _ = opened(path)
    pages.put(segment)
    segment.close()
    monkeypatch.setattr(dram, "populate", lambda *_: False)
    again, _ = opened(path)
    assert pages.stored(again) == pages.payloads
    again.close()


def test_huge_pages_that_are_not_to_be_had_stop_the_start(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise [never] deny force\n")
    monkeypatch.setattr(dram, "HUGE_PAGES_OF_FILES", setting)
    with pytest.raises(ConfigError, match="huge pages were asked for"):
        open_dram(path, CLUSTER, NAME, GEOMETRY, huge_pages=True)
    opened(path)[0].close()  # and the ownership was given up
