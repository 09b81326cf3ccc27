"""A segment on a device: filled and read under its records, and given back chunk by chunk."""

from __future__ import annotations

import os
import threading
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue, OutOfSpace, Unavailable
from kvstore.page import checksum_seeds
from kvstore.record import RECORD_BYTES
from kvstore.transfer.device import CpuDevice, Move
from kvstore.transfer.memory import Memory, zero_bytes
from kvstore.wire.messages.common import Outcome
from tests.devices import DEVICES, TamperedDevice, device_named
from tests.unit.hbm_segments import asked, host, opened, put
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE
from tests.unit.worker_segments import Pages, memory_folder
from tests.unit.worker_segments import opened as dram_opened
from workers.events import Stretch
from workers.tiers.hbm import Extents

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.transfer.device import Block, Device
    from workers.tiers.hbm import HbmSegment

OFFSETS = (0, PAGE, 2 * PAGE, 5 * PAGE, CHUNK, 3 * CHUNK)
SEEDS = checksum_seeds(bytes(32), 0)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


@pytest.fixture
def segment(device: Device) -> Iterator[HbmSegment]:
    made = opened(device)
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


def read(segment: HbmSegment, pages: Pages) -> tuple[bytes, list[bytes]]:
    """Outcomes, and what came."""
    into = host(b"\xee" * (len(pages.keys) * pages.size))
    outcomes = segment.read(asked(segment, pages), into, pages.places())
    return outcomes, [bytes(into.view[at : at + pages.size]) for at in pages.places()]


def test_every_start_is_a_new_life_without_pages(device: Device) -> None:
    first, second = opened(device), opened(device)
    assert first.incarnation != second.incarnation
    for segment in (first, second):
        assert (segment.tier, list(segment.chunks)) == ("hbm", [0, 1, 2, 3])
        assert bytes(segment.records.read(CHUNK, PAGE)) == bytes(RECORD_BYTES)
        segment.close()


@pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, CHUNK - 5, CHUNK])
def test_parts_of_any_size_come_in_from_host_memory(segment: HbmSegment, size: int) -> None:
    stride = (size + PAGE - 1) // PAGE * PAGE
    pages = Pages([0, CHUNK, CHUNK + stride] if stride <= CHUNK // 2 else [0, CHUNK], size=size)
    assert put(segment, pages) == pages.checksums.tolist()
    assert read(segment, pages) == (bytes(len(pages.keys)), pages.payloads)


def test_pages_come_in_from_a_block_of_the_device(segment: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    block = segment.device.allocate(len(pages.source) + 100)
    block.copy_from(host(pages.source), [Move(100, 0, len(pages.source))])
    places = [place + 100 for place in pages.places()]
    assert put(segment, pages, block, places) == pages.checksums.tolist()
    assert read(segment, pages) == (bytes(len(OFFSETS)), pages.payloads)


@given(seed=st.integers(0, 1 << 32), size=st.sampled_from([100, PAGE, 2 * PAGE]))
def test_any_places_on_both_sides(seed: int, size: int) -> None:
    random = Random(seed)
    stride = (size + PAGE - 1) // PAGE * PAGE
    slots = random.sample(range(4 * CHUNK // stride), random.randrange(1, 16))
    pages = Pages([slot * stride for slot in slots], size=size)
    order = random.sample(range(len(slots)), len(slots))
    source = host(b"".join(pages.payloads[i] for i in order))
    segment = opened(CpuDevice())
    assert put(segment, pages, source, [order.index(i) * size for i in range(len(slots))]) == (
        pages.checksums.tolist()
    )
    assert read(segment, pages) == (bytes(len(slots)), pages.payloads)
    segment.close()


def test_the_checksum_is_of_the_extent_and_not_of_what_was_sent(tampered: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    spoilt = tampered.chunks[0].address + PAGE

    def spoil(moves: Sequence[Move]) -> None:
        if any(move.to == spoilt for move in moves):
            zero_bytes(spoilt + 7, 1, 1)

    tampering(tampered).after_copy = spoil
    found = put(tampered, pages)
    assert [a == b for a, b in zip(found, pages.checksums, strict=True)] == [
        True, False, True, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("extents", "field"),
    [
        (Extents(0, 0, PAGE, PAGE), "count"),
        (Extents(100, 1, PAGE, PAGE), "offset"),
        (Extents(4 * CHUNK, 1, PAGE, PAGE), "offset"),
        (Extents(-PAGE, 1, PAGE, PAGE), "offset"),
        (Extents(CHUNK - PAGE, 2, PAGE, PAGE), "extents"),
        (Extents(0, 1, 2 * CHUNK, PAGE), "size_bytes"),
        (Extents(0, 1, PAGE, 0), "size_bytes"),
        (Extents(0, 1, PAGE, PAGE + 1), "size_bytes"),
    ],
)
def test_extents_outside_of_the_segment_are_refused(
    tampered: HbmSegment, extents: Extents, field: str
) -> None:
    with pytest.raises(BadValue, match=rf"^{field}: got"):
        tampered.fill(extents, host(bytes(PAGE)), [0] * extents.count, SEEDS)
    with pytest.raises(BadValue, match=rf"^{field}: got"):
        tampered.checksums(extents, SEEDS)


def test_places_outside_of_the_source_are_refused(tampered: HbmSegment) -> None:
    extents = Extents(0, 1, PAGE, PAGE)
    sources: tuple[Memory | Block, ...] = (host(bytes(PAGE)), tampered.device.allocate(PAGE))
    for source in sources:
        for place in (-1, 1, 1 << 62):
            with pytest.raises(BadValue, match="move: got"):
                tampered.fill(extents, source, [place], SEEDS)


def test_pages_come_out_to_any_places(segment: HbmSegment) -> None:
    pages = Pages(OFFSETS, size=100)
    put(segment, pages)
    into, places = host(b"\xee" * 1000), [900, 0, 300, 120, 700, 500]
    assert segment.read(asked(segment, pages), into, places) == bytes(6)
    assert [bytes(into.view[at : at + 100]) for at in places] == pages.payloads
    assert bytes(into.view[100:120]) == b"\xee" * 20


@pytest.mark.parametrize(
    "change",
    [{"part": 1}, {"incarnation": 1}, {"segment": "w-hbm1"}, {"generations": bytes(48)},
     {"keys": bytes(6 * 32)}],
)  # fmt: skip
def test_a_page_that_is_not_the_one_asked_for_is_stale(
    segment: HbmSegment, change: dict[str, object]
) -> None:
    pages = Pages(OFFSETS)
    put(segment, pages)
    into = host(b"\xee" * len(pages.source))
    other = msgspec.structs.replace(asked(segment, pages), **change)
    assert segment.read(other, into, pages.places()) == bytes((Outcome.STALE,)) * 6
    assert bytes(into.view) == bytes(len(pages.source))


def test_a_page_freed_while_it_was_copied_is_stale_and_wiped(tampered: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    put(tampered, pages)
    freed = Stretch(0, 1, 0, 1, PAGE)
    tampering(tampered).after_copy = lambda _: tampered.records.write_free(freed, PAGE)
    outcomes, found = read(tampered, pages)
    assert outcomes == bytes((0, Outcome.STALE, 0, 0, 0, 0))
    assert found == [pages.payloads[0], bytes(PAGE), *pages.payloads[2:]]


def test_an_extent_outside_of_the_segment_is_a_callers_error(tampered: HbmSegment) -> None:
    with pytest.raises(BadValue, match="offset"):
        read(tampered, Pages((4 * CHUNK,)))


def test_a_device_that_fails_costs_the_pages_and_not_the_process(tampered: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    put(tampered, pages)

    def fail(_: Sequence[Move]) -> None:
        raise Unavailable("CUDA: cuMemcpyAsync failed")

    tampering(tampered).after_copy = fail
    assert read(tampered, pages) == (bytes((Outcome.TRANSPORT,)) * 6, [bytes(PAGE)] * 6)
    with pytest.raises(Unavailable):
        put(tampered, pages)
    tampering(tampered).after_copy = lambda _: None
    assert read(tampered, pages)[0][0] == Outcome.STALE  # RESERVED by the put that failed


def test_a_released_chunk_is_memory_again_and_its_extents_are_refused() -> None:
    device = TamperedDevice(5 * CHUNK)
    segment, pages = opened(device), Pages(OFFSETS)
    put(segment, pages)
    assert device.free_bytes == CHUNK
    segment.release([1, 3])
    assert (device.free_bytes, device.trims) == (3 * CHUNK, 1)
    assert list(segment.chunks) == [0, 2]
    outcomes, found = read(segment, pages)
    assert outcomes == bytes(4) + bytes((Outcome.STALE,)) * 2
    assert found == [*pages.payloads[:4], bytes(PAGE), bytes(PAGE)]
    for offset in (CHUNK, 3 * CHUNK):
        extents = Extents(offset, 1, PAGE, PAGE)
        with pytest.raises(OutOfSpace, match=rf"chunk {offset // CHUNK} was given back to cpu"):
            segment.fill(extents, host(bytes(PAGE)), [0], SEEDS)
        with pytest.raises(OutOfSpace):
            segment.checksums(extents, SEEDS)
    segment.release([1, 3, 99])
    segment.close()
    assert device.free_bytes == 5 * CHUNK


def test_a_release_waits_for_what_runs_there_and_nothing_new_begins(
    tampered: HbmSegment,
) -> None:
    pages = Pages((0,))
    put(tampered, pages)
    copying, refused = threading.Event(), threading.Event()
    released = threading.Thread(target=tampered.release, args=([0],))

    def meanwhile(_: Sequence[Move]) -> None:
        tampering(tampered).after_copy = lambda _: None
        released.start()
        copying.set()
        # The chunk is refused from the moment that the release has begun, which waits for us.
        while 0 in tampered.chunks:
            os.sched_yield()
        assert read(tampered, pages)[0] == bytes((Outcome.STALE,))
        assert released.is_alive()
        refused.set()

    tampering(tampered).after_copy = meanwhile
    assert read(tampered, pages) == (bytes(1), pages.payloads)
    assert copying.is_set()
    assert refused.is_set()
    released.join()
    assert tampering(tampered).trims == 1


def test_what_readers_have_open_goes_when_they_have_closed_it() -> None:
    device = TamperedDevice(4 * CHUNK)
    segment = opened(device)
    with segment.shared(7) as blocks:
        assert list(blocks) == [0, 1, 2, 3]
    segment.release([1])
    with segment.shared(8) as blocks:
        assert list(blocks) == [0, 2, 3]
    segment.release([2, 3])
    assert device.free_bytes == 0
    segment.unshare(7)
    assert device.free_bytes == CHUNK
    segment.unshare(7)
    segment.unshare(8)
    assert device.free_bytes == 3 * CHUNK
    segment.close()
    assert device.free_bytes == 4 * CHUNK


def test_a_share_may_be_closed_chunk_by_chunk() -> None:
    device = TamperedDevice(4 * CHUNK)
    segment = opened(device)
    with segment.shared("an engine"):
        segment.release([0, 1, 2])
    segment.unshare("an engine", [1, 3, 99])
    assert device.free_bytes == CHUNK
    segment.release([3])
    assert device.free_bytes == 2 * CHUNK
    segment.unshare("an engine", [0, 2])
    assert device.free_bytes == 4 * CHUNK
    segment.close()


def test_a_share_that_could_not_be_sent_keeps_nothing() -> None:
    device = TamperedDevice(4 * CHUNK)
    segment = opened(device)
    with pytest.raises(Unavailable), segment.shared(7):
        raise Unavailable("the connection ended")
    segment.release([0])
    assert device.free_bytes == CHUNK
    segment.close()


def test_a_segment_that_ends_takes_what_is_open_with_it() -> None:
    device = TamperedDevice(4 * CHUNK)
    segment = opened(device)
    with segment.shared(7):
        segment.release([0, 1])
    segment.close()
    assert device.free_bytes == 4 * CHUNK


def test_too_small_a_device_is_refused_with_both_numbers_and_keeps_nothing() -> None:
    device = TamperedDevice(4 * CHUNK - 1)
    want = rf"cpu has {4 * CHUNK - 1} bytes free, segment w-hbm0 needs {4 * CHUNK}"
    with pytest.raises(OutOfSpace, match=want):
        opened(device)
    assert (device.free_bytes, device.pinned) == (4 * CHUNK - 1, 0)


def test_memory_that_somebody_takes_meanwhile_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = TamperedDevice(4 * CHUNK)
    before = len(os.listdir("/proc/self/fd"))
    allocate = device.allocate

    def short(size_bytes: int) -> object:
        if device.free_bytes == CHUNK:
            raise OutOfSpace("cpu has 0 bytes free")
        return allocate(size_bytes)

    monkeypatch.setattr(device, "allocate", short)
    with pytest.raises(OutOfSpace):
        opened(device)
    assert (device.free_bytes, device.pinned) == (4 * CHUNK, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_readers_see_the_records_and_cannot_write_them(segment: HbmSegment) -> None:
    pages = Pages(OFFSETS)
    put(segment, pages)
    fd = segment.open_for_reader()
    at = GEOMETRY.record_offset(PAGE, PAGE)
    assert os.pread(fd, RECORD_BYTES, at) == bytes(segment.records.read(PAGE, PAGE))
    assert os.fstat(fd).st_size == GEOMETRY.payload_base
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", at)
    os.close(fd)


def test_no_reader_locks_an_extent(segment: HbmSegment) -> None:
    stretch = Stretch(0, 3, 0, 0, 0)
    assert segment.locks.try_lock(stretch, PAGE) == b"\1\1\1"
    segment.locks.unlock(stretch, PAGE)
    assert segment.locks.try_lock(stretch, PAGE) == b"\1\1\1"


def test_a_closed_segment_has_given_everything_back() -> None:
    device = TamperedDevice(4 * CHUNK)
    before = len(os.listdir("/proc/self/fd"))
    segment = opened(device)
    assert device.free_bytes == 0
    assert device.pinned > 0
    segment.close()
    assert (device.free_bytes, device.pinned, device.trims) == (4 * CHUNK, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_dram_segment_is_pinned_for_copies_to_the_device(device: Device) -> None:
    pages = Pages(OFFSETS)
    with memory_folder() as folder:
        dram, _ = dram_opened(folder / "segment")
        unpin = device.pin(dram.payload_address, GEOMETRY.payload_bytes)
        hbm = opened(device)
        for offset, data in zip(pages.offsets, pages.payloads, strict=True):
            dram.payload[offset : offset + PAGE] = data
        from_dram = Memory(dram.payload, dram.payload_address)
        assert put(hbm, pages, from_dram, pages.offsets) == pages.checksums.tolist()
        assert read(hbm, pages) == (bytes(6), pages.payloads)
        hbm.close()
        unpin()
        del from_dram
        dram.close()
