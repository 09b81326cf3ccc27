"""Which threads carry actions out: one disk that hangs holds up no other."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, cast

import pytest

from kvstore.codec import Codec
from kvstore.ids import SegmentId
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer.choice import Choice
from kvstore.wire.messages.common import Outcome
from tests.fake_disk import FakeDisk
from tests.fakes import ManualClock
from tests.unit import nvme_parts
from tests.unit.worker_scripts import GEOMETRY, PAGE
from workers import events
from workers.mover import MoverThreads
from workers.service import Service
from workers.tiers.nvme import open_nvme

if TYPE_CHECKING:
    from workers.report_line import ReportLine
    from workers.state import WorkerState

    Work = events.WriteFree | events.WriteRemoved | events.VerifyPayloads

HUNG, OTHER = 0, 1
WAIT_S: Final = 20.0


class Wanting:
    """In the place of the state machine: wants the same of an extent of each disk, in order."""

    def __init__(self, kind: type[Work], segments: list[str]) -> None:
        self.wanted: list[Work] = [
            kind(work, events.ExtentGroup(segment, PAGE, (nvme_parts.stretch(0),)))
            for work, segment in enumerate(segments)
        ]
        self.ended: SimpleQueue[events.WorkEnded] = SimpleQueue()

    def handle(self, event: events.Event, _now_s: float) -> list[Work]:
        if not isinstance(event, events.WorkEnded):
            return self.wanted
        self.ended.put(event)
        return []


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (events.WriteFree, Outcome.OK),
        (events.WriteRemoved, Outcome.OK),
        (events.VerifyPayloads, Outcome.CHECKSUM),
    ],
)
def test_a_disk_that_hangs_holds_up_no_other(kind: type[Work], outcome: Outcome) -> None:
    clock = ManualClock()
    disks = [FakeDisk(), FakeDisk()]
    segments = [
        open_nvme(
            nvme_parts.PATH, nvme_parts.CLUSTER, SegmentId(f"w-nvme{number}"), GEOMETRY,
            codec=Codec.NONE, clock=clock, disk=disk,
        )[0]
        for number, disk in enumerate(disks)
    ]  # fmt: skip
    wanting = Wanting(kind, [segment.id for segment in segments])
    state, line = cast("WorkerState", wanting), cast("ReportLine", None)
    peers = Choice(("tcp",), lambda: Identity(Role.WORKER), clock)
    service = Service(state, segments, clock, line, peers=peers, threads=MoverThreads(1, 1))
    disks[HUNG].answers.clear()
    try:
        service.dispatch(events.Tick())
        assert wanting.ended.get(timeout=WAIT_S) == events.WorkEnded(OTHER, bytes((outcome,)))
        assert wanting.ended.empty()
    finally:
        disks[HUNG].answers.set()
    assert wanting.ended.get(timeout=WAIT_S) == events.WorkEnded(HUNG, bytes((outcome,)))
    service.close()
    for segment in segments:
        segment.close()
