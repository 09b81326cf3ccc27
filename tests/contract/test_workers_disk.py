"""What every Disk does: the file systems of this machine, and the fake, by one suite."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import SegmentInUse
from tests.fake_disk import FakeDisk
from workers.tiers.disk import BLOCK_BYTES, LocalDisk, read_whole, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.tiers.disk import Channel, Disk, DiskFile

    Place = tuple[Disk[DiskFile], Path]

ROOM = 4 * BLOCK_BYTES


@pytest.fixture(params=["local", "fake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A disk and a folder on it."""
    if request.param == "fake":
        return FakeDisk(), Path("/d")
    return LocalDisk(), tmp_path


def made(place: Place, name: str = "segment") -> DiskFile:
    """A file of ROOM bytes with a name."""
    disk, folder = place
    file = disk.create(folder)
    file.allocate(0, ROOM)
    file.publish(folder / name)
    return file


def content(channel: Channel, at: int, length: int) -> bytes:
    block = mmap.mmap(-1, length)
    read_whole(channel, [memoryview(block)], at)
    return bytes(block)


def blocks(*fillings: bytes) -> list[memoryview]:
    """Aligned memory, one block for each filling."""
    memory = [mmap.mmap(-1, BLOCK_BYTES) for _ in fillings]
    for block, filling in zip(memory, fillings, strict=True):
        block[:] = filling * BLOCK_BYTES
    return [memoryview(block) for block in memory]


def test_an_absent_file_is_none(place: Place) -> None:
    disk, folder = place
    assert disk.open(folder / "absent") is None


def test_a_file_has_no_name_until_it_is_published(place: Place) -> None:
    disk, folder = place
    file = disk.create(folder)
    assert disk.open(folder / "segment") is None
    file.publish(folder / "segment")
    assert disk.is_named(file, folder / "segment")
    file.close()
    again = disk.open(folder / "segment")
    assert again is not None
    again.close()


def test_a_name_that_is_taken_is_refused(place: Place) -> None:
    disk, folder = place
    first = made(place)
    second = disk.create(folder)
    with pytest.raises(FileExistsError):
        second.publish(folder / "segment")
    assert not disk.is_named(second, folder / "segment")
    first.close()
    second.close()


def test_a_file_has_one_owner_at_a_time(place: Place) -> None:
    disk, folder = place
    file = made(place)
    with pytest.raises(SegmentInUse, match="another process owns this segment"):
        disk.open(folder / "segment")
    file.close()
    again = disk.open(folder / "segment")
    assert again is not None
    again.close()


def test_a_removed_file_lives_on_for_its_owner(place: Place) -> None:
    disk, folder = place
    file = made(place)
    disk.remove(folder / "segment")
    assert not disk.is_named(file, folder / "segment")
    assert disk.open(folder / "segment") is None
    write_whole(file.cached, [memoryview(b"still")], 0)
    assert content(file.cached, 0, 5) == b"still"
    file.close()


def test_a_folder_that_is_not_there_is_an_error(place: Place) -> None:
    disk, folder = place
    with pytest.raises(OSError, match="No such file"):
        disk.create(folder / "absent")


def test_new_room_is_zeros_and_takes_what_it_says(place: Place) -> None:
    file = made(place)
    assert file.size_bytes == ROOM
    assert file.taken_bytes >= ROOM
    assert content(file.cached, 0, ROOM) == bytes(ROOM)
    file.close()


def test_more_room_than_there_is_is_refused(place: Place) -> None:
    disk, folder = place
    file = disk.create(folder)
    with pytest.raises(OSError) as refused:  # noqa: PT011 - both numbers below name it
        file.allocate(0, file.free_bytes + (1 << 44))
    assert refused.value.errno in (errno.ENOSPC, errno.EFBIG)
    file.close()


def test_data_is_found_and_holes_are_skipped(place: Place) -> None:
    file = made(place)
    assert file.next_data(0) is None
    write_whole(file.cached, [memoryview(b"x")], 2 * BLOCK_BYTES + 7)
    found = file.next_data(0)
    assert found is not None
    assert 0 <= found <= 2 * BLOCK_BYTES + 7
    assert file.next_data(3 * BLOCK_BYTES) is None
    file.close()


def test_views_are_written_and_filled_one_after_the_other(place: Place) -> None:
    file = made(place)
    write_whole(file.cached, [memoryview(b"abc"), memoryview(b""), memoryview(b"defgh")], 100)
    first, second = bytearray(5), bytearray(3)
    read_whole(file.cached, [memoryview(first), memoryview(second)], 100)
    assert bytes(first + second) == b"abcdefgh"
    file.close()


def test_a_read_beyond_the_end_is_an_error(place: Place) -> None:
    file = made(place)
    assert file.cached.pread([memoryview(bytearray(8))], ROOM - 3) == 3
    with pytest.raises(OSError, match="nothing more was moved"):
        content(file.cached, ROOM - 3, 8)
    file.close()


def test_the_direct_channel_sees_the_same_file(place: Place) -> None:
    file = made(place)
    direct = file.direct() or file.cached  # some file systems have none
    write_whole(direct, blocks(b"a", b"b"), BLOCK_BYTES)
    assert content(direct, BLOCK_BYTES, 2 * BLOCK_BYTES) == b"a" * BLOCK_BYTES + b"b" * BLOCK_BYTES
    assert content(file.cached, 2 * BLOCK_BYTES, 4) == b"bbbb"
    file.sync()
    file.close()


def test_the_fake_refuses_what_some_file_systems_do() -> None:
    file = made((FakeDisk(), Path("/d")))
    direct = file.direct()
    assert direct is not None
    for at, length in ((1, BLOCK_BYTES), (0, BLOCK_BYTES - 1)):
        with pytest.raises(OSError, match="Invalid argument"):
            direct.pread([memoryview(bytearray(length))], at)
    file.close()


def test_what_was_written_is_there_for_the_next_owner(place: Place) -> None:
    disk, folder = place
    file = made(place)
    write_whole(file.cached, [memoryview(b"kept")], 50)
    file.sync()
    file.close()
    again = disk.open(folder / "segment")
    assert again is not None
    assert content(again.cached, 50, 4) == b"kept"
    again.close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "segment").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        LocalDisk().open(tmp_path / "segment")


def test_a_file_system_without_direct_reads_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made((LocalDisk(), tmp_path))
    asked: list[int] = []
    plain_open, before = os.open, len(os.listdir("/proc/self/fd"))

    def refusing(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            asked.append(flags)
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(path, flags, *rest)

    def misleading(fd: int, views: Sequence[memoryview], at: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    ways: list[tuple[str, Callable[..., int]]] = [("open", refusing), ("preadv", misleading)]
    for name, way in ways:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, way)
            assert file.direct() is None
    assert asked
    assert len(os.listdir("/proc/self/fd")) == before
    file.close()
