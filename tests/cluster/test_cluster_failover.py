"""Masters and workers that die, hang, leave or are cut off, with their metadata in a real etcd."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore import Hit, Miss, Stored
from kvstore.errors import NotLeader
from kvstore.rpc.connection import Connection
from kvstore.rpc.identity import Identity, Role
from kvstore.standing import Standing
from kvstore.wire.messages.reads import Probe
from tests.cluster.client_program import MODEL
from tests.cluster.pages import PAGE_TOKENS, PAGES, Pages, more
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until
from tests.cluster.up import clean_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore import OpenedNamespace, PageChain
    from kvstore.client.locations import Locations

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LEASE_TTL_S = 2.0


@pytest.fixture(scope="module")
def harmed_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    # One replica, so that a page is gone with its worker.
    one: dict[str, object] = {"lease_ttl_s": LEASE_TTL_S, "replicas": 1}
    shape = Shape(masters=2, workers=2, dram="64MiB", master=one)
    with Rig(tmp_path_factory.mktemp("rig") / "pool", shape) as made:
        yield made


@pytest.fixture
def pages(rig: Rig, request: pytest.FixtureRequest) -> Iterator[Pages]:
    with rig.pages(model=request.node.name) as made:
        yield made


@contextmanager
def another_leads(rig: Rig) -> Iterator[int]:
    """The number of the leader inside; afterwards, soon, another one leads in a higher epoch."""
    leader = rig.leader()
    epoch = rig.status(leader).epoch
    yield leader
    until("another master leads", lambda: rig.leaders()[:1] not in ([], [leader]))
    assert rig.status(rig.leader()).epoch > epoch


# Masters.


def test_a_killed_leader_costs_seconds_and_no_page(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    with another_leads(rig) as leader:
        rig.masters[leader].kill()
        pages.store_somehow(opened, more(opened))
        pages.assert_found(opened, chain)
    rig.masters[leader].start()
    pages.assert_readable(opened, chain)


def test_a_standby_names_the_leader(rig: Rig, opened: OpenedNamespace) -> None:
    leader, standby = rig.leader(), rig.standby()
    connection = Connection.open(rig.addresses[standby], Identity(Role.ENGINE), 5)
    try:
        with pytest.raises(NotLeader) as refusal:
            connection.call(Probe(opened.namespace.id, more(opened).packed), 5)
    finally:
        connection.close()
    assert refusal.value.where == (rig.to_masters[leader].address,)


def test_a_stopped_leader_is_replaced_and_stands_by_when_it_goes_on(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    with another_leads(rig) as leader:
        rig.masters[leader].stop()
        pages.store_somehow(opened, more(opened))
    rig.masters[leader].go_on()
    until("the old leader stands by", lambda: rig.status(leader).standing == Standing.STANDBY)
    pages.assert_found(opened, chain)
    pages.assert_readable(opened, more(opened))


def test_a_leader_that_is_told_to_end_hands_over_at_once(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    key = f"/kvharbor/{rig.cluster}/leader"
    held = rig.etcd.get(key)
    assert held is not None
    with another_leads(rig) as leader:
        rig.masters[leader].terminate()
        assert rig.masters[leader].wait() == 0
        assert rig.etcd.get(key) != held  # given up: its lease would have kept it for a while
        pages.store_somehow(opened, more(opened))
    pages.assert_found(opened, chain)


def test_a_leader_cut_off_from_etcd_is_replaced(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    with another_leads(rig) as leader:
        for proxy in rig.to_etcd[leader]:
            proxy.cut()
        until("the standby leads", lambda: leader not in rig.leaders()[:1])
        pages.store_somehow(opened, more(opened))
    for proxy in rig.to_etcd[leader]:
        proxy.heal()
    until("the old leader stands by", lambda: rig.status(leader).standing == Standing.STANDBY)
    pages.assert_found(opened, chain)


def test_a_leader_that_etcds_answers_do_not_reach_is_replaced(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    """Its renewals arrive, so it keeps the key; what it asks for is never known to have happened.

    It must stop leading by its own clock; the lease that it keeps alive without knowing ends when
    the connection that carries the renewals is given up."""
    leader = rig.leader()
    for proxy in rig.to_etcd[leader]:
        proxy.hold(forward=False)
    until("a lease is refused", lambda: not pages.store.match_prefix(opened, chain).leased_until_s)
    for proxy in rig.to_etcd[leader]:
        proxy.heal()
    pages.store_all(opened, more(opened))
    pages.assert_found(opened, chain)


@contextmanager
def planned_put(rig: Rig, pages: Pages) -> Iterator[None]:
    """Inside, a put by another process has its plan and has not sent its pages; it sends them at
    the end, and all are stored and found."""
    pages.model = MODEL
    opened = pages.open()
    chain = opened.chain(range(4 * PAGES))
    pages.store.remove(opened, chain)
    program = "tests.cluster.client_program"
    with subprocess.Popen(
        [sys.executable, "-P", "-m", program, ",".join(rig.addresses), "shm", "hang"],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "planned\n"
        yield
        client.stdin.write("go on\n")
        client.stdin.flush()
        assert client.stdout.readline() == "Stored\n"
    pages.assert_found(opened, chain)


def test_a_put_that_a_leader_planned_is_finished_under_the_next(rig: Rig, pages: Pages) -> None:
    with planned_put(rig, pages), another_leads(rig) as leader:
        rig.masters[leader].kill()


# Workers.


def holder(rig: Rig, found: Locations) -> int:
    """The number of the worker that holds the located pages."""
    (segment,) = {each.segment for piece in found.pieces for each in piece.located.segments}
    return int(segment.removeprefix("w").partition("-")[0])


def is_absent(pages: Pages, opened: OpenedNamespace, chain: PageChain) -> bool:
    return pages.store.match_prefix(opened, chain).pages == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_workers_pages_are_misses_until_it_is_back(rig: Rig, transport: str) -> None:
    with rig.pages(transport, f"killed worker {transport}") as pages:
        opened = pages.open()
        chain = opened.chain(range(4 * PAGES))
        pages.store_all(opened, chain)
        found = pages.store.match_prefix(opened, chain)
        worker = rig.workers[holder(rig, found)]
        worker.kill()
        outcomes = pages.read_back(found, PAGES)
        # What was mapped before can still be copied and verified; a stream is gone.
        assert all(isinstance(each, Hit if transport == "shm" else Miss) for each in outcomes)
        until("its pages are gone", lambda: is_absent(pages, opened, chain))
        assert pages.put(opened, more(opened)) == [Stored()]  # by the other one
        worker.start()
        pages.assert_found(opened, chain)


@pytest.mark.parametrize("harm", ["killed", "stopped"])
def test_a_put_whose_worker_is_harmed_goes_to_another(rig: Rig, pages: Pages, harm: str) -> None:
    with planned_put(rig, pages):
        segments = rig.status(rig.leader()).segments
        (number,) = (int(each.worker[1:]) for each in segments if each.reserved_bytes)
        worker = rig.workers[number]
        if harm == "killed":
            worker.kill()
        else:
            worker.stop()


def test_a_stopped_worker_is_passed_over_and_comes_back(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    worker = rig.workers[holder(rig, pages.store.match_prefix(opened, chain))]
    worker.stop()
    until("its pages are gone", lambda: is_absent(pages, opened, chain))
    assert pages.put(opened, more(opened)) == [Stored()]
    worker.go_on()
    pages.assert_found(opened, chain)


def test_a_worker_cut_off_from_masters_is_lost_and_taken_back(rig: Rig) -> None:
    """All workers, since they share the way: none can be written to, and nothing is lost."""
    # Straight to the leader: a standby would name the address that workers use.
    with Pages(rig.addresses[rig.leader()], "shm", "cut off workers") as pages:
        opened = pages.open()
        chain = opened.chain(range(PAGES * PAGE_TOKENS))
        pages.store_all(opened, chain)
        for proxy in rig.to_masters:
            proxy.hold()
        until("all pages are gone", lambda: is_absent(pages, opened, chain))
        assert pages.put(opened, more(opened), timeout_s=1.0) != [Stored()]
        for proxy in rig.to_masters:
            proxy.heal()
        pages.assert_found(opened, chain)
        pages.store_all(opened, more(opened))


def test_a_worker_that_is_told_to_end_lets_its_readers_finish(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    found = pages.store.match_prefix(opened, chain)
    worker = rig.workers[holder(rig, found)]
    worker.terminate()
    until("its pages are given up", lambda: is_absent(pages, opened, chain))
    assert worker.is_running
    assert pages.read_back(found, PAGES) == [Hit()] * PAGES
    assert worker.wait() == 0
    worker.start()
    pages.assert_found(opened, chain)


def test_master_and_worker_killed_at_once(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    worker = rig.workers[holder(rig, pages.store.match_prefix(opened, chain))]
    with another_leads(rig) as leader:
        rig.masters[leader].kill()
        worker.kill()
    worker.start()
    pages.assert_found(opened, chain)
    assert len(pages.store.match_prefix(opened, chain).pieces[0].located.runs[0].copies) == 1


def test_a_page_removed_while_its_worker_is_away_stays_removed(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    """Also when the master that was told is gone before the worker is back."""
    worker = rig.workers[holder(rig, pages.store.match_prefix(opened, chain))]
    worker.kill()
    until("its pages are gone", lambda: is_absent(pages, opened, chain))
    pages.store.remove(opened, chain)
    with another_leads(rig) as leader:
        rig.masters[leader].kill()
    worker.start()
    until("the worker serves", rig.is_serving)
    assert is_absent(pages, opened, chain)
    pages.store_all(opened, chain)
    pages.assert_readable(opened, chain)
