"""Options of `kvharbor replicas` before a sub-command, which has the same ones."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvstore.cli import replicas
from kvstore.cli.main import app
from kvstore.cli.operator import Operator
from kvstore.cli.output import print_replicas
from kvstore.errors import BadValue
from kvstore.wire.messages.replicas import RepairNow, ReplicaReport

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.hello import Done


class FakeOperator(Operator):
    """Does all that is wished."""

    def __init__(self) -> None:
        self.wishes: list[Message] = []
        self.masters: list[str] = []

    def __exit__(self, *_: object) -> None:
        pass

    def change(  # type: ignore[override]  # wished is one kind alone
        self, wish: Message, want: type[Done]
    ) -> Done:
        self.wishes.append(wish)
        return want()

    def connected(self, masters: str, *_: object) -> FakeOperator:
        self.masters.append(masters)
        return self


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> FakeOperator:
    fake = FakeOperator()
    monkeypatch.setattr(replicas, "operator", fake.connected)
    return fake


@pytest.mark.parametrize("option", ["--master", "--cluster", "--secret-file"])
def test_an_option_that_a_sub_command_would_not_see_is_refused(
    asked: FakeOperator, option: str, tmp_path: Path
) -> None:
    value = str(tmp_path / "other")
    found = CliRunner().invoke(app, ["replicas", option, value, "repair"])
    assert isinstance(found.exception, BadValue)
    assert str(found.exception).startswith(f"{option}: got {value!r}")
    assert str(found.exception).endswith("want it after repair")
    assert not asked.wishes


def test_a_sub_command_goes_to_the_master_named_after_it(asked: FakeOperator) -> None:
    variables = {"KVHARBOR_MASTER": "a:1"}
    for arguments in ([], ["--master", "b:1"]):
        found = CliRunner().invoke(app, ["replicas", "repair", *arguments], env=variables)
        assert found.exit_code == 0, found
    assert asked.masters == ["a:1", "b:1"]
    assert asked.wishes == [RepairNow(b"")] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "replicas", "repair"],
        ["replicas", "--json", "repair"],
        ["replicas", "repair", "--json"],
    ],
)
def test_json_may_stand_anywhere(asked: FakeOperator, arguments: list[str]) -> None:
    found = CliRunner().invoke(app, arguments)
    assert json.loads(found.stdout) == {"repairing": "all"}
    assert asked.wishes


def test_what_repair_waits_for_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = {"due": 3, "rate": 2, "room": 1}
    print_replicas(ReplicaReport((), 0, 2, 3, (), waiting, 5 << 20, 1024.0, inf, "off", 0, 0))
    said = capsys.readouterr().out
    assert "waiting: 3 for their time, 2 for copy_bytes_per_s, 1 for room" in said
    assert "backlog: 5 MiB, copied lately: 1 KiB/s\n" in said, "no time to go that nobody knows"
