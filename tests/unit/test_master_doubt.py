"""A master whose lease is in doubt: what it answers; nothing else happens until it knows."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from kvstore import limits
from kvstore.ids import Epoch
from kvstore.replica import ExtentState
from kvstore.wire.messages.membership import (
    FreeExtents,
    Heartbeat,
    HeartbeatNoted,
    InventoryEnd,
    RegisterWorker,
)
from kvstore.wire.messages.puts import BeginPut
from kvstore.wire.messages.reads import (
    GetStatus,
    Located,
    Lookup,
    MatchPrefix,
    Probe,
    Removed,
    Status,
)
from kvstore.wire.messages.tickets import GetTerm
from master.events import Prolonged
from master.segments import SegmentState
from master.state import HANDLERS, MasterState
from master.tunables import Tunables
from tests.unit.golden_vectors import message_examples
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message

KEYS: Final = chain(1, 8)
LEASE_S: Final = limits.LEASE_TTL_S + limits.LEASE_MARGIN_S
ANSWERED: Final = {MatchPrefix, Lookup, Probe, GetStatus, GetTerm}
EXAMPLES: Final = {type(each): each for each in message_examples().values()}


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace of one part, with KEYS in it."""
    made = rig.open_namespace()
    made.put(KEYS)
    return made


def doubt(rig: Rig) -> None:
    """Let the lease end a second ago."""
    rig.send(Prolonged(rig.now - 1.0))


def be_sure(rig: Rig) -> None:
    """The renewal came through after all."""
    rig.send(Prolonged(inf))
    rig.settle()


def beat(rig: Rig) -> Message | None:
    """A heartbeat of the worker."""
    session = rig.workers["w1"].session
    assert session is not None
    return rig.ask(session, Heartbeat("w1", 1, 0))


def traces(rig: Rig) -> list[object]:
    """All that a lookup could leave behind in the directory, and what waits."""
    core = rig.master.core
    runs = [run for known in core.namespaces for run in known.tree.all_runs()]
    kept = ("expires_s", "heat", "touches", "touched_s", "leased_until_s", "keys", "cold_hits")
    return [{name: getattr(run, name) for name in kept} for run in runs] + [core.wakeup.at_s]


def test_a_leader_is_sure_until_its_lease_may_end() -> None:
    rig = Rig()
    rig.master = MasterState(rig.tunables, Epoch(1), leads_until_s=rig.now + 1.0)
    rig.engine = rig.open("engine", "tenant", "e")
    rig.now += 0.999
    rig.open_namespace()
    rig.now += 0.001
    (known,) = rig.master.core.namespaces
    reply = rig.ask(rig.engine, MatchPrefix(known.namespace.id, KEYS))
    assert isinstance(reply, Located)
    assert failure(rig.ask(rig.engine, EXAMPLES[BeginPut])).code == "unavailable"


@pytest.mark.parametrize("question", [MatchPrefix, Lookup])
def test_lookups_are_answered_without_lease_and_without_a_trace(
    rig: Rig, space: OpenedNamespace, question: type[MatchPrefix | Lookup]
) -> None:
    asked = question(space.id, KEYS[: 32 * 5] + chain(2, 1))
    sure = rig.ask(rig.engine, msgspec.structs.replace(asked, lease=False))
    assert isinstance(sure, Located)
    doubt(rig)
    before = traces(rig)
    answered = rig.ask(rig.engine, asked)
    assert isinstance(answered, Located)
    assert (answered.epoch, answered.lease_ttl_s) == (1, 0.0)
    assert (answered.runs, answered.segments) == (sure.runs, sure.segments)
    assert [(run.first, run.count) for run in answered.runs] == [(0, 5)]
    assert space.probe(KEYS) == b"\1" * 8
    assert traces(rig) == before


def test_a_match_in_doubt_does_not_split_what_it_matches(rig: Rig, space: OpenedNamespace) -> None:
    doubt(rig)
    before = traces(rig)
    assert space.match(KEYS[: 32 * 3]).runs[0].count == 3
    assert traces(rig) == before


def test_lookups_are_refused_once_the_doubt_has_lasted(rig: Rig, space: OpenedNamespace) -> None:
    rig.send(Prolonged(rig.now - limits.STALE_READ_MAX_S + 0.001))
    assert space.match(KEYS).runs
    rig.send(Prolonged(rig.now - limits.STALE_READ_MAX_S))
    for question in (MatchPrefix(space.id, KEYS), Lookup(space.id, KEYS), Probe(space.id, KEYS)):
        refused = failure(rig.ask(rig.engine, question))
        assert (refused.code, "in doubt for 300.0 s" in refused.text) == ("unavailable", True)


def test_who_is_strict_is_refused_at_once() -> None:
    rig = Rig(Tunables(cluster="test", stale_read_max_s=0.0))
    rig.add_worker()
    space = rig.open_namespace()
    rig.send(Prolonged(rig.now))
    assert failure(rig.ask(rig.engine, MatchPrefix(space.id, KEYS))).code == "unavailable"


@pytest.mark.parametrize("kind", [k for k in HANDLERS if k not in ANSWERED])
def test_everything_else_is_refused(rig: Rig, kind: type[Message]) -> None:
    session = rig.workers["w1"].session
    assert session is not None
    doubt(rig)
    for asker in (rig.engine, session, rig.open("operator", "", "o")):
        assert failure(rig.ask(asker, EXAMPLES[kind])).code == "unavailable"


def test_the_pool_can_still_be_looked_at(rig: Rig, space: OpenedNamespace) -> None:
    doubt(rig)
    space.match(KEYS)
    seen = rig.ask(rig.engine, GetStatus())
    assert isinstance(seen, Status)
    assert (seen.pages, seen.counters["pages_located_in_doubt"]) == (8, 8)


def test_no_tick_is_wanted_and_none_does_anything(rig: Rig, space: OpenedNamespace) -> None:
    rig.send(Prolonged(rig.now + 1.0))
    before = traces(rig)
    rig.tick(600.0)
    assert traces(rig) == before
    assert rig.master.wakeup_s == inf
    be_sure(rig)
    assert rig.now < rig.master.wakeup_s < inf


def test_pages_do_not_expire_in_doubt(rig: Rig, space: OpenedNamespace) -> None:
    space.put(chain(2, 3), ttl_s=2.0)
    doubt(rig)
    rig.tick(10.0)
    assert space.probe(chain(2, 3)) == b"\1" * 3
    be_sure(rig)
    assert space.probe(chain(2, 3)) == bytes(3)


def test_what_is_due_to_be_freed_waits(rig: Rig, space: OpenedNamespace) -> None:
    space.match(KEYS)
    assert space.remove(KEYS) == b"\1" * 8
    rig.holds_commands = True
    doubt(rig)
    rig.tick(LEASE_S + 5.0)
    beat(rig)
    assert rig.commands == []
    be_sure(rig)
    assert [type(each.message) for each in rig.commands] == [FreeExtents]
    rig.holds_commands = False
    rig.obey_all()
    allocator = rig.master.core.segments["w1-dram"].allocator
    assert allocator.bytes_in[ExtentState.RETIRED] == 0


def test_what_a_worker_answers_in_doubt_counts(rig: Rig, space: OpenedNamespace) -> None:
    rig.holds_commands = True
    assert space.remove(KEYS) is None
    request = rig.last_request
    doubt(rig)
    rig.holds_commands = False
    rig.obey_all()
    # The records are REMOVED, whoever leads: so it may be said.
    assert rig.reply(rig.engine, request) == Removed(b"\1" * 8)
    be_sure(rig)
    space.put(KEYS)
    assert space.probe(KEYS) == b"\1" * 8


def test_what_a_lost_connection_makes_necessary_is_stored_later(
    rig: Rig, space: OpenedNamespace
) -> None:
    rig.holds_commands = rig.holds_persists = True
    assert space.remove(KEYS) is None
    request = rig.last_request
    rig.persists.clear()
    doubt(rig)
    session = rig.workers["w1"].session
    assert session is not None
    rig.close(session)
    assert rig.persists == []
    assert rig.reply(rig.engine, request) is None
    rig.send(Prolonged(inf))
    assert any(key.startswith("tombstones/") for p in rig.persists for key, _ in p.puts)
    rig.store_all()
    assert rig.reply(rig.engine, request) == Removed(b"\1" * 8)


def test_a_heartbeat_is_no_contact_but_shows_that_the_worker_lives(
    rig: Rig, space: OpenedNamespace
) -> None:
    doubt(rig)
    for _ in range(20):
        rig.now += limits.HEARTBEAT_INTERVAL_S
        assert failure(beat(rig)).code == "unavailable"
    be_sure(rig)
    assert rig.master.core.segments["w1-dram"].state is SegmentState.LIVE
    assert space.probe(KEYS) == b"\1" * 8
    assert beat(rig) == HeartbeatNoted(1, known=True)


def test_a_worker_that_could_not_register_in_doubt_has_the_time_to_afterwards(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(chain(2, 3), ttl_s=77.0)
    worker = rig.workers["w1"]
    doubt(rig)
    for _ in range(10):  # it has fenced itself, and comes back again and again
        rig.tick(2.0)
        worker.leave()
        worker.session = rig.open("worker", "", "w1")
        example = msgspec.structs.replace(EXAMPLES[RegisterWorker], worker="w1")
        assert failure(worker.ask(example)).code == "unavailable"
    be_sure(rig)
    assert space.probe(KEYS) == b"\1" * 8
    worker.leave()
    rig.tick(limits.WORKER_LOST_AFTER_S - 0.1)
    worker.connect()
    assert worker.offer().chunk_starts == ()  # nothing was forgotten meanwhile
    worker.ask(InventoryEnd(worker.segment, worker.incarnation))
    assert space.probe(KEYS) == b"\1" * 8
    assert rig.master.core.counters["pages_lost"] == 0
    found = rig.master.core.tree(1).stretches(chain(2, 3))
    assert {stretch.run.ttl_s for stretch in found} == {77.0}


def test_a_worker_that_stays_silent_after_the_doubt_is_lost(
    rig: Rig, space: OpenedNamespace
) -> None:
    doubt(rig)
    rig.tick(10 * limits.WORKER_LOST_AFTER_S)
    assert space.probe(KEYS) == b"\1" * 8
    be_sure(rig)
    rig.tick(limits.WORKER_LOST_AFTER_S - 0.1)
    assert space.probe(KEYS) == b"\1" * 8
    rig.tick(0.2)
    assert rig.master.core.segments["w1-dram"].state is SegmentState.LOST
    assert space.probe(KEYS) == bytes(8)


def test_a_worker_that_died_is_lost_however_often_the_lease_is_in_doubt(
    rig: Rig, space: OpenedNamespace
) -> None:
    rounds = 0
    while rig.master.core.segments["w1-dram"].state is SegmentState.LIVE:
        rig.send(Prolonged(rig.now + 0.5))
        rig.tick(0.49)
        rig.tick(1.0)  # in doubt
        rounds += 1
    assert rounds == limits.WORKER_LOST_AFTER_S / 0.5 + 1
    assert space.probe(KEYS) == bytes(8)


def test_a_put_that_waits_gets_its_plans_afterwards(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(chain(3, 2))
    other = rig.open("engine", "tenant", "other")
    assert space.begin(chain(3, 2), wait=True, session=other) is None
    waiting = rig.last_request
    doubt(rig)
    rig.close(rig.engine)  # the first writer dies
    assert rig.reply(other, waiting) is None
    be_sure(rig)
    answer = rig.reply(other, waiting)
    assert type(answer) is type(plans), answer


def test_orders_and_writes_that_arise_all_the_same_wait_in_their_order(rig: Rig) -> None:
    rig.holds_persists = True
    doubt(rig)
    first = rig.master.core.persist((("k", b"1"),))
    rig.tick()
    second = rig.master.core.persist((("k", b"2"),))
    rig.tick()
    assert rig.persists == []
    rig.send(Prolonged(inf))
    assert [each.write for each in rig.persists[:2]] == [first, second]
