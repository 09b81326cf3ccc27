"""Verified copies and views out of a mapped segment file."""

from __future__ import annotations

import fcntl
import gc
import os
import warnings
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from kvstore.errors import Unavailable
from kvstore.ids import PageKey
from kvstore.page import PageChain
from kvstore.record import RecordState
from kvstore.segment import Geometry
from kvstore.transfer.mapped_segment import COPY_BYTES_MAX, MappedSegment
from kvstore.transfer.memory import Memory
from kvstore.transfer.read_locks import lock_range
from kvstore.wire.messages.common import Outcome
from tests.fakes import payload
from tests.unit.segment_files import CHUNK_BYTES, INCARNATION, SegmentFile

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4096
PAGES = 8


def chain_of(pages: int) -> PageChain:
    return PageChain(payload(b"keys", 0, pages * 32))


@pytest.fixture
def file() -> Iterator[SegmentFile]:
    made = SegmentFile()
    yield made
    made.close()


@pytest.fixture
def mapped(file: SegmentFile) -> Iterator[MappedSegment]:
    made = MappedSegment("s", INCARNATION, file.geometry, file.open())
    yield made
    made.close()


def fresh(size: int) -> Memory:
    return Memory.of("into", bytearray(b"\xee" * size), writable=True)


@pytest.mark.parametrize(
    "size", [1, 100, 4096, 5000, 65536, COPY_BYTES_MAX + 4096 + 7, CHUNK_BYTES]
)
@pytest.mark.parametrize("order", ["in order", "backwards", "with gaps"])
def test_reads_bring_every_byte_to_its_place(
    file: SegmentFile, mapped: MappedSegment, size: int, order: str
) -> None:
    pages = max(1, min(PAGES, file.geometry.chunk_slots((size + 4095) // 4096 * 4096)))
    chain = chain_of(pages)
    offsets = file.store(chain, size, part=2)
    gap = 13 if order == "with gaps" else 0
    places = [i * (size + gap) for i in range(pages)]
    if order == "backwards":
        places.reverse()
    into = fresh(pages * (size + gap))
    span = file.span(chain, offsets, size, places, part=2)
    assert mapped.read(span, into) == bytes(pages)
    for key, place in zip(chain, places, strict=True):
        assert bytes(into.view[place : place + size]) == payload(key, 2, size)
        assert bytes(into.view[place + size : place + size + gap]) == b"\xee" * gap


@pytest.mark.parametrize("size", [4096, COPY_BYTES_MAX * 2])
def test_a_flipped_bit_is_found_and_its_place_wiped(
    file: SegmentFile, mapped: MappedSegment, size: int
) -> None:
    pages = 1 if size > SIZE else PAGES
    chain = chain_of(pages)
    offsets = file.store(chain, size)
    file.flip(offsets[-1] + size - 1)
    into = fresh(pages * size)
    places = [i * size for i in range(pages)]
    outcomes = mapped.read(file.span(chain, offsets, size, places), into)
    assert outcomes == bytes(pages - 1) + bytes([Outcome.CHECKSUM])
    assert bytes(into.view[places[-1] :]) == bytes(size)


@pytest.mark.parametrize("state", [RecordState.FREE, RecordState.RESERVED, RecordState.REMOVED])
def test_a_record_in_another_state_is_stale(
    file: SegmentFile, mapped: MappedSegment, state: RecordState
) -> None:
    chain = chain_of(2)
    offsets = file.store(chain, SIZE)
    file.write_record(chain.key(1), offsets[1], SIZE, state=state)
    into = fresh(2 * SIZE)
    span = file.span(chain, offsets, SIZE, (0, SIZE))
    assert mapped.read(span, into) == bytes([0, Outcome.STALE])
    assert bytes(into.view[SIZE:]) == bytes(SIZE)


def test_the_right_bytes_under_another_identity_are_stale(
    file: SegmentFile, mapped: MappedSegment
) -> None:
    chain = chain_of(1)
    offsets = file.store(chain, SIZE)
    good = file.span(chain, offsets, SIZE, (0,))
    for change in (
        {"generations": b"\x63" + bytes(7)},
        {"segment": file.ref(INCARNATION + 1)},
        {"keys": bytes(32)},
        {"part": 1},
    ):
        span = msgspec.structs.replace(good, **change)
        assert mapped.read(span, fresh(SIZE)) == bytes([Outcome.STALE]), change


def test_bytes_of_another_extent_are_stale(file: SegmentFile, mapped: MappedSegment) -> None:
    chain = chain_of(2)
    offsets = file.store(chain, SIZE)
    span = file.span(chain, offsets[::-1], SIZE, (0, SIZE))
    assert mapped.read(span, fresh(2 * SIZE)) == bytes([Outcome.STALE] * 2)


@pytest.mark.parametrize("offset", [1 << 40, 4 * CHUNK_BYTES, 4 * CHUNK_BYTES - 1, (1 << 64) - 1])
def test_an_extent_outside_the_segment_is_stale(
    file: SegmentFile, mapped: MappedSegment, offset: int
) -> None:
    chain = chain_of(1)
    span = file.span(chain, [0], SIZE, (0,))
    span = msgspec.structs.replace(span, offsets=offset.to_bytes(8, "little"))
    into = fresh(SIZE)
    assert mapped.read(span, into) == bytes([Outcome.STALE])
    assert bytes(into.view) == bytes(SIZE)
    assert bytes(mapped.hold(span).outcomes) == bytes([Outcome.STALE])


def test_a_file_shorter_than_its_geometry_is_refused(file: SegmentFile) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="its geometry needs"):
        MappedSegment("s", 1, Geometry(8 * CHUNK_BYTES, CHUNK_BYTES), file.open())
    assert len(os.listdir("/proc/self/fd")) == descriptors


class Owner:
    """The worker's side of the locks: an open file description of its own."""

    def __init__(self, file: SegmentFile) -> None:
        self.file = file
        self.fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)

    def may_reuse(self, offset: int, size: int = SIZE) -> bool:
        start = self.file.geometry.payload_base + offset
        granted = lock_range(self.fd, fcntl.F_WRLCK, start, size)
        if granted:
            lock_range(self.fd, fcntl.F_UNLCK, start, size)
        return granted

    def take(self, offset: int, size: int = SIZE) -> None:
        start = self.file.geometry.payload_base + offset
        assert lock_range(self.fd, fcntl.F_WRLCK, start, size)


@pytest.fixture
def owner(file: SegmentFile) -> Iterator[Owner]:
    made = Owner(file)
    yield made
    os.close(made.fd)


def test_views_are_verified_read_only_and_locked_until_their_end(
    file: SegmentFile, mapped: MappedSegment, owner: Owner
) -> None:
    chain = chain_of(PAGES)
    offsets = file.store(chain, SIZE)
    held = mapped.hold(file.span(chain, offsets, SIZE, range(PAGES)))
    assert bytes(held.outcomes) == bytes(PAGES)
    for key, view, offset in zip(chain, held.views, offsets, strict=True):
        assert view is not None
        assert view.readonly
        assert bytes(view) == payload(key, 0, SIZE)
        assert not owner.may_reuse(offset)
    assert owner.may_reuse(offsets[-1] + SIZE)
    seen = held.views[0]
    assert held.end() == 0
    assert all(owner.may_reuse(offset) for offset in offsets)
    assert mapped.held_extents == 0
    with pytest.raises(ValueError, match="released"):
        bytes(seen)  # type: ignore[arg-type]  # released, that is the point


def test_nested_views_share_a_lock(file: SegmentFile, mapped: MappedSegment, owner: Owner) -> None:
    chain = chain_of(2)
    offsets = file.store(chain, SIZE)
    outer = mapped.hold(file.span(chain, offsets, SIZE, (0, 1)))
    inner = mapped.hold(file.span(chain.slice(0, 1), offsets[:1], SIZE, (0,)))
    outer.end()
    assert [owner.may_reuse(offset) for offset in offsets] == [False, True]
    inner.end()
    assert owner.may_reuse(offsets[0])


def test_an_extent_that_its_owner_is_overwriting_cannot_be_viewed(
    file: SegmentFile, mapped: MappedSegment, owner: Owner
) -> None:
    chain = chain_of(3)
    offsets = file.store(chain, SIZE)
    owner.take(offsets[1])
    held = mapped.hold(file.span(chain, offsets, SIZE, (0, 1, 2)))
    assert bytes(held.outcomes) == bytes([0, Outcome.BUSY, 0])
    assert held.views[1] is None
    held.end()
    assert mapped.held_extents == 0


def test_pages_that_are_not_right_hold_no_lock(
    file: SegmentFile, mapped: MappedSegment, owner: Owner
) -> None:
    chain = chain_of(3)
    offsets = file.store(chain, SIZE)
    file.flip(offsets[0])
    file.write_record(PageKey(bytes(32)), offsets[2], SIZE)
    held = mapped.hold(file.span(chain, offsets, SIZE, (0, 1, 2)))
    assert bytes(held.outcomes) == bytes([Outcome.CHECKSUM, 0, Outcome.STALE])
    assert [owner.may_reuse(offset) for offset in offsets] == [True, False, True]
    held.drop((1,))
    assert owner.may_reuse(offsets[1])
    held.end()


@pytest.mark.parametrize("kind", ["array", "slice"])
def test_a_view_in_use_after_its_end_keeps_the_lock(
    file: SegmentFile, mapped: MappedSegment, owner: Owner, kind: str
) -> None:
    chain = chain_of(1)
    offsets = file.store(chain, SIZE)
    held = mapped.hold(file.span(chain, offsets, SIZE, (0,)))
    view = held.views[0]
    assert view is not None
    user: object = np.frombuffer(view, np.uint8) if kind == "array" else view[10:20]
    assert held.end() == 1
    assert not owner.may_reuse(offsets[0])
    del user, view
    gc.collect()
    assert owner.may_reuse(offsets[0])


def test_views_outlive_the_closing_of_their_segment(file: SegmentFile, owner: Owner) -> None:
    mapped = MappedSegment("s", INCARNATION, file.geometry, file.open())
    chain = chain_of(1)
    offsets = file.store(chain, SIZE)
    span = file.span(chain, offsets, SIZE, (0,))
    held = mapped.hold(span)
    mapped.close()
    assert bytes(held.views[0] or b"") == payload(chain.key(0), 0, SIZE)
    assert not owner.may_reuse(offsets[0])
    assert bytes(mapped.hold(span).outcomes) == bytes([Outcome.BUSY])
    held.end()
    assert owner.may_reuse(offsets[0])


def test_a_forked_child_neither_keeps_nor_drops_the_locks(file: SegmentFile, owner: Owner) -> None:
    mapped = MappedSegment("s", INCARNATION, file.geometry, file.open())
    chain = chain_of(1)
    offsets = file.store(chain, SIZE)
    held = mapped.hold(file.span(chain, offsets, SIZE, (0,)))
    goes_on, says_so = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        os.close(says_so)
        held.end()
        os.read(goes_on, 1)
        os._exit(0)
    os.close(goes_on)
    try:
        assert not owner.may_reuse(offsets[0]), "the child unlocked what the parent holds"
        held.end()
        mapped.close()
        assert owner.may_reuse(offsets[0]), "the child's descriptor keeps the lock"
    finally:
        os.close(says_so)
        os.waitpid(child, 0)
