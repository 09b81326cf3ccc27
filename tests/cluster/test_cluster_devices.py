"""`kvharbor up --hbm` with real processes: pages put on a device, read, gone with the worker."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from kvstore import Hit, Miss, MissReason, Stored
from kvstore.exit_codes import ExitCode
from tests.cluster.pages import Pages
from tests.cluster.up import FREE_PORTS, Up, kvharbor, remove_segments
from tests.devices import DEVICES, device_named

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


@pytest.fixture(params=DEVICES)
def lent(request: pytest.FixtureRequest) -> str:
    """The option that lends a device."""
    return f"--hbm={device_named(request.param).name}:64MiB"


def sealed_bytes(pages: Pages) -> dict[str, int]:
    """Bytes of readable pages, by tier."""
    return {each.tier: each.sealed_bytes for each in pages.store.stat().segments}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pages_are_put_on_a_device_and_read(data_dir: Path, lent: str, transport: str) -> None:
    with Up(data_dir, lent) as up, Pages(up.master, transport, "devices") as pages:
        opened = pages.open()
        asked, usual = opened.chain(range(64)), opened.chain(range(100, 132))
        assert pages.put(opened, asked, tier="hbm") == [Stored()] * 16
        pages.store_all(opened, usual)
        assert sealed_bytes(pages) == {"hbm": 1 << 20, "dram": 1 << 19}
        pages.assert_readable(opened, asked)
        with pages.store.views(pages.store.match_prefix(opened, asked)) as views:
            assert views == [Miss(MissReason.UNREACHABLE)] * 16
        assert pages.store.remove(opened, asked) == [True] * 16
        assert pages.store.probe(opened, asked) == [False] * 16


def test_a_device_s_pages_end_with_the_worker_and_others_do_not(data_dir: Path, lent: str) -> None:
    with Up(data_dir, lent) as up, Pages(up.master, "shm", "devices") as pages:
        opened = pages.open()
        asked, usual = opened.chain(range(64)), opened.chain(range(100, 132))
        pages.put(opened, asked, tier="hbm")
        pages.store_all(opened, usual)
        up.end(signal.SIGKILL)
    with Up(data_dir, lent) as up, Pages(up.master, "shm", "devices") as pages:
        opened = pages.open()
        assert pages.store.probe(opened, asked) == [False] * 16
        pages.assert_readable(opened, usual)
        assert pages.put(opened, asked, tier="hbm") == [Stored()] * 16
        assert pages.read_back(pages.store.match_prefix(opened, asked), 16) == [Hit()] * 16


def test_a_device_that_does_not_do_is_named(data_dir: Path) -> None:
    for given, code, text in (
        ("cuda:99:64MiB", ExitCode.USAGE, "device: got 'cuda:99', want one of cpu"),
        ("cpu", ExitCode.USAGE, "a device and a size, device:size"),
        ("cpu:1MiB", ExitCode.USAGE, "at least one chunk of 67108864 bytes"),
        ("cpu:4000000GiB", ExitCode.NO_SPACE, "bytes free, segment standalone-hbm-cpu needs"),
    ):
        done = kvharbor("up", f"--data-dir={data_dir}", *FREE_PORTS, f"--hbm={given}")
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
