"""Each change of what a disk does is told once, and a look that lasts is not asked for again."""

from __future__ import annotations

import errno
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.fake_disk import FakeDisk
from tests.unit import nvme_parts
from workers.disk_watch import DiskWatch
from workers.events import MediumChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.guarded_threads import GuardedThreads
    from workers.tiers.nvme import NvmeSegment


class Later:
    """Runs what it was given when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[..., Any]]] = []

    def begin(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Keep a job."""
        future: Future[None] = Future()
        self.jobs.append((future, partial(work, *arguments)))
        return future

    def run(self) -> None:
        """Carry out what was kept."""
        for future, job in self.jobs:
            future.set_result(job())
        self.jobs.clear()


def watching(threads: dict[NvmeSegment, Later], tell: Callable[[MediumChanged], None]) -> DiskWatch:
    """A watch whose looks wait until they are told to run."""
    return DiskWatch(cast("dict[NvmeSegment, GuardedThreads]", threads), tell)


@pytest.mark.parametrize(
    ("spoil", "state"),
    [
        (lambda disk: setattr(disk, "read_error", errno.EIO), "failed"),
        (lambda disk: setattr(disk, "write_error", errno.EROFS), "read_only"),
        (lambda disk: disk.vanish(nvme_parts.PATH.parent), "read_only"),
    ],
)
def test_each_change_is_told_once(spoil: Callable[[FakeDisk], None], state: str) -> None:
    disk, executor, told = FakeDisk(), Later(), list[MediumChanged]()
    segment, _ = nvme_parts.opened(disk)
    watch = watching({segment: executor}, told.append)
    watch.look_soon()
    executor.run()
    assert told == []
    spoil(disk)
    segment.write(nvme_parts.parts_at(0))
    nvme_parts.read_back(segment, nvme_parts.parts_at(0))
    for _ in range(2):
        watch.look_soon()
        executor.run()
    assert [(each.segment, each.state) for each in told] == [(segment.id, state)]
    assert told[0].reason
    segment.close()


def test_a_look_that_lasts_is_not_asked_for_again_and_holds_up_no_other_disk() -> None:
    stuck, other, told = Later(), Later(), list[MediumChanged]()
    hung, _ = nvme_parts.opened(FakeDisk())
    disk = FakeDisk()
    good, _ = nvme_parts.opened(disk)
    watch = watching({hung: stuck, good: other}, told.append)
    for _ in range(3):
        watch.look_soon()
        assert (len(stuck.jobs), len(other.jobs)) == (1, 1)
        other.run()
    disk.vanish(nvme_parts.PATH.parent)
    watch.look_soon()
    other.run()
    assert [each.state for each in told] == ["read_only"]
    stuck.run()
    watch.look_soon()
    assert len(stuck.jobs) == 1
    hung.close()
    good.close()
