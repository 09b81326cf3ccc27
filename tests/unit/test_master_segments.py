"""Segments of several tiers: which take puts, how their media are, what of them is adopted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.lease import inherited_release_s
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import RegisterWorker, ReportSegment, SegmentOffer
from kvstore.wire.messages.puts import PutPlans
from kvstore.wire.messages.reads import GetStatus, Status, TierStatus
from master.segments import REASON_CHARS_MAX, SegmentState
from master.tunables import Tunables
from tests.unit.master_pages import KEYS, refused
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain, failure

if TYPE_CHECKING:
    from tests.unit.master_worker import FakeWorker

GRACE_S = inherited_release_s(0.0) + 0.5
"""After it whatever an earlier master may have leased is free to go."""


@pytest.fixture
def rig() -> Rig:
    """A master, and a worker with memory and a larger drive."""
    made = Rig()
    made.add_worker(chunks=4, nvme_chunks=16)
    return made


def report(worker: FakeWorker, state: str, segment: str = "w1-dram", reason: str = "") -> None:
    """The worker says how a segment's medium is."""
    incarnation = worker.rig.segment(segment).incarnation
    assert worker.ask(ReportSegment(segment, incarnation, state, reason)) == Done()
    worker.rig.settle()


def shown(rig: Rig) -> tuple[str, str]:
    """What the status says of the segment's medium."""
    status = rig.ask(rig.engine, GetStatus())
    assert isinstance(status, Status)
    (segment,) = (each for each in status.segments if each.segment == "w1-dram")
    return segment.medium, segment.reason


def placed(plans: PutPlans) -> set[str]:
    """The segments that plans lie in."""
    return {plans.segments[span.segment].segment for span in plans.spans}


def test_puts_go_to_memory_however_much_a_drive_has_free(space: OpenedNamespace) -> None:
    assert placed(space.plans(KEYS)) == {"w1-dram"}
    plans = space.plans(chain(2, 64))
    assert placed(plans) == {"w1-dram"}
    assert refused(plans) == [(56, 8, Outcome.OUT_OF_SPACE)]


def test_puts_go_to_a_drive_where_there_is_no_memory() -> None:
    rig = Rig()
    worker = rig.add_worker(join=False)
    worker.tier = "nvme"
    worker.join()
    assert placed(rig.open_namespace().put(KEYS)) == {"w1-dram"}


@pytest.fixture
def above(rig: Rig) -> FakeWorker:
    """A worker with a segment on a device."""
    made = rig.add_worker("w2", chunks=4, join=False)
    made.tier = "hbm"
    made.join()
    return made


def wished(space: OpenedNamespace, keys: bytes, tier: str) -> PutPlans:
    reply = space.begin(keys, tier=tier)
    assert isinstance(reply, PutPlans), reply
    return reply


def test_pages_go_to_a_device_only_where_that_is_asked(
    space: OpenedNamespace, above: FakeWorker
) -> None:
    assert placed(space.plans(KEYS)) == {"w1-dram"}
    assert placed(wished(space, chain(2, 8), "hbm")) == {above.segment}
    assert placed(space.plans(chain(3, 8))) == {"w1-dram"}


def test_a_wish_without_room_is_no_reason_to_refuse(
    space: OpenedNamespace, above: FakeWorker
) -> None:
    plans = wished(space, chain(2, 70), "hbm")
    assert [plans.segments[span.segment].tier for span in plans.spans] == ["hbm", "dram"]
    assert sum(span.count for span in plans.spans) == 70
    above.leave()
    assert placed(wished(space, chain(3, 8), "hbm")) == {"w1-dram"}
    assert placed(wished(space, chain(4, 8), "nvme")) == {"w1-nvme"}


def test_a_wish_for_an_unknown_tier_is_refused(space: OpenedNamespace) -> None:
    reply = space.begin(KEYS, tier="tape")
    assert failure(reply).text == "tier: got 'tape', want one of hbm, dram, nvme"


def test_memory_that_is_away_is_memory_still(rig: Rig, space: OpenedNamespace) -> None:
    other = rig.add_worker("w2", join=False)
    other.tier = "nvme"
    other.join()
    rig.workers["w1"].leave()
    assert refused(space.plans(KEYS)) == [(0, 8, Outcome.OUT_OF_SPACE)]
    rig.pass_time(4.0)
    assert placed(space.plans(KEYS)) == {"w2-dram"}


def test_a_segment_that_is_read_only_is_read_and_not_filled(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    report(rig.workers["w1"], "read_only", reason="EROFS")
    assert space.probe(KEYS) == b"\1" * 8
    assert refused(space.plans(chain(2, 1))) == [(0, 1, Outcome.OUT_OF_SPACE)]
    assert shown(rig) == ("read_only", "EROFS")
    space.remove(KEYS[-32:])
    rig.pass_time(0.5)
    assert len(rig.segment("w1-dram").records) == 7, "it takes orders"
    report(rig.workers["w1"], "serving")
    assert shown(rig) == ("serving", "")
    assert placed(space.plans(chain(2, 1))) == {"w1-dram"}


def test_of_a_segment_that_failed_every_copy_is_a_miss(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    plans = space.plans(chain(2, 4))
    other = rig.add_worker("w2")
    report(rig.workers["w1"], "failed", reason="EIO while writing")
    segment = rig.master.core.segments["w1-dram"]
    assert (segment.state, segment.reason) == (SegmentState.LOST, "EIO while writing")
    assert space.probe(KEYS) == bytes(8)
    assert not rig.master.core.plans, plans
    assert rig.master.core.tree(1).pages == 0
    assert placed(space.put(KEYS)) == {other.segment}
    rig.pass_time(10.0)
    assert not rig.master.core.workers["w1"].lost, "its other segments serve"
    report(rig.workers["w1"], "failed", reason="EIO again")
    assert rig.master.core.counters["segments_failed"] == 1


def test_what_failed_serves_again_only_once_it_has_been_compared(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    worker = rig.workers["w1"]
    report(worker, "failed")
    reply = failure(worker.ask(ReportSegment("w1-dram", 1, "serving", "")))
    assert reply.code == "unavailable"
    assert "register again" in reply.text
    worker.restart()
    worker.join()
    assert space.probe(KEYS) == b"\1" * 8
    assert rig.master.core.segments["w1-dram"].takes_plans


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        (ReportSegment("w1-dram", 1, "fine", ""), "bad_value", "serving, read_only, failed"),
        (ReportSegment("w1-dram", 2, "failed", ""), "bad_value", "1, as registered"),
        (ReportSegment("other", 1, "failed", ""), "unavailable", "other is not registered"),
        (ReportSegment("w2-dram", 1, "failed", ""), "access_denied", "not of worker w1"),
    ],
)
def test_reports_that_cannot_be_right_are_refused(
    rig: Rig, message: ReportSegment, code: str, said: str
) -> None:
    rig.add_worker("w2")
    reply = failure(rig.workers["w1"].ask(message))
    assert reply.code == code
    assert said in reply.text
    assert failure(rig.ask(rig.engine, message)).code == "access_denied"


def test_a_reason_is_cut_to_its_bound(rig: Rig) -> None:
    report(rig.workers["w1"], "read_only", reason="x" * 10_000)
    assert len(rig.master.core.segments["w1-dram"].reason) == REASON_CHARS_MAX


def test_a_tier_that_nobody_knows_is_refused(rig: Rig) -> None:
    worker = rig.workers["w1"]
    offer = SegmentOffer("w1-tape", 1, "tape", worker.geometry)
    reply = failure(worker.ask(RegisterWorker("w1", "w1", (), (offer,))))
    assert "hbm, dram, nvme" in reply.text


def test_a_drive_under_the_name_of_memory_is_another_segment(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    worker = rig.workers["w1"]
    worker.leave()
    worker.tier = "nvme"
    worker.restart()
    worker.join()
    rig.settle()
    assert space.probe(KEYS) == bytes(8)


@pytest.mark.parametrize(
    ("tier", "size_class", "stored_bytes", "found"),
    [
        ("nvme", 4096, 4000, True),
        ("nvme", 4096, 4096, True),
        ("nvme", 4096, 0, False),
        ("nvme", 4096, 4097, False),
        ("nvme", 8192, 9000, False),
        ("dram", 4096, 4000, False),
    ],
)
def test_only_a_drive_may_hold_pages_in_less_than_their_length(
    tier: str, size_class: int, stored_bytes: int, *, found: bool
) -> None:
    rig = Rig()
    worker = rig.add_worker(join=False)
    worker.tier = tier
    worker.join()
    space = rig.open_namespace(heads=2)  # parts of 8 KiB
    keys = chain(1, 1)
    space.put(keys)
    (record,) = worker.records.values()
    assert record.state is RecordState.SEALED
    worker.records[0] = msgspec.structs.replace(
        record, size_class=size_class, stored_bytes=stored_bytes
    )
    rig.takeover(2)
    again = rig.open_namespace(heads=2)
    worker.join()
    assert again.probe(keys) == bytes([found])
    rig.pass_time(GRACE_S)
    assert bool(worker.records) == found


def test_the_status_adds_tiers_up() -> None:
    tunables = Tunables(
        watermark_demote=0.1, watermark_low=0.8, watermark_high=0.9, nvme_admission="all"
    )
    rig = Rig(tunables)
    rig.add_worker(chunks=1, nvme_chunks=4)
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(1.0)
    space.match(KEYS, lease=False)
    status = rig.ask(rig.engine, GetStatus())
    assert isinstance(status, Status)
    moved = 8 * 4096
    assert status.tiers == (
        TierStatus("dram", 1, CHUNK, moved, 8, 8, 0, 0, 0, 0),
        TierStatus("nvme", 1, 4 * CHUNK, moved, 8, 0, 0, 8, moved, moved),
    )
    report(rig.workers["w1"], "failed", "w1-nvme")
    status = rig.ask(rig.engine, GetStatus())
    assert isinstance(status, Status)
    assert [each.tier for each in status.tiers] == ["dram"], "what is lost holds nothing"
