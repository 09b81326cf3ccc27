"""The wall clock of any process jumps by an hour, forward and back: nothing notices."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.history import History
from tests.cluster.pages import PAGE_TOKENS, PAGES, more
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until
from tests.cluster.wall_clocks import WallClocks, seconds_of_day

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HOUR_S = 3600
LEASE_S = 2.0
CALM_S = 4.5
"""Longer than leases of readers and leaders, and than a silent worker is waited for."""


def test_a_program_takes_its_clock_for_the_time_of_day(tmp_path: Path) -> None:
    with WallClocks(tmp_path) as clocks:
        now_s = seconds_of_day(clocks, 0)
        assert 0 <= seconds_of_day(clocks, HOUR_S) - now_s - HOUR_S < 60
        assert 0 <= seconds_of_day(clocks, -HOUR_S) - now_s + HOUR_S < 60


def test_jumps_of_an_hour_end_no_lease_no_page_and_no_term(tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "lease_ttl_s": LEASE_S, "page_ttl_s": 600.0, "replicas": 1,
        # Far below an hour, and above what a busy machine may let a worker stand still.
        "worker_lost_after_s": 30.0,
    }  # fmt: skip
    shape = Shape(masters=2, workers=2, master=settings)
    with WallClocks(tmp_path) as clocks, Rig(tmp_path / "pool", shape) as rig:
        with rig.pages("tcp") as pages:
            opened = pages.open()
            chain = opened.chain(range(PAGES * PAGE_TOKENS))
            pages.store_all(opened, chain)
            leader = rig.leader()
            before = rig.status(leader)
            load = rig.load(0, 1)
            for number, seconds in enumerate((HOUR_S, -HOUR_S, 0)):
                for server in rig.servers:
                    assert clocks.is_set_in(server.pid)
                    clocks.set(server.pid, seconds)
                    pages.assert_readable(opened, chain)
                assert clocks.is_set_in(load.pid)
                clocks.set(load.pid, seconds)
                ends_s = time.monotonic() + CALM_S
                while time.monotonic() < ends_s:
                    pages.assert_readable(opened, chain)
                pages.store_all(opened, more(opened, number + 1))
                after = rig.status(leader)
                assert (after.standing, after.epoch) == (before.standing, before.epoch)
                assert {each.state for each in after.workers} == {"live"}
                assert not after.counters.get("pages_expired")
            clocks.set(rig.masters[rig.standby()].pid, HOUR_S)
            rig.masters[leader].kill()
            until("the standby leads", lambda: rig.leaders()[:1] not in ([], [leader]))
            pages.assert_found(opened, chain)
            load.end()
        findings = History(rig.calls()).check()
    assert findings.wrong == 0, findings.stories
    assert findings.reads > 100
