"""Stored chunks whose pages the tree knows already: other parts, other copies, other parents."""

from __future__ import annotations

import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import InventoryEnd, ReportSegment
from tests.unit.master_rig import OpenedNamespace, Rig, chain
from tests.unit.stored_pages import KEYS, TTL_S, counter, end, offer, sealed


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace of one part, with twelve pages of which the store knows."""
    space = rig.open_namespace()
    space.put(KEYS, ttl_s=TTL_S)
    rig.pass_time(1.0)
    return space


def test_parts_and_copies_come_in_whatever_order(rig: Rig) -> None:
    rig.add_worker("w2")
    two = rig.open_namespace(2)
    two.put(KEYS, parts=(0,), ttl_s=TTL_S)
    report = ReportSegment("w1-dram", rig.workers["w1"].incarnation, "read_only", "")
    assert rig.workers["w1"].ask(report) == Done()
    two.put(KEYS, parts=(1,), ttl_s=TTL_S)  # on the other worker
    two.put(chain(2, 5), parent=KEYS[3 * KEY_BYTES : 4 * KEY_BYTES], parts=(0, 1))
    rig.pass_time(1.0)
    runs = rig.master.core.tree(1).all_runs()
    assert {copy.segment.id for run in runs for copy in run.copies} == {"w1-dram", "w2-dram"}
    rig.takeover(2)
    for name in ("w2", "w1"):
        assert offer(rig, name).chunk_starts == ()
        end(rig, name)
    assert two.probe(KEYS + chain(2, 5)) == b"\1" * 17
    assert counter(rig, "pages_adopted") == 34
    assert not counter(rig, "extents_unaccounted")


def test_the_copy_on_a_drive_is_taken_in_beside_the_one_in_memory() -> None:
    rig = Rig()
    worker = rig.add_worker(nvme_chunks=8)
    space = rig.open_namespace()
    worker.stored_bytes.update(
        {chain(n, 16)[i * 32 : i * 32 + 32]: 100 for n in range(12) for i in range(16)}
    )
    for number in range(12):
        space.put(chain(number, 16))
    rig.pass_time(13.5)
    before = sealed(rig, "w1-dram"), sealed(rig, "w1-nvme")
    assert all(before)
    rig.takeover(2)
    worker.connect()
    for segment in reversed(worker.segments):
        assert worker.offer(segment).chunk_starts == ()
        assert worker.ask(InventoryEnd(segment.segment, segment.incarnation)) == Done()
    assert (sealed(rig, "w1-dram"), sealed(rig, "w1-nvme")) == before


def test_pages_that_were_put_again_meanwhile_are_taken_in_one_by_one(
    rig: Rig, space: OpenedNamespace
) -> None:
    rig.takeover(2)
    rig.add_worker("w2")
    again = rig.open_namespace()
    again.put(KEYS[: 5 * KEY_BYTES])
    offer(rig)
    end(rig)
    assert again.probe(KEYS) == b"\1" * 12
    run = rig.master.core.tree(1).get(KEYS[:KEY_BYTES])
    assert run is not None
    assert len(run.copies) == 2
    assert run.ttl_s == limits.PAGE_TTL_S


def test_a_page_that_hangs_elsewhere_now_is_fenced(rig: Rig, space: OpenedNamespace) -> None:
    rig.takeover(2)
    rig.add_worker("w2")
    again = rig.open_namespace()
    again.put(chain(9, 1))
    again.put(KEYS, parent=chain(9, 1))
    offer(rig)
    end(rig)
    # Of the stored chain the first page's parent is another one.
    assert counter(rig, "extents_unaccounted") == 1
    assert counter(rig, "pages_adopted") == 11
