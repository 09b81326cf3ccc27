"""The client's plan for pages that nobody holds: decoded from others, after every replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client.locations import Query, match_steps
from kvstore.client.outcomes import Hit, Miss, MissReason
from kvstore.client.performer import HostMover
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.steps import drive
from kvstore.errors import MalformedMessage
from kvstore.transfer.memory import Memory
from kvstore.transfer.transport import all_of
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.reads import LocatedCopy, LocatedRun, ReportSuspect
from kvstore.wire.messages.stripes import Shard, StripedPage
from tests.unit.client_scripts import Script, copy, located, opened, segment, u64
from tests.unit.stripe_shards import PART_BYTES, Stripes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.locations import Match
    from kvstore.client.outcomes import ReadOutcome
    from kvstore.transfer.choice import Choice
    from kvstore.transfer.transport import ReadSpan

SIZE = 4096
SPACE = opened()
SEGMENTS = [segment("near", "shm"), segment("far", "tcp")]


def striped(number: int = 0, *, shards: tuple[int, ...] = (1, 2), segment: int = 1) -> StripedPage:
    """A page of a stripe of 2+1."""
    found = (Shard(n, segment, 0, bytes([n]) * 32, 0, 5, 6) for n in shards)
    return StripedPage(2, 1, number, tuple(found))


def decoded(pages: int, *stripes: StripedPage) -> LocatedCopy:
    """How pages are located that nobody holds."""
    zeros = u64([0] * pages)
    return LocatedCopy(0, 0, SIZE, zeros, u64([9] * pages), zeros, stripes)


class Degraded(Script):
    """Reads by transports as ever; what is decoded ends as it is told to."""

    ends_with = Outcome.OK

    def read(
        self,
        spans: Sequence[ReadSpan],
        timeout_s: float,
        others: Sequence[ReadSpan | None] = (),
    ) -> list[bytes]:
        del others
        self.spans_read += spans
        return [
            all_of(self.ends_with, len(span))
            if span.stripes
            else self.transport.read(span, self.memory, timeout_s)
            for span in spans
        ]


def rank(ref: SegmentRef) -> int | None:
    return 0 if ref.segment == "near" else 10


class Pool:
    """Three pages, of which nobody holds the second."""

    def __init__(self, *stripes: StripedPage) -> None:
        self.script = Degraded()
        self.chain = SPACE.chain(range(12))
        self.places = (0, SIZE, 2 * SIZE)
        self.script.store("near", self.chain, list(self.places), SIZE)
        self.runs = [
            LocatedRun(0, 1, (copy(self.chain.slice(0, 1), [0], SIZE, 0),)),
            LocatedRun(1, 1, (decoded(1, *(stripes or (striped(),))),)),
            LocatedRun(2, 1, (copy(self.chain.slice(2, 3), [2 * SIZE], SIZE, 0),)),
        ]

    def match(self) -> Match:
        query = Query(SPACE, self.chain, self.script.clock.now_s() + 10)
        self.script.will(located(SEGMENTS, *self.runs))
        return drive(match_steps(query, self.script.clock), self.script)

    def read(self, *, views: bool = False) -> list[ReadOutcome]:
        deadline_s = self.script.clock.now_s() + 10.0
        request = ReadRequest(self.match(), 0, self.places, deadline_s, needs_lease=views)
        return drive(read_steps(request, self.script.clock, rank), self.script)


def test_a_page_that_nobody_holds_is_read_from_its_stripe() -> None:
    pool = Pool()
    assert pool.read() == [Hit()] * 3
    (span,) = (each for each in pool.script.spans_read if each.stripes)
    assert (span.stripes, span.places, len(span)) == ((striped(),), (SIZE,), 1)
    assert span.segments == tuple(SEGMENTS)


def test_it_is_a_hit_of_the_match() -> None:
    assert Pool().match().pages == 3


@pytest.mark.parametrize("outcome", [Outcome.TRANSPORT, Outcome.CHECKSUM])
def test_what_cannot_be_decoded_is_a_miss_and_nobody_is_suspected(outcome: Outcome) -> None:
    pool = Pool()
    pool.script.ends_with = outcome
    assert pool.read() == [Hit(), Miss(MissReason(outcome.name.lower())), Hit()]
    assert pool.script.asked_of(ReportSuspect) == []
    assert len([span for span in pool.script.spans_read if span.stripes]) == 1, "tried once"


def test_views_of_it_are_misses() -> None:
    """Of places that are mapped: what is decoded lies nowhere."""
    pool = Pool()
    pool.runs = pool.runs[1:2]
    request = ReadRequest(pool.match(), 0, (0, SIZE), 1e9, needs_lease=True)
    far_only = drive(read_steps(request, pool.script.clock, lambda _: None), pool.script)
    assert far_only[1] == Miss(MissReason.UNREACHABLE)


@pytest.mark.parametrize("stripes", [
    (striped(), striped()),
    (striped(number=1),),
    (striped(number=3),),
    (striped(shards=(1, 1)),),
    (striped(segment=2),),
    (StripedPage(0, 1, 0, ()),),
    (StripedPage(30, 3, 0, ()),),
    (StripedPage(2, 1, 0, (Shard(1, 0, 0, b"short", 0, 5, 6),)),),
])  # fmt: skip
def test_a_stripe_that_makes_no_sense_is_malformed(stripes: tuple[StripedPage, ...]) -> None:
    with pytest.raises(MalformedMessage, match="LocatedCopy: "):
        Pool(*stripes).match()


class Ways:
    """In the place of a choice of transports, all of which are one."""

    def __init__(self, stripes: Stripes) -> None:
        self.read = stripes.read
        self.rank = stripes.rank


def test_the_mover_reads_shards_by_the_ways_that_it_has() -> None:
    stripes = Stripes(2, 1, 2)
    into = Memory.of("into", bytearray(4 * PART_BYTES), writable=True)
    choice: Choice = Ways(stripes)  # type: ignore[assignment]  # as far as shards need one
    span = stripes.span(1, (0, PART_BYTES))
    assert HostMover(choice, into).read([span], 9.0) == [bytes(2)]
    assert into.view[:PART_BYTES] == stripes.payload(0, 1)
    assert into.view[PART_BYTES : 2 * PART_BYTES] == stripes.payload(1, 1)
