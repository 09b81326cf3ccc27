"""Every drill, once, on one deployment: no wrong token, no leak, no lost answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import KVStoreError
from kvstore.exit_codes import ExitCode
from tests.cluster.up import kvharbor
from workers.drills.deployment import SEGMENT_DIR
from workers.drills.network import require_network
from workers.drills.scenarios import DRILLS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HELD_S = 900
"""On a machine that is busy with other things, too."""


def _has_network() -> bool:
    try:
        require_network()
    except KVStoreError:
        return False
    return True


def segments() -> set[Path]:
    """Of drills, on this host; one that was killed outright leaves its own."""
    return set(SEGMENT_DIR.glob("kvharbor-drill-*"))


def test_every_drill_shows_what_it_has_to() -> None:
    names, others = list(DRILLS), segments()
    if not _has_network():
        refused = kvharbor("drill", *names)
        assert refused.returncode in (ExitCode.DENIED, ExitCode.USAGE), refused
        names = [name for name, drill in DRILLS.items() if drill.hosts == 1]
    done = kvharbor("drill", "--json", "--clients=2", *names, timeout_s=HELD_S)
    assert done.returncode == ExitCode.OK, (done.stdout, done.stderr)
    found = json.loads(done.stdout)["drills"]
    assert [each["drill"] for each in found] == names
    for each in found:
        assert (each["wrong"], each["failed"], each["leftovers"]) == (0, 0, []), each
        assert each["answers"] > 0, each
        assert each["outcome"]["faults"] == [], each
    by_name = {each["drill"]: each for each in found}
    assert by_name["prefill-dead"]["refusals"] > 0
    assert by_name["decode-half-dead"]["moved"] > 0
    assert not segments() - others


def test_drills_are_listed_and_others_refused() -> None:
    listed = kvharbor("drill", "--list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(DRILLS)
    for wrong in ((), ("fire",)):
        done = kvharbor("drill", *wrong)
        assert done.returncode == ExitCode.USAGE, done
        assert "prefill-dead" in done.stderr
