"""A real worker that verifies its tiers unasked: memory, a disk, and the device cpu."""

from __future__ import annotations

import errno
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import pytest

from kvstore.transfer.memory import zero_bytes
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import ExtentsConfirmed, FreeExtents, ReportDamage
from kvstore.wire.messages.puts import ExtentSource, Ingested
from tests.contract.worker_rig import OFFSETS, Rig, column, order, pool
from tests.devices import TamperedDevice
from tests.fake_disk import FakeDisk
from tests.unit import nvme_parts
from tests.unit.worker_scripts import PAGE, generation
from tests.unit.worker_segments import Pages
from workers.events import ExtentGroup, Scrubbed, ScrubExtents
from workers.scrubber import Scrubber

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.tiers.tier import Segment

LOW: Final = (5 * PAGE, 6 * PAGE, 8 * PAGE, 0)
SPOILT: Final = 1
"""Which of the pages is damaged."""
FAST: Final = 1 << 40
"""Bytes a second: a look at every tick."""
WAIT_S: Final = 20.0


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def rig(disk: FakeDisk) -> Iterator[Rig]:
    with pool(disk, TamperedDevice()) as made:
        fill(made)
        yield made


def fill(rig: Rig) -> None:
    """Four pages in each tier, of generation 5; on the disk they are copies."""
    with rig.client() as client:
        assert client.ingest(Pages(OFFSETS)) == Ingested(bytes(4))
        assert client.call(Pages(OFFSETS).ingest(rig.hbm)) == Ingested(bytes(4))
    generations = column([generation(5)] * 4)
    memory = rig.segment
    origin = ExtentSource(memory.id, memory.incarnation, column(list(OFFSETS)), generations)
    moved = rig.leader.command(Pages(LOW).ingest(rig.nvme, 5, origin))
    assert isinstance(moved, Ingested)
    assert moved.outcomes == bytes(4)


def spoil_memory(rig: Rig, disk: FakeDisk) -> tuple[Segment, int]:
    """A byte of a payload in memory changes: where."""
    del disk
    rig.segment.payload[OFFSETS[SPOILT] + 17] ^= 1
    return rig.segment, OFFSETS[SPOILT]


def spoil_record(rig: Rig, disk: FakeDisk) -> tuple[Segment, int]:
    """A byte of a record in memory changes."""
    del disk
    rig.segment.records.read(OFFSETS[SPOILT], PAGE)[20] ^= 1
    return rig.segment, OFFSETS[SPOILT]


def spoil_disk(rig: Rig, disk: FakeDisk) -> tuple[Segment, int]:
    """A bit on the disk changes."""
    disk.names[nvme_parts.PATH].flip(nvme_parts.payload_place(LOW[SPOILT]) * 8 + 99)
    return rig.nvme, LOW[SPOILT]


def spoil_device(rig: Rig, disk: FakeDisk) -> tuple[Segment, int]:
    """Bytes in the device's memory change."""
    del disk
    zero_bytes(rig.hbm.chunks[0].address + OFFSETS[SPOILT], 0xEE, 9)
    return rig.hbm, OFFSETS[SPOILT]


@pytest.mark.parametrize("spoil", [spoil_memory, spoil_record, spoil_disk, spoil_device])
def test_damage_that_nobody_has_read_is_told_to_the_leader(
    rig: Rig, disk: FakeDisk, spoil: Callable[[Rig, FakeDisk], tuple[Segment, int]]
) -> None:
    segment, offset = spoil(rig, disk)
    rig.state.rounds.bytes_per_s = FAST
    found = rig.leader.expect(ReportDamage)
    assert found == ReportDamage(
        segment.id, segment.incarnation, column([offset]), column([generation(5)])
    )


def test_what_the_leader_then_frees_is_told_no_more(rig: Rig, disk: FakeDisk) -> None:
    spoil_memory(rig, disk)
    rig.state.rounds.bytes_per_s = FAST
    rig.leader.expect(ReportDamage)
    freed = rig.leader.command(order(FreeExtents, rig, (OFFSETS[SPOILT],)))
    assert freed == ExtentsConfirmed(rig.leader.epoch, bytes(1))
    ended = rig.state.rounds.by_segment[rig.segment.id].ended
    while rig.state.rounds.by_segment[rig.segment.id].ended < ended + 3:
        rig.leader.beats.get(timeout=WAIT_S)
    assert not rig.state.rounds.damaged


def test_a_disk_that_fails_is_no_finding(rig: Rig, disk: FakeDisk) -> None:
    disk.read_error = errno.EIO
    rounds = rig.state.rounds.by_segment
    rig.state.rounds.bytes_per_s = FAST
    while rounds[rig.segment.id].ended < 3:
        rig.leader.beats.get(timeout=WAIT_S)
    assert rounds[rig.segment.id].extents >= 4
    assert (rounds[rig.nvme.id].extents, rounds[rig.nvme.id].damaged) == (0, 0)


def test_a_disk_that_hangs_holds_up_no_other_segment(rig: Rig, disk: FakeDisk) -> None:
    ended: SimpleQueue[Scrubbed] = SimpleQueue()
    scrubber = Scrubber(rig.service.segments, ended.put, rig.bugs.put)
    segments: tuple[Segment, ...] = (rig.nvme, rig.hbm, rig.segment)
    disk.answers.clear()
    try:
        for number, segment in enumerate(segments):
            offset = LOW[0] if segment is rig.nvme else OFFSETS[0]
            group = ExtentGroup(segment.id, PAGE, (nvme_parts.stretch(offset),))
            scrubber.begin(ScrubExtents(number, group))
        others = [ended.get(timeout=WAIT_S) for _ in range(2)]
        assert sorted(each.look for each in others) == [1, 2]
        assert ended.empty()
    finally:
        disk.answers.set()
    assert ended.get(timeout=WAIT_S) == Scrubbed(0, bytes(1))
    scrubber.close()


class Gate(threading.Event):
    """Tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def test_an_ending_worker_reads_no_more(rig: Rig, disk: FakeDisk) -> None:
    ended: SimpleQueue[Scrubbed] = SimpleQueue()
    scrubber = Scrubber({rig.nvme.id: rig.nvme}, ended.put, rig.bugs.put)
    gate = disk.answers = Gate()
    stretches = tuple(nvme_parts.stretch(each) for each in LOW[:2])
    scrubber.begin(ScrubExtents(1, ExtentGroup(rig.nvme.id, PAGE, stretches)))
    scrubber.begin(ScrubExtents(2, ExtentGroup(rig.nvme.id, PAGE, stretches)))
    assert gate.is_waited_for.wait(WAIT_S)
    closing = threading.Thread(target=scrubber.close)
    closing.start()
    while not scrubber.is_closing:
        pass
    gate.set()
    closing.join()
    assert ended.get(timeout=WAIT_S) == Scrubbed(1, bytes((Outcome.OK, Outcome.TRANSPORT)))
    assert ended.empty()
