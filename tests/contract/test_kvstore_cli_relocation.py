"""`kvharbor drain` and its like as programs: what they print, and what they refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.relocation import RelocationRow, Relocations
from tests.contract.cli_rig import ScriptedMaster, kvharbor, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMESPACE = "6e" * 32
ROW = RelocationRow(
    "3-1", "drain", "w[red]1", "", bytes.fromhex(NAMESPACE), 0, "", "done", True, 9, 9 << 20,
    0, 0, 0, 0, 0.0, 0.0, "",
)  # fmt: skip
RUNNING = replace(
    ROW, id="3-2", state="running", left_bytes=1 << 20, eta_s=12.4, bytes_per_s=2.0**20, keys=4,
    reason="no room", stuck_bytes=4096,
)  # fmt: skip


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """One that says that everything is done."""
    with ScriptedMaster(ListenerIdentity("c"), Relocations((ROW,))) as running:
        yield running.address


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    """One where it runs for ever."""
    with ScriptedMaster(ListenerIdentity("c"), Relocations((RUNNING,))) as running:
        yield running.address


def test_the_end_of_a_drain_for_people_and_for_programs(master: str) -> None:
    done = kvharbor("drain", "w[red]1", "--yes", "--master", master)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "drain 3-1 of w[red]1: done\n"
    done = kvharbor("--json", "drain", "w[red]1", "--yes", KVHARBOR_MASTER=master)
    row = json.loads(done.stdout)
    assert (row["id"], row["state"], row["namespace"]) == ("3-1", "done", NAMESPACE)


def test_a_list_for_people_and_for_programs(busy: str) -> None:
    done = kvharbor("relocations", "--master", busy)
    assert done.returncode == 0, done.stderr
    line = next(each for each in done.stdout.splitlines() if "3-2" in each)
    words = line.split()
    assert words[:4] == ["3-2", "drain", "w[red]1", "-"]
    for part in ("4 of 6e6e6e6e6e6e6e6e", "1 MiB", "12", "no room (4 KiB)"):
        assert part in line, line
    rows = json.loads(kvharbor("relocations", "--json", "--master", busy).stdout)["relocations"]
    assert [row["reason"] for row in rows] == ["no room"]


def test_undrain_names_those_that_are_drained(master: str) -> None:
    done = kvharbor("undrain", "w[red]1", "--master", master)
    assert (done.returncode, done.stdout) == (0, "worker w[red]1 is filled again\n")
    done = kvharbor("drain", "--cancel", "w[red]1", "--json", "--master", master)
    assert json.loads(done.stdout)["kind"] == "drain"
    text = refused(ExitCode.USAGE, "undrain", "w9", "--master", master)
    assert text == "worker: got 'w9', want one that is drained: w[red]1"


def test_a_worker_that_is_filled_again_is_not_drained() -> None:
    rows = replace(ROW, state="undone"), replace(ROW, id="3-2", state="cancelled")
    with ScriptedMaster(ListenerIdentity("c"), Relocations(rows)) as running:
        text = refused(ExitCode.USAGE, "undrain", "w[red]1", "--master", running.address)
    assert text == "worker: got 'w[red]1', want one that is drained: none"


@pytest.mark.parametrize(
    ("command", "field", "word"),
    [
        (("drain", "w9", "--yes"), "source", "WORKER"),
        (("copy", "--from", "w9", "--to", "w1"), "source", "--from"),
        (("copy", "--to", "w9", NAMESPACE), "target", "--to"),
        (("copy", "--to", "w1", NAMESPACE), "namespace", "NAMESPACE"),
        (("move", "--to", "w1", "--from", "w2", "--yes", "--tier", "hbm"), "tier", "--tier"),
        (("move", "--to", "w1", "--yes", NAMESPACE, NAMESPACE), "keys", "KEY"),
        (("drain", "w9", "--yes"), "kind", "kind"),
    ],
)
def test_what_a_master_refuses_is_named_as_it_was_written(
    command: tuple[str, ...], field: str, word: str
) -> None:
    answer = Failure("bad_value", f"{field}: got 'x', want another: or none")
    with ScriptedMaster(ListenerIdentity("c"), answer) as running:
        text = refused(ExitCode.USAGE, *command, "--master", running.address)
    assert text == f"{word}: got 'x', want another: or none"


def test_it_is_not_waited_for_where_that_is_asked(busy: str) -> None:
    done = kvharbor("drain", "w[red]1", "--yes", "--no-wait", "--master", busy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("drain 3-2 of w[red]1: running, 1 MiB left, 1 MiB/s, 12 s to go")


def test_waiting_ends_by_its_time(busy: str) -> None:
    done = kvharbor("drain", "w1", "--yes", "--timeout-s", "0.2", "--master", busy)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "goes on after 0.2 s: 1 MiB left" in done.stderr
    assert done.stdout.startswith("drain 3-2 of w[red]1: 90%")


def test_a_cancelled_one_has_failed() -> None:
    row = replace(ROW, state="cancelled", reason="as an operator wishes")
    with ScriptedMaster(ListenerIdentity("c"), Relocations((row,))) as running:
        done = kvharbor("rebalance", "--master", running.address)
    assert done.returncode == ExitCode.FAILED
    assert "cancelled (as an operator wishes)" in done.stdout


@pytest.mark.parametrize("command", [("drain", "w1"), ("move", "--from", "w1", "--to", "w2")])
def test_what_takes_pages_away_asks_unless_nobody_can_be_asked(command: tuple[str, ...]) -> None:
    row = replace(ROW, state="planned")
    with ScriptedMaster(ListenerIdentity("c"), Relocations((row,))) as running:
        text = refused(ExitCode.USAGE, *command, "--master", running.address)
    assert text == "--yes: got False, want it, where nobody can be asked"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("copy", "feed", "--to", "w"), "namespace: got 'feed', want 64 hex digits"),
        (("copy", NAMESPACE, "x", "--to", "w"), "key: got 'x', want 64 hex digits"),
    ],
)
def test_what_is_no_id_is_named(arguments: tuple[str, ...], text: str) -> None:
    assert refused(ExitCode.USAGE, *arguments) == text
