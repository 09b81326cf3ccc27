"""What operators ask about replicas and change: the report, a number, repair at once."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import GetStatus, ReplicaTotals, Status
from kvstore.wire.messages.replicas import GetReplicas, RepairNow, ReplicaReport, SetReplicas
from master import census, replica_requests
from master.tunables import Tunables
from master.victims import evict_copy
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import Rig, chain, failure
from tests.unit.replicated_pools import PAGES, got, rig_of, run_of

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message


def ask(rig: Rig, message: Message) -> Message:
    """The answer that an operator gets, in steps."""
    session = rig.open("operator", "", "operator")
    reply = rig.settled(session, rig.ask(session, message))
    assert reply is not None
    return reply


def report(rig: Rig) -> ReplicaReport:
    """How many replicas there are."""
    reply = ask(rig, GetReplicas())
    assert isinstance(reply, ReplicaReport), reply
    return reply


@pytest.fixture
def rig() -> Rig:
    """Three workers of three hosts."""
    return rig_of("w1", "w2", "w3")


def test_pages_are_counted_by_their_replicas(rig: Rig) -> None:
    rig.holds_moves = True
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.1)
    (row,) = report(rig).namespaces
    assert (row.namespace, row.tenant, row.replicas) == (space.id, "tenant", 0)
    assert (row.pages, row.by_got, row.by_wanted) == (8, (8,), (0, 8))
    assert (row.lacking, row.without_host, row.thinned) == (8, 0, 0)
    rig.holds_moves = False
    for move in rig.moves:
        rig.obey(move)
    (row,) = report(rig).namespaces
    assert (row.by_got, row.lacking) == ((0, 8), 0)


def test_what_lacks_hosts_and_what_was_thinned_out_is_told_apart(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    rig.master.core.namespaces.get(space.id).replicas = 4
    rig.pass_time(0.5)
    ask(rig, RepairNow(b""))
    rig.pass_time(3.0)
    (row,) = report(rig).namespaces
    assert (row.by_got, row.lacking, row.without_host, row.thinned) == ((0, 0, 8), 8, 8, 0)
    rig.pass_time(11.0)  # so that no lease of what was copied runs
    run = run_of(rig)
    assert evict_copy(rig.master.core, run.copies[0].segment, run, 5)
    (row,) = report(rig).namespaces
    assert (row.by_got, row.lacking, row.without_host, row.thinned) == ((0, 1, 7), 8, 7, 1)


def test_the_report_says_what_repair_is_at() -> None:
    rig = rig_of("w1", "w2", tunables=Tunables(cluster="test", copy_bytes_per_s=4096))
    rig.holds_moves = True
    space = rig.open_namespace()
    for number in range(6):
        space.put(chain(number, 2))
    rig.pass_time(0.2)
    found = report(rig)
    assert (found.replicas, found.hosts) == (2, 2)
    assert sum(found.queued) >= 3, "until their worker may be read from again"
    assert found.backlog_bytes >= 3 * 2 * 4096
    assert found.bytes_per_s > 0
    assert found.eta_s == pytest.approx(found.backlog_bytes / found.bytes_per_s)


def test_what_waits_for_a_worker_to_come_back_has_no_end_that_is_known() -> None:
    rig = rig_of("w1", "w2", "w3", tunables=Tunables(cluster="test", repair_after_s=60.0))
    rig.open_namespace().put(KEYS)
    rig.pass_time(5.0)
    holder = run_of(rig).copies[0].segment.worker
    rig.workers[holder].leave()
    rig.pass_time(10.0)
    found = report(rig)
    assert (sum(found.queued), found.waiting) == (0, {"due": 1})
    assert found.backlog_bytes
    assert found.bytes_per_s > 0, "of what was copied before"
    assert found.eta_s == inf


def test_a_pool_of_one_host_is_counted_as_well() -> None:
    rig = rig_of("w1")
    rig.open_namespace().put(KEYS)
    (row,) = report(rig).namespaces
    assert (row.by_got, row.by_wanted, row.lacking) == ((8,), (8,), 0)


def test_namespaces_without_pages_are_listed_last(rig: Rig) -> None:
    empty = rig.open_namespace(heads=1)
    full = rig.open_namespace(heads=2)
    full.put(KEYS)
    rows = report(rig).namespaces
    assert [row.namespace for row in rows] == [full.id, empty.id]
    assert (rows[1].pages, rows[1].by_got, rows[1].lacking, rows[1].unreadable) == (0, (), 0, 0)


def test_pages_that_nobody_can_read_are_told_unless_they_are_being_put() -> None:
    rig = rig_of("w1")
    space = rig.open_namespace()
    space.put(KEYS)
    space.remove(KEYS[2 * 32 : 3 * 32])  # others hang below it: its key stays
    later = chain(9, 2)
    space.plans(later, parent=KEYS[-32:])
    (row,) = report(rig).namespaces
    assert (row.pages, row.unreadable) == (7, 1)
    space.put(KEYS[2 * 32 : 3 * 32], parent=KEYS[32:64])
    (row,) = report(rig).namespaces
    assert (row.pages, row.unreadable) == (8, 0)


def test_who_asks_together_is_answered_together(rig: Rig) -> None:
    rig.open_namespace().put(KEYS)
    rig.pass_time(1.0)
    scans = rig.master.core.counters["replica_scans"]
    sessions = [rig.open("operator", "", f"o{number}") for number in range(3)]
    asked = []
    for session in sessions:
        assert rig.ask(session, GetReplicas()) is None
        asked.append((session, rig.last_request))
    rig.settle()
    assert all(rig.reply(*each) is not None for each in asked)
    assert rig.master.core.counters["replica_scans"] == scans + 1


def test_only_the_worst_namespaces_are_listed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_requests, "ROWS_MAX", 1)
    rig.open_namespace(heads=1).put(chain(1, 2))
    rig.pass_time(0.5)
    worse = rig.open_namespace(heads=2)
    rig.holds_moves = True
    worse.put(chain(2, 2))
    found = report(rig)
    assert [row.namespace for row in found.namespaces] == [worse.id]
    assert found.others == 1


def test_a_number_is_durable_and_holds_at_once(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    rig.pass_time(0.5)
    assert ask(rig, SetReplicas(space.id, 3)) == Done()
    rig.pass_time(2.0)
    assert got(rig) == [3] * PAGES
    rig.takeover(2)
    assert rig.master.core.namespaces.get(space.id).replicas == 3
    for name in ("w1", "w2", "w3"):
        rig.workers[name].join()
    assert ask(rig, SetReplicas(space.id, 1)) == Done()
    rig.pass_time(40.0)
    assert got(rig) == [1] * PAGES, "the last one stays"
    assert ask(rig, SetReplicas(space.id, 0)) == Done()
    rig.pass_time(3.0)
    assert got(rig) == [2] * PAGES


def test_repair_at_once_waits_for_nobody(rig: Rig) -> None:
    rig.open_namespace().put(KEYS)
    rig.pass_time(0.5)
    rig.workers[run_of(rig).copies[0].segment.worker].leave()
    rig.pass_time(4.0)
    assert got(rig) == [1] * PAGES
    assert ask(rig, RepairNow(b"")) == Done()
    rig.pass_time(3.0)
    assert got(rig) == [2] * PAGES


def test_what_cannot_be_is_refused(rig: Rig) -> None:
    space = rig.open_namespace()
    assert "replicas" in failure(ask(rig, SetReplicas(space.id, 17))).text
    assert "namespace" in failure(ask(rig, SetReplicas(b"x" * 32, 2))).text
    assert "namespace" in failure(ask(rig, RepairNow(b"x" * 32))).text
    for message in (GetReplicas(), SetReplicas(space.id, 2), RepairNow(b"")):
        assert failure(rig.ask(rig.engine, message)).code == "access_denied"


def test_the_status_tells_what_was_counted_last(rig: Rig) -> None:
    rig.open_namespace().put(KEYS)
    rig.pass_time(0.5)
    report(rig)
    rig.pass_time(2.0)
    status = ask(rig, GetStatus())
    assert isinstance(status, Status)
    counted_ago_s = status.replicas.counted_ago_s
    assert counted_ago_s == pytest.approx(2.0)
    assert status.replicas == ReplicaTotals((0, 8), 0, 0, 0, counted_ago_s, (), 0)


def test_pages_are_counted_now_and_then_though_nobody_asks(rig: Rig) -> None:
    rig.pass_time(20.0)
    scans = rig.master.core.counters["replica_scans"]
    rig.pass_time(census.COUNT_EVERY_S + 1.0, 0.5)
    assert rig.master.core.counters["replica_scans"] == scans + 1
