"""What a worker lists and the master does not know: taken in once, or fenced."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.ids import Generation, PageKey
from kvstore.lease import inherited_release_s
from kvstore.record import RecordFlag, RecordState
from kvstore.replica import ExtentState
from tests.unit.master_rig import OpenedNamespace, Rig, chain

PAGE = 4096
GRACE_S = inherited_release_s(0.0)


def test_of_two_records_of_one_page_one_is_adopted_and_one_is_fenced() -> None:
    rig = Rig()
    worker = rig.add_worker(chunks=1)
    space = rig.open_namespace()
    keys = chain(1, 3)
    space.write(space.plans(keys), keys)
    # As after a seal whose report was lost, and a second put of the same page.
    first = worker.records[0]
    again = 8 * PAGE
    worker.records[again] = msgspec.structs.replace(
        first, offset=again, generation=Generation(first.generation + 7)
    )
    rig.takeover(2)
    rig.open_namespace()
    worker.join()
    assert space.probe(keys) == b"\1\1\1"
    counts = rig.master.core.segments[worker.segment].allocator.bytes_in
    assert counts[ExtentState.SEALED] == 3 * PAGE
    assert counts[ExtentState.QUARANTINED] == PAGE
    rig.pass_time(inherited_release_s(1.0))
    assert counts[ExtentState.QUARANTINED] == 0
    assert sorted(worker.records) == [0, PAGE, 2 * PAGE]


def test_leases_on_what_returns_are_kept_though_the_page_is_known_by_another_copy() -> None:
    rig = Rig()
    away = rig.add_worker("w1", chunks=1)
    space = rig.open_namespace()
    keys = chain(1, 2)
    space.put(keys)
    space.match(keys)
    leased_until_s = rig.now + limits.LEASE_TTL_S + limits.LEASE_MARGIN_S
    away.leave()
    rig.pass_time(4.0)
    rig.add_worker("w2", chunks=1)
    space.put(keys)  # on w2: the tree knows the pages when w1 returns
    away.join()
    tree = rig.master.core.tree(space.ordinal)
    run = tree.get(keys[:32])
    assert run is not None
    assert len(run.copies) == 2
    assert run.leased_until_s >= leased_until_s


def takeover(rig: Rig) -> OpenedNamespace:
    """Another master, with its first client."""
    rig.takeover(2)
    return rig.open_namespace()


def test_an_inventory_alone_rebuilds_the_tree(rig: Rig, space: OpenedNamespace) -> None:
    keys = chain(1, 30)
    space.put(keys)
    space.put(chain(2, 5), parent=keys[9 * 32 : 10 * 32])
    again = takeover(rig)
    assert again.ordinal == space.ordinal
    rig.workers["w1"].join()
    assert again.probe(keys + chain(2, 5)) == b"\1" * 35
    assert rig.master.core.tree(1).runs == 5  # cut at the branch, and where chunks end
    assert rig.master.core.counters["pages_adopted"] == 35


def test_pages_whose_parents_come_later_are_found(rig: Rig, space: OpenedNamespace) -> None:
    rig.add_worker("w2", chunks=16)
    space.put(chain(1, 250))
    tail = chain(2, 12)
    space.put(tail, parent=chain(1, 250)[-32:])
    again = takeover(rig)
    rig.workers["w2"].join()
    assert sum(again.probe(tail)) > 0
    rig.workers["w1"].join()
    rig.settle()
    assert again.probe(chain(1, 250) + tail) == b"\1" * 262


def test_adopted_pages_stay_for_leases_of_the_old_master(rig: Rig, space: OpenedNamespace) -> None:
    space.put(chain(1, 4), ttl_s=1.0)
    space.match(chain(1, 4))
    again = takeover(rig)
    rig.workers["w1"].join()
    run = rig.master.core.tree(1).get(chain(1, 4)[:32])
    assert run is not None
    assert run.leased_until_s == rig.now + GRACE_S
    assert again.remove(chain(1, 4)) == b"\1" * 4
    rig.pass_time(GRACE_S - 0.5)
    assert rig.workers["w1"].records
    rig.pass_time(1.0)
    assert not rig.workers["w1"].records


def test_what_is_fenced_after_a_takeover_waits_for_old_leases(
    rig: Rig, space: OpenedNamespace
) -> None:
    plans = space.plans(chain(1, 4))
    space.write(plans, chain(1, 4))
    worker = rig.workers["w1"]
    for offset, record in worker.records.items():
        worker.records[offset] = msgspec.structs.replace(record, namespace_ordinal=99)
    takeover(rig)
    worker.join()
    rig.pass_time(GRACE_S - 0.5)
    assert len(worker.records) == 4
    rig.pass_time(1.0)
    assert not worker.records


@pytest.mark.parametrize(
    "change",
    [
        {"namespace_ordinal": 99},
        {"part": 1},
        {"payload_bytes": 100},
        {"flags": RecordFlag.PRIVATE},
        {"incarnation": 7},
        {"state": RecordState.RESERVED},
        {"state": RecordState.REMOVED},
    ],
)
def test_records_that_prove_nothing_are_fenced(
    rig: Rig, space: OpenedNamespace, change: dict[str, object]
) -> None:
    space.put(chain(1, 4))
    worker = rig.workers["w1"]
    worker.records[PAGE] = msgspec.structs.replace(worker.records[PAGE], **change)
    again = takeover(rig)
    worker.join()
    assert again.probe(chain(1, 4)) == b"\1\0\1\1"
    rig.pass_time(GRACE_S + 1.0)
    assert sorted(worker.records) == [0, 2 * PAGE, 3 * PAGE]


def test_a_parent_that_contradicts_the_tree_is_fenced(rig: Rig, space: OpenedNamespace) -> None:
    keys = chain(1, 4)
    space.put(keys)
    worker = rig.workers["w1"]
    wrong = msgspec.structs.replace(
        worker.records[PAGE], offset=8 * PAGE, parent=PageKey(chain(9, 1))
    )
    worker.records[8 * PAGE] = wrong
    again = takeover(rig)
    worker.join()
    rig.pass_time(GRACE_S + 1.0)
    assert again.probe(keys) == b"\1" * 4
    assert 8 * PAGE not in worker.records


def test_pages_that_claim_to_be_their_own_ancestors_are_fenced(
    rig: Rig, space: OpenedNamespace
) -> None:
    # Parents in records are what writers said; a loop of them would never end.
    keys = chain(1, 4)
    space.put(keys)
    records = rig.workers["w1"].records
    records[0] = msgspec.structs.replace(records[0], parent=PageKey(keys[-32:]))
    lonely = chain(2, 1)
    space.put(lonely)
    (at,) = (offset for offset, record in records.items() if record.key == lonely)
    records[at] = msgspec.structs.replace(records[at], parent=PageKey(lonely))
    again = takeover(rig)
    rig.workers["w1"].join()
    assert again.probe(keys + lonely) == b"\1\1\1\0\0"
    rig.pass_time(GRACE_S + 1.0)
    assert sorted(records) == [0, PAGE, 2 * PAGE]


def test_a_page_listed_twice_in_one_chain_is_taken_in_once(
    rig: Rig, space: OpenedNamespace
) -> None:
    keys = chain(1, 3)
    space.put(keys)
    records = rig.workers["w1"].records
    records[3 * PAGE] = msgspec.structs.replace(
        records[0], offset=3 * PAGE, parent=PageKey(keys[-32:])
    )
    again = takeover(rig)
    rig.workers["w1"].join()
    assert again.probe(keys) == b"\1\1\1"
    rig.pass_time(GRACE_S + 1.0)
    assert sorted(records) == [0, PAGE, 2 * PAGE]
