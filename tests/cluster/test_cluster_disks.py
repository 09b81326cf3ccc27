"""`kvharbor up --nvme` with real processes: lent, found again after kill -9, cleared by a wipe."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from kvstore.cli.places import places_of
from kvstore.exit_codes import ExitCode
from tests.cluster.up import FREE_PORTS, Up, kvharbor, remove_segments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
        (f"{tmp_path}", ExitCode.USAGE, "option --nvme: got "),
        (f"{tmp_path}:1MiB", ExitCode.USAGE, "at least one chunk of 67108864 bytes"),
        (f"{tmp_path}:4000000GiB", ExitCode.NO_SPACE, "bytes free, the segment needs"),
    ):
        done = kvharbor("up", f"--data-dir={data_dir}", *FREE_PORTS, f"--nvme={given}")
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
