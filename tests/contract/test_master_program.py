"""The master's program: the cores of its terms, and the events that it writes down."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from math import inf
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.announcement import Announcement, read_announcement
from kvstore.errors import ConfigError
from kvstore.event_log import read_header
from kvstore.exit_codes import ExitCode
from kvstore.ids import Epoch
from kvstore.standing import Standing
from master.__main__ import main
from master.events import Tick
from master.leadership import Leadership
from master.program import CRASH_FILE, EVENTS_FILE, Cores, tell_standing
from master.tunables import Tunables

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path


def leadership(standing: Standing) -> Leadership:
    made = Leadership()
    made.standing, made.epoch = standing, Epoch(4)
    return made


def test_the_announcement_names_the_epoch_of_a_leader_alone(tmp_path: Path) -> None:
    told = Announcement("master", 1, "c", "127.0.0.1:1")
    for standing, epoch in ((Standing.LEADING, 4), (Standing.STANDBY, None)):
        tell_standing(tmp_path, told, leadership(standing))
        found = read_announcement(tmp_path, "master")
        assert found == msgspec.structs.replace(told, epoch=epoch)


def test_an_announcement_that_cannot_be_written_ends_no_leader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = Announcement("master", 1, "c", "127.0.0.1:1")
    tell_standing(tmp_path / "absent", told, leadership(Standing.LEADING))
    assert "out of date: No such file or directory" in caplog.text


def test_who_never_led_has_nothing_to_write_down(tmp_path: Path) -> None:
    async def life() -> None:
        cores = Cores(Tunables(), tmp_path)
        cores.start_dump()
        await cores.close()

    asyncio.run(life())
    assert not list(tmp_path.iterdir())


def test_metadata_that_nothing_can_stand_in_for_is_named_with_what_to_do(tmp_path: Path) -> None:
    damaged = [("namespaces/00", b"damaged")]
    want = "metadata value namespaces/00: .*; put it back from a backup, or delete all metadata"
    with pytest.raises(ConfigError, match=want):
        Cores(Tunables(), tmp_path).make(Epoch(3), damaged, inf)


def test_what_is_written_down_is_of_the_last_term(tmp_path: Path) -> None:
    async def life() -> None:
        cores = Cores(Tunables(cluster="c"), tmp_path)
        cores.make(Epoch(3), (), inf).handle(Tick(), 1.0)
        last = cores.make(Epoch(4), (), inf)
        for now in (1.0, 2.0):
            last.handle(Tick(), now)
        cores.start_dump()
        await cores.close()
        await cores.dump(CRASH_FILE)

    asyncio.run(life())
    for name in (EVENTS_FILE, CRASH_FILE):
        header, *events = (tmp_path / name).read_text().splitlines()
        assert read_header(header) == {"role": "master", "cluster": "c", "epoch": 4}
        assert len(events) == 2


def test_what_a_master_knew_in_a_term_goes_with_it(tmp_path: Path) -> None:
    cores = Cores(Tunables(cluster="c"), tmp_path)
    known = weakref.ref(cores.make(Epoch(3), (), inf))
    gc.collect()
    assert known() is None


def test_collections_leave_out_what_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frozen: list[int] = []

    def run(service: Coroutine[None, None, None]) -> None:
        service.close()
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr("uvloop.run", run)
    monkeypatch.setattr("sys.argv", ["kvharbor-master", f"--data-dir={tmp_path}"])
    before = gc.get_freeze_count()
    try:
        main()
    finally:
        gc.unfreeze()
    assert frozen[0] > before + 10_000


BUGGY = """
import asyncio, sys
from master import program
from master.__main__ import main

make = program.Cores.make

def fail():
    raise IndexError("a bug that nobody knows of")

def make_and_fail(*given):
    asyncio.get_running_loop().call_soon(fail)
    return make(*given)

program.Cores.make = make_and_fail
sys.argv[0] = "kvharbor-master"
main()
"""


def test_a_bug_in_a_callback_ends_the_program_and_says_where_it_is(tmp_path: Path) -> None:
    options = f"--data-dir={tmp_path}", "--listen=127.0.0.1:0", "--admin=off"
    process = subprocess.run(
        [sys.executable, "-c", BUGGY, *options],
        stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.returncode == ExitCode.INTERNAL
    assert "IndexError: a bug that nobody knows of" in process.stderr
    assert read_announcement(tmp_path, "master") is None


def test_events_that_cannot_be_written_end_no_leader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def life() -> None:
        cores = Cores(Tunables(cluster="c"), tmp_path / "absent")
        cores.make(Epoch(3), (), inf).handle(Tick(), 1.0)
        await cores.dump(CRASH_FILE)

    asyncio.run(life())
    assert f"absent/{CRASH_FILE}: No such file or directory" in caplog.text
