"""`kvharbor tier` as a program: what it prints, and what it refuses before it asks anybody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity
from kvstore.wire.messages.operator import SegmentShrinks
from tests.contract.cli_rig import ScriptedMaster, kvharbor, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

SHRINKS = SegmentShrinks("w-hbm-cpu", 8 << 30, 64 << 20)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The address of a master that says the same to everything."""
    with ScriptedMaster(ListenerIdentity("c"), SHRINKS) as running:
        yield running.address


def test_what_stays_for_people_and_for_programs(master: str) -> None:
    done = kvharbor("tier", "shrink", "w-hbm-cpu", "8GiB", "--master", master)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "w-hbm-cpu: 8 GiB stay, 64 MiB are being given back\n"
    done = kvharbor("--json", "tier", "shrink", "w-hbm-cpu", "0B", KVHARBOR_MASTER=master)
    assert json.loads(done.stdout)["left_bytes"] == 64 << 20


@pytest.mark.parametrize("size", ["much", "-1", "1XB"])
def test_a_size_that_is_none_is_named(size: str) -> None:
    text = refused(ExitCode.USAGE, "tier", "shrink", "--", "w-hbm-cpu", size)
    assert text.startswith(f"size: got {size!r}, want a size such as")
