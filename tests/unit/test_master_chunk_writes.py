"""What is written of a chunk is what its worker's records say, however it came to be there."""

from __future__ import annotations

import pytest

from kvstore.ids import KEY_BYTES
from kvstore.record import RecordState, chunk_digest
from master import chunk_writes
from master.chunk_values import PREFIX, decode_chunk, key_of
from master.packed import split_keys
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain
from tests.unit.stored_pages import KEYS, record_rows, stored_rows, value_rows


def require_same(rig: Rig, name: str = "w1-dram") -> None:
    """The store holds what the worker does, and by the worker's digests."""
    segment = rig.segment(name)
    rig.pass_time(6.0)
    assert stored_rows(rig, name) == record_rows(segment)
    for chunk in segment.digests():
        value = decode_chunk(rig.store[key_of(name, chunk.chunk_start)])
        assert (value.size_class, value.digest()) == (chunk.size_class, chunk.digest)


@pytest.fixture
def rig() -> Rig:
    """A master with one worker that has a drive."""
    rig = Rig()
    rig.add_worker(nvme_chunks=4)
    return rig


def test_chains_branches_and_namespaces(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    space.put(chain(2, 5), parent=KEYS[4 * KEY_BYTES : 5 * KEY_BYTES])  # splits the run
    rig.open_namespace(1, heads=2).put(chain(3, 3))
    rig.open_namespace(2).put(chain(4, 5), parts=(0, 1))
    space.put(chain(5, 3))
    require_same(rig)


def test_pages_put_one_by_one_have_a_row_each(rig: Rig, space: OpenedNamespace) -> None:
    keys = split_keys(KEYS)
    for above, key in zip([bytes(32), *keys], keys, strict=False):
        space.put(key, parent=above)
    require_same(rig)
    assert len(decode_chunk(rig.store[key_of("w1-dram", 0)]).rows) == 12


def test_gaps_and_what_fills_them(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    for page in (1, 2, 7):
        space.remove(KEYS[page * KEY_BYTES : (page + 1) * KEY_BYTES])
    require_same(rig)
    space.put(chain(2, 4))  # of which some pages lie apart
    space.put(KEYS)
    require_same(rig)


def test_parts_that_are_not_all_there(rig: Rig) -> None:
    space = rig.open_namespace(2)
    space.put(KEYS[: 4 * KEY_BYTES], parts=(1,))
    rig.pass_time(1.0)
    values = [decode_chunk(v) for k, v in rig.store.items() if k.startswith(PREFIX)]
    assert [row.part for value in values for row in value.rows] == [1]


def test_pages_on_a_drive_are_stored_as_they_lie_there(rig: Rig, space: OpenedNamespace) -> None:
    rig.workers["w1"].stored_bytes.update(dict.fromkeys(split_keys(chain(9, 999)), 100))
    for number in range(12):  # fills memory up to where pages are copied down
        space.put(chain(number, 16))
    rig.pass_time(10.0)
    assert record_rows(rig.segment("w1-nvme"))
    require_same(rig)
    require_same(rig, "w1-nvme")


def many(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> OpenedNamespace:
    """A chunk of pages that were put one by one, whose value is made in many steps."""
    monkeypatch.setattr(chunk_writes, "ROWS_PER_STEP", 2)
    monkeypatch.setattr(chunk_writes, "SLOTS_PER_STEP", 2)
    space = rig.open_namespace()
    rig.holds_persists = True
    for page in split_keys(KEYS):
        space.put(page)
    rig.checks = False  # in between the store holds something else
    rig.tick(0.06)
    assert rig.master.core.jobs
    return space


def test_a_value_is_made_in_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    many(rig, monkeypatch)
    ticks = 0
    while rig.master.core.jobs:
        rig.tick()
        ticks += 1
    assert ticks >= 2
    rig.holds_persists = False
    rig.store_all()
    require_same(rig)


def test_a_value_made_of_two_moments_is_right_where_a_worker_agrees(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = many(rig, monkeypatch)
    space.remove(KEYS[:KEY_BYTES])  # already in the value
    space.put(chain(2, 2))  # its place is behind what was made
    rig.settle()
    (write,) = [each for each in rig.persists if each.behind]
    value = decode_chunk(dict(write.puts)[key_of("w1-dram", 0)])
    rows = value_rows(value, 0)
    slots = [(row[0] // 4096, RecordState.SEALED, row[4]) for row in rows]
    assert value.digest() == chunk_digest(slots)
    held = {(row[0], row[4]): row for row in record_rows(rig.segment("w1-dram"))}
    assert all(held.get((row[0], row[4]), row) == row for row in rows)
    rig.holds_persists = False
    rig.store_all()
    require_same(rig)


def test_a_chunk_that_goes_while_its_value_is_made(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = many(rig, monkeypatch)
    rig.holds_persists = False
    space.remove(KEYS)
    while rig.master.core.jobs:
        rig.tick()
    require_same(rig)
    assert not stored_rows(rig, "w1-dram")


def test_a_segment_that_is_lost_while_a_value_is_made(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(rig, monkeypatch)
    rig.holds_persists = False
    rig.workers["w1"].leave()
    rig.pass_time(10.0)
    assert not rig.master.core.saving.writing
    rig.workers["w1"].join()
    require_same(rig)


def test_what_is_stored_of_a_segment_that_is_given_up_is_deleted_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_writes, "DELETES_PER_WRITE", 2)
    rig = Rig()
    rig.add_worker(chunks=6)
    rig.open_namespace().put(chain(1, 5 * CHUNK // 4096))
    rig.pass_time(1.0)
    rig.takeover(2)
    rig.workers["w1"].segment = "w1-other"
    rig.workers["w1"].join()
    deletes = [each.deletes for each in rig.written if each.deletes]
    assert [len(keys) for keys in deletes] == [2, 2, 1]
    assert not stored_rows(rig, "w1-dram")
