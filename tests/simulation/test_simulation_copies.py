"""Copies from worker to worker, and all that may happen meanwhile (I3, I4, I35)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kvstore.client.outcomes import Hit
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import FenceExtents, FreeExtents
from kvstore.wire.messages.puts import Ingest, Sealed
from master import moves
from master.moves import MoveKind
from master.tunables import WORKER
from tests.simulation.pages import WHOLE

if TYPE_CHECKING:
    from kvstore.page import PageChain
    from master.run import Run
    from tests.simulation.conftest import MakeScene
    from tests.simulation.scene import Scene

TWO: Final[dict[str, object]] = {
    "workers": 2, "hosts": 2, "clients": 2, "lease_ttl_s": 1.0, "replicas_apart": WORKER,
}  # fmt: skip
SLOW_S: Final = 1.0
ENDED: Final = 14.0
"""Seconds after which neither a copy nor its lease is left."""


@pytest.fixture(params=[1, 2], ids=["one host", "two hosts"])
def two(request: pytest.FixtureRequest, make_scene: MakeScene) -> Scene:
    """Two workers with room for 16 small pages each, on one host or on two."""
    return make_scene(**{**TWO, "hosts": request.param})


@pytest.fixture
def apart(make_scene: MakeScene) -> Scene:
    """The same on two hosts."""
    return make_scene(**TWO)


def run_of(scene: Scene, chain: PageChain) -> Run:
    """The run of a chain, as the master has it."""
    ordinal = scene.client().namespace(WHOLE).ordinal
    run = scene.core.tree(ordinal).get(chain.key(0))
    assert run is not None
    return run


def sealed(scene: Scene, worker: int, tier: str = "dram") -> set[bytes]:
    """What a worker would offer of a segment if it started now."""
    records = scene.worker(worker).memories[f"worker{worker}-{tier}"].all_records()
    return {record.key for record in records if record.state is RecordState.SEALED}


def holder(scene: Scene, chain: PageChain) -> int:
    """The worker in whose memory a chain lies."""
    numbers = range(len(scene.simulation.workers))
    return next(number for number in numbers if set(chain) <= sealed(scene, number))


def stored(scene: Scene, length: int = 4, number: int = 0) -> PageChain:
    """A chain in the memory of one worker."""
    chain = scene.chain(length, number)
    scene.stored(chain)
    return chain


def begin(scene: Scene, chain: PageChain, tier: str = "dram") -> int:
    """Have a chain copied to the other worker, or the next; which one that is."""
    core, run = scene.core, run_of(scene, chain)
    other = (holder(scene, chain) + 1) % len(scene.simulation.workers)
    target = core.segments[f"worker{other}-{tier}"]
    assert moves.start(core, MoveKind.COPY, run, run.copies[0], range(len(run)), target) == len(run)
    return other


def copying(scene: Scene, chain: PageChain) -> int:
    """Begin to copy, and stop the clock when the first byte is read; the target."""
    target = begin(scene, chain)
    for number in (0, 1):
        scene.worker(number).copy_delay_max_s = SLOW_S
    scene.run_until(lambda: bool(scene.worker(target).pulls))
    scene.run(0.1)
    assert not set(chain) & sealed(scene, target)
    return target


def hurry(scene: Scene) -> None:
    """Workers take their usual time again."""
    for number in (0, 1):
        scene.worker(number).copy_delay_max_s = 0.002


def ended(scene: Scene) -> None:
    """Let time pass until no copy is under way."""
    scene.run_until(lambda: not scene.core.moves.in_flight)


def is_hit(scene: Scene, chain: PageChain) -> bool:
    """Whether all of a chain can be read by the second client."""
    return scene.read_all(chain, client=1) == [Hit()] * len(chain)


def test_a_copy_serves_when_the_worker_that_was_read_is_gone(two: Scene) -> None:
    chain = stored(two)
    target = begin(two, chain)
    ended(two)
    assert set(chain) <= sealed(two, 0) & sealed(two, 1)
    two.simulation.crash(f"worker{1 - target}")
    two.run(4.0)
    assert is_hit(two, chain)
    two.simulation.restart(f"worker{1 - target}")


@pytest.mark.parametrize("hosts", [1, 2])
def test_pages_are_copied_to_a_disk_and_from_one(make_scene: MakeScene, hosts: int) -> None:
    scene = make_scene(
        **{**TWO, "workers": 3, "hosts": hosts}, disks=1, watermark_demote=0.9
    )  # fmt: skip
    chain = stored(scene)
    target = begin(scene, chain, "nvme")
    ended(scene)
    assert set(chain) <= sealed(scene, target, "nvme")
    run, core = run_of(scene, chain), scene.core
    lower = next(copy for copy in run.copies if copy.segment.tier == "nvme")
    third = (target + 1) % 3
    other = core.segments[f"worker{third}-nvme"]
    assert moves.start(core, MoveKind.COPY, run, lower, range(4), other) == 4
    ended(scene)
    assert set(chain) <= sealed(scene, third, "nvme")


def test_a_worker_that_dies_while_it_is_read_costs_the_copy(apart: Scene) -> None:
    chain = stored(apart)
    target = copying(apart, chain)
    apart.simulation.crash(f"worker{1 - target}")
    hurry(apart)
    ended(apart)
    assert not set(chain) & sealed(apart, target)
    apart.simulation.restart(f"worker{1 - target}")
    apart.settle()
    assert is_hit(apart, chain)
    assert begin(apart, chain) == target
    ended(apart)
    assert set(chain) <= sealed(apart, target)


def test_a_copy_out_of_mapped_memory_does_not_need_its_worker(make_scene: MakeScene) -> None:
    scene = make_scene(**{**TWO, "hosts": 1})
    chain = stored(scene)
    target = copying(scene, chain)
    scene.simulation.crash(f"worker{1 - target}")
    hurry(scene)
    ended(scene)
    scene.run(4.0)
    assert is_hit(scene, chain)
    scene.simulation.restart(f"worker{1 - target}")


def test_a_target_that_dies_leaves_nothing_behind(two: Scene) -> None:
    chain = stored(two)
    target = copying(two, chain)
    two.simulation.crash(f"worker{target}")
    hurry(two)
    two.simulation.restart(f"worker{target}")
    two.settle()
    ended(two)
    assert not sealed(two, target)
    assert is_hit(two, chain)


def test_workers_that_cannot_reach_each_other_copy_once_they_can(apart: Scene) -> None:
    chain = stored(apart)
    apart.cut_off("worker0", "worker1")
    target = begin(apart, chain)
    ended(apart)
    assert not sealed(apart, target)
    apart.world.cut.clear()
    apart.run(2.0)
    begin(apart, chain)
    ended(apart)
    assert set(chain) <= sealed(apart, target)


def page_is_removed_meanwhile(scene: Scene) -> None:
    """Remove pages while they are copied; what the copy reads must stay, and the copy must go."""
    chain = stored(scene)
    target = copying(scene, chain)
    kept = sealed(scene, 1 - target)
    scene.hold(FreeExtents, target=f"worker{1 - target}")
    assert scene.removed(chain) == [True] * 4
    scene.run(2.0)  # no reader has a lease
    assert not scene.held_messages(FreeExtents)
    scene.release()
    hurry(scene)
    ended(scene)
    scene.run(ENDED)
    assert scene.probe(chain) == [False] * 4
    assert not kept & (sealed(scene, 0) | sealed(scene, 1))


def test_pages_removed_while_they_are_copied_are_gone_at_both_workers(two: Scene) -> None:
    page_is_removed_meanwhile(two)


def source_is_reused(scene: Scene) -> None:
    """A copy that no fence stops goes on when what it reads is another page's by now."""
    chain = stored(scene)
    target = copying(scene, chain)
    hurry(scene)
    scene.hold(FenceExtents)
    scene.world.pause(f"worker{target}")
    assert scene.removed(chain) == [True] * 4
    scene.run(ENDED)
    for number in range(10, 14):
        scene.stored(scene.chain(4, number))
    assert not set(chain) & sealed(scene, 1 - target)
    scene.world.resume(f"worker{target}")
    scene.run(4.0)
    scene.release()
    scene.run(4.0)
    assert not set(chain) & sealed(scene, target)


def test_a_copy_of_what_was_freed_and_reused_meanwhile_seals_nothing(two: Scene) -> None:
    source_is_reused(two)


def test_damage_at_the_source_is_not_copied_and_is_found(two: Scene) -> None:
    chain = stored(two, 2)
    source = two.worker(holder(two, chain)).mapped[f"worker{holder(two, chain)}-dram"]
    (record,) = [each for each in source.all_records() if each.key == chain.key(1)]
    source.flip_payload_bit(two.world.random, record)
    target = begin(two, chain)
    ended(two)
    assert two.world.counts[f"moved: {Outcome.CHECKSUM.name.lower()}"] == 1
    assert sealed(two, target) == {chain.key(0)}
    two.run(1.0)
    assert two.core.counters["pages_corrupt"] == 1
    assert two.probe(chain) == [True, False]


def test_a_copy_that_was_sealed_for_an_earlier_master_is_adopted(two: Scene) -> None:
    chain = stored(two)
    two.hold(Sealed, source="worker")
    target = begin(two, chain)
    two.run_until(lambda: set(chain) <= sealed(two, target))
    two.replace_master()
    two.lose_held()
    two.settle()
    assert two.core.counters["pages_adopted"] == 2 * len(chain)


def test_a_copy_that_an_earlier_master_has_asked_for_is_refused(two: Scene) -> None:
    chain = stored(two)
    two.hold(Ingest, source="master")
    target = begin(two, chain)
    two.run_until(lambda: bool(two.held_messages(Ingest)))
    two.take_over()
    two.release()
    two.run(2.0)
    assert not sealed(two, target)
    assert is_hit(two, chain)
