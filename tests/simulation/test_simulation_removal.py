"""Interleavings of removes: invisible at once, and never back (I29)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.outcomes import Stored
from kvstore.errors import DeadlineExceeded
from kvstore.record import RecordState
from kvstore.replica import ExtentState
from kvstore.wire.messages.membership import FreeExtents, RetireExtents
from kvstore.wire.messages.puts import Ingest, Sealed
from tests.simulation.pages import HALVES, NAMED, SMALL

if TYPE_CHECKING:
    from kvstore.page import PageChain
    from tests.simulation.conftest import MakeScene
    from tests.simulation.scene import Scene

SEALED, RETIRED = ExtentState.SEALED, ExtentState.RETIRED


def sealed_keys(scene: Scene, worker: int = 0) -> set[bytes]:
    """Pages that a worker would offer if it started now."""
    memory = scene.worker(worker).memories[f"worker{worker}-dram"]
    return {r.key for r in memory.all_records() if r.state is RecordState.SEALED}


def holder_of(scene: Scene, chain: PageChain) -> str:
    """The worker that holds a chain's first page."""
    return scene.checks.history.pages[chain.key(0)].sealed[-1].segment.removesuffix("-dram")


def test_a_remove_is_answered_when_the_records_are_written(scene: Scene) -> None:
    chain = scene.chain(3)
    scene.stored(chain)
    scene.hold(RetireExtents)
    removal = scene.remove(chain)
    scene.run(0.5)
    assert not removal.is_over
    assert scene.probe(chain) == [False] * 3  # but invisible at once
    scene.release()
    assert scene.finish(removal) == [True] * 3
    assert not sealed_keys(scene)


def test_a_page_removed_under_a_lease_is_invisible_and_freed_after_it(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(clients=2, lease_ttl_s=3.0)
    chain = scene.chain(2)
    scene.stored(chain)
    found = scene.match(chain, client=1)
    assert scene.removed(chain) == [True] * 2
    assert scene.match(chain).pages == 0
    assert scene.bytes_in(RETIRED) == 2 * SMALL
    outcomes = scene.finish(scene.read(found, client=1)[0])
    assert {type(outcome).__name__ for outcome in outcomes} == {"Miss"}
    scene.run(4.0)
    assert scene.bytes_in(RETIRED) == 0


def test_a_slow_holder_is_not_waited_for_beyond_the_deadline(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.stored(chain)
    scene.hold(RetireExtents)
    removal = scene.remove(chain)  # 6 s
    scene.run(5.9)
    assert not removal.is_over
    scene.run(0.3)
    # The tombstones are stored at the deadline; the answer may just have missed its caller.
    assert removal.value in ([], [[True] * 2])
    assert not removal.error or isinstance(removal.error[0], DeadlineExceeded)
    assert len(scene.core.tombstones) == 2
    scene.lose_held()
    scene.worker().links.close()
    scene.run(20.0)
    assert not sealed_keys(scene)


def test_a_page_removed_while_its_holder_is_away_does_not_return_with_it(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(workers=2)
    chain = scene.chain(4)
    scene.stored(chain)
    name = holder_of(scene, chain)
    number = int(name[-1])
    scene.simulation.crash(name)
    scene.run(0.5)  # away, and not lost yet
    assert scene.removed(chain.slice(1, 2)) == [True]
    assert chain.key(1) in sealed_keys(scene, number)
    scene.simulation.restart(name)
    scene.run(1.0)
    assert scene.probe(chain) == [True, False, True, True]


def test_nor_with_a_holder_that_was_lost(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2)
    chain = scene.chain(4)
    scene.stored(chain)
    name = holder_of(scene, chain)
    scene.simulation.crash(name)
    scene.run(5.0)
    assert scene.removed(chain.slice(1, 2)) == [False]  # nobody knows it any more
    scene.simulation.restart(name)
    scene.run(1.0)
    assert scene.probe(chain) == [True, False, True, True]


def test_nor_after_a_takeover_in_between(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2)
    chain = scene.chain(4)
    scene.stored(chain)
    name = holder_of(scene, chain)
    scene.simulation.crash(name)
    scene.run(0.5)
    scene.removed(chain.slice(1, 2))
    scene.simulation.crash("master0")
    scene.simulation.restart("master0")
    scene.run(1.0)
    scene.simulation.restart(name)
    scene.run(1.0)
    assert scene.probe(chain) == [True, False, True, True]


def test_nor_when_nobody_had_registered_yet(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    scene.simulation.crash("worker0")
    scene.simulation.crash("master0")
    scene.simulation.restart("master0")
    scene.run(1.0)
    scene.removed(chain.slice(1, 2))
    scene.simulation.restart("worker0")
    scene.run(1.0)
    assert scene.probe(chain) == [True, False, True, True]


def test_a_page_put_again_elsewhere_stays_when_the_old_holder_returns(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(workers=2)
    chain = scene.chain(2)
    scene.stored(chain)
    name = holder_of(scene, chain)
    scene.simulation.crash(name)
    scene.run(0.5)
    scene.removed(chain)
    assert scene.stored(chain) == [Stored()] * 2
    newest = [scene.checks.history.pages[key].sealed[-1].generation for key in chain]
    scene.simulation.restart(name)
    scene.run(1.0)
    assert scene.probe(chain) == [True] * 2
    found = scene.match(chain)
    located = [copy for run in found.pieces[0].located.runs for copy in run.copies]
    assert len(located) == 1
    assert int.from_bytes(located[0].generations[:8], "little") == newest[0]


def test_removed_and_put_again_in_the_same_segment(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.stored(chain)
    scene.match(chain)  # so that the removed extents stay for a while
    scene.removed(chain)
    assert scene.stored(chain) == [Stored()] * 2
    scene.take_over()
    assert scene.probe(chain) == [True] * 2
    scene.run(20.0)
    assert scene.probe(chain) == [True] * 2
    assert scene.bytes_in(SEALED) == 2 * SMALL


def test_a_remove_ends_a_put_that_is_open(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Sealed)
    scene.put(chain)
    scene.run(0.3)
    assert sealed_keys(scene) == set(chain)  # sealed, and not reported
    scene.world.pause("client0")  # else it would put the pages again
    assert scene.removed(chain, client=1) == [True] * 2
    scene.lose_held()
    scene.take_over()
    assert scene.probe(chain, client=1) == [False] * 2
    scene.simulation.crash("client0")


def test_a_remove_before_the_first_byte_ends_the_put_too(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Ingest)
    put = scene.put(chain, timeout_s=1.0)
    scene.run(0.2)
    assert scene.removed(chain, client=1) == [True] * 2
    scene.release()  # refused: the generation is fenced
    scene.finish(put)
    scene.run(1.0)
    newest = scene.checks.history.pages[chain.key(0)].sealed
    assert all(place.generation > 0 for place in newest)


def test_a_page_that_had_expired_does_not_return_after_its_removal(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.stored(chain, ttl_s=1.0)
    scene.hold(FreeExtents)
    scene.run(2.0)
    assert sealed_keys(scene) == set(chain)
    scene.removed(chain.slice(0, 1))
    scene.lose_held()
    scene.take_over()
    assert scene.probe(chain) == [False, True]


def test_the_parts_of_a_removed_page_come_free_in_any_order(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, chunks=2)
    chain = scene.chain(2, namespace=HALVES)
    scene.stored(chain, namespace=HALVES)
    scene.hold(RetireExtents)
    removal = scene.remove(chain, namespace=HALVES)
    scene.run(0.2)
    scene.simulation.crash("worker0")
    scene.lose_held()
    scene.simulation.restart("worker0")
    scene.finish(removal)
    scene.take_over()
    assert scene.probe(chain, namespace=HALVES) == [False] * 2
    scene.run(15.0)
    assert not len(scene.core.tombstones)


def test_a_repeated_remove_gets_the_same_answer(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.stored(chain)
    scene.hold(RetireExtents)
    first = scene.remove(chain)
    second = scene.remove(chain, client=1)
    scene.run(0.3)
    scene.release()
    assert scene.finish(first) == scene.finish(second) == [True] * 2
    assert scene.removed(chain) == [False] * 2


def test_named_objects_are_removed_one_by_one(scene: Scene) -> None:
    names = scene.simulation.universe.names[:1]
    chain = scene.names(names)
    assert scene.stored(chain, namespace=NAMED) == [Stored()]
    assert scene.removed(chain, namespace=NAMED) == [True]
    assert scene.probe(chain, namespace=NAMED) == [False]
    assert scene.stored(chain, namespace=NAMED) == [Stored()]
