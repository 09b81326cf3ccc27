"""All that workers and a master do every now and then, done as often as they can at once.

Pages have sizes that divide no chunk, so that places behind the last page of one are met, too.
What a job raises must not stop heartbeats: no page is lost and no worker is, round after round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest

from kvstore import Hit, Stored
from kvstore.announcement import read_announcement
from tests.cluster.pages import Pages, content, more
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore import OpenedNamespace, PageChain

pytestmark = pytest.mark.cluster

FRAME = 256 << 10
"""What chunks are made of where the largest has 1 MiB."""
SIZES = (9 * 4096, 27 * 4096, 49 * 4096)
PAGES = 3
LENT = "4MiB"
PATIENCE_S = 60.0
OFTEN = {
    "replicas": 2,
    "repair_after_s": 0.5,
    "lease_ttl_s": 1.0,
    "watermark_demote": 0.01,
    "nvme_admission": "all",
    "replication_parameters": "window_s=1,port_bytes_per_s=1000,port_share=1",
    "page_ttl_s": 600.0,
}
"""Seconds of the master's jobs, and shares from which others begin."""
DONE = ("copied_pages_dram", "moved_pages_nvme", "pages_expired", "replica_scans")
"""What the master counts of its jobs: repair, demotion, the end of lives, scans."""


def shape(folder: Path, pace: int) -> Shape:
    """Two hosts with memory above a drive, whose scrubbers have that pace in bytes a second."""
    folder.mkdir()
    worker: dict[str, object] = {
        "admin": "127.0.0.1:0", "nvme": [f"{folder}:{LENT}"], "staging": "1MiB",
        "scrub_bytes_per_s": pace,
    }  # fmt: skip
    return Shape(
        masters=1, members=0, workers=2, dram=LENT, chunk="1MiB", master=OFTEN, worker=worker
    )


def rounds(rig: Rig) -> list[float]:
    """How often each segment of every worker has been gone through."""
    found: list[float] = []
    for worker in rig.workers:
        announced = read_announcement(worker.folder, "worker")
        assert announced is not None
        with urlopen(f"http://{announced.admin}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        name = "kvharbor_worker_scrub_rounds_total{"
        found += [float(line.split()[-1]) for line in lines if line.startswith(name)]
    return found


def store_kept(pages: Pages) -> list[tuple[OpenedNamespace, PageChain]]:
    """A chain of each size, with its replicas."""
    kept = []
    for number, size in enumerate(SIZES):
        opened = pages.open(size)
        chain = opened.chain([number + 1] * PAGES * Pages.layout().page_tokens)
        pages.store_all(opened, chain)
        kept.append((opened, chain))
    return kept


@pytest.mark.parametrize(
    ("pace", "wanted"),
    [
        (4 * (FRAME - 16384), 2),  # a second look begins behind the last page of a chunk
        (1 << 30, 10),
    ],
)
def test_no_round_of_anything_stops_a_heartbeat(tmp_path: Path, pace: int, wanted: int) -> None:
    with (
        Rig(tmp_path / "pool", shape(tmp_path / "disks", pace)) as rig,
        rig.pages("tcp") as pages,
    ):
        kept = store_kept(pages)
        brief = pages.store.open(content("brief", SIZES[0]), Pages.layout(), ttl_s=1.0)
        puts = 0

        def have_gone_round() -> bool:
            nonlocal puts
            assert {rig.state_of(each.folder.name) for each in rig.workers} == {"live"}
            for opened, chain in kept:
                pages.assert_readable(opened, chain)
            puts += 1
            assert pages.put(brief, more(brief, puts)) == [Stored()]
            counted = rig.status(0).counters
            return (
                min(rounds(rig)) >= wanted
                and not rig.lacking()
                and all(counted.get(each, 0) for each in DONE)
            )

        until("everything has been done often", have_gone_round, PATIENCE_S)
        counted = rig.status(0).counters
        assert (counted["registrations"], counted.get("workers_lost", 0)) == (2, 0)
        assert counted.get("pages_lost", 0) == 0
        for opened, chain in kept:
            match = pages.store.match_prefix(opened, chain)
            assert pages.read_back(match, PAGES) == [Hit()] * PAGES
