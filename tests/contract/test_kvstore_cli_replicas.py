"""`kvharbor replicas` as a program: what it prints, and what it refuses before it asks anybody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.replicas import NamespaceReplicas, ReplicaReport
from tests.contract.cli_rig import ScriptedMaster, kvharbor, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMESPACE = "6e" * 32
ROW = NamespaceReplicas(
    bytes.fromhex(NAMESPACE), "t[red]1", "m", 0, 100, (10, 80, 6, 4), (0, 100), 10, 2, 3, 5
)
REPORT = ReplicaReport(
    (ROW,), 7, 2, 3, (5, 1), {"rate": 4, "room": 1}, 3 << 20, 2.0**20, 12.4, "enforce", 6, 9
)  # fmt: skip


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """One that reports."""
    with ScriptedMaster(ListenerIdentity("c"), REPORT) as running:
        yield running.address


@pytest.fixture(scope="module")
def obedient() -> Iterator[str]:
    """One that has done everything."""
    with ScriptedMaster(ListenerIdentity("c"), Done()) as running:
        yield running.address


@pytest.mark.parametrize("words", [(), ("show",)])
def test_the_report_for_people_and_for_programs(master: str, words: tuple[str, ...]) -> None:
    done = kvharbor("replicas", *words, KVHARBOR_MASTER=master)
    assert done.returncode == 0, done.stderr
    line = next(each for each in done.stdout.splitlines() if "t[red]1" in each)
    counts = ["2", "(usual)", "100", "10", "80", "10", "10", "2", "3", "5"]
    assert line.split() == [*counts, "t[red]1", "m", NAMESPACE]
    for part in (
        "7 namespaces that lack less are left out",
        "hosts that lend: 3",
        "5 with 1, 1 with 2; waiting: 4 for copy_bytes_per_s, 1 for room",
        "for heat (enforce): 9 replicas of 6 runs",
        "backlog: 3 MiB, copied lately: 1 MiB/s, 12 s to go",
    ):
        assert part in done.stdout
    done = kvharbor("--json", "replicas", *words, KVHARBOR_MASTER=master)
    found = json.loads(done.stdout)
    assert found["namespaces"][0]["namespace"] == NAMESPACE
    assert found["namespaces"][0]["by_got"] == [10, 80, 6, 4]
    assert (found["hosts"], found["waiting"]) == (3, {"rate": 4, "room": 1})


def test_a_number_is_set_and_repair_asked_for(obedient: str) -> None:
    done = kvharbor("replicas", "set", NAMESPACE.upper(), "3", "--master", obedient)
    assert (done.returncode, done.stdout) == (0, f"namespace {NAMESPACE}, replicas 3\n")
    done = kvharbor("replicas", "repair", "--json", "--master", obedient)
    assert json.loads(done.stdout) == {"repairing": "all"}
    done = kvharbor("replicas", "repair", NAMESPACE, "--master", obedient)
    assert done.stdout == f"repairing {NAMESPACE}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("set", "6e", "2"), "namespace: got '6e', want 64 hex digits"),
        (("set", NAMESPACE, "17"), "replicas: got 17, want 1 to 16, or 0 for as many as usual"),
        (("repair", "all"), "namespace: got 'all', want 64 hex digits"),
    ],
)
def test_what_cannot_be_is_refused_before_anybody_is_asked(
    words: tuple[str, ...], text: str
) -> None:
    assert refused(ExitCode.USAGE, "replicas", *words) == text
