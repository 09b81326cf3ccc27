"""`kvharbor up --nvme` with real processes: lent, found again after kill -9, cleared by a wipe."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

import pytest

from kvstore import Hit, Miss
from kvstore.cli.places import places_of
from kvstore.exit_codes import ExitCode
from tests.cluster.pages import SIZE, Pages
from tests.cluster.up import FREE_PORTS, Up, kvharbor, remove_segments
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore import PageChain
    from kvstore.client.locations import Locations

PAGES = 32
PAUSE_S = 0.05
"""Between puts: copies on disks are made ahead, at the pool's own pace."""

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """The data folder of a pool that leaves nothing in /dev/shm."""
    folder = tmp_path / "pool"
    yield folder
    remove_segments(folder)


@pytest.fixture
def disks(tmp_path: Path) -> tuple[str, str]:
    """Two folders of disks, as options."""
    for name in "ab":
        (tmp_path / name).mkdir()
    return f"--nvme={tmp_path}/a:64MiB", f"--nvme={tmp_path}/b:128MiB"


def lent(up: Up) -> dict[str, int]:
    """Sizes of the segments on disks, by name."""
    segments = up.ready["segments"]
    return {each["segment"]: each["capacity_bytes"] for each in segments if each["tier"] == "nvme"}


def files(tmp_path: Path) -> set[int]:
    """Which files the segments are."""
    return {path.stat().st_ino for path in tmp_path.glob("[ab]/*/kvharbor-*")}


def test_disks_are_lent_and_found_again_in_any_order(
    data_dir: Path, disks: tuple[str, str], tmp_path: Path
) -> None:
    with Up(data_dir, *disks) as up:
        before, were = lent(up), files(tmp_path)
        assert sorted(before.values()) == [64 << 20, 128 << 20]
        up.end(signal.SIGKILL)
    with Up(data_dir, *reversed(disks)) as up:
        assert (lent(up), files(tmp_path)) == (before, were)
        assert up.ready["discarded_bytes"] == 0


def below_memory(found: Locations) -> int:
    """How many pages have their only copy on a disk."""
    return sum(
        run.count
        for piece in found.pieces
        for run in piece.located.runs
        if {piece.located.segments[copy.segment].tier for copy in run.copies} == {"nvme"}
    )


def read_found(pages: Pages, found: Locations) -> int:
    """Read what a lookup has found, of a chain whose tail may be evicted; how much that is."""
    gone = [i for i, hit in enumerate(found.hits) if not hit]
    hits = PAGES - len(gone)
    assert pages.read_back(found, PAGES, misses=gone).count(Hit()) == hits
    return hits


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pages_below_memory_are_read_also_after_a_kill(
    data_dir: Path, disks: tuple[str, str], tmp_path: Path, transport: str
) -> None:
    config = tmp_path / "pool.toml"
    # What a disk of this size can bear in its life would be a few pages a second.
    config.write_text('[master]\nnvme_admission = "all"\n')
    options = (*disks, f"--config={config}")
    with Up(data_dir, *options) as up, Pages(up.master, transport, "below") as pages:
        opened = pages.open()
        # Memory holds 32 of these chains.
        chains = [opened.chain([number] * 4 * PAGES) for number in range(100)]
        below: list[PageChain] = []
        for chain in chains:
            pages.put(opened, chain)
            time.sleep(PAUSE_S)
            probes = (pages.store.lookup(opened, each, lease=False) for each in chains)
            below = [found.chain for found in probes if below_memory(found)]
            if len(below) >= 4:
                break
        assert len(below) >= 4, "too little ever lies on a disk alone"
        for chain in below:
            found = pages.store.lookup(opened, chain)
            hits = read_found(pages, found)
            if transport == "shm":
                with pages.store.views(found) as views:
                    assert sum(isinstance(view, memoryview) for view in views) == hits
                    for view, key in zip(views, chain, strict=True):
                        assert isinstance(view, Miss) or view == payload(key, 0, SIZE)
        up.end(signal.SIGKILL)
    with Up(data_dir, *options) as up, Pages(up.master, transport, "below") as pages:
        opened = pages.open()
        for chain in below:
            assert read_found(pages, pages.store.lookup(opened, chain))


def test_a_wipe_clears_disks_too(data_dir: Path, disks: tuple[str, str], tmp_path: Path) -> None:
    with Up(data_dir, *disks):
        folders = [places_of(data_dir).disk_folder(tmp_path / name) for name in "ab"]
        assert [len(list(folder.glob("kvharbor-*"))) for folder in folders] == [1, 1]
    with Up(data_dir):  # without them, this time
        pass
    done = kvharbor("wipe", "--json", f"--data-dir={data_dir}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["freed_bytes"] > 192 << 20
    assert not any(folder.exists() for folder in folders)


def test_pages_on_a_disk_go_with_their_metadata(data_dir: Path, disks: tuple[str, str]) -> None:
    with Up(data_dir, *disks):
        pass
    for file in data_dir.glob("metadata.db*"):
        file.unlink()
    with Up(data_dir, *disks) as up:
        assert up.ready["discarded_bytes"] > (64 + 64 + 128) << 20


def test_a_disk_that_does_not_do_is_named(data_dir: Path, tmp_path: Path) -> None:
    for given, code, text in (
        (f"{tmp_path}/nowhere:64MiB", ExitCode.USAGE, "cannot be made: No such file"),
        ("/proc:64MiB", ExitCode.USAGE, "cannot be made: "),
        (f"{tmp_path}", ExitCode.USAGE, "option --nvme: got "),
        (f"{tmp_path}:1MiB", ExitCode.USAGE, "at least one chunk of 67108864 bytes"),
        (f"{tmp_path}:4000000GiB", ExitCode.NO_SPACE, "bytes free, the segment needs"),
    ):
        done = kvharbor("up", f"--data-dir={data_dir}", *FREE_PORTS, f"--nvme={given}")
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
