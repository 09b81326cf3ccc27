"""NVMe segments: parts in and out, encoded and verified."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.codec import Codec
from kvstore.errors import BadValue
from kvstore.ids import Generation, PageKey
from kvstore.record import RECORD_BYTES, RecordState, pack_record, unpack_record
from kvstore.wire.messages.common import Outcome
from tests.fake_disk import FakeDisk
from tests.unit.nvme_parts import (
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
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE, generation, key
from workers.tiers import nvme, part_io
from workers.tiers.part_io import Encoded, encoded

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


# --- parts ------------------------------------------------------------------------------------


def test_parts_come_back_as_they_went_in(segment: NvmeSegment) -> None:
    parts = parts_at(*OFFSETS)
    assert outcomes(segment.write(parts)) == [OK] * 5
    assert read_back(segment, parts) == [OK] * 5
    assert (segment.counts.parts_written, segment.counts.parts_read) == (5, 5)
    assert segment.counts.bytes_written == segment.counts.bytes_read == 5 * PAGE


def test_answers_are_in_the_order_of_the_parts(segment: NvmeSegment) -> None:
    parts = parts_at(3 * PAGE, CHUNK, 0, PAGE)
    segment.write(parts)
    missing = part(9, 5 * PAGE)
    assert read_back(segment, [parts[1], missing, *parts[2:], parts[0]]) == [
        OK, STALE, OK, OK, OK,
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE + 1, 3 * PAGE - 7])
def test_a_length_that_is_no_block_is_padded_with_zeros(
    disk: FakeDisk, segment: NvmeSegment, size: int
) -> None:
    segment.write([part(1, 0, data=b"\xff" * (4 * PAGE))])  # leaves its bytes in the aligned memory
    odd = part(2, CHUNK, data=b"\xaa" * size)
    assert outcomes(segment.write([odd])) == [OK]
    assert read_back(segment, [odd]) == [OK]
    end = payload_place(CHUNK) + size
    assert not any(disk.names[PATH].data[end : payload_place(CHUNK) + odd.record.size_class])


def test_neighbours_go_at_once_and_strangers_one_by_one(
    disk: FakeDisk, segment: NvmeSegment
) -> None:
    disk.trace.clear()
    segment.write(parts_at(0, PAGE, 2 * PAGE))
    assert [len(data) for _, data in disk.trace] == [3 * RECORD_BYTES, 3 * PAGE, 3 * RECORD_BYTES]


def test_records_are_reserved_before_the_bytes_and_sealed_after(
    disk: FakeDisk, segment: NvmeSegment
) -> None:
    disk.trace.clear()
    segment.write(parts_at(PAGE))
    before, data, after = disk.trace
    states = [record.state for _, row in (before, after) if (record := unpack_record(row))]
    assert states == [RecordState.RESERVED, RecordState.SEALED]
    assert before[0] == after[0] == GEOMETRY.record_offset(PAGE, PAGE)
    assert data[0] == payload_place(PAGE)


def test_aligned_memory_is_filled_without_a_copy(segment: NvmeSegment) -> None:
    parts = parts_at(0, PAGE)
    segment.write(parts)
    memory = memoryview(mmap.mmap(-1, 2 * PAGE))
    asked = [
        msgspec.structs.replace(reading(each.record), into=memory[i * PAGE : (i + 1) * PAGE])
        for i, each in enumerate(parts)
    ]
    assert outcomes(segment.read(asked)) == [OK, OK]
    assert memory == b"".join(each.payload for each in parts)


@pytest.mark.parametrize(
    "change",
    [
        {"key": PageKey(key(8))},
        {"part": 1},
        {"generation": Generation(generation(6))},
        {"payload_bytes": PAGE - 1},
        {"offset": PAGE},
        {"size_class": 2 * PAGE, "payload_bytes": 2 * PAGE},
    ],
    ids=str,
)
def test_another_part_than_lies_there_is_stale(
    segment: NvmeSegment, change: dict[str, object]
) -> None:
    (written,) = parts_at(0)
    segment.write([written])
    asked = reading(msgspec.structs.replace(written.record, **change))
    assert outcomes(segment.read([asked])) == [STALE]
    assert not any(asked.into)


@pytest.mark.parametrize("state", [RecordState.RESERVED, RecordState.REMOVED, RecordState.FREE])
def test_what_is_not_sealed_is_never_read(segment: NvmeSegment, state: RecordState) -> None:
    (written,) = parts_at(0)
    segment.write([written])
    record = unpack_record(segment.records.read(0, PAGE))
    assert record is not None
    segment.records.write_rows(
        stretch(0), pack_record(msgspec.structs.replace(record, state=state))
    )
    assert read_back(segment, [written]) == [STALE]


def test_a_part_that_is_freed_while_it_is_read_is_stale(
    disk: FakeDisk, segment: NvmeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (written,) = parts_at(0)
    segment.write([written])
    file = segment._file  # noqa: SLF001 - the read is interrupted between bytes and record
    read = file.read_payload

    def interrupted(views: list[memoryview], at: int) -> None:
        read(views, at)
        segment.write_free([stretch(0)], PAGE)

    monkeypatch.setattr(file, "read_payload", interrupted)
    assert read_back(segment, [written]) == [STALE]


def test_a_payload_that_is_not_what_its_record_says_is_not_written(
    disk: FakeDisk, segment: NvmeSegment
) -> None:
    good, bad = parts_at(0, PAGE)
    bad = msgspec.structs.replace(bad, payload=memoryview(bytes(PAGE)))
    disk.trace.clear()
    assert outcomes(segment.write([good, bad])) == [OK, CHECKSUM]
    assert len(disk.trace) == 3
    assert read_back(segment, [good]) == [OK]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"offset": 100}, "offset"),
        ({"offset": 1 << 40}, "offset"),
        ({"size_class": 2 * PAGE}, "size_class"),
        ({"payload_bytes": PAGE + 1}, "payload"),
    ],
)
def test_impossible_places_and_sizes_are_refused(
    segment: NvmeSegment, change: dict[str, int], field: str
) -> None:
    (good,) = parts_at(0)
    bad = msgspec.structs.replace(good, record=msgspec.structs.replace(good.record, **change))
    with pytest.raises(BadValue, match=field):
        segment.write([good, bad])
    assert read_back(segment, [good]) == [STALE]


# --- codecs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*Codec, None])
def test_every_codec_brings_the_same_bytes(disk: FakeDisk, codec: Codec | None) -> None:
    segment, _ = opened(disk, codec)
    size = 8 * PAGE
    parts = [part(i, (i - 1) * size, data=compressible(key(i), size)) for i in range(1, 7)]
    written = segment.write(parts)
    assert outcomes(written) == [OK] * 6
    assert read_back(segment, parts) == [OK] * 6
    ratio = segment.counts.bytes_written / segment.counts.payload_bytes_written
    assert ratio == 1 if codec is Codec.NONE else ratio < 0.75
    segment.close()


@pytest.mark.parametrize("codec", [Codec.LZ4, None])
def test_parts_are_encoded_in_the_callers_thread(
    disk: FakeDisk, monkeypatch: pytest.MonkeyPatch, codec: Codec | None
) -> None:
    segment, _ = opened(disk, codec)
    encoders = list[int]()

    def noted(codec: Codec, payload: memoryview) -> Encoded:
        encoders.append(threading.get_ident())
        return encoded(codec, payload)

    monkeypatch.setattr(nvme, "encoded", noted)
    monkeypatch.setattr(part_io, "encoded", noted)
    assert outcomes(segment.write(parts_at(*OFFSETS))) == [OK] * 5
    assert set(encoders) == {threading.get_ident()}, "reads wait for the disk's threads"
    segment.close()


def test_a_smaller_extent_holds_what_fits_it_encoded(disk: FakeDisk) -> None:
    segment, _ = opened(disk, Codec.ZSTD)
    size, room = 8 * PAGE, 5 * PAGE
    parts = [
        part(i, (i - 1) * room, data=compressible(key(i), size), size_class=room)
        for i in range(1, 4)
    ]
    noise = part(4, CHUNK, data=noise_of(size), size_class=room)
    written = segment.write([*parts, noise])
    found = read_back(segment, [*parts, noise])
    segment.close()
    assert outcomes(written) == [OK, OK, OK, Outcome.TOO_BIG]
    assert written[-1].stored_bytes == size  # as it is: no codec shortens noise
    assert found == [OK, OK, OK, STALE]
    again, adopted = opened(disk, Codec.NONE)  # what lies there is read whatever is asked for now
    found = read_back(again, parts)
    again.close()
    assert (len(adopted.adopted), found) == (3, [OK] * 3)


def test_a_failure_in_a_row_leaves_its_neighbours(disk: FakeDisk) -> None:
    segment, _ = opened(disk, Codec.ZSTD)
    size, room = 4 * PAGE, 3 * PAGE
    good = [
        part(i, (i - 1) * room, data=compressible(key(i), size), size_class=room) for i in (1, 3)
    ]
    middle = part(2, room, data=noise_of(size), size_class=room)
    assert outcomes(segment.write([good[0], middle, good[1]])) == [OK, Outcome.TOO_BIG, OK]
    assert read_back(segment, good) == [OK, OK]
    segment.close()


def noise_of(size: int) -> bytes:
    """Bytes that no codec shortens."""
    return b"".join(part(n, 0).payload for n in range(50, 50 + size // PAGE))
