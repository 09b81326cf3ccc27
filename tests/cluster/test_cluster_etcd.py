"""Trouble of etcd itself: members that die or hang, all of it away, no space, spoiled values."""

from __future__ import annotations

import time
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from kvstore import AlreadyThere, Hit, Stored
from kvstore.errors import Unavailable
from tests.cluster.pages import PAGES, more
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore import OpenedNamespace, PageChain
    from tests.cluster.pages import Pages
    from tests.etcd_server import EtcdMember

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

AWAY_S = 4.0
STALL_S = 0.3
GOES_ON_S = 0.05


@pytest.fixture(scope="module")
def harmed_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("rig") / "pool", Shape(masters=2, members=3)) as made:
        yield made


@pytest.fixture
def pages(rig: Rig, request: pytest.FixtureRequest) -> Iterator[Pages]:
    with rig.pages(model=request.node.name) as made:
        yield made


def store_at_last(pages: Pages, opened: OpenedNamespace, number: int) -> None:
    """Put a chain of this number until it is stored."""

    def is_stored() -> bool:
        try:
            (outcome,) = pages.put(opened, more(opened, number), timeout_s=1)
        except Unavailable:
            return False
        return outcome in (Stored(), AlreadyThere())  # by a try whose answer was lost

    until("a page is stored", is_stored)


@pytest.mark.parametrize("harm", ["stopped", "killed"])
def test_etcds_leader_is_harmed(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain, harm: str
) -> None:
    leader = rig.etcd.leader()
    if harm == "stopped":
        leader.freeze()
    else:
        leader.kill()
    try:
        for number in range(1, 4):
            store_at_last(pages, opened, number)
            time.sleep(0.5)
        pages.assert_readable(opened, chain)
    finally:
        if harm == "stopped":
            leader.thaw()
        else:
            rig.etcd.restart(leader)
    pages.assert_readable(opened, chain)


def test_all_of_etcd_away_for_a_while(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    """Reads go on without leases, puts are refused by their type, and it mends itself."""
    epoch = rig.status(rig.leader()).epoch
    for member in rig.etcd.members:
        member.freeze()
    try:
        until("leases end", lambda: not pages.store.match_prefix(opened, chain).leased_until_s)
        ends_s = time.monotonic() + AWAY_S
        while time.monotonic() < ends_s:
            match = pages.store.match_prefix(opened, chain)
            assert pages.read_back(match, PAGES) == [Hit()] * PAGES
        match = pages.store.match_prefix(opened, chain)
        with pytest.raises(Unavailable):
            pages.put(opened, more(opened), timeout_s=1)
        with pages.store.views(match) as views:
            assert not any(isinstance(view, memoryview) for view in views)
    finally:
        for member in rig.etcd.members:
            member.thaw()
    store_at_last(pages, opened, 1)
    pages.assert_readable(opened, chain)
    assert rig.status(rig.leader()).epoch >= epoch


@contextmanager
def stalling(members: Sequence[EtcdMember]) -> Iterator[None]:
    """Members that all stand still again and again, as those of one disk that is slow to write."""
    is_over = Event()

    def run() -> None:
        while not is_over.wait(GOES_ON_S):
            for member in members:
                member.freeze()
            is_over.wait(STALL_S)
            for member in members:
                member.thaw()

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_an_etcd_that_stalls_again_and_again_costs_time_alone(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    owners = [f"owner {number}" for number in range(1, 9)]
    with stalling(rig.etcd.members):
        for number, owner in enumerate(owners, 1):
            store_at_last(pages, opened, number)
            # Answered when etcd has it.
            pinned = pages.store.pin(opened, more(opened, number), owner=owner, ttl_s=600.0)
            assert pinned == [True]
            pages.assert_readable(opened, chain)
    rig.masters[rig.leader()].kill()
    pages.assert_found(opened, chain)
    assert {pin.owner for pin in pages.store.pins()} == set(owners)


def test_a_compaction_and_a_restart_of_every_member(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chain: PageChain
) -> None:
    rig.etcd.compact()
    for number, member in enumerate(rig.etcd.members, 1):
        member.kill()
        store_at_last(pages, opened, number)
        rig.etcd.restart(member)
        rig.etcd.wait_ready()
    rig.masters[rig.leader()].kill()
    pages.assert_found(opened, chain)
    pages.assert_found(opened, more(opened, 3))
