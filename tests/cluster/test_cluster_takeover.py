"""kill -9 of the only master, or of everything; an etcd of yesterday: the same pages are found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvstore import Stored
from kvstore.lease import inherited_release_s
from master.write_behind import CLOCK_EVERY_S
from tests.cluster.pages import PAGES, SIZE
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until
from tests.fakes import payload

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore import OpenedNamespace, PageChain
    from tests.cluster.pages import Pages

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GRACE_S = inherited_release_s(0.0)
"""In which nothing goes after a takeover, since old leases may run."""
TTL_S = 18.0
LIVED_S = 9.0
SLACK_S = 2.5
# What is left of such pages ends within the grace; if they lived anew they would outlast it.
assert TTL_S - LIVED_S + CLOCK_EVERY_S <= GRACE_S + SLACK_S < TTL_S


def put_for(pages: Pages, opened: OpenedNamespace, chain: PageChain, ttl_s: float | None) -> None:
    """Store pages with a TTL of their own."""
    written = b"".join(payload(key, 0, SIZE) for key in chain)
    places = range(0, len(chain) * SIZE, SIZE)
    assert pages.store.put(opened, chain, written, places, ttl_s=ttl_s) == [Stored()] * len(chain)


@pytest.mark.parametrize("killed", ["master", "everything"])
def test_pages_and_their_lives_outlast_kill_9(tmp_path: Path, killed: str) -> None:
    with Rig(tmp_path / "pool", Shape(masters=1, members=0)) as rig:
        with rig.pages() as pages:
            opened = pages.open()
            kept, short = opened.chain(range(4 * PAGES)), opened.chain(range(9, 9 + 4 * PAGES))
            put_for(pages, opened, kept, None)
            put_for(pages, opened, short, TTL_S)
            time.sleep(LIVED_S)
            for server in rig.masters if killed == "master" else rig.servers:
                server.kill()
        rig.heal()
        until("the pool serves again", rig.is_serving)
        began_s = time.monotonic()
        (status,) = rig.standings().values()
        assert (status.epoch, status.pages) == (2, 2 * PAGES)
        assert status.counters["pages_adopted"] == 2 * PAGES
        with rig.pages() as pages:
            opened = pages.open()
            pages.assert_readable(opened, kept)
            gone = pages.store.probe
            until("what was to live shortly is gone", lambda: not any(gone(opened, short)), TTL_S)
            assert time.monotonic() < began_s + GRACE_S + SLACK_S
            pages.assert_readable(opened, kept)


def test_an_etcd_that_was_put_back_to_an_earlier_state_is_overtaken(tmp_path: Path) -> None:
    with Rig(tmp_path / "pool") as rig, rig.pages() as pages:
        epoch, leader = (f"/kvharbor/{rig.cluster}/{key}" for key in ("epoch", "leader"))
        earlier = rig.etcd.get(epoch)
        assert earlier is not None
        opened = pages.open()
        chain = opened.chain(range(4 * PAGES))
        put_for(pages, opened, chain, None)
        for _ in range(2):
            rig.masters[rig.leader()].kill()
            until("a standby serves", rig.is_serving)
            rig.heal()
        until("the first one stands by", rig.is_whole)
        last = max(status.epoch for status in rig.standings().values())
        for master in rig.masters:
            master.kill()
        rig.etcd.put(epoch, earlier)
        rig.etcd.delete(leader)
        rig.heal()
        until("the pool serves again", rig.is_serving)
        assert rig.standings()[rig.leader()].epoch > last
        pages.assert_readable(opened, chain)
        put_for(pages, opened, opened.chain(range(9, 9 + 4 * PAGES)), None)
