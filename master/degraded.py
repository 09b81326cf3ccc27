"""Pages that nobody holds and a stripe still gives: how they stay in the directory, and are found.

For the directory such a page has one more copy, in a place that is no segment: with the stripe's
number for a generation, so that leases, matches and copies work as for any page. It comes when the
last copy is lost, and goes with the first that is there again, with the stripe, or when too few
shards are left. See the step table "stripe" in ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore.errors import InvariantBroken
from kvstore.wire.messages.puts import StripeSource
from kvstore.wire.messages.stripes import Shard, StripedPage
from master import replica_counts
from master.packed import WORD, split_keys, word, words
from master.run import Copy, Run
from master.segments import Segment
from master.stripes import Member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.common import SegmentRef
    from master.core import Core
    from master.moves import Move
    from master.stripes import Stripe


class Standing(msgspec.Struct, eq=False):
    """How a member of a stripe stands in the directory."""

    member: Member
    run: Run | None = None
    """The one that has its page, if any has."""
    page: int = 0
    copies: tuple[Copy, ...] = ()
    """Those that can be read, fastest first."""
    is_decoded: bool = False
    """Only its stripe gives it."""
    is_there: bool = False
    """Its page is in the pool, though perhaps it cannot be read just now."""


def stand(core: Core, member: Member) -> Standing:
    """Look one up."""
    known = core.namespaces.by_ordinal(member.namespace)
    run = None if known is None else known.tree.get(member.key)
    if run is None:
        return Standing(member)
    page, place = run.page_of(member.key), core.stripes.place
    at = slice(page * WORD, (page + 1) * WORD)
    checksum = word(member.checksum)
    found = [
        copy
        for copy in run.copies_of(member.part)
        if copy.generation(page) and copy.checksums[at] == checksum
    ]
    readable = tuple(c for c in found if c.segment.readable and c.segment is not place)
    is_decoded = any(copy.segment is place for copy in found)
    return Standing(member, run, page, readable, is_decoded, bool(found))


def standings(core: Core, stripe: Stripe) -> list[Standing]:
    """All members of a stripe."""
    return [stand(core, member) for member in stripe.members]


def lost(core: Core, run: Run, copy: Copy, page: int) -> None:
    """This copy of a page is gone by a loss: if it was the last one, its stripe has to do."""
    stripe = core.stripes.find(run.namespace, copy.part, run.key(page))
    if stripe is None:
        return
    stripe.rebuild_at_s = core.now + core.tunables.repair_after_s
    core.stripes.want(stripe, core.now)
    if any(other.generation(page) for other in run.copies_of(copy.part)):
        return
    member = stripe.members[stripe.number_of(run.key(page), copy.part, run.namespace)]
    was_it = copy.checksums[page * WORD : (page + 1) * WORD] == word(member.checksum)
    alive = sum(bool(each.copies) for each in standings(core, stripe))
    if was_it and alive >= stripe.k:
        core.counters["pages_degraded"] += 1
        hang(core, run, page, stripe, member)


def hang(core: Core, run: Run, page: int, stripe: Stripe, member: Member) -> None:
    """Have a page, which nobody holds, found by its stripe."""
    columns = word(0), word(stripe.number), word(member.checksum)
    run.fill(page, Copy(member.part, core.stripes.place, stripe.part_bytes, *columns, absent=0))


def found(core: Core, run: Run, part: int, first: int, count: int) -> None:
    """Some copy of these pages is there now: no stripe is needed for them any more."""
    for copy in run.copies_of(part):
        if copy.segment is core.stripes.place:
            for page in range(first, first + count):
                stripe = core.stripes.by_number.get(copy.generation(page))
                if stripe is not None:
                    core.stripes.want(stripe, core.now)
            run.clear(copy, first, count)
            return


def let_go(core: Core, standing: Standing) -> None:
    """A page that only its stripe gave is found no more."""
    run = standing.run
    assert run is not None, standing.member
    for copy in run.copies_of(standing.member.part):
        if copy.segment is core.stripes.place:
            run.clear(copy, standing.page)


def located(
    core: Core, run: Run, copy: Copy, pages: range, indexes: dict[Segment, int], until_s: float
) -> tuple[StripedPage, ...]:
    """What these pages of a run, which nobody holds, are decoded from, leased until `until_s`."""
    core.counters["pages_located_degraded"] += len(pages)
    return tuple(_striped(core, run, copy, page, indexes, until_s) for page in pages)


def _striped(
    core: Core, run: Run, copy: Copy, page: int, indexes: dict[Segment, int], until_s: float
) -> StripedPage:
    stripe = core.stripes.by_number[copy.generation(page)]
    number = stripe.number_of(run.key(page), copy.part, run.namespace)
    shards = []
    for other, standing in enumerate(standings(core, stripe)):
        if other != number and standing.copies and standing.run is not None:
            _lease(standing.run, until_s)
            shards.append(shard(other, standing, standing.copies[0], indexes))
    return StripedPage(stripe.k, stripe.m, number, tuple(shards))


def shard(number: int, standing: Standing, copy: Copy, indexes: dict[Segment, int]) -> Shard:
    """This copy of a member, as messages name it."""
    member, page = standing.member, standing.page
    index = indexes.setdefault(copy.segment, len(indexes))
    generation = copy.generation(page)
    return Shard(
        number, index, member.part, member.key, copy.offset(page), generation, member.checksum
    )


def _lease(run: Run, until_s: float) -> None:
    """It stays where it is so long; that is no use of it."""
    run.lease(until_s)


def lease(core: Core, run: Run, pages: range, until_s: float) -> None:
    """Lease what these pages are decoded from, as far as they are."""
    for copy in run.copies:
        if copy.segment is core.stripes.place:
            for page in pages:
                stripe = core.stripes.by_number.get(copy.generation(page))
                for standing in standings(core, stripe) if stripe is not None else ():
                    lease_all(standing, until_s)


def lease_all(standing: Standing, until_s: float) -> None:
    """Keep it where it can be read, without its being used."""
    if standing.run is not None:
        _lease(standing.run, until_s)
    for copy in standing.copies:
        copy.segment.leased_until_s = max(copy.segment.leased_until_s, until_s)


def source(core: Core, move: Move) -> StripeSource:
    """From what a worker decodes the pages of a copy; leased as long as the copy may take (I35)."""
    plan, indexes = move.plan, dict[Segment, int]()
    tree, pages = core.tree(plan.namespace), []
    for key in split_keys(plan.keys):
        run = tree.get(key)
        assert run is not None, plan
        copy = next(c for c in run.copies_of(plan.part) if c.segment is move.source)
        page = run.page_of(key)
        pages.append(_striped(core, run, copy, page, indexes, move.leased_until_s))
    for segment in indexes:
        segment.leased_until_s = max(segment.leased_until_s, move.leased_until_s)
    return StripeSource(_refs(indexes), tuple(pages))


def _refs(indexes: dict[Segment, int]) -> tuple[SegmentRef, ...]:
    return tuple([segment.ref for segment in indexes])


def beside(core: Core, run: Run, part: int, pages: range) -> set[str]:
    """The domains in which other shards of the stripes of these pages lie."""
    domains: set[str] = set()
    if not core.stripes.has_part(run.namespace, part):
        return domains
    for page in pages:
        stripe = core.stripes.find(run.namespace, part, run.key(page))
        for standing in standings(core, stripe) if stripe is not None else ():
            if standing.member.key != run.key(page):
                domains |= _domains(core, standing)
    return domains


def _domains(core: Core, standing: Standing) -> set[str]:
    return {replica_counts.domain(core, copy.segment) for copy in standing.copies}


def check(core: Core, runs: Iterator[Run]) -> None:
    """Raise InvariantBroken where a page is to be decoded from what are no shards of it (I37)."""
    core.stripes.check()
    for run in runs:
        for copy in run.copies:
            if copy.segment is core.stripes.place:
                _check_copy(core, run, copy)


def _check_copy(core: Core, run: Run, copy: Copy) -> None:
    for page, (number, checksum) in enumerate(
        zip(words(copy.generations), words(copy.checksums), strict=True)
    ):
        if not number:
            continue
        stripe = core.stripes.find(run.namespace, copy.part, run.key(page))
        if stripe is None or stripe.number != number:
            raise InvariantBroken(f"I37: {run.key(page).hex()} is not of stripe {number:#x}")
        member = stripe.members[stripe.number_of(run.key(page), copy.part, run.namespace)]
        if member.checksum != checksum or stripe.part_bytes != copy.part_bytes:
            raise InvariantBroken(f"I37: stripe {number:#x} gives other bytes")
        others = (other for other in run.copies_of(copy.part) if other is not copy)
        if any(other.generation(page) for other in others):
            raise InvariantBroken(f"I37: {run.key(page).hex()} is decoded, and lies somewhere")
