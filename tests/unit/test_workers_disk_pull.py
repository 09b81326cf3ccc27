"""Pulls into a segment on a disk: verified, encoded, sealed; and a disk's pages as a source."""

from __future__ import annotations

import errno
import mmap
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.codec import Codec
from kvstore.record import RecordState
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import ExtentSource
from tests.fake_disk import FakeDisk, Killed
from tests.unit import nvme_parts
from tests.unit.nvme_parts import compressible
from tests.unit.worker_scripts import CHUNK, PAGE, generation, key, packed
from tests.unit.worker_segments import Pages, memory_folder, opened
from workers import disk_pull
from workers.disk_pull import DiskPull, DiskSource
from workers.ingest import Pull, PullFailed
from workers.tiers.guarded_file import ServiceState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.ingest import Target
    from workers.tiers.nvme import NvmeSegment

OK = Outcome.OK
FOUR = (0, PAGE, 2 * PAGE, CHUNK)


class Given:
    """A source whose bytes are at hand; `before` hears of each page that is about to be asked."""

    def __init__(self, pages: Pages, group_bytes: int = 2 * PAGE) -> None:
        self.group_bytes = group_bytes
        self.before: Callable[[int], None] = lambda page: None
        self.pieces = 0
        self._pages = pages

    def fill(self, page: int, target: Target) -> None:
        """Bring the pages' bytes, and nothing beyond."""
        self.pieces += 1
        for i in range(target.count):
            self.before(page + i)
            data = self._pages.payloads[page + i][target.start :][: target.size_bytes]
            target.view[i * target.stride :][: len(data)] = data

    def cancel(self) -> None:
        """Nothing to end."""


def pulled(segment: NvmeSegment, pages: Pages, source: Given | None = None) -> bytes:
    return DiskPull(segment, pages.start(segment), source or Given(pages)).run()


def stored(segment: NvmeSegment, pages: Pages) -> list[Outcome]:
    """Read back by what the records say; each right, or a miss."""
    records = [record for record in pages.records(segment) if record is not None]
    asked = [nvme_parts.reading(record) for record in records]
    found = segment.read(asked)
    for place, want, each in zip(asked, pages.payloads, found, strict=True):
        assert each.outcome is not OK or place.into == want
    return nvme_parts.outcomes(found)


@pytest.mark.parametrize("group", [PAGE // 4, PAGE, 3 * PAGE, 1 << 20])
@pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_pages_of_any_size_from_a_source_of_any_group(size: int, group: int) -> None:
    segment, _ = nvme_parts.opened(FakeDisk())
    pages = Pages(range(0, 4 * size_class_of(size), size_class_of(size)), size=size)
    assert pulled(segment, pages, Given(pages, group)) == bytes(4)
    assert stored(segment, pages) == [OK] * 4
    segment.close()


def test_records_say_what_the_request_said() -> None:
    segment, _ = nvme_parts.opened(FakeDisk())
    pages = Pages(FOUR)
    assert pulled(segment, pages) == bytes(4)
    for i, record in enumerate(pages.records(segment)):
        assert record is not None
        assert (record.state, record.key) == (RecordState.SEALED, pages.keys[i])
        assert (record.checksum, record.offset) == (pages.checksums[i], FOUR[i])
        assert (record.generation, record.incarnation) == (generation(5), segment.incarnation)
        assert record.parent == (pages.keys[i - 1] if i else bytes(32))
        assert (record.token_count, record.namespace_ordinal) == (64, 1)
    segment.close()


def test_encoded_pages_need_less_and_say_how_much() -> None:
    segment, _ = nvme_parts.opened(FakeDisk(), Codec.ZSTD)
    size = 4 * PAGE
    pages = Pages((0, 2 * PAGE), size=size, size_class=2 * PAGE, data=compressible)
    pull = DiskPull(segment, pages.start(segment), Given(pages))
    assert pull.run() == bytes(2)
    assert PAGE < pull.stored_max <= 2 * PAGE
    assert stored(segment, pages) == [OK, OK]
    segment.close()


def test_a_page_too_big_for_its_extent_says_how_big_it_is_and_costs_nothing() -> None:
    segment, _ = nvme_parts.opened(FakeDisk(), Codec.ZSTD)
    size = 4 * PAGE
    zeros = key(2)
    pages = Pages(
        (0, PAGE),
        size=size,
        size_class=PAGE,
        data=lambda each, size: bytes(size) if each == zeros else compressible(each, size),
    )
    pull = DiskPull(segment, pages.start(segment), Given(pages))
    assert pull.run() == bytes((Outcome.TOO_BIG, OK))
    assert PAGE < pull.stored_max <= 2 * PAGE
    first, second = pages.records(segment)
    assert first is None
    assert second is not None
    segment.close()


def test_bytes_that_are_not_the_writers_are_not_sealed() -> None:
    segment, _ = nvme_parts.opened(FakeDisk())
    pages = Pages(FOUR)
    pages.payloads[1] = bytes(PAGE)
    assert pulled(segment, pages) == bytes((OK, Outcome.CHECKSUM, OK, OK))
    assert pages.records(segment)[1] is None
    segment.close()


def test_a_source_that_fails_ends_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pull, "BOUNCE_BYTES", PAGE)
    segment, _ = nvme_parts.opened(FakeDisk())
    pages = Pages(FOUR)
    source = Given(pages)

    def lost(page: int) -> None:
        if page == 2:
            raise PullFailed(Outcome.SOURCE_LOST, "gone")

    source.before = lost
    lost_ones = bytes((OK, OK, Outcome.SOURCE_LOST, Outcome.SOURCE_LOST))
    assert pulled(segment, pages, source) == lost_ones
    segment.close()


def test_a_cancelled_pull_ends_with_the_group_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pull, "BOUNCE_BYTES", PAGE)
    segment, _ = nvme_parts.opened(FakeDisk())
    pages = Pages(FOUR)
    source = Given(pages)
    pull = DiskPull(segment, pages.start(segment), source)
    source.before = lambda page: pull.cancel() if page == 1 else None
    fenced = Outcome.FENCED
    assert pull.run() == bytes((OK, fenced, fenced, fenced))
    assert [record is None for record in pages.records(segment)] == [False, True, True, True]
    segment.close()


def test_a_pull_that_was_cancelled_before_it_began_writes_nothing() -> None:
    disk = FakeDisk()
    segment, _ = nvme_parts.opened(disk)
    pages = Pages(FOUR)
    pull = DiskPull(segment, pages.start(segment), Given(pages))
    pull.cancel()
    disk.trace.clear()
    assert pull.run() == bytes((Outcome.FENCED,)) * 4
    assert not disk.trace
    segment.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_disk_that_takes_no_writes_fails_pulls_and_not_the_process(number: int) -> None:
    disk = FakeDisk()
    segment, _ = nvme_parts.opened(disk)
    disk.write_error = number
    assert pulled(segment, Pages(FOUR)) == bytes((Outcome.TRANSPORT,)) * 4
    assert segment.service is ServiceState.READ_ONLY
    segment.close()


def test_a_pull_without_memory_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    segment, _ = nvme_parts.opened(FakeDisk())

    def refuse(_fd: int, _length: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert pulled(segment, Pages(FOUR)) == bytes((Outcome.OUT_OF_SPACE,)) * 4
    segment.close()


def test_a_kill_at_any_change_leaves_whole_pages_or_none() -> None:
    after, was_killed = 0, True
    while was_killed:
        disk = FakeDisk()
        segment, _ = nvme_parts.opened(disk)
        disk.kill_after = after
        was_killed = False
        try:
            pulled(segment, Pages(FOUR))
        except Killed:
            was_killed = True
        segment.close()
        disk.end_process()
        again, found = nvme_parts.opened(disk)
        right = nvme_parts.require_never_wrong(again, found)
        assert len(right) == len(found.adopted)
        assert was_killed or len(right) == 4
        again.close()
        after += 1
    assert after > 4


@pytest.fixture
def demoted() -> Iterator[tuple[NvmeSegment, Pages, FakeDisk]]:
    """Four encoded pages on a disk."""
    disk = FakeDisk()
    segment, _ = nvme_parts.opened(disk, Codec.ZSTD)
    size = 4 * PAGE
    pages = Pages((0, 2 * PAGE, 4 * PAGE, CHUNK), size=size, size_class=2 * PAGE,
                  data=compressible)  # fmt: skip
    assert pulled(segment, pages) == bytes(4)
    yield segment, pages, disk
    segment.close()


def promoted(segment: NvmeSegment, pages: Pages) -> tuple[bytes, list[bytes]]:
    """Copy pages up into memory; outcomes, and what lies there."""
    generations = packed([generation(5)] * 4)
    source = ExtentSource(segment.id, segment.incarnation, pages.offsets.tobytes(), generations)
    with memory_folder() as folder:
        dram, _ = opened(folder / "segment")
        up = Pages((0, CHUNK, 2 * CHUNK, 3 * CHUNK), size=pages.size, data=compressible)
        start = msgspec.structs.replace(
            up.start(dram, 6, source), source_classes=(pages.size_class,) * 4
        )
        outcomes = Pull(dram, start, DiskSource(segment, start)).run()
        found = up.stored(dram)
        dram.close()
    return outcomes, found


def test_pages_come_back_decoded(demoted: tuple[NvmeSegment, Pages, FakeDisk]) -> None:
    segment, pages, _ = demoted
    assert promoted(segment, pages) == (bytes(4), pages.payloads)


def test_a_bit_flipped_on_the_disk_costs_its_page_alone(
    demoted: tuple[NvmeSegment, Pages, FakeDisk],
) -> None:
    segment, pages, disk = demoted
    disk.names[nvme_parts.PATH].flip((segment.geometry.payload_base + 2 * PAGE + 99) * 8)
    outcomes, _ = promoted(segment, pages)
    assert outcomes == bytes((OK, Outcome.CHECKSUM, OK, OK))


def test_a_disk_that_cannot_be_read_is_said_to_be_that(
    demoted: tuple[NvmeSegment, Pages, FakeDisk],
) -> None:
    segment, pages, disk = demoted
    disk.read_error = errno.EIO
    outcomes, _ = promoted(segment, pages)
    assert outcomes == bytes((Outcome.TRANSPORT,)) * 4
