"""Records of extents: whole and ours, or refused, whatever the bytes."""

from __future__ import annotations

from array import array

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import limits
from kvstore.errors import CorruptPage
from kvstore.ids import Generation, Incarnation, PageKey
from kvstore.record import (
    RECORD_BYTES,
    Record,
    RecordBatch,
    RecordFlag,
    RecordState,
    chunk_digest,
    in_new_life,
    is_sealed_as,
    pack_record,
    sealed_digest,
    unpack_record,
)
from tests.unit.golden_vectors import RECORD

keys = st.binary(min_size=32, max_size=32).map(PageKey)
u16 = st.integers(0, (1 << 16) - 1)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
records = st.builds(
    Record,
    st.sampled_from(RecordState),
    keys,
    u16,
    u64.map(Generation),
    u64.map(Incarnation),
    u64,
    u64,
    u64,
    u64,
    u32,
    keys,
    u32,
    u64,
    st.integers(0, 255),
    st.sampled_from([RecordFlag.NONE, RecordFlag.PRIVATE, RecordFlag.NAME]),
    u64,
)


def unpack_or_refuse(data: bytes) -> Record | None:
    try:
        return unpack_record(data)
    except CorruptPage:
        return None


def test_a_record_has_room_for_the_tokens_of_any_page() -> None:
    record = msgspec.structs.replace(RECORD, token_count=limits.TOKENS_PER_PAGE_MAX)
    assert unpack_record(pack_record(record)) == record


@given(records)
def test_records_come_back(record: Record) -> None:
    packed = pack_record(record)
    assert len(packed) == RECORD_BYTES
    assert unpack_record(packed) == record
    assert unpack_record(memoryview(packed)) == record


@given(records, u64)
def test_a_new_life_changes_the_incarnation_alone(record: Record, life: int) -> None:
    renewed = msgspec.structs.replace(record, incarnation=Incarnation(life))
    assert in_new_life(pack_record(record), life) == pack_record(renewed)


@given(records, st.integers(0, RECORD_BYTES * 8 - 1))
def test_nothing_damaged_gets_a_new_life(record: Record, bit: int) -> None:
    packed = bytearray(pack_record(record))
    packed[bit // 8] ^= 1 << bit % 8
    assert in_new_life(bytes(packed), 7) is None


@given(
    records,
    st.lists(st.tuples(keys, u64, u64), max_size=5),
    st.lists(keys, min_size=5, max_size=5),
    st.sampled_from(RecordState),
)
def test_a_batch_is_its_records_packed_one_by_one(
    first: Record,
    others: list[tuple[PageKey, int, int]],
    above: list[PageKey],
    state: RecordState,
) -> None:
    rows = [(first.key, first.offset, first.checksum), *others]
    parents = [first.parent, *(parent for _, parent in zip(rows[1:], above, strict=False))]
    batch = RecordBatch(
        first,
        b"".join(key for key, _, _ in rows),
        b"".join(parents),
        array("Q", (offset for _, offset, _ in rows)),
        array("Q", (checksum for _, _, checksum in rows)),
    )
    singles = [
        msgspec.structs.replace(first, key=key, parent=parent, offset=offset, checksum=checksum)
        for (key, offset, checksum), parent in zip(rows, parents, strict=True)
    ]
    assert batch.packed(0, len(rows)) == b"".join(map(pack_record, singles))
    batch.restate(state)
    restated = (msgspec.structs.replace(each, state=state) for each in singles)
    assert batch.packed(0, len(rows)) == b"".join(map(pack_record, restated))


@given(records, st.integers(0, RECORD_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(record: Record, bit: int) -> None:
    damaged = bytearray(pack_record(record))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptPage):
        unpack_record(bytes(damaged))


@given(records, records, st.integers(1, RECORD_BYTES - 1))
def test_a_torn_record_is_noticed(old: Record, new: Record, at: int) -> None:
    before, after = pack_record(old), pack_record(new)
    torn = after[:at] + before[at:]
    if torn not in (before, after):
        with pytest.raises(CorruptPage):
            unpack_record(torn)


@given(st.one_of(st.binary(max_size=RECORD_BYTES * 2), st.binary(min_size=192, max_size=192)))
def test_any_bytes_are_a_record_or_corrupt(data: bytes) -> None:
    record = unpack_or_refuse(data)
    assert record is None or pack_record(record) == data
    assert not is_sealed_as(data, RECORD.key, RECORD.part, 1, 1)


@given(st.binary(min_size=RECORD_BYTES - 12, max_size=RECORD_BYTES - 12))
def test_bytes_that_only_a_checksum_vouches_for_are_a_record_or_corrupt(body: bytes) -> None:
    forged = pack_record(RECORD)[:4] + body
    forged += xxhash.xxh3_64_intdigest(forged).to_bytes(8, "little")
    record = unpack_or_refuse(forged)
    assert record is None or record.state in RecordState


def test_a_place_never_written_has_no_record() -> None:
    assert unpack_record(bytes(RECORD_BYTES)) is None
    assert not is_sealed_as(bytes(RECORD_BYTES), bytes(32), 0, 0, 0)


def test_only_the_same_page_part_generation_and_life_is_sealed_as_named() -> None:
    packed = pack_record(RECORD)
    names = (RECORD.key, RECORD.part, RECORD.generation, RECORD.incarnation)
    key, part, generation, incarnation = names
    assert is_sealed_as(packed, *names)
    assert not is_sealed_as(packed, RECORD.parent, part, generation, incarnation)
    assert not is_sealed_as(packed, key, part + 1, generation, incarnation)
    assert not is_sealed_as(packed, key, part, generation + 1, incarnation)
    assert not is_sealed_as(packed, key, part, generation, incarnation - 1)
    assert not is_sealed_as(packed[:-1], *names)


@pytest.mark.parametrize("state", [s for s in RecordState if s is not RecordState.SEALED])
def test_only_sealed_is_sealed(state: RecordState) -> None:
    packed = pack_record(
        Record(
            state=state,
            key=RECORD.key,
            part=3,
            generation=RECORD.generation,
            incarnation=RECORD.incarnation,
            payload_bytes=1,
            checksum=0,
            offset=0,
            size_class=4096,
            namespace_ordinal=0,
            parent=RECORD.parent,
            token_count=0,
        )
    )
    assert not is_sealed_as(packed, RECORD.key, 3, RECORD.generation, RECORD.incarnation)


@given(st.dictionaries(st.integers(0, 4095), st.integers(0, (1 << 64) - 1)))
def test_the_digest_of_sealed_columns_is_that_of_their_rows(held: dict[int, int]) -> None:
    slots = sorted(held)
    rows = [(slot, RecordState.SEALED, held[slot]) for slot in slots]
    columns = array("H", slots), array("Q", [held[slot] for slot in slots])
    assert sealed_digest(*columns) == chunk_digest(rows)
