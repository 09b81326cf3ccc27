"""How much room memory makes for pages that are wanted again."""

from __future__ import annotations

from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Prefetch
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig, chain

TIERED = Tunables(watermark_demote=0.4, watermark_low=0.6, watermark_high=0.8, nvme_admission="all")
PAGES_BELOW_HIGH = 51
"""Of the 64 pages of four chunks."""


def with_cold_chains() -> tuple[Rig, OpenedNamespace]:
    """A pool of 64 pages of memory below whose high watermark no page fits, with far more on its
    drive; chain 0 is a long one that lies there only.
    """
    rig = Rig(TIERED)
    rig.add_worker(chunks=4, nvme_chunks=64)
    space = rig.open_namespace()
    space.put(chain(0, 60))
    rig.pass_time(2.0)
    for number in range(1, 40):
        space.put(chain(number, 4))
        rig.pass_time(1.0)
    segment = rig.master.core.segments["w1-dram"]
    number = 40
    while segment.allocator.used_bytes // 4096 < PAGES_BELOW_HIGH:
        space.put(chain(number, 1))
        rig.pass_time(1.0)
        number += 1
    assert [ref.tier for ref in space.match(chain(0, 60), lease=False).segments] == ["nvme"]
    return rig, space


def in_memory(rig: Rig, keys: bytes) -> int:
    """How many of these pages, by the worker's records."""
    held = {bytes(record.key) for record in rig.segment("w1-dram").records.values()}
    return sum(keys[at : at + 32] in held for at in range(0, len(keys), 32))


def test_a_wish_makes_room_once_however_late_that_is_free() -> None:
    rig, space = with_cold_chains()
    counters = rig.master.core.counters
    counters.clear()
    rig.holds_commands = True
    assert rig.ask(rig.engine, Prefetch(space.id, chain(0, 4))) == Done()
    for _ in range(4):
        rig.tick(0.06)
    assert counters["moves_without_room"] == 4
    assert counters["copies_evicted_dram"] == 4
    rig.holds_commands = False
    rig.obey_all()
    rig.pass_time(0.5, step_s=0.05)
    assert in_memory(rig, chain(0, 4)) == 4
    assert counters["copies_evicted_dram"] == 4


def test_of_a_wish_that_is_larger_than_memory_comes_up_what_fits() -> None:
    rig, space = with_cold_chains()
    counters = rig.master.core.counters
    counters.clear()
    rig.ask(rig.engine, Prefetch(space.id, chain(0, 60)))
    rig.pass_time(2.0, step_s=0.05)
    assert not rig.master.core.moves.wishes
    assert counters["copies_evicted_dram"] + counters["pages_evicted"] <= 60
    assert in_memory(rig, chain(0, 60)) >= 8
