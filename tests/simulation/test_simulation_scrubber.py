"""Damage to pages that nobody reads: found by their worker, told to whoever leads, dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client.outcomes import Hit, Stored
from kvstore.wire.messages.membership import ReportDamage
from tests.simulation.options import CHUNK_BYTES
from tests.simulation.pages import WHOLE

if TYPE_CHECKING:
    from kvstore.record import Record
    from tests.simulation.conftest import MakeScene
    from tests.simulation.scene import Scene

PACE = CHUNK_BYTES
"""A round a second, where there is one chunk."""
PAGES = 3
BAD = 1


@pytest.fixture
def scene(make_scene: MakeScene) -> Scene:
    """One worker that verifies its segment, with three pages in it."""
    made = make_scene(clients=1, scrub_bytes_per_s=PACE)
    made.stored(made.chain(PAGES))
    return made


def record_of(scene: Scene, segment: str, page: int) -> Record:
    """The record of a page where it was sealed."""
    memory = scene.checks.memories[segment]
    key = scene.chain(PAGES).key(page)
    (found,) = (each for each in memory.all_records() if each.key == key)
    return found


def spoil(scene: Scene, segment: str = "worker0-dram") -> None:
    """A bit of a page's payload turns over."""
    memory = scene.checks.memories[segment]
    memory.flip_payload_bit(scene.world.random, record_of(scene, segment, BAD))


def readable(scene: Scene) -> list[bool]:
    """Which pages are there, by a question that is no use of them."""
    return scene.probe(scene.chain(PAGES), namespace=WHOLE)


def test_damage_that_nobody_reads_is_dropped_and_the_page_can_be_put_again(scene: Scene) -> None:
    spoil(scene)
    scene.run_until(lambda: scene.core.counters["pages_corrupt"] == 1, 5.0)
    assert readable(scene) == [True, False, True]
    assert scene.core.counters["suspects_reported"] == 0
    scene.run_until(lambda: not scene.worker_core().rounds.damaged, 15.0)
    assert scene.stored(scene.chain(PAGES))[BAD] == Stored()
    assert scene.read_all(scene.chain(PAGES)) == [Hit()] * PAGES


def test_a_damaged_record_is_found_too(scene: Scene) -> None:
    memory = scene.checks.memories["worker0-dram"]
    memory.flip_record_bit(scene.world.random, record_of(scene, "worker0-dram", BAD))
    scene.run_until(lambda: scene.core.counters["pages_corrupt"] == 1, 5.0)
    assert readable(scene) == [True, False, True]


def test_the_next_leader_is_told_what_the_last_one_did_not_hear(scene: Scene) -> None:
    scene.hold(ReportDamage)
    spoil(scene)
    scene.run_until(lambda: bool(scene.held_messages(ReportDamage)), 5.0)
    scene.replace_master()
    scene.lose_held()
    scene.settle()
    scene.run_until(lambda: scene.core.counters["pages_corrupt"] == 1, 1.0)
    assert readable(scene) == [True, False, True]


def test_the_next_leader_is_told_what_the_last_one_heard_and_had_not_freed(scene: Scene) -> None:
    scene.match(scene.chain(PAGES))  # whoever has this lease may read on
    spoil(scene)
    scene.run_until(lambda: scene.core.counters["pages_corrupt"] == 1, 5.0)
    scene.take_over()
    scene.run_until(lambda: scene.core.counters["pages_corrupt"] == 1, 1.0)
    assert readable(scene) == [True, False, True]


def test_what_rots_on_a_disk_is_found(make_scene: MakeScene) -> None:
    scene = make_scene(
        clients=1, disks=1, segments=0, disk_chunks=1, scrub_bytes_per_s=PACE, lease_ttl_s=1.0
    )
    scene.stored(scene.chain(PAGES))
    spoil(scene, "worker0-nvme")
    scene.run_until(lambda: scene.core.counters["pages_corrupt"] == 1, 5.0)
    assert readable(scene) == [True, False, True]
