"""One process at a time in a folder; who it is, is told to the next."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvstore import folder_lock
from kvstore.errors import ConfigError, SegmentInUse

if TYPE_CHECKING:
    from pathlib import Path


def test_the_next_one_learns_who_has_it_and_gets_it_once_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = folder_lock.hold(path, "a pool")
    want = rf"data folder {tmp_path}: a pool runs from it \(process {os.getpid()}\)"
    with pytest.raises(SegmentInUse, match=want):
        folder_lock.hold(path, "a pool")
    os.close(held)
    os.close(folder_lock.hold(path, "a pool"))


def test_heirs_of_a_process_that_is_gone_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    held = folder_lock.hold(path, "a pool")
    path.write_text("none\n")  # which is no process
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.close(held)

    monkeypatch.setattr("time.sleep", pause)
    os.close(folder_lock.hold(path, "a pool"))
    assert len(waits) == 3
    assert path.read_text() == f"{os.getpid()}\n"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/absent/lock: cannot be opened"):
        folder_lock.hold(tmp_path / "absent" / "lock", "a pool")
