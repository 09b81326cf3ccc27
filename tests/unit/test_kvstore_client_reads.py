"""The plans of lookups and reads, driven by a scripted master."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client.locations import Query, lookup_steps
from kvstore.client.outcomes import Hit, Miss, MissReason
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.steps import drive
from kvstore.errors import DeadlineExceeded, KVStoreError, NotLeader, Unavailable
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import (
    LeaseRenewed,
    LocatedCopy,
    LocatedRun,
    RenewLease,
    ReportSuspect,
)
from tests.unit.client_scripts import located, segment, u64
from tests.unit.read_pools import SIZE, SPACE, Pool, rank

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message


def test_a_match_is_read_in_one_span() -> None:
    pool = Pool(4)
    match = pool.match()
    assert match.pages == 4
    assert match.leased_until_s == pool.script.clock.now_s() + 9.5
    assert pool.read(match) == [Hit()] * 4
    pool.script.assert_holds(pool.chain, pool.places, SIZE)
    (span,) = pool.script.spans_read
    assert span.keys == pool.chain.packed
    assert pool.script.asked_of(RenewLease) == []


def test_the_best_replica_is_read_first() -> None:
    pool = Pool(3, far=True)
    assert pool.read(pool.match()) == [Hit()] * 3
    assert [span.segment.segment for span in pool.script.spans_read] == ["near"]


def test_fewer_places_read_fewer_pages() -> None:
    pool = Pool(4)
    pool.places = pool.places[:2]
    assert pool.read(pool.match()) == [Hit()] * 2


def test_bytes_that_differ_are_read_again() -> None:
    pool = Pool(3)
    pool.spoil("near", 1, Outcome.CHECKSUM)
    assert pool.read(pool.match()) == [Hit()] * 3
    again = pool.script.spans_read[1]
    assert (again.keys, again.places) == (pool.chain.key(1), pool.places[1:2])
    assert pool.script.asked_of(ReportSuspect) == []


def test_then_the_next_replica_is_read_and_the_suspect_reported() -> None:
    pool = Pool(3, far=True)
    pool.spoil("near", 1, Outcome.CHECKSUM, Outcome.CHECKSUM)
    match = pool.match()
    pool.script.will(Done())
    assert pool.read(match) == [Hit()] * 3
    assert [span.segment.segment for span in pool.script.spans_read] == ["near", "near", "far"]
    assert pool.script.asked_of(ReportSuspect) == [
        ReportSuspect(SPACE.namespace.id, pool.chain.key(1), 0, "near", 3, SIZE, SIZE + 1)
    ]


def test_then_it_is_a_miss() -> None:
    pool = Pool(3)
    pool.spoil("near", 2, Outcome.CHECKSUM, Outcome.CHECKSUM)
    match = pool.match()
    pool.script.will(Unavailable("the report is lost"))
    assert pool.read(match) == [Hit(), Hit(), Miss(MissReason.CHECKSUM)]
    pool.assert_wiped(2)


def test_suspects_are_reported_within_the_deadline() -> None:
    pool = Pool(3)
    for page in range(3):
        pool.spoil("near", page, Outcome.STALE)
    match = pool.match()

    def answer_late(message: Message) -> Message:
        assert isinstance(message, ReportSuspect)
        pool.script.clock.advance(2.0)
        return Done()

    pool.script.will(answer_late)
    assert pool.read(match, timeout_s=1.0) == [Miss(MissReason.STALE)] * 3
    assert len(pool.script.asked_of(ReportSuspect)) == 1


def test_without_a_lease_nothing_is_suspect() -> None:
    pool = Pool(1)
    pool.spoil("near", 0, Outcome.CHECKSUM, Outcome.CHECKSUM)
    assert pool.read(pool.match(lease=False)) == [Miss(MissReason.CHECKSUM)]
    assert pool.script.asked_of(ReportSuspect) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (Outcome.STALE, MissReason.STALE),
        (Outcome.MISSING, MissReason.STALE),
        (Outcome.BUSY, MissReason.BUSY),
        (Outcome.TRANSPORT, MissReason.TRANSPORT),
        (Outcome.FENCED, MissReason.STALE),
    ],
)
def test_other_failures_go_to_the_next_replica_at_once(code: Outcome, reason: MissReason) -> None:
    pool = Pool(2, far=True)
    pool.spoil("near", 0, code)
    match = pool.match()
    pool.script.will(Done())
    assert pool.read(match) == [Hit()] * 2
    pool = Pool(2)
    pool.spoil("near", 0, code)
    match = pool.match()
    pool.script.will(Done())
    assert pool.read(match) == [Miss(reason), Hit()]
    # Under a lease the record may not change: a page whose record did is a suspect.
    assert len(pool.script.asked_of(ReportSuspect)) == (code is Outcome.STALE)
    pool.assert_wiped(0)
    assert len(pool.script.spans_read) == 1


def test_pages_that_fail_alike_are_retried_together() -> None:
    pool = Pool(6, far=True)
    for page in (1, 2, 3):
        pool.spoil("near", page, Outcome.STALE)
    match = pool.match()
    pool.script.will(Done(), Done(), Done())
    assert pool.read(match) == [Hit()] * 6
    assert [len(span) for span in pool.script.spans_read] == [6, 3]


def test_a_lease_that_ends_during_the_copy_makes_misses_and_wipes() -> None:
    pool = Pool(2)
    match = pool.match()
    pool.script.read_takes_s = 9.5
    assert pool.read(match, timeout_s=60) == [Miss(MissReason.LEASE_ENDED)] * 2
    pool.assert_wiped(0)
    pool.assert_wiped(1)


def test_a_copy_that_ends_just_before_the_lease_is_a_hit() -> None:
    pool = Pool(2)
    match = pool.match()
    pool.script.read_takes_s = 9.49
    assert pool.read(match, timeout_s=60) == [Hit()] * 2


def test_without_lease_time_does_not_matter() -> None:
    pool = Pool(2)
    match = pool.match(lease=False)
    assert match.leased_until_s == 0
    pool.script.read_takes_s = 1000
    assert pool.read(match, timeout_s=2000) == [Hit()] * 2


def test_an_old_lease_is_renewed_before_reading() -> None:
    pool = Pool(3)
    match = pool.match()
    pool.script.clock.advance(100.0)
    pool.script.will(LeaseRenewed(10.0, b"\1\0\1"))
    assert pool.read(match) == [Hit(), Miss(MissReason.LEASE_ENDED), Hit()]
    (renewal,) = pool.script.asked_of(RenewLease)
    assert renewal == RenewLease(
        SPACE.namespace.id, pool.chain.packed, u64([1, SIZE + 1, 2 * SIZE + 1])
    )


def test_renewals_take_their_time_from_the_read() -> None:
    pool = Pool(2)
    match = pool.match()
    pool.script.clock.advance(100.0)

    def answer_late(message: Message) -> Message:
        assert isinstance(message, RenewLease)
        pool.script.clock.advance(1.5)
        return LeaseRenewed(10.0, b"\1\1")

    pool.script.will(answer_late)
    assert pool.read(match, timeout_s=1.0) == [Miss(MissReason.DEADLINE)] * 2
    assert pool.script.spans_read == []


def test_a_renewal_that_grants_nothing_makes_misses() -> None:
    pool = Pool(1)
    match = pool.match()
    pool.script.clock.advance(100.0)
    pool.script.will(LeaseRenewed(0.0, b"\1"))
    assert pool.read(match) == [Miss(MissReason.LEASE_ENDED)]


def test_without_a_lease_because_the_leader_is_in_doubt_pages_are_copied() -> None:
    pool = Pool(2)
    match = pool.match(ttl_s=0.0)
    assert match.leased_until_s == 0.0
    pool.script.clock.advance(100.0)
    pool.spoil("near", 1, Outcome.CHECKSUM, Outcome.CHECKSUM)
    assert pool.read(match) == [Hit(), Miss(MissReason.CHECKSUM)]
    pool.assert_wiped(1)
    assert pool.script.asked_of(RenewLease) == []
    assert pool.script.asked_of(ReportSuspect) == []  # it may have been reused


def test_what_needs_a_lease_is_a_miss_while_the_leader_is_in_doubt() -> None:
    pool = Pool(2)
    assert pool.view(pool.match(ttl_s=0.0)) == [Miss(MissReason.NO_LEASE)] * 2
    assert pool.script.spans_read == []
    assert pool.view(pool.match()) == [Hit()] * 2
    assert pool.view(pool.match(lease=False)) == [Hit()] * 2  # as its caller wants


@pytest.mark.parametrize("refusal", [Unavailable("in doubt"), NotLeader(), DeadlineExceeded("")])
def test_a_read_goes_on_while_its_lease_lasts_though_nobody_renews_it(
    monkeypatch: pytest.MonkeyPatch, refusal: KVStoreError
) -> None:
    monkeypatch.setattr("kvstore.client.reads.ROUND_BYTES_MAX", SIZE)
    pool = Pool(5)
    match = pool.match()
    pool.script.read_takes_s = 3.0
    pool.script.will(*[refusal] * 5)
    ended = Miss(MissReason.LEASE_ENDED)
    assert pool.read(match, timeout_s=60) == [Hit(), Hit(), Hit(), ended, ended]
    for page in (3, 4):
        pool.assert_wiped(page)
    assert len(pool.script.asked_of(RenewLease)) == 3


def test_a_renewal_never_takes_more_than_half_of_what_the_lease_has_left() -> None:
    pool = Pool(1)
    match = pool.match()
    pool.script.clock.advance(9.3)
    pool.script.will(Unavailable("in doubt"))
    assert pool.read(match, timeout_s=60) == [Hit()]
    assert pool.script.patience[-1] == pytest.approx(0.1)


def test_long_reads_renew_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.reads.ROUND_BYTES_MAX", 2 * SIZE)
    pool = Pool(5)
    match = pool.match()
    pool.script.read_takes_s = 4.0
    pool.script.will(LeaseRenewed(10.0, b"\1"))
    assert pool.read(match, timeout_s=60) == [Hit()] * 5
    assert [len(span) for span in pool.script.spans_read] == [2, 2, 1]
    (renewal,) = pool.script.asked_of(RenewLease)
    assert isinstance(renewal, RenewLease)
    assert renewal.keys == pool.chain.key(4)


def test_the_deadline_ends_a_read() -> None:
    pool = Pool(2)
    pool.spoil("near", 0, Outcome.CHECKSUM)
    match = pool.match()
    pool.script.read_takes_s = 2.0
    assert pool.read(match, timeout_s=1.0) == [Miss(MissReason.DEADLINE), Hit()]
    assert pool.read(match, timeout_s=0.0) == [Miss(MissReason.DEADLINE)] * 2


def test_segments_out_of_reach_are_misses() -> None:
    pool = Pool(2)
    pool.segments = [segment("near", "pigeon"), segment("far", "tcp")]
    assert pool.read(pool.match()) == [Miss(MissReason.UNREACHABLE)] * 2
    assert pool.script.spans_read == []


def test_a_lookup_reads_beyond_gaps() -> None:
    pool = Pool(5)
    run = pool.run.copies[0]
    pool.script.will(
        located(
            pool.segments,
            LocatedRun(0, 1, (LocatedCopy(0, 0, SIZE, run.offsets[:8], run.generations[:8],
                                          run.checksums[:8]),)),
            LocatedRun(3, 2, (LocatedCopy(0, 0, SIZE, run.offsets[24:], run.generations[24:],
                                          run.checksums[24:]),)),
        )
    )  # fmt: skip
    query = Query(SPACE, pool.chain, pool.script.clock.now_s() + 1)
    found = drive(lookup_steps(query, pool.script.clock), pool.script)
    assert found.hits == [True, False, False, True, True]
    assert found.pages == 5
    absent = Miss(MissReason.ABSENT)
    request = ReadRequest(found, 0, pool.places, pool.script.clock.now_s() + 10)
    outcomes = drive(read_steps(request, pool.script.clock, rank), pool.script)
    assert outcomes == [Hit(), absent, absent, Hit(), Hit()]


def test_another_part_is_not_located() -> None:
    pool = Pool(1)
    request = ReadRequest(pool.match(), 1, pool.places, pool.script.clock.now_s() + 10)
    outcomes = drive(read_steps(request, pool.script.clock, rank), pool.script)
    assert outcomes == [Miss(MissReason.UNREACHABLE)]
