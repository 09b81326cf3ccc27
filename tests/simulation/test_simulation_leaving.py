"""Workers that are asked to end, while others read, put, remove, fail (I9, I12, I18)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.client.outcomes import Hit, Refused, Stored
from kvstore.wire.messages.membership import LeaveWorker
from kvstore.wire.messages.puts import Ingest, Sealed
from tests.simulation.scans import scan
from workers import events

if TYPE_CHECKING:
    from tests.simulation.conftest import MakeScene
    from tests.simulation.scene import Scene

LEASE_S = limits.LEASE_TTL_S + limits.LEASE_MARGIN_S
INHERITED_S = limits.LEADER_LEASE_S + LEASE_S


def ask_to_end(scene: Scene, number: int = 0) -> float:
    """SIGTERM; when that was."""
    scene.worker(number).feed(events.LeaveWanted())
    return scene.world.now


def await_end(scene: Scene, number: int = 0) -> float:
    """Until the worker ends; when that is. Then start its next life."""
    worker = scene.worker(number)
    scene.run_until(lambda: worker.may_end)
    ended_s = scene.world.now
    scan(scene.checks)
    scene.simulation.crash(worker.name)
    scene.simulation.restart(worker.name)
    scene.settle()
    return ended_s


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_reader_under_a_lease_is_waited_for(make_scene: MakeScene, hosts: int) -> None:
    scene = make_scene(clients=2, hosts=hosts)
    chain = scene.chain(8)
    scene.stored(chain)
    scene.run(INHERITED_S)
    found = scene.match(chain, client=1)
    asked_s = ask_to_end(scene)
    scene.run(limits.LEASE_TTL_S / 2 - 0.5)
    assert scene.finish(scene.read(found, client=1)[0]) == [Hit()] * 8
    assert not any(scene.probe(chain))
    assert await_end(scene) >= asked_s + limits.LEASE_TTL_S - limits.LEASE_MARGIN_S
    assert all(scene.probe(chain))
    assert scene.read_all(chain) == [Hit()] * 8


def test_without_readers_it_ends_at_once(scene: Scene) -> None:
    scene.stored(scene.chain(4))
    asked_s = ask_to_end(scene)
    assert await_end(scene) < asked_s + 1.0
    assert scene.read_all(scene.chain(4)) == [Hit()] * 4


def test_the_next_leader_is_told_and_waits_for_what_the_last_one_leased(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    scene.match(chain)
    asked_s = ask_to_end(scene)
    scene.run(1.0)
    scene.replace_master()
    assert await_end(scene) >= asked_s + LEASE_S
    assert scene.read_all(chain) == [Hit()] * 4


def test_without_a_leader_it_ends_when_no_lease_can_run_any_more(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    scene.match(chain)
    name = scene.leader.name
    scene.simulation.crash(name)
    asked_s = ask_to_end(scene)
    scene.run_until(lambda: scene.worker().may_end)
    assert asked_s + LEASE_S <= scene.world.now <= asked_s + limits.LEAVE_TIMEOUT_S + 0.5
    scene.simulation.restart(name)
    await_end(scene)
    assert scene.read_all(chain) == [Hit()] * 4


def test_an_answer_that_is_lost_is_asked_for_again(scene: Scene) -> None:
    scene.stored(scene.chain(4))
    scene.hold(LeaveWorker)
    asked_s = ask_to_end(scene)
    scene.run(1.0)
    scene.lose_held()
    assert await_end(scene) < asked_s + limits.LEAVE_TIMEOUT_S


@pytest.mark.parametrize("kept_back", [Ingest, Sealed])
def test_a_put_under_way_goes_elsewhere(make_scene: MakeScene, kept_back: type) -> None:
    scene = make_scene(workers=2, clients=2, hosts=2)
    chain = scene.chain(4)
    scene.hold(kept_back)
    put = scene.put(chain, timeout_s=30.0)
    scene.run(0.2)
    (name,) = {plan.segment.worker for plan in scene.core.plans.values()}
    number = int(name.removeprefix("worker"))
    ask_to_end(scene, number)
    scene.run(0.2)
    scene.release()
    assert scene.finish(put) == [Stored()] * 4
    assert await_end(scene, number)
    assert all(scene.probe(chain))


def test_puts_that_find_no_other_worker_are_refused_and_nothing_is_left(scene: Scene) -> None:
    ask_to_end(scene)
    outcomes = scene.finish(scene.put(scene.chain(2), wait=False))
    assert all(isinstance(each, Refused) for each in outcomes)
    await_end(scene)
    assert scene.stored(scene.chain(2)) == [Stored()] * 2


def test_what_is_removed_while_its_worker_leaves_does_not_come_back(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    scene.match(chain)
    ask_to_end(scene)
    scene.run(0.1)
    scene.removed(chain)
    await_end(scene)
    assert not any(scene.probe(chain))


def test_a_kill_while_it_waits_is_a_leave_all_the_same(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain)
    scene.match(chain)
    ask_to_end(scene)
    scene.run(1.0)
    scene.simulation.crash("worker0")
    scene.run(limits.WORKER_LOST_AFTER_S + 1.0)
    assert scene.core.workers["worker0"].left
    assert scene.core.counters["workers_lost"] == 0
    scene.simulation.restart("worker0")
    scene.settle()
    assert scene.read_all(chain) == [Hit()] * 4
