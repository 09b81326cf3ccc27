"""When it is looked for pages to copy down, other than at the next put."""

from __future__ import annotations

import pytest

from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import InventoryEnd
from master import tiering
from master.directory import Stretch
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig, chain

TIERED = Tunables(watermark_demote=0.4, watermark_low=0.6, watermark_high=0.8, nvme_admission="all")
HALF = 32
"""Of the 64 pages of memory: above the watermark where copies are made."""


@pytest.fixture
def rig() -> Rig:
    """A worker with little memory and a drive."""
    made = Rig(TIERED)
    made.add_worker(chunks=4, nvme_chunks=16)
    return made


def on_drive(rig: Rig) -> int:
    """Pages there."""
    return len(rig.segment("w1-nvme").records)


def test_pages_are_copied_once_they_are_sealed(rig: Rig, space: OpenedNamespace) -> None:
    keys = chain(1, HALF)
    plans = space.plans(keys)
    rig.settle()
    assert not rig.master.core.moves.demoting, "nothing is sealed yet"
    space.report(space.write(plans, keys))
    rig.settle()
    assert on_drive(rig)
    assert not rig.master.core.moves.demoting


def test_below_the_watermark_a_seal_makes_nobody_look(rig: Rig, space: OpenedNamespace) -> None:
    space.put(chain(1, 8))
    assert not rig.master.core.moves.demoting
    assert rig.master.core.moves.look_at_s == float("inf")


@pytest.mark.parametrize("order", [("w1-dram", "w1-nvme"), ("w1-nvme", "w1-dram")])
def test_what_a_new_master_finds_in_memory_is_copied(
    rig: Rig, space: OpenedNamespace, order: tuple[str, str]
) -> None:
    worker, keys = rig.workers["w1"], chain(1, HALF)
    space.write(space.plans(keys), keys)  # no report: the first master copies nothing
    rig.takeover(2)
    rig.open_namespace()
    worker.connect()
    for name in order:
        segment = rig.segment(name)
        for start in worker.offer(segment).chunk_starts:
            worker.send_rows(start, segment)
        assert worker.ask(InventoryEnd(name, segment.incarnation)) == Done()
    rig.settle()
    assert on_drive(rig)


def test_memory_that_a_new_master_finds_too_full_is_emptied() -> None:
    rig = Rig(TIERED)
    worker = rig.add_worker(chunks=4)
    space = rig.open_namespace()
    keys = chain(1, 64)
    space.write(space.plans(keys), keys)  # no report: the first master evicts nothing
    rig.takeover(2)
    space = rig.open_namespace()
    worker.join()
    rig.pass_time(15.0)  # longer than leases of the first master may run
    assert 0 < len(worker.records) <= 0.6 * 64


def test_a_hole_is_no_hit(rig: Rig, space: OpenedNamespace) -> None:
    core, keys = rig.master.core, chain(1, 2)
    space.plans(keys)
    run = core.tree(space.ordinal).get(keys[:32])
    assert run is not None
    with pytest.raises(AssertionError, match="Stretch"):
        tiering.note_hits(core, 1, Stretch(0, 2, run, 0), is_leased=True)
