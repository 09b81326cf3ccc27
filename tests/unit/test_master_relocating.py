"""Copies and moves that an operator wishes: what lies where by then."""

from __future__ import annotations

import pytest

from master.tunables import Tunables
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import Rig, chain
from tests.unit.relocation_rig import holders, is_empty, made, put_at, row_of, start


@pytest.fixture
def rig() -> Rig:
    return made(16, 16, 16)


def test_a_copy_makes_one_more_replica_and_ends(rig: Rig) -> None:
    space = rig.open_namespace()
    put_at(rig, space, "w1", KEYS)
    row = start(rig, "copy", namespace=space.id, target="w3")
    assert row.left_pages == 8
    rig.pass_time(3.0)
    row = row_of(rig, row.id)
    assert (row.state, row.done_pages, row.left_pages) == ("done", 8, 0)
    assert rig.workers["w3"].records
    assert rig.workers["w1"].records
    assert not any(key.startswith("relocations/") for key in rig.store)


def test_between_workers_of_a_host_pages_move_and_are_not_copied(rig: Rig) -> None:
    for name in ("w1", "w2"):
        rig.master.core.workers[name].host = "h"
        rig.master.core.segments[f"{name}-dram"].host = "h"
    space = rig.open_namespace()
    put_at(rig, space, "w1", KEYS)
    put_at(rig, space, "w3", chain(2, 8))
    row = start(rig, "copy", namespace=space.id, target="w2")
    rig.pass_time(15.0)
    row = row_of(rig, row.id)
    assert (row.state, row.done_pages) == ("done", 8), "the host had the others"
    assert holders(space, KEYS) == {"w1"}
    assert holders(space, chain(2, 8)) == {"w2", "w3"}
    row = start(rig, "move", source="w1", target="w2")
    rig.pass_time(15.0)
    assert row_of(rig, row.id).state == "done"
    assert holders(space, KEYS) == {"w2"}
    assert is_empty(rig, "w1")


def test_a_move_takes_the_named_pages_along_and_no_others(rig: Rig) -> None:
    space = rig.open_namespace()
    for number in range(2):
        put_at(rig, space, "w1", chain(number, 8))
    row = start(rig, "move", source="w1", target="w2", namespace=space.id, keys=chain(1, 8)[:128])
    rig.pass_time(15.0)
    assert row_of(rig, row.id).state == "done"
    assert holders(space, chain(0, 8)) == {"w1"}
    assert len(rig.workers["w2"].records) == 4
    assert len(rig.workers["w1"].records) == 12
    assert space.probe(chain(1, 8)) == b"\1" * 8


def test_a_move_of_all_that_a_worker_has(rig: Rig) -> None:
    space, other = rig.open_namespace(), rig.open_namespace(2)
    put_at(rig, space, "w1", KEYS)
    start(rig, "move", source="w1", target="w2", namespace=other.id)
    rig.pass_time(3.0)
    assert not rig.workers["w2"].records
    row = start(rig, "move", source="w1", target="w2")
    rig.pass_time(15.0)
    assert row_of(rig, row.id).state == "done"
    assert holders(space, KEYS) == {"w2"}
    assert is_empty(rig, "w1")


def test_a_move_without_a_source_leaves_the_replicas_that_are_wanted() -> None:
    rig = made(16, 16, 16, tunables=Tunables(cluster="test", replicas=2))
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(5.0)
    (target,) = {"w1", "w2", "w3"} - holders(space, KEYS)
    row = start(rig, "move", namespace=space.id, target=target)
    rig.pass_time(15.0)
    assert row_of(rig, row.id).state == "done"
    found = holders(space, KEYS)
    assert target in found
    assert len(found) == 2


def test_a_page_is_copied_once_however_many_wish_it(rig: Rig) -> None:
    space = rig.open_namespace()
    put_at(rig, space, "w1", KEYS)
    rig.holds_moves = True
    start(rig, "copy", namespace=space.id, target="w2")
    rig.pass_time(1.0)
    start(rig, "copy", source="w1", target="w2")
    start(rig, "drain", source="w1")
    rig.pass_time(2.0)
    assert len(rig.moves) == 1


def test_a_copy_of_some_pages_asks_for_no_more_replicas_of_the_others() -> None:
    rig = made(16, 16, 16, tunables=Tunables(cluster="test", replicas=2))
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(5.0)
    (target,) = {"w1", "w2", "w3"} - holders(space, KEYS)
    middle = KEYS[2 * 32 : 5 * 32]
    row = start(rig, "copy", namespace=space.id, keys=middle, target=target)
    rig.pass_time(40.0)
    assert row_of(rig, row.id).state == "done"
    tree = rig.master.core.tree(space.ordinal)
    asked = [(stretch.count, stretch.run.replicas) for stretch in tree.stretches(KEYS)]
    assert asked == [(2, 0), (3, 3), (3, 0)]
    assert len(rig.workers[target].records) == 3


def test_what_a_move_leaves_short_of_replicas_is_noted() -> None:
    rig = made(16, 16, 16, tunables=Tunables(cluster="test", replicas=2))
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(5.0)
    first, second = sorted(holders(space, KEYS))
    row = start(rig, "move", source=first, target=second)
    rig.pass_time(3.0)
    assert row_of(rig, row.id).state == "done"
    rig.pass_time(5.0)
    assert len(holders(space, KEYS)) == 2
