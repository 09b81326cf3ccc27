"""Workers emptied while the pool is at work, whatever happens to who leads."""

from __future__ import annotations

import json
import subprocess
import sys
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from kvstore import Hit
from kvstore.cli.operator import Operator
from kvstore.errors import KVStoreError
from kvstore.wire.messages.relocation import GetRelocations, RelocationRow, Relocations
from tests.cluster.history import History
from tests.cluster.pages import PAGE_TOKENS, PAGES, Pages
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until
from tests.cluster.up import clean_environment, kvharbor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

    from kvstore import OpenedNamespace, PageChain

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CHAINS = 24
DRAINED = "w0"
DRAIN_S = 60.0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Three workers, each page on one of them; copying what one has takes some seconds."""
    settings = {"lease_ttl_s": 2.0, "replicas": 1, "copy_bytes_per_s": "2MiB"}
    with Rig(tmp_path / "pool", Shape(masters=2, workers=3, master=settings)) as made:
        yield made


class Reader:
    """Reads all chains over and over in a thread, and counts what was no hit."""

    def __init__(self, pages: Pages, opened: OpenedNamespace, chains: list[PageChain]) -> None:
        self._work = pages, opened, chains
        self._ends = Event()
        self._thread = Thread(target=self._run)
        self.rounds = 0
        self.misses: list[str] = []
        self.is_strict = True
        """A miss counts; while nobody leads, and before workers are back, it is none of ours."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        pages, opened, chains = self._work
        while not self._ends.is_set():
            for chain in chains:
                was_strict = self.is_strict
                try:
                    match = pages.store.match_prefix(opened, chain)
                    found = pages.read_back(match, match.pages)
                except KVStoreError as error:
                    found = [error]
                if found != [Hit()] * len(chain) and was_strict and self.is_strict:
                    self.misses.append(f"{len(found)} of {len(chain)}: {found[-1:]}")
            self.rounds += 1

    def goes_on(self, rounds: int = 2) -> None:
        """Wait until everything was read a few times more."""
        done = self.rounds + rounds
        until("everything is read again", lambda: self.rounds >= done)


def drain(rig: Rig) -> subprocess.Popen[str]:
    """The command that drains a worker and waits."""
    return subprocess.Popen(
        [
            sys.executable, "-P", "-m", "kvstore.cli.main", "drain", DRAINED, "--yes", "--json",
            "--master", ",".join(rig.addresses),
        ],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def row_of(rig: Rig) -> RelocationRow | None:
    """The drain, as whoever leads sees it."""
    try:
        with Operator(",".join(rig.addresses), None, rig.cluster) as asking:
            rows = asking.ask(GetRelocations(), Relocations).rows
    except KVStoreError:
        return None
    return rows[0] if rows else None


def is_under_way(rig: Rig) -> bool:
    row = row_of(rig)
    return row is not None and row.done_pages > 0


def held(rig: Rig, worker: str) -> int:
    """Bytes that are sealed at a worker."""
    segments = rig.status(rig.leader()).segments
    return sum(each.sealed_bytes for each in segments if each.worker == worker)


def stored(pages: Pages, opened: OpenedNamespace) -> list[PageChain]:
    chains = [opened.chain([number, *range(1, PAGES * PAGE_TOKENS)]) for number in range(CHAINS)]
    for chain in chains:
        pages.store_all(opened, chain)
    return chains


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_drain_goes_on_under_the_next_leader_and_no_read_fails_for_it(
    rig: Rig, transport: str
) -> None:
    load = rig.load(0, 1, transport=transport)
    with rig.pages(transport) as pages:
        opened = pages.open()
        chains = stored(pages, opened)
        assert held(rig, DRAINED) > 0
        with Reader(pages, opened, chains) as reader, drain(rig) as command:
            until("the drain is under way", lambda: is_under_way(rig))
            leader = rig.leader()
            reader.is_strict = False
            rig.masters[leader].kill()
            until("another master leads", lambda: rig.leaders()[:1] not in ([], [leader]))
            until("its workers are back", rig.is_serving)
            for chain in chains:
                pages.assert_found(opened, chain)
            reader.is_strict = True
            said, error = command.communicate(timeout=DRAIN_S)
            reader.goes_on()
        assert command.returncode == 0, error
        assert json.loads(said)["state"] == "done"
        assert reader.misses == []
        load.end()
        assert held(rig, DRAINED) == 0
        assert rig.state_of(DRAINED) == "drained"
        rig.workers[0].kill()
        until("it is lost", lambda: rig.state_of(DRAINED) == "lost")
        for chain in chains:
            pages.assert_readable(opened, chain)
    findings = History(rig.calls()).check()
    assert findings.wrong == 0, findings.stories


def test_a_drained_worker_is_filled_again_when_that_is_asked(rig: Rig) -> None:
    masters = ("--master", ",".join(rig.addresses))
    done = kvharbor("drain", DRAINED, "--yes", *masters)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("done")
    rig.workers[0].kill()
    rig.workers[0].start()
    until("it is back, and drained", lambda: rig.state_of(DRAINED) == "drained")
    with rig.pages() as pages:
        opened = pages.open()
        stored(pages, opened)
        assert held(rig, DRAINED) == 0
        assert kvharbor("undrain", DRAINED, *masters).returncode == 0
        assert rig.state_of(DRAINED) == "live"
        done = kvharbor("rebalance", *masters)
        assert done.returncode == 0, done.stderr
        assert held(rig, DRAINED) > 0 or "done" in done.stdout
        for number in range(CHAINS):
            pages.assert_readable(opened, opened.chain([number, *range(1, PAGES * PAGE_TOKENS)]))
