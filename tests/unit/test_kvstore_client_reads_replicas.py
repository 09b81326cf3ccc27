"""Which replica a read tries first, and where else it may be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore.client.locations import Query, match_steps
from kvstore.client.outcomes import Hit
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.steps import drive
from kvstore.wire.messages.common import Outcome, SegmentRef
from kvstore.wire.messages.reads import LocatedCopy, LocatedRun
from kvstore.wire.messages.stripes import Shard, StripedPage
from tests.unit.client_scripts import copy, located, segment
from tests.unit.read_pools import SIZE, SPACE, Pool, rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.outcomes import ReadOutcome


class Ties:
    """Three replicas of every page, two of them of one rank, and who is told to be first."""

    def __init__(self, pages: int) -> None:
        self.pool = pool = Pool(pages, far=True)
        pool.segments = [segment("near", "tcp"), segment("far", "tcp"), segment("best", "shm")]
        self.orders: list[list[str]] = []
        best = [(1 << 19) + i * SIZE for i in range(pages)]
        pool.script.store("best", pool.chain, best, SIZE)
        copies = (*pool.run.copies, copy(pool.chain, best, SIZE, 2))
        pool.run = LocatedRun(0, pages, copies)

    def order(self, alike: Sequence[SegmentRef]) -> list[int]:
        """The last one first."""
        self.orders.append([each.segment for each in alike])
        return list(range(len(alike)))[::-1]

    def read(self) -> list[ReadOutcome]:
        pool, script = self.pool, self.pool.script
        match = pool.match()
        request = ReadRequest(match, 0, pool.places, script.clock.now_s() + 10.0)
        return drive(read_steps(request, script.clock, rank, self.order), script)

    def tried(self) -> list[str]:
        return [span.segment.segment for span in self.pool.script.spans_read]


def test_replicas_of_one_rank_are_tried_in_the_order_of_who_measured_them() -> None:
    ties = Ties(1)
    for where in ("best", "near"):
        ties.pool.spoil(where, 0, Outcome.TRANSPORT)
    ties.pool.script.transport.spoil["best", 1 << 19] = [Outcome.TRANSPORT]
    assert ties.read() == [Hit()]
    assert ties.orders == [["far", "near"]]  # the master's order
    assert ties.tried() == ["best", "near", "far"]


def test_one_order_holds_for_all_pages_that_lie_alike() -> None:
    ties = Ties(4)
    first, rest = ties.pool.run.copies[0], ties.pool.run.copies
    assert first.segment == 1
    runs = [LocatedRun(at, 2, tuple(_cut(each, at) for each in rest)) for at in (0, 2)]
    ties.pool.run = runs[0]
    ties.pool.script.will(located(ties.pool.segments, *runs))
    query = Query(SPACE, ties.pool.chain, ties.pool.script.clock.now_s() + 10)
    match = drive(match_steps(query, ties.pool.script.clock), ties.pool.script)
    request = ReadRequest(match, 0, ties.pool.places, ties.pool.script.clock.now_s() + 10.0)
    steps = read_steps(request, ties.pool.script.clock, rank, ties.order)
    assert drive(steps, ties.pool.script) == [Hit()] * 4
    assert len(ties.orders) == 1


def test_a_single_replica_asks_for_no_order() -> None:
    ties = Ties(1)
    ties.pool.run = LocatedRun(0, 1, ties.pool.run.copies[:1])
    assert ties.read() == [Hit()]
    assert ties.orders == []


def _cut(replica: LocatedCopy, at: int) -> LocatedCopy:
    """Pages [at, at + 2) of a replica."""
    span = slice(at * 8, (at + 2) * 8)
    return msgspec.structs.replace(
        replica, offsets=replica.offsets[span], generations=replica.generations[span],
        checksums=replica.checksums[span],
    )  # fmt: skip


def test_who_hedges_is_told_where_else_each_page_lies() -> None:
    ties = Ties(2)
    pool, script = ties.pool, ties.pool.script
    pool.segments[1] = msgspec.structs.replace(pool.segments[1], worker="worker-best")
    pool.spoil("far", 0, Outcome.TRANSPORT)
    script.transport.spoil["best", 1 << 19] = [Outcome.TRANSPORT]
    request = ReadRequest(
        pool.match(), 0, pool.places, script.clock.now_s() + 10.0, is_hedged=True
    )  # fmt: skip
    assert drive(read_steps(request, script.clock, rank), script) == [Hit()] * 2
    others = [other and (other.segment.segment, other.places) for other in script.others]
    # "far" is of the worker of "best", and after "near" nothing is left but that.
    assert ties.tried() == ["best", "far", "near"]
    assert others == [("near", pool.places), ("near", pool.places[:1]), None]


def test_pages_that_are_to_be_decoded_are_no_replica_to_hedge_by() -> None:
    pool = Pool(1, far=True)
    far, near = pool.run.copies
    shards = (Shard(0, 0, 0, bytes(32), 0, 1, 0),)
    striped = msgspec.structs.replace(far, stripes=(StripedPage(1, 1, 1, shards),))
    pool.run = LocatedRun(0, 1, (near, striped))
    script = pool.script
    request = ReadRequest(
        pool.match(), 0, pool.places, script.clock.now_s() + 10.0, is_hedged=True
    )  # fmt: skip
    assert drive(read_steps(request, script.clock, rank), script) == [Hit()]
    assert script.others == [None]


def test_who_does_not_hedge_is_told_nothing() -> None:
    pool = Pool(2, far=True)
    assert pool.read(pool.match()) == [Hit()] * 2
    assert pool.script.others == []
