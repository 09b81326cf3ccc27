"""`kvharbor masters`, and what `kvharbor status` says of who leads, against scripted masters."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity
from tests.contract.cli_rig import STATUS, ScriptedMaster, kvharbor, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

LEADER = "10.0.0.1:7700"
STANDBY = msgspec.structs.replace(STATUS, master="m2", standing="standby", leader=(LEADER,))


@pytest.fixture(scope="module")
def leads() -> Iterator[str]:
    """The address of a master that leads."""
    with ScriptedMaster(ListenerIdentity("c"), STATUS) as running:
        yield running.address


@pytest.fixture(scope="module")
def stands_by() -> Iterator[str]:
    """The address of one that stands by."""
    with ScriptedMaster(ListenerIdentity("c"), STANDBY) as running:
        yield running.address


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield "{}:{}".format(*taken.getsockname())


def test_masters_for_programs(leads: str, stands_by: str, nobody: str) -> None:
    done = kvharbor("masters", "--json", "--master", f"{nobody},{stands_by},{leads},{leads}")
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)["masters"]
    assert (first["address"], first["standing"]) == (nobody, "")
    assert "Connection refused" in first["error"]
    assert (second["master"], second["standing"], second["epoch"]) == ("m2", "standby", 4)
    assert second["leader"] == [LEADER]
    assert (third["address"], third["master"], third["standing"]) == (leads, "m1", "leading")


def test_masters_for_people(leads: str, stands_by: str, nobody: str) -> None:
    done = kvharbor("masters", KVHARBOR_MASTER=f"{leads},{stands_by},{nobody}")
    assert done.returncode == 0, done.stderr
    for text in ("m1", "leading", "m2", "standby", LEADER, f"no answer: cannot reach {nobody}"):
        assert text in done.stdout


def test_masters_of_whom_nobody_answers(nobody: str) -> None:
    nowhere = "unix:/nonexistent/master.sock"
    said = refused(ExitCode.UNAVAILABLE, "masters", "--master", f"{nobody},{nowhere}")
    assert f"cannot reach {nobody}: Connection refused" in said
    assert f"cannot reach {nowhere}: No such file or directory" in said


def test_status_of_a_standby_names_the_leader(stands_by: str) -> None:
    done = kvharbor("status", "--master", stands_by)
    assert done.stdout == f"cluster c, epoch 4, m2 is standby, the leader is at {LEADER}\n"


@pytest.mark.parametrize(
    ("standing", "text"),
    [
        ("in doubt", "m2 leads but its lease is in doubt: lookups only"),
        ("loading", "m2 is loading, no leader is known"),
    ],
)
def test_status_says_what_a_master_cannot_do(standing: str, text: str) -> None:
    status = msgspec.structs.replace(STANDBY, standing=standing, leader=())
    with ScriptedMaster(ListenerIdentity("c"), status) as running:
        assert text in kvharbor("status", "--master", running.address).stdout
