"""Remove: when it is answered, what it leaves, and that nothing comes back."""

from __future__ import annotations

import math

import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.lease import inherited_release_s
from kvstore.record import RecordState
from kvstore.replica import ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import (
    ExtentsConfirmed,
    FreeExtents,
    InventoryEnd,
    RetireExtents,
)
from kvstore.wire.messages.reads import Remove, Removed
from master.events import CommandAnswered
from master.packed import words
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure

KEYS = chain(1, 8)
LEASE_S = limits.LEASE_TTL_S + limits.LEASE_MARGIN_S
GRACE_S = inherited_release_s(0.0)


def key(page: int) -> bytes:
    """Key of one page of KEYS."""
    return KEYS[page * KEY_BYTES : (page + 1) * KEY_BYTES]


def sealed_keys(rig: Rig, worker: str = "w1") -> set[bytes]:
    """Pages that a worker's records would offer."""
    records = rig.workers[worker].records.values()
    return {record.key for record in records if record.state is RecordState.SEALED}


def bytes_in(rig: Rig, state: ExtentState) -> int:
    """Bytes of the segment in this state."""
    return rig.master.core.segments["w1-dram"].allocator.bytes_in[state]


def test_a_remove_is_answered_when_the_holders_have_written_it(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    rig.holds_commands = True
    assert space.remove(KEYS) is None
    request = rig.last_request
    assert space.probe(KEYS) == bytes(8)
    (command,) = rig.commands
    assert isinstance(command.message, RetireExtents)
    rig.holds_commands = False
    rig.obey_all()
    assert rig.reply(rig.engine, request) == Removed(b"\1" * 8)
    rig.pass_time(0.5)
    assert bytes_in(rig, ExtentState.RETIRED) == bytes_in(rig, ExtentState.SEALED) == 0
    assert not rig.workers["w1"].records
    assert rig.master.core.namespaces.get(space.id).tree.pages == 0
    assert not rig.store.keys() & {"tombstones/w1-dram"}


def test_what_is_not_there_is_not_removed(space: OpenedNamespace) -> None:
    space.put(KEYS)
    assert space.remove(chain(2, 1) + key(7) + chain(3, 1)) == b"\0\1\0"
    assert space.remove(key(7)) == b"\0"


def test_leased_pages_vanish_at_once_and_are_freed_later(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    space.match(KEYS)
    assert space.remove(KEYS) == b"\1" * 8
    assert space.match(KEYS).runs == ()
    rig.pass_time(LEASE_S - 0.1)
    assert bytes_in(rig, ExtentState.RETIRED) == 8 * 4096
    assert {r.state for r in rig.workers["w1"].records.values()} == {RecordState.REMOVED}
    rig.pass_time(0.3)
    assert bytes_in(rig, ExtentState.RETIRED) == 0
    assert not rig.workers["w1"].records


def test_leases_on_removed_pages_outlive_a_reconnect(rig: Rig, space: OpenedNamespace) -> None:
    rig.pass_time(LEASE_S + 1.0)  # whatever an earlier master granted has ended
    space.put(KEYS)
    space.match(KEYS)
    assert space.remove(KEYS) == b"\1" * 8
    rig.workers["w1"].leave()
    rig.workers["w1"].join()
    rig.pass_time(LEASE_S - 0.5)
    assert len(rig.workers["w1"].records) == 8
    rig.pass_time(1.0)
    assert not rig.workers["w1"].records


def test_a_removed_page_can_be_put_again(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    space.match(KEYS)
    space.remove(KEYS)
    space.put(KEYS)
    assert space.probe(KEYS) == b"\1" * 8
    rig.pass_time(LEASE_S + 1.0)
    assert space.probe(KEYS) == b"\1" * 8


def test_a_middle_page_leaves_a_hole(space: OpenedNamespace) -> None:
    space.put(KEYS)
    space.remove(key(3))
    tree = space.rig.master.core.namespaces.get(space.id).tree
    assert tree.pages == 8
    space.remove(KEYS[4 * KEY_BYTES :])
    assert tree.pages == 3


def test_every_part_is_removed(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    space.put(KEYS, parts=(0, 1))
    assert space.remove(KEYS) == b"\1" * 8
    assert not sealed_keys(rig)


def test_a_holder_that_is_away_gets_a_tombstone(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.workers["w1"].leave()
    rig.holds_persists = True
    assert space.remove(key(6) + key(7)) is None
    request = rig.last_request
    (persist,) = rig.persists
    assert [name for name, _ in persist.puts] == ["tombstones/w1-dram"]
    rig.holds_persists = False
    rig.store_all()
    assert rig.reply(rig.engine, request) == Removed(b"\1\1")
    assert sealed_keys(rig) >= {key(6), key(7)}
    rig.workers["w1"].join()
    rig.pass_time(GRACE_S + 1.0)
    assert space.probe(KEYS) == b"\1" * 6 + b"\0\0"
    assert not sealed_keys(rig) & {key(6), key(7)}
    assert "tombstones/w1-dram" not in rig.store


def test_a_tombstone_outlives_the_master(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.workers["w1"].leave()
    space.remove(key(7))
    rig.takeover(2)
    again = rig.open_namespace()
    rig.workers["w1"].join()
    assert again.probe(KEYS) == b"\1" * 7 + b"\0"
    rig.pass_time(GRACE_S + 1.0)
    assert not sealed_keys(rig) & {key(7)}
    assert len(rig.master.core.tombstones) == 0
    assert "tombstones/w1-dram" not in rig.store


def test_a_later_put_is_untouched_by_the_tombstone(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.workers["w1"].leave()
    space.remove(KEYS)
    rig.add_worker("w2")
    space.put(KEYS)
    rig.workers["w1"].join()
    rig.pass_time(GRACE_S + 1.0)
    assert space.probe(KEYS) == b"\1" * 8
    assert sealed_keys(rig, "w2") == {key(page) for page in range(8)}
    assert not sealed_keys(rig)


def test_a_holder_that_goes_meanwhile_gets_a_tombstone(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.holds_commands = True
    assert space.remove(KEYS) is None
    request = rig.last_request
    rig.workers["w1"].leave()
    assert rig.reply(rig.engine, request) == Removed(b"\1" * 8)
    assert len(rig.master.core.tombstones) == 8
    rig.commands.clear()
    rig.holds_commands = False
    rig.workers["w1"].join()
    rig.pass_time(GRACE_S + 1.0)
    assert not sealed_keys(rig)
    assert len(rig.master.core.tombstones) == 0


def test_a_slow_holder_is_not_waited_for(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.holds_commands = True
    assert space.remove(KEYS, timeout_s=1.0) is None
    request = rig.last_request
    rig.pass_time(0.9)
    assert rig.reply(rig.engine, request) is None
    rig.pass_time(0.3)
    assert rig.reply(rig.engine, request) == Removed(b"\1" * 8)
    assert len(rig.master.core.tombstones) == 8
    rig.holds_commands = False
    rig.obey_all()
    rig.pass_time(1.0)
    assert len(rig.master.core.tombstones) == 0
    assert not rig.workers["w1"].records


@pytest.mark.parametrize("outcome", [Outcome.STALE, Outcome.FENCED, Outcome.BUSY])
def test_a_holder_that_refuses_gets_a_tombstone(
    rig: Rig, space: OpenedNamespace, outcome: Outcome
) -> None:
    space.put(KEYS)
    rig.holds_commands = True
    assert space.remove(KEYS) is None
    request = rig.last_request
    (command,) = rig.commands
    rig.commands.clear()
    rig.send(CommandAnswered(command.command, ExtentsConfirmed(1, bytes([outcome]) * 8)))
    assert rig.reply(rig.engine, request) == Removed(b"\1" * 8)
    assert len(rig.master.core.tombstones) == 8
    rig.holds_commands = False
    rig.pass_time(1.0)
    assert not rig.workers["w1"].records
    assert len(rig.master.core.tombstones) == 0


def test_a_holder_of_some_pages_removes_those(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    space.remove(key(2))
    assert space.remove(KEYS) == b"\1\1\0\1\1\1\1\1"
    assert rig.master.core.namespaces.get(space.id).tree.pages == 0


def test_an_open_put_of_the_page_is_stopped(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS[: 4 * KEY_BYTES])
    plans = space.plans(KEYS)
    reports = space.write(plans, KEYS)
    rig.holds_commands = True
    assert space.remove(key(5)) == b"\1"
    assert len(rig.master.core.tombstones) == 1
    assert b"\12" in space.report(reports)[0]  # PLAN_CLOSED for that page
    assert space.probe(KEYS) == b"\1\1\1\1\1\0\1\1"
    rig.holds_commands = False
    rig.obey_all()
    rig.settle()
    assert len(rig.master.core.tombstones) == 0
    assert not sealed_keys(rig) & {key(5)}


def test_a_stopped_put_does_not_come_back_with_another_master(
    rig: Rig, space: OpenedNamespace
) -> None:
    plans = space.plans(KEYS)
    space.write(plans, KEYS)
    rig.holds_commands = True
    assert space.remove(key(7)) == b"\1"
    rig.holds_commands = False
    rig.takeover(2)
    again = rig.open_namespace()
    rig.workers["w1"].join()
    assert again.probe(KEYS) == b"\1" * 7 + b"\0"


def test_a_repeated_remove_gives_the_first_ones_answer(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.holds_commands = True
    assert space.remove(KEYS) is None
    first = rig.last_request
    assert space.remove(KEYS) is None
    second = rig.last_request
    rig.holds_commands = False
    rig.obey_all()
    assert rig.reply(rig.engine, first) == rig.reply(rig.engine, second) == Removed(b"\1" * 8)
    assert len(rig.master.core.removals) == 0


def test_large_removes_are_done_in_steps(rig: Rig, space: OpenedNamespace) -> None:
    rig.add_worker("w2", chunks=64)
    keys = chain(1, 700)
    space.put(keys)
    assert space.remove(keys) is None
    request = rig.last_request
    assert rig.settled(rig.engine, rig.reply(rig.engine, request)) == Removed(b"\1" * 700)


def test_children_may_be_named_before_their_parents(space: OpenedNamespace) -> None:
    space.put(KEYS[: 4 * KEY_BYTES])
    branch = chain(2, 2)
    space.put(branch, parent=key(3))
    space.remove(key(2) + key(3))
    assert space.remove(branch + KEYS) == b"\1\1\1\1\0\0\0\0\0\0"
    assert space.rig.master.core.namespaces.get(space.id).tree.pages == 0


def test_the_bound_on_tombstones_refuses_removes(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TOMBSTONES_MAX", 7)
    space.put(KEYS)
    rig.workers["w1"].leave()
    reply = failure(rig.ask(rig.engine, Remove(space.id, KEYS, 1.0)))
    assert reply.code == "out_of_space"
    assert space.probe(KEYS) == b"\1" * 8
    assert space.remove(KEYS[: 7 * KEY_BYTES]) == b"\1" * 7


@pytest.mark.parametrize(
    ("keys", "timeout_s", "code"),
    [
        (b"x", 1.0, "bad_value"),
        (bytes(4097 * 32), 1.0, "bad_value"),
        (bytes(32), 1.0, "bad_value"),  # the root's
        (KEYS, -1.0, "bad_value"),
        (KEYS, math.nan, "bad_value"),
    ],
)
def test_bad_removes_are_refused(
    rig: Rig, space: OpenedNamespace, keys: bytes, timeout_s: float, code: str
) -> None:
    assert failure(rig.ask(rig.engine, Remove(space.id, keys, timeout_s))).code == code


def test_another_tenant_removes_nothing(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    stranger = rig.open("engine", "another", "e")
    assert failure(rig.ask(stranger, Remove(space.id, KEYS, 1.0))).code == "access_denied"
    assert space.probe(KEYS) == b"\1" * 8


def test_a_reader_with_a_lock_delays_the_freeing_only(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.put(KEYS)
    worker = rig.workers["w1"]
    worker.locked.update(words(plans.spans[0].offsets))
    assert space.remove(KEYS) == b"\1" * 8
    rig.pass_time(2.0)
    assert bytes_in(rig, ExtentState.RETIRED) == 8 * 4096
    worker.locked.clear()
    rig.pass_time(0.5)
    assert bytes_in(rig, ExtentState.RETIRED) == 0


def test_no_extent_is_freed_before_it_is_retired(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    rig.holds_commands = True
    space.remove(KEYS)
    rig.pass_time(3.0)
    assert not [c for c in rig.commands if isinstance(c.message, FreeExtents)]


def test_what_is_removed_during_an_inventory_is_freed_after_its_lease(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS)
    rig.pass_time(LEASE_S)  # older leases play no part
    worker = rig.workers["w1"]
    worker.leave()
    space.match(KEYS)
    worker.connect()
    wanted = worker.offer().chunk_starts
    assert space.remove(KEYS) == b"\1" * 8
    for start in wanted:
        worker.send_rows(start)
    worker.ask(InventoryEnd(worker.segment, worker.incarnation))
    rig.pass_time(LEASE_S - 0.5)
    assert bytes_in(rig, ExtentState.RETIRED) == 8 * 4096
    rig.pass_time(1.0)
    assert bytes_in(rig, ExtentState.RETIRED) == 0
