"""`kvharbor debug dump`: which masters are not asked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvstore.announcement import Announcement, announce
from kvstore.cli.debug import dump_master
from kvstore.errors import Unavailable

if TYPE_CHECKING:
    from pathlib import Path


def test_nobody_runs_from_this_folder(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no master runs from this data folder"):
        dump_master(tmp_path, None)


def test_a_standby_has_no_events(tmp_path: Path) -> None:
    announce(tmp_path, Announcement("master", os.getpid(), "c", "127.0.0.1:1", epoch=None))
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 does not lead"):
        dump_master(tmp_path, None)
