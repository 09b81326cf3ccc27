"""Pulls into a segment on a device, and such a segment's pages as the source of a move."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import Unavailable
from kvstore.record import RecordState
from kvstore.transfer.device import CPU, Move
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import ExtentSource
from tests.devices import DEVICES, TamperedDevice, device_named
from tests.unit.hbm_segments import asked, host, opened, put
from tests.unit.test_workers_disk_pull import Given
from tests.unit.worker_scripts import CHUNK, PAGE, generation
from tests.unit.worker_segments import Pages, memory_folder
from tests.unit.worker_segments import opened as dram_opened
from workers.device_pull import DevicePull
from workers.device_source import DeviceSource
from workers.events import Stretch
from workers.extent_sources import HbmSource, MemorySource
from workers.stream_source import StreamSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workers.ingest import Source
    from workers.tiers.hbm import HbmSegment

OFFSETS = (0, PAGE, 2 * PAGE, 5 * PAGE, CHUNK)


@pytest.fixture(params=DEVICES)
def segment(request: pytest.FixtureRequest) -> Iterator[HbmSegment]:
    made = opened(device_named(request.param))
    yield made
    made.close()


@pytest.fixture
def tampered() -> Iterator[HbmSegment]:
    made = opened(TamperedDevice())
    yield made
    made.close()


def tampering(segment: HbmSegment) -> TamperedDevice:
    assert isinstance(segment.device, TamperedDevice)
    return segment.device


def pulled(segment: HbmSegment, pages: Pages, source: Source, counter: int = 5) -> bytes:
    return DevicePull(segment, pages.start(segment, counter), source).run()


def stored(segment: HbmSegment, pages: Pages, counter: int = 5) -> list[bytes]:
    into = host(bytes(len(pages.source)))
    segment.read(asked(segment, pages, counter), into, pages.places())
    return [bytes(into.view[at : at + pages.size]) for at in pages.places()]


def moving(segment: HbmSegment, pages: Pages) -> ExtentSource:
    """The leader's order to copy these pages."""
    generations = array("Q", [generation(5)] * len(pages.offsets)).tobytes()
    return ExtentSource(segment.id, segment.incarnation, pages.offsets.tobytes(), generations)


@pytest.mark.parametrize("group", [PAGE // 4, PAGE, 3 * PAGE, 1 << 20])
@pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_pages_of_any_size_from_a_source_of_any_group(
    segment: HbmSegment, size: int, group: int
) -> None:
    stride = (size + PAGE - 1) // PAGE * PAGE
    pages = Pages(range(0, 4 * stride, stride), size=size)
    assert pulled(segment, pages, Given(pages, group)) == bytes(4)
    assert stored(segment, pages) == pages.payloads
    records = pages.records(segment)
    assert all(record and record.state is RecordState.SEALED for record in records)


@pytest.mark.parametrize("size", [100, PAGE])
def test_a_clients_block_of_the_same_device_never_sees_the_host(
    segment: HbmSegment, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(OFFSETS, size=size)
    block = segment.device.allocate(len(pages.source))
    block.copy_from(host(pages.source), [Move(0, 0, len(pages.source))])
    monkeypatch.delattr(segment, "sources")
    source = DeviceSource(block, pages.places(), size)
    assert pulled(segment, pages, source) == bytes(5)
    assert stored(segment, pages) == pages.payloads


def test_a_large_page_of_the_same_device_goes_at_once(tampered: HbmSegment) -> None:
    pages, moved = Pages((0, 4 * PAGE), size=3 * PAGE + 100), list[int]()
    block = tampered.device.allocate(len(pages.source))
    block.copy_from(host(pages.source), [Move(0, 0, len(pages.source))])
    source = DeviceSource(block, pages.places(), pages.size)
    source.group_bytes = PAGE
    device = tampering(tampered)
    device.after_copy = lambda moves: moved.extend(move.size_bytes for move in moves)
    assert pulled(tampered, pages, source) == bytes(2)
    assert set(moved) == {pages.size}
    assert stored(tampered, pages) == pages.payloads


def test_a_block_of_another_device_comes_through_the_host(tampered: HbmSegment) -> None:
    pages, other = Pages(OFFSETS), TamperedDevice()
    block = other.allocate(len(pages.source))
    block.copy_from(host(pages.source), [Move(0, 0, len(pages.source))])
    other.identity = "another"  # as a second GPU has
    assert other.identity != tampered.device.identity == CPU
    assert pulled(tampered, pages, DeviceSource(block, pages.places(), PAGE)) == bytes(5)
    assert stored(tampered, pages) == pages.payloads


@pytest.mark.parametrize("size", [100, PAGE])
def test_pages_are_moved_down_to_memory_and_up_again(segment: HbmSegment, size: int) -> None:
    pages, above = (
        Pages(OFFSETS, size=size),
        Pages((CHUNK, 8 * PAGE, 0, PAGE, 3 * CHUNK), size=size),
    )
    put(segment, pages)
    with memory_folder() as folder:
        dram, _ = dram_opened(folder / "segment")
        start = pages.start(dram, 6, moving(segment, pages))
        assert above.pull(dram, HbmSource(segment, start), 6).run() == bytes(5)
        assert above.stored(dram) == pages.payloads
        put(segment, Pages(OFFSETS, size=size, first_key=50))  # what was there is gone
        assert pulled(segment, pages, MemorySource(dram, above.offsets), 7) == bytes(5)
        assert stored(segment, pages, 7) == pages.payloads
        dram.close()


def test_a_page_that_is_gone_when_it_is_moved_is_refused(segment: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    put(segment, pages)
    segment.records.write_free(Stretch(0, 1, 0, 1, PAGE), PAGE)
    with memory_folder() as folder:
        dram, _ = dram_opened(folder / "segment")
        source = HbmSource(segment, pages.start(dram, 6, moving(segment, pages)))
        assert pages.pull(dram, source, 6).run() == bytes((0, Outcome.CHECKSUM, 0, 0, 0))
        dram.close()


def test_bytes_that_change_on_their_way_are_refused(tampered: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    spoilt = tampered.chunks[0].address + PAGE

    def spoil(moves: Sequence[Move]) -> None:
        if any(move.to == spoilt for move in moves):
            tampered.chunks[0].copy_from(host(b"\xff\x00"), [Move(PAGE + 9, 0, 2)])

    tampering(tampered).after_copy = spoil
    assert pulled(tampered, pages, Given(pages)) == bytes((0, Outcome.CHECKSUM, 0, 0, 0))
    assert pages.records(tampered)[1] is None


def test_a_device_that_fails_ends_the_pull_and_leaves_no_record(tampered: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    put(tampered, pages, counter=4)

    def fail(_: Sequence[Move]) -> None:
        raise Unavailable("CUDA: cuMemcpyAsync failed")

    tampering(tampered).after_copy = fail
    assert pulled(tampered, pages, Given(pages)) == bytes((Outcome.TRANSPORT,)) * 5
    assert pages.records(tampered) == [None] * 5


def test_a_device_that_fails_as_a_source_ends_the_move(tampered: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    put(tampered, pages)

    def fail(_: Sequence[Move]) -> None:
        raise Unavailable("CUDA: cuMemcpyAsync failed")

    tampering(tampered).after_copy = fail
    with memory_folder() as folder:
        dram, _ = dram_opened(folder / "segment")
        source = HbmSource(tampered, pages.start(dram, 6, moving(tampered, pages)))
        assert pages.pull(dram, source, 6).run() == bytes((Outcome.TRANSPORT,)) * 5
        dram.close()


def test_a_chunk_that_was_given_back_takes_nothing(segment: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    segment.release([1])
    outcomes = pulled(segment, pages, Given(pages))
    assert outcomes == bytes((0, 0, 0, 0, Outcome.OUT_OF_SPACE))


def test_a_cancelled_pull_seals_nothing_more(segment: HbmSegment) -> None:
    pages, source = Pages((0,), size=4 * PAGE), Given(Pages((0,), size=4 * PAGE), PAGE)
    pull = DevicePull(segment, pages.start(segment), source)
    source.before = lambda _: pull.cancel()
    assert pull.run() == bytes((Outcome.FENCED,))
    assert pages.records(segment) == [None]


class Arriving:
    """A connection on which a client's pages arrive."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def receive_raw_into(self, views: list[memoryview], deadline_s: float) -> None:
        """Bring the next bytes."""
        del deadline_s
        for view in views:
            view[:], self._data = self._data[: len(view)], self._data[len(view) :]


@pytest.mark.parametrize("size", [100, PAGE])
def test_a_stream_waits_for_its_client_in_memory_of_its_own(segment: HbmSegment, size: int) -> None:
    pages = Pages(OFFSETS, size=size)
    link = Arriving(pages.source)
    source = StreamSource(link, 5, size, 0.0)  # type: ignore[arg-type]  # a double
    with segment.sources.one(), segment.sources.one():  # all there are
        assert pulled(segment, pages, source) == bytes(5)
    assert stored(segment, pages) == pages.payloads
