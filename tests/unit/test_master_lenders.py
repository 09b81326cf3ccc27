"""Segments of workers that a new master has not heard of yet: durable, reached by removes."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.ids import KEY_BYTES
from kvstore.lease import inherited_release_s
from kvstore.wire.messages.membership import WorkerAccepted
from kvstore.wire.messages.puts import AbortPut
from master.lenders import PREFIX, Lenders
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig, chain

KEYS = chain(1, 4)
WORKER = PREFIX + "w1"


def reopened(rig: Rig, epoch: int, parts: int = 1) -> OpenedNamespace:
    """The namespace, at the next master."""
    rig.takeover(epoch)
    return rig.open_namespace(parts)


def test_a_worker_is_accepted_when_its_segments_are_durable() -> None:
    rig = Rig()
    worker = rig.add_worker(join=False)
    worker.session = rig.open("worker", "", "w1")
    rig.holds_persists = True
    with pytest.raises(AssertionError):
        worker.register()  # not answered yet
    request = rig.last_request
    rig.holds_persists = False
    rig.store_all()
    assert isinstance(rig.reply(worker.session, request), WorkerAccepted)
    assert WORKER in rig.store
    assert isinstance(worker.register(), WorkerAccepted)  # at once: nothing has changed


def test_a_page_removed_while_its_worker_is_unknown_does_not_return() -> None:
    rig = Rig()
    worker = rig.add_worker()
    rig.open_namespace().put(KEYS)
    space = reopened(rig, 2)
    assert space.remove(KEYS[:KEY_BYTES]) == b"\0"
    worker.join()
    assert space.probe(KEYS) == b"\0\1\1\1"
    rig.pass_time(inherited_release_s(1.0))
    assert not len(rig.master.core.tombstones)


def test_nor_does_one_removed_while_its_worker_is_lost() -> None:
    rig = Rig()
    worker = rig.add_worker()
    space = rig.open_namespace()
    space.put(KEYS)
    worker.leave()
    rig.pass_time(5.0)
    assert space.remove(KEYS[:KEY_BYTES]) == b"\0"
    worker.join()
    assert space.probe(KEYS) == b"\0\1\1\1"
    space.put(KEYS[:KEY_BYTES])  # put again, it is another generation's
    assert space.probe(KEYS) == b"\1" * 4


def test_nor_one_removed_while_a_failed_put_of_it_is_not_fenced_yet() -> None:
    rig = Rig()
    worker = rig.add_worker()
    space = rig.open_namespace()
    plans = space.plans(KEYS)
    space.write(plans, KEYS)  # sealed, and the report is lost
    rig.holds_commands = True
    rig.ask(rig.engine, AbortPut(tuple(span.generation for span in plans.spans)))
    assert space.remove(KEYS[:KEY_BYTES]) == b"\0"
    rig.holds_commands = False
    space = reopened(rig, 2)
    worker.join()
    assert space.probe(KEYS) == b"\0\1\1\1"


def test_nor_one_that_had_expired_and_is_not_freed_yet() -> None:
    rig = Rig()
    worker = rig.add_worker()
    space = rig.open_namespace()
    space.put(KEYS, ttl_s=1.0)
    rig.holds_commands = True
    rig.tick(2.0)
    assert space.probe(KEYS) == bytes(4)
    assert space.remove(KEYS[:KEY_BYTES]) == b"\0"
    rig.holds_commands = False
    space = reopened(rig, 2)
    worker.join()
    assert space.probe(KEYS) == b"\0\1\1\1"


def test_segments_that_stay_away_are_given_up() -> None:
    rig = Rig(Tunables(cluster="test", segment_forget_s=60.0))
    worker = rig.add_worker()
    rig.open_namespace().put(KEYS)
    space = reopened(rig, 2)
    rig.tick(59.0)
    assert rig.master.core.lenders.absent
    rig.tick(2.0)
    assert not rig.master.core.lenders.absent
    assert WORKER not in rig.store
    worker.join()
    assert space.probe(KEYS) == bytes(4)


def test_a_segment_that_another_worker_lends_now_is_not_given_up_for_the_first_one() -> None:
    rig = Rig()
    first, other = (rig.add_worker(name, join=False) for name in ("w2", "w1"))
    first.segment = "disk"
    first.join()
    space = rig.open_namespace()
    space.put(KEYS)
    first.leave()
    rig.pass_time(5.0)
    first.segment, other.segment = "empty", "disk"
    first.records, other.records = {}, first.records
    other.restart()
    other.join()
    assert (WORKER in rig.store, PREFIX + "w2" in rig.store) == (True, False)
    space = reopened(rig, 2)
    first.join()
    other.join()
    assert space.probe(KEYS) == b"\1" * 4


def test_a_segment_that_is_lent_no_more_is_given_up() -> None:
    rig = Rig()
    rig.add_worker()
    rig.store[WORKER] += b"\x03old"
    space = reopened(rig, 2)
    assert "old" in rig.master.core.lenders.absent
    rig.workers["w1"].join()
    assert not rig.master.core.lenders.absent
    assert b"old" not in rig.store[WORKER]
    assert space.remove(KEYS) == bytes(4)
    assert rig.master.core.tombstones.covers("old", KEYS[:KEY_BYTES], 1)


@pytest.mark.parametrize("value", [b"\x05abc", b"\x00", b"\x02\xff\xfe"])
def test_values_that_are_not_ours_stop_the_start(value: bytes) -> None:
    with pytest.raises(ConfigError):
        Lenders().restore(WORKER, value)
