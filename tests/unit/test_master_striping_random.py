"""A pool with stripes under whatever happens, from a seed: nothing contradicts itself, nothing that
was removed comes back, and once all has healed every stripe is whole and every page is found.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.membership import ReportDamage
from master import degraded
from master.packed import word
from tests.unit.master_rig import Rig, chain
from tests.unit.striped_pools import pool, stripes, tunables

if TYPE_CHECKING:
    from collections.abc import Iterable

SEEDS = range(12)
STEPS = 40
WORKERS = 6


class Story:
    """A pool, what was put into it and not removed, and one thing after the other."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        k, m = self.draw.choice([(2, 1), (2, 2), (3, 2), (4, 2)])
        replicas = self.draw.choice([1, 2])
        self.rig: Rig = pool(WORKERS, tunables(k, m, replicas=replicas))
        self.m = m
        self.pages: list[bytes] = []
        self.removed: list[bytes] = []
        self.epoch = 1
        self.serial = 10_000 + seed * 1000
        self.damaged: set[tuple[str, int, int]] = set()
        """Copies: segment, offset and generation."""

    def away(self) -> list[str]:
        """Workers that are not there."""
        return [name for name, worker in self.rig.workers.items() if worker.session is None]

    def step(self) -> str:
        """One thing; what it was."""
        kinds = [self.put, self.put, self.leave, self.come, self.come, self.remove, self.damage,
                 self.takeover, self.wait, self.wait]  # fmt: skip
        kind = self.draw.choice(kinds)
        kind()
        self.rig.settle()
        if kind == self.damage or self.away():  # with what was damaged more than parity stands for
            found = self.rig.open_namespace().probe(b"".join(self.pages))
            self.lose(key for key, is_there in zip(self.pages, found, strict=True) if not is_there)
        return kind.__name__

    def put(self) -> None:
        for _ in range(4):
            self.serial += 1
            key = chain(self.serial, 1)
            self.rig.open_namespace().put(key)
            self.pages.append(key)

    def leave(self) -> None:
        """Never more at once than parity stands for."""
        there = [name for name in self.rig.workers if name not in self.away()]
        if len(self.away()) < self.m and len(there) > 1:
            self.rig.workers[self.draw.choice(there)].leave()
            self.rig.pass_time(self.draw.choice([0.5, 4.0, 6.0]))

    def come(self) -> None:
        """In the same life, or in another with the same drive."""
        if self.away():
            worker = self.rig.workers[self.draw.choice(self.away())]
            if self.draw.random() < 0.5:
                worker.restart()
            worker.join()

    def remove(self) -> None:
        if self.pages:
            key = self.pages.pop(self.draw.randrange(len(self.pages)))
            self.rig.open_namespace().remove(key, timeout_s=1.0)
            self.rig.pass_time(1.5)
            self.removed.append(key)

    def damage(self) -> None:
        """A copy proves bad; its worker says so, and has freed it once it is told to."""
        name = self.draw.choice(list(self.rig.workers))
        worker = self.rig.workers[name]
        if worker.session is not None and worker.records and not self.away():
            offset = self.draw.choice(sorted(worker.records))
            generation = worker.records[offset].generation
            self.damaged.add((worker.segment, offset, generation))
            worker.ask(
                ReportDamage(worker.segment, worker.incarnation, word(offset), word(generation))
            )

    def lose(self, keys: Iterable[bytes]) -> None:
        """These pages need not be found any more, unless a worker has them, there or not."""
        held = {
            record.key
            for worker in self.rig.workers.values()
            for at, record in worker.records.items()
            if (worker.segment, at, record.generation) not in self.damaged
        }
        lost = set(keys) - held
        self.pages = [key for key in self.pages if key not in lost]

    def takeover(self) -> None:
        """What only a stripe gives is forgotten by the next master."""
        self.lose(self.pages)
        self.epoch += 1
        gone = self.away()
        self.rig.takeover(self.epoch)
        for name, worker in self.rig.workers.items():
            if name not in gone:
                worker.join()

    def wait(self) -> None:
        self.rig.pass_time(self.draw.choice([0.3, 2.0, 5.0]))

    def look(self) -> None:
        space = self.rig.open_namespace()
        for key in self.removed:
            assert space.probe(key) == b"\0", key.hex()

    def heal(self) -> None:
        for name in self.away():
            self.rig.workers[name].join()
        self.rig.checks = False
        self.rig.pass_time(60.0, step_s=0.5)
        self.rig.checks = True
        self.rig.master.check_invariants()


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_pages_are_found_and_removed_ones_are_not(seed: int) -> None:
    print("seed", seed)
    story = Story(seed)
    story.rig.checks = False
    for number in range(STEPS):
        what = story.step()
        story.rig.master.check_invariants()
        story.look()
        print(number, what)
    story.heal()
    story.look()
    assert story.pages, "not everything may be lost"
    assert story.rig.open_namespace().probe(b"".join(story.pages)) == b"\1" * len(story.pages)
    for stripe in stripes(story.rig):
        every = degraded.standings(story.rig.master.core, stripe)
        assert all(each.copies for each in every[stripe.k :]), "parity that lacks"
        assert not any(each.is_decoded for each in every), "a page that nobody rebuilt"
