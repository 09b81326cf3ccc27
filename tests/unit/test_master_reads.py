"""Lookups, probes, leases: what is found, in which form, and what it keeps in place."""

from __future__ import annotations

import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES, NO_PARENT
from kvstore.namespace import opaque
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.namespaces import OpenNamespace
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans
from kvstore.wire.messages.reads import (
    GiveBackLease,
    LeaseRenewed,
    ListObjects,
    Located,
    LocatedCopy,
    Lookup,
    MatchPrefix,
    ObjectsListed,
    Probe,
    RenewLease,
)
from master.packed import split_keys, words
from master.run import LEASES_MAX
from master.sharded import SHARD_FROM_ENTRIES, ShardedDict
from tests.unit.master_rig import TENANT, OpenedNamespace, Rig, chain, failure

KEYS = chain(1, 8)


def key(page: int) -> bytes:
    """Key of one page of KEYS."""
    return KEYS[page * KEY_BYTES : (page + 1) * KEY_BYTES]


def upto(page: int) -> bytes:
    """Keys of the pages of KEYS before this one."""
    return KEYS[: page * KEY_BYTES]


def stretches(found: Located) -> list[tuple[int, int]]:
    """(first, count) of each run in an answer."""
    return [(run.first, run.count) for run in found.runs]


def lookup(space: OpenedNamespace, keys: bytes, *, lease: bool = True) -> Located:
    """Look pages up."""
    reply = space.rig.ask(space.rig.engine, Lookup(space.id, keys, (), lease))
    assert isinstance(reply, Located), reply
    return reply


def lease_end(space: OpenedNamespace, page: bytes) -> float:
    """Until when the page's run is leased."""
    run = space.rig.master.core.namespaces.get(space.id).tree.get(page)
    assert run is not None
    return run.leased_until_s


def test_a_match_says_where_the_pages_are(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.put(KEYS)
    found = space.match(KEYS + chain(2, 2))
    assert stretches(found) == [(0, 8)]
    (copy,) = found.runs[0].copies
    assert isinstance(copy, LocatedCopy)
    assert (copy.part, copy.part_bytes) == (0, 4096)
    assert copy.offsets == plans.spans[0].offsets
    assert set(words(copy.generations)) == {plans.spans[0].generation}
    assert list(words(copy.checksums)) == [
        int.from_bytes(key(page)[:8], "little") for page in range(8)
    ]
    assert found.segments[copy.segment] == rig.master.core.segments["w1-dram"].ref
    assert found.lease_ttl_s == limits.LEASE_TTL_S


def test_a_match_leases_matched_pages_only(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    assert stretches(space.match(upto(5))) == [(0, 5)]
    until_s = rig.now + limits.LEASE_TTL_S + limits.LEASE_MARGIN_S
    assert lease_end(space, key(4)) == until_s
    assert lease_end(space, key(5)) == 0.0
    assert stretches(space.match(KEYS, lease=False)) == [(0, 5), (5, 3)]


def test_a_match_in_the_middle_starts_there(space: OpenedNamespace) -> None:
    space.put(KEYS)
    found = space.match(KEYS[3 * KEY_BYTES : 6 * KEY_BYTES])
    assert stretches(found) == [(0, 3)]
    assert words(found.runs[0].copies[0].offsets)[0] == 3 * 4096


def test_without_lease_nothing_is_promised_but_only_matched_pages_are_used(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    rig.pass_time(100.0)
    found = space.match(upto(5), lease=False)
    assert (stretches(found), found.lease_ttl_s) == ([(0, 5)], 0.0)
    assert lease_end(space, key(0)) == 0.0
    tree = rig.master.core.namespaces.get(space.id).tree
    used, rest = tree.get(key(4)), tree.get(key(5))
    assert used is not None
    assert rest is not None
    assert used.expires_s == pytest.approx(rest.expires_s + 100.0)


def test_a_match_stops_at_a_hole_and_a_lookup_does_not(space: OpenedNamespace) -> None:
    space.put(KEYS)
    space.remove(key(3))
    assert stretches(space.match(KEYS)) == [(0, 3)]
    assert stretches(lookup(space, KEYS)) == [(0, 3), (4, 4)]
    assert space.probe(KEYS) == b"\1\1\1\0\1\1\1\1"


def test_a_lookup_takes_pages_in_any_order(space: OpenedNamespace) -> None:
    space.put(KEYS)
    other = chain(2, 3)
    space.put(other)
    asked = key(6) + other[:KEY_BYTES] + chain(3, 1) + key(0) + key(1) + key(0)
    found = lookup(space, asked)
    assert stretches(found) == [(0, 1), (1, 1), (3, 2), (5, 1)]
    assert list(words(found.runs[2].copies[0].offsets)) == [0, 4096]


def test_a_page_needs_all_its_parts(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    space.put(KEYS, parts=(0,))
    assert space.match(KEYS).runs == ()
    space.put(upto(5), parts=(1,))
    found = space.match(KEYS)
    assert stretches(found) == [(0, 5)]
    assert [copy.part for copy in found.runs[0].copies] == [0, 1]


def test_only_the_parts_asked_for_are_listed(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    space.put(KEYS, parts=(0, 1))
    reply = rig.ask(rig.engine, MatchPrefix(space.id, KEYS, (1,)))
    assert isinstance(reply, Located)
    assert [copy.part for copy in reply.runs[0].copies] == [1]


def test_runs_are_cut_where_copies_differ(rig: Rig, space: OpenedNamespace) -> None:
    rig.add_worker("w2", chunks=16)
    keys = chain(4, 250)
    space.put(keys)  # fills w1 but for six pages
    space.put(chain(5, 12))
    found = space.match(chain(5, 12))
    listed = [
        (run.first, run.count, [found.segments[c.segment].segment for c in run.copies])
        for run in found.runs
    ]
    assert sum(count for _, count, _ in listed) == 12
    assert {tuple(names) for _, _, names in listed} <= {("w1-dram",), ("w2-dram",)}
    for run in found.runs:
        for copy in run.copies:
            assert all(words(copy.generations))


def test_two_copies_are_both_listed(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.workers["w1"].leave()
    rig.pass_time(4.0)
    rig.add_worker("w2")
    space.put(KEYS)
    rig.workers["w1"].join()
    rig.settle()
    found = space.match(KEYS)
    assert stretches(found) == [(0, 8)]
    names = {found.segments[copy.segment].segment for copy in found.runs[0].copies}
    assert names == {"w1-dram", "w2-dram"}


@pytest.mark.parametrize("away", ["leave", "lose"])
def test_a_worker_that_is_away_is_read_until_it_is_lost(
    rig: Rig, space: OpenedNamespace, away: str
) -> None:
    space.put(KEYS)
    rig.workers["w1"].leave()
    rig.pass_time(4.0 if away == "lose" else 1.0)
    assert space.probe(KEYS) == (bytes(8) if away == "lose" else b"\1" * 8)


def test_a_joining_worker_is_not_read(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.workers["w1"].connect()
    assert space.match(KEYS).runs == ()


def test_probe_touches_nothing(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    run = rig.master.core.namespaces.get(space.id).tree.get(key(0))
    assert run is not None
    before = run.heat, run.touches, run.expires_s, run.leased_until_s
    rig.pass_time(11.0)
    assert space.probe(KEYS) == b"\1" * 8
    assert (run.heat, run.touches, run.expires_s, run.leased_until_s) == before


def test_a_lease_is_renewed_while_the_generation_lasts(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    generations = space.match(KEYS).runs[0].copies[0].generations
    rig.tick(1.0)
    reply = rig.ask(rig.engine, RenewLease(space.id, KEYS, generations))
    assert reply == LeaseRenewed(limits.LEASE_TTL_S, b"\1" * 8)
    assert lease_end(space, key(7)) == rig.now + limits.LEASE_TTL_S + limits.LEASE_MARGIN_S
    stale = generations[:24] + bytes(8) + generations[32:]
    reply = rig.ask(rig.engine, RenewLease(space.id, KEYS, stale))
    assert reply == LeaseRenewed(limits.LEASE_TTL_S, b"\1\1\1\0\1\1\1\1")
    space.remove(key(0))
    reply = rig.ask(rig.engine, RenewLease(space.id, KEYS + chain(9, 1), generations + bytes(8)))
    assert reply == LeaseRenewed(limits.LEASE_TTL_S, b"\0\1\1\1\1\1\1\1\0")


def test_a_lease_on_what_cannot_be_read_is_not_renewed(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    generations = space.match(KEYS).runs[0].copies[0].generations
    rig.workers["w1"].connect()
    reply = rig.ask(rig.engine, RenewLease(space.id, KEYS, generations))
    assert reply == LeaseRenewed(limits.LEASE_TTL_S, bytes(8))


def test_a_renewed_lease_is_never_longer_than_one(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    generations = space.match(KEYS).runs[0].copies[0].generations
    for _ in range(5):
        rig.ask(rig.engine, RenewLease(space.id, KEYS, generations))
    assert lease_end(space, key(0)) == rig.now + limits.LEASE_TTL_S + limits.LEASE_MARGIN_S


def promised(space: OpenedNamespace, keys: bytes, number: int) -> None:
    """Lease the pages of a match under a number."""
    rig = space.rig
    assert isinstance(rig.ask(rig.engine, MatchPrefix(space.id, keys, lease_id=number)), Located)


def give_back(space: OpenedNamespace, keys: bytes, number: int) -> None:
    """Give what was leased under the number back."""
    rig = space.rig
    assert rig.ask(rig.engine, GiveBackLease(space.id, keys, number)) == Done()


def test_a_lease_that_is_given_back_ends_at_once(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    promised(space, KEYS, 1)
    assert lease_end(space, key(0)) > rig.now
    give_back(space, KEYS, 2)
    assert lease_end(space, key(0)) > rig.now
    give_back(space, KEYS, 1)
    assert lease_end(space, key(0)) == 0.0
    give_back(space, KEYS + chain(9, 1), 1)
    assert lease_end(space, key(0)) == 0.0


def test_leases_of_others_outlive_one_that_is_given_back(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    other = rig.open("engine", "tenant", "another")
    assert isinstance(rig.ask(other, MatchPrefix(space.id, KEYS, lease_id=1)), Located)
    others_end_s = lease_end(space, key(0))
    rig.tick(1.0)
    promised(space, KEYS, 1)
    rig.tick(1.0)
    promised(space, upto(5), 2)  # a run that is divided is leased as a whole before
    for keys, ends_s in ((KEYS[5 * KEY_BYTES :], others_end_s), (upto(5), others_end_s + 2.0)):
        give_back(space, KEYS, 1)
        assert lease_end(space, keys[:KEY_BYTES]) == ends_s
    give_back(space, KEYS, 2)
    assert lease_end(space, key(0)) == others_end_s


@pytest.mark.parametrize("lookup_first", [True, False])
def test_a_lease_without_number_lapses(
    rig: Rig, space: OpenedNamespace, lookup_first: bool
) -> None:
    space.put(KEYS)
    for number in (0, 1) if lookup_first else (1, 0):
        promised(space, KEYS, number)
    ends_s = lease_end(space, key(0))
    for number in (0, 1):
        give_back(space, KEYS, number)
    assert lease_end(space, key(0)) == ends_s


def test_of_too_many_leases_the_oldest_lapse(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    ends_s = []
    for number in range(1, LEASES_MAX + 2):
        promised(space, KEYS, number)
        ends_s.append(lease_end(space, key(0)))
        rig.tick(0.25)
    for number in range(1, LEASES_MAX + 2):
        give_back(space, KEYS, number)
    assert lease_end(space, key(0)) == ends_s[0]


@pytest.mark.parametrize("message", [MatchPrefix, Lookup, Probe])
def test_bad_keys_are_refused(
    rig: Rig, space: OpenedNamespace, message: type[MatchPrefix | Lookup | Probe]
) -> None:
    assert failure(rig.ask(rig.engine, message(space.id, b"x" * 31))).code == "bad_value"
    too_many = bytes((limits.BATCH_PAGES_MAX + 1) * KEY_BYTES)
    assert failure(rig.ask(rig.engine, message(space.id, too_many))).code == "bad_value"
    assert failure(rig.ask(rig.engine, message(bytes(32), KEYS))).code == "unknown_namespace"
    stranger = rig.open("engine", "another", "e")
    assert failure(rig.ask(stranger, message(space.id, KEYS))).code == "access_denied"


def test_generations_must_be_as_many_as_keys(rig: Rig, space: OpenedNamespace) -> None:
    reply = failure(rig.ask(rig.engine, RenewLease(space.id, KEYS, bytes(8))))
    assert "generations" in reply.text


def test_no_keys_are_no_pages(space: OpenedNamespace) -> None:
    assert space.match(b"").runs == ()
    assert space.probe(b"") == b""


def test_use_slides_the_ttl_up_to_the_maximum_age(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS, ttl_s=100.0)
    run = rig.master.core.namespaces.get(space.id).tree.get(key(0))
    assert run is not None
    assert run.expires_s == rig.now + 100.0
    rig.pass_time(50.0, step_s=2.0)
    space.match(KEYS, lease=False)
    assert run.expires_s == rig.now + 100.0
    run.created_s = rig.now - limits.PAGE_AGE_MAX_S + 1.0
    rig.pass_time(20.0, step_s=2.0)
    space.match(KEYS, lease=False)
    assert run.expires_s == rig.now + 80.0


def test_keys_of_another_namespace_are_misses(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    other = rig.open_namespace(parts=2)
    assert other.probe(KEYS) == bytes(8)
    assert lookup(other, KEYS).runs == ()


def test_objects_are_listed_in_the_order_of_their_keys(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = opaque(TENANT, "objects")
    rig.ask(rig.engine, OpenNamespace(named.content, named.layout))
    keys = [chain(seed, 1) for seed in range(6)]
    put = BeginPut(bytes(16), named.id, (PutChain(NO_PARENT, b"".join(keys)),), (0,), (5000,), 5.0)
    assert isinstance(rig.ask(rig.engine, put), PutPlans)
    monkeypatch.setattr(limits, "BATCH_PAGES_MAX", 4)
    first = rig.ask(rig.engine, ListObjects(named.id))
    assert isinstance(first, ObjectsListed)
    second = rig.ask(rig.engine, ListObjects(named.id, first.keys[-KEY_BYTES:]))
    assert isinstance(second, ObjectsListed)
    assert split_keys(first.keys) == sorted(keys)[:4]
    assert split_keys(second.keys) == sorted(keys)[4:]
    assert rig.ask(rig.engine, ListObjects(named.id, max(keys))) == ObjectsListed(b"")
    layered = rig.ask(rig.engine, ListObjects(space.id))
    assert "want an opaque one" in failure(layered).text


def test_listing_a_large_namespace_looks_at_one_shard_after_the_other() -> None:
    index: ShardedDict[int] = ShardedDict()
    keys = sorted(chain(seed, 1) for seed in range(SHARD_FROM_ENTRIES + 2))
    index.put_all(list(reversed(keys)), 1)
    assert len(index.shards) > 1
    assert index.after(b"", 5) == keys[:5]
    assert index.after(keys[4], len(keys)) == keys[5:]
    assert index.after(keys[-1], 5) == []
