"""The plans of lookups: batches, gaps, and answers that do not add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.client.locations import (
    Query,
    give_back_steps,
    hint_steps,
    lookup_steps,
    match_steps,
    object_steps,
    prefetch_steps,
    probe_steps,
    remove_steps,
)
from kvstore.client.steps import drive
from kvstore.errors import MalformedMessage
from kvstore.hints import Hints
from kvstore.ids import KEY_BYTES
from kvstore.page import PageChain
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import (
    GiveBackLease,
    GiveHints,
    ListObjects,
    LocatedCopy,
    LocatedRun,
    Lookup,
    MatchPrefix,
    ObjectsListed,
    Prefetch,
    Probe,
    Probed,
    Remove,
    Removed,
)
from tests.fakes import payload
from tests.unit.client_scripts import Script, located, opened, segment, u64

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message

SIZE = 4096
SPACE = opened()
COSTS = {"shm": 0, "tcp": 10}


def chain_of(pages: int) -> PageChain:
    return SPACE.chain(range(pages * 4))


def big_chain(batches: int) -> PageChain:
    return PageChain(payload(b"keys", 0, (batches * limits.BATCH_PAGES_MAX) * KEY_BYTES))


def test_a_match_stops_at_the_first_batch_with_a_gap() -> None:
    full = limits.BATCH_PAGES_MAX
    columns = u64([0] * full)
    whole = LocatedRun(0, full, (LocatedCopy(0, 0, SIZE, columns, columns, columns),))
    half = LocatedRun(0, 2, (LocatedCopy(0, 0, SIZE, columns[:16], columns[:16], columns[:16]),))
    script = Script().will(
        located([segment("near")], whole), located([segment("near")], half, ttl_s=4.0)
    )
    query = Query(SPACE, big_chain(4), script.clock.now_s() + 10)
    match = drive(match_steps(query, script.clock), script)
    assert match.pages == full + 2
    assert [piece.first for piece in match.pieces] == [0, full]
    assert match.leased_until_s == script.clock.now_s() + 3.5
    assert repr(match).startswith(f"Match({full + 2} of {4 * full} pages, PageChain(")
    assert [type(message) for message in script.asked] == [MatchPrefix, MatchPrefix]


def test_a_hint_is_told_of_every_page_once() -> None:
    chain, hints = big_chain(2), Hints(tool_call_s=20.0)
    script = Script().will(Done(), Done())
    query = Query(SPACE, chain, script.clock.now_s() + 10, lease=False, hints=hints)
    drive(hint_steps(query, script.clock), script)
    told = [each for each in script.asked if isinstance(each, GiveHints)]
    assert {each.hints for each in told} == {hints}
    assert b"".join(each.keys for each in told) == chain.packed


def test_a_prefetch_names_every_page_once() -> None:
    chain = big_chain(2)
    script = Script().will(Done(), Done())
    query = Query(SPACE, chain, script.clock.now_s() + 10)
    drive(prefetch_steps(query, script.clock, "hbm"), script)
    assert {each.tier for each in script.asked if isinstance(each, Prefetch)} == {"hbm"}
    assert (
        b"".join(each.keys for each in script.asked if isinstance(each, Prefetch)) == chain.packed
    )


def test_leases_are_given_back_under_the_number_that_they_were_taken_with() -> None:
    chain = big_chain(2)
    script = Script().will(located([]), located([]), located([]), Done(), Done())
    query = Query(SPACE, chain, script.clock.now_s() + 10, lease_id=7)
    drive(match_steps(query, script.clock), script)
    drive(lookup_steps(query, script.clock), script)
    drive(give_back_steps(query, script.clock), script)
    kinds = MatchPrefix | Lookup | GiveBackLease
    assert [each.lease_id for each in script.asked if isinstance(each, kinds)] == [7] * 5
    given = [each.keys for each in script.asked if isinstance(each, GiveBackLease)]
    assert b"".join(given) == chain.packed


def test_lookups_probes_and_removes_are_cut_into_batches() -> None:
    full = limits.BATCH_PAGES_MAX
    chain = big_chain(2)
    script = Script()
    query = Query(SPACE, chain, script.clock.now_s() + 10, parts=(0,), lease=False)
    script.will(located([]), located([]))
    assert drive(lookup_steps(query, script.clock), script).hits == [False] * (2 * full)
    script.will(Probed(b"\1" * full), Probed(bytes(full)))
    probed = drive(probe_steps(query, script.clock), script)
    assert probed == [True] * full + [False] * full
    script.will(Removed(bytes(full)), Removed(b"\1" * full))
    removed = drive(remove_steps(query, script.clock), script)
    assert removed == [False] * full + [True] * full
    kinds = [type(message) for message in script.asked]
    assert kinds == [Lookup, Lookup, Probe, Probe, Remove, Remove]
    assert script.asked[0] == Lookup(
        SPACE.namespace.id, chain.packed[: full * KEY_BYTES], (0,), lease=False
    )


def test_hints_ride_with_every_batch() -> None:
    chain, hints, script = big_chain(2), Hints(turn=2), Script()
    query = Query(SPACE, chain, script.clock.now_s() + 10, lease=False, hints=hints)
    script.will(located([]), located([]), located([]))
    drive(lookup_steps(query, script.clock), script)
    drive(match_steps(query, script.clock), script)
    for kind, count in ((Lookup, 2), (MatchPrefix, 1)):
        assert [m.hints for m in script.asked if isinstance(m, kind)] == [hints] * count


def test_no_keys_ask_nothing() -> None:
    script = Script()
    query = Query(SPACE, PageChain(b""), script.clock.now_s())
    assert drive(match_steps(query, script.clock), script).pages == 0
    assert drive(lookup_steps(query, script.clock), script).hits == []
    assert drive(probe_steps(query, script.clock), script) == []
    assert drive(remove_steps(query, script.clock), script) == []


ONE = u64([0])


@pytest.mark.parametrize(
    "answer",
    [
        Done(),
        located([], LocatedRun(0, 1, (LocatedCopy(0, 0, SIZE, ONE, ONE, ONE),))),
        located([segment("a")], LocatedRun(0, 3, ())),
        located([segment("a")], LocatedRun(-1, 1, ())),
        located([segment("a")], LocatedRun(0, 0, ())),
        located([segment("a")], LocatedRun(0, 1, (LocatedCopy(0, 0, SIZE, b"", ONE, ONE),))),
        located([segment("a")], LocatedRun(0, 1, (LocatedCopy(0, -1, SIZE, ONE, ONE, ONE),))),
        located([segment("a")], LocatedRun(0, 1, (LocatedCopy(0, 0, 0, ONE, ONE, ONE),))),
        located([segment("a")], LocatedRun(0, 1, (LocatedCopy(0, 0, 1 << 40, ONE, ONE, ONE),))),
    ],
)
def test_an_answer_that_does_not_add_up_is_malformed(answer: Message) -> None:
    script = Script().will(answer)
    query = Query(SPACE, chain_of(2), script.clock.now_s() + 10)
    with pytest.raises(MalformedMessage):
        drive(match_steps(query, script.clock), script)


def test_flags_must_match_the_question() -> None:
    script = Script().will(Probed(b"\1"))
    query = Query(SPACE, chain_of(2), script.clock.now_s() + 10)
    with pytest.raises(MalformedMessage):
        drive(probe_steps(query, script.clock), script)


def test_objects_are_listed_until_there_are_no_more() -> None:
    first, second = PageChain(b"".join([b"a" * 32, b"b" * 32])), PageChain(b"c" * 32)
    script = Script().will(*(ObjectsListed(keys) for keys in (first.packed, second.packed, b"")))
    assert drive(object_steps(SPACE, 1e9, script.clock), script) == [first, second]
    afters = [each.after for each in script.asked if isinstance(each, ListObjects)]
    assert afters == [b"", b"b" * 32, b"c" * 32]


def test_a_listing_that_begins_anew_is_no_answer() -> None:
    script = Script().will(ObjectsListed(b"b" * 32), ObjectsListed(b"a" * 32))
    with pytest.raises(MalformedMessage, match="listed before"):
        drive(object_steps(SPACE, 1e9, script.clock), script)
