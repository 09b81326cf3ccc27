"""When values of chunks are written: soon, together, one at a time, within the budget, or later."""

from __future__ import annotations

import pytest

from kvstore.ids import KEY_BYTES
from master.chunk_values import PREFIX, decode_chunk, key_of
from master.pool_time import KEY as CLOCK
from master.pool_time import PoolTime
from master.tunables import Tunables
from master.write_behind import CLOCK_EVERY_S, DELAY_S, IN_FLIGHT_MAX, LATER_S
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain

KEYS = chain(1, 8)
FIRST = key_of("w1-dram", 0)
PAGES = CHUNK // 4096
"""Of a chunk."""


@pytest.fixture
def rig() -> Rig:
    """A master with one worker, everything that was due for its start is written."""
    rig = Rig()
    rig.add_worker(chunks=2 * IN_FLIGHT_MAX)
    rig.open_namespace()
    rig.settle()
    return rig


def values(rig: Rig) -> list[str]:
    """Keys of the chunks' values that were written, in order."""
    return [key for each in rig.written for key, _ in each.puts if key.startswith(PREFIX)]


def counter(rig: Rig, name: str) -> int:
    """One of the core's counters."""
    return rig.master.core.counters[name]


def test_what_is_sealed_is_stored_soon_and_together(rig: Rig, space: OpenedNamespace) -> None:
    for page in range(8):
        above = KEYS[(page - 1) * KEY_BYTES : page * KEY_BYTES] if page else bytes(32)
        space.put(KEYS[page * KEY_BYTES : (page + 1) * KEY_BYTES], parent=above)
        rig.tick(DELAY_S / 10)
    assert values(rig) == []
    rig.tick(DELAY_S)
    assert values(rig) == [FIRST]
    assert len(decode_chunk(rig.store[FIRST]).keys) == len(KEYS)
    assert counter(rig, "chunk_rows_written") == 8
    assert counter(rig, "chunk_bytes_written") == len(rig.store[FIRST])
    assert all(each.behind for each in rig.written if FIRST in dict(each.puts))


def test_what_is_removed_is_gone_soon_what_expires_later(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    space.put(chain(2, 1), ttl_s=1.0)
    rig.tick(DELAY_S)
    space.remove(KEYS[-KEY_BYTES:])
    rig.tick(DELAY_S)
    assert len(decode_chunk(rig.store[FIRST]).keys) == len(KEYS)
    rig.pass_time(1.5, step_s=0.5)
    assert space.probe(chain(2, 1)) == b"\0"
    assert len(values(rig)) == 2
    rig.pass_time(LATER_S)
    assert decode_chunk(rig.store[FIRST]).keys == KEYS[:-KEY_BYTES]
    assert len(values(rig)) == 3


def test_a_chunk_in_which_nothing_is_sealed_has_no_value(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.tick(DELAY_S)
    assert FIRST in rig.store
    space.remove(KEYS)
    rig.tick(DELAY_S)
    assert FIRST not in rig.store
    assert counter(rig, "chunk_values_deleted") == 1
    assert not rig.master.core.saving.stored["w1-dram"]


def test_a_value_that_would_be_the_same_is_not_written(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.tick(DELAY_S)
    rig.workers["w1"].leave()
    rig.workers["w1"].join()  # every chunk is looked at
    assert rig.master.core.saving.dirty == 1
    rig.pass_time(LATER_S)
    assert rig.master.core.saving.dirty == 0
    assert values(rig) == [FIRST]


def test_pool_time_is_due_though_a_chunk_that_is_due_later_waits(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS[:KEY_BYTES], ttl_s=CLOCK_EVERY_S)
    rig.holds_persists = True
    rig.tick(DELAY_S)
    rig.pass_time(CLOCK_EVERY_S + 1.0)
    assert space.probe(KEYS[:KEY_BYTES]) == b"\0"  # due in LATER_S
    rig.holds_persists = False
    rig.store_all()
    rig.master.check_invariants()
    assert rig.master.wakeup_s <= rig.now


def test_one_write_of_a_chunk_is_under_way(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS[:KEY_BYTES])
    rig.holds_persists = True
    rig.tick(DELAY_S)
    assert len(rig.persists) == 1
    space.put(KEYS[KEY_BYTES:], parent=KEYS[:KEY_BYTES])
    rig.tick(DELAY_S)
    rig.tick(DELAY_S)
    assert len(rig.persists) == 1
    assert rig.master.wakeup_s > rig.now  # nobody looks again and again
    rig.holds_persists = False
    rig.store_all()
    rig.tick()
    assert values(rig) == [FIRST, FIRST]
    assert decode_chunk(rig.store[FIRST]).keys == KEYS


def test_while_the_store_is_away_nothing_piles_up(rig: Rig, space: OpenedNamespace) -> None:
    rig.holds_persists = True
    for number in range(IN_FLIGHT_MAX + 4):
        space.put(chain(number, PAGES))
    rig.pass_time(20.0)
    space.remove(chain(0, PAGES))
    rig.pass_time(20.0)
    saving = rig.master.core.saving
    assert len([each for each in rig.persists if each.behind]) == IN_FLIGHT_MAX
    assert saving.dirty == 5
    assert saving.behind_s(rig.now) == pytest.approx(40.0, abs=1.0)
    rig.holds_persists = False
    rig.store_all()
    rig.settle()
    assert saving.behind_s(rig.now) == 0.0
    assert len(values(rig)) == IN_FLIGHT_MAX + 4
    assert len([key for key in rig.store if key.startswith(PREFIX)]) == IN_FLIGHT_MAX + 3


def test_the_budget_is_kept_and_the_oldest_goes_first() -> None:
    rig = Rig(Tunables("test", metadata_bytes_per_s=1000))
    rig.add_worker(chunks=12)
    space = rig.open_namespace()
    rig.settle()
    for number in range(8):
        space.put(chain(number, PAGES))
        rig.now += 0.001
    began_s = rig.now
    rig.pass_time(4.0, step_s=0.01)
    written = values(rig)
    assert written == [key_of("w1-dram", number * CHUNK) for number in range(len(written))]
    size = counter(rig, "chunk_bytes_written")
    assert 3500 < size <= 1000 * (rig.now - began_s) + 250 + len(rig.store[written[0]])
    assert rig.master.core.saving.behind_s(rig.now) > 3.0
    rig.pass_time(4.0)
    assert len(values(rig)) == 8


def test_chunks_that_pages_left_get_their_turn_among_those_that_fill(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(chain(1, PAGES), ttl_s=1.0)
    rig.pass_time(2.0)
    assert FIRST in rig.store
    for number in range(2, 200):
        space.put(chain(number, 1))
        rig.pass_time(DELAY_S / 2)
    assert chain(1, 1) not in decode_chunk(rig.store[FIRST]).keys


def test_pool_time_is_stored_while_it_matters(rig: Rig, space: OpenedNamespace) -> None:
    rig.pass_time(2 * CLOCK_EVERY_S)
    assert CLOCK not in rig.store
    space.put(KEYS)
    for _ in range(5):
        rig.pass_time(CLOCK_EVERY_S)
        clock = PoolTime()
        clock.restore(rig.store[CLOCK])
        led_s = rig.now - rig.master.core.started_s
        assert led_s - CLOCK_EVERY_S - 0.5 <= clock.restored_s <= led_s
    assert 5 <= len([1 for each in rig.written if CLOCK in dict(each.puts)]) <= 7


def test_a_lost_segments_values_stay_until_it_is_forgotten() -> None:
    rig = Rig(Tunables("test", segment_forget_s=30.0))
    rig.add_worker(chunks=4)
    rig.open_namespace().put(chain(1, 3 * PAGES))
    rig.pass_time(1.0)
    rig.workers["w1"].leave()
    rig.pass_time(20.0)
    assert len([key for key in rig.store if key.startswith(PREFIX)]) == 3
    rig.pass_time(20.0)
    assert not [key for key in rig.store if key.startswith(PREFIX)]
    assert "w1-dram" not in rig.master.core.saving.stored
