"""Cold pages in stripes over real drives: read while holders are gone, rebuilt, read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import Hit, Stored
from tests.cluster.pages import SIZE, more
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore import OpenedNamespace, PageChain
    from tests.cluster.pages import Pages

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PAGES = 48
K, M = 4, 2
MADE_S = 60.0
"""Long enough for a machine that has much else to do."""


def shape(folder: Path, **master: object) -> Shape:
    """A drive of each of six workers, and stripes of 4+2 over what is half a second old.

    Puts draw their drives: the emptiest one would for a moment be everybody's, and few stripes
    could be made of what lies on one.
    """
    folder.mkdir()
    erasure = f"k={K}, m={M}, cold_after_s=0.5, left_s=0"
    settings: dict[str, object] = {
        "replicas": 1, "erasure": "reed-solomon", "erasure_parameters": erasure,
        "placement": "two_choices", "replication": "off",
    }  # fmt: skip
    return Shape(
        masters=1, members=0, workers=K + M, dram="16MiB", master=settings | master,
        worker={"transports": ["tcp"], "nvme": [f"{folder}:64MiB"], "staging": "16MiB"},
    )  # fmt: skip


def count(rig: Rig, name: str) -> int:
    return rig.status(0).counters.get(name, 0)


def store(pages: Pages, opened: OpenedNamespace) -> list[PageChain]:
    """Put pages to drives, without anything above or below them."""
    chains = [more(opened, number) for number in range(1, PAGES + 1)]
    for chain in chains:
        assert pages.put(opened, chain, tier="nvme") == [Stored()]
    return chains


def await_parity(rig: Rig) -> int:
    """Wait until half of the pages are in stripes, and those have their parity; of how many."""

    def is_done() -> bool:
        made = count(rig, "stripes_made")
        return made * K >= PAGES / 2 and count(rig, "copied_pages_nvme") >= M * made

    until("stripes are made", is_done, MADE_S)
    return count(rig, "stripes_made")


def read_all(pages: Pages, opened: OpenedNamespace, chains: list[PageChain]) -> int:
    """How many pages are found; every byte is right."""
    found = 0
    for chain in chains:
        match = pages.store.match_prefix(opened, chain)
        if match.pages:
            assert pages.read_back(match, 1) == [Hit()]
            found += 1
    return found


def test_pages_are_read_while_two_hosts_of_six_are_gone_and_rebuilt_when_they_stay_so(
    tmp_path: Path,
) -> None:
    pool = shape(tmp_path / "drives", repair_after_s=4.0)
    with Rig(tmp_path / "pool", pool) as rig, rig.pages("tcp") as pages:
        opened = pages.open()
        chains = store(pages, opened)
        stripes = await_parity(rig)
        sealed = sum(each.sealed_bytes for each in rig.status(0).segments)
        assert sealed <= (PAGES + M * count(rig, "stripes_made")) * SIZE, (
            "half of what three replicas take"
        )
        for worker in rig.workers[:M]:
            worker.kill()
        until("two workers are lost", lambda: count(rig, "pages_degraded") > 0, MADE_S)
        until("all is cleaned", lambda: not rig.status(0).segments or _lost(rig) == M, MADE_S)
        there = read_all(pages, opened, chains)
        assert there >= stripes * K, "all that had parity"
        assert count(rig, "pages_located_degraded") > 0
        until("data is rebuilt", lambda: _reads_plainly(rig, pages, opened, chains), MADE_S)
        assert read_all(pages, opened, chains) == there
        for worker in rig.workers[:M]:
            worker.launch()
        until("they come again", lambda: read_all(pages, opened, chains) == PAGES, MADE_S)


def _lost(rig: Rig) -> int:
    return sum(each.state == "lost" for each in rig.status(0).workers)


def _reads_plainly(
    rig: Rig, pages: Pages, opened: OpenedNamespace, chains: list[PageChain]
) -> bool:
    """Whether no page is decoded any more."""
    before = count(rig, "pages_located_degraded")
    read_all(pages, opened, chains)
    return count(rig, "pages_located_degraded") == before
