"""Following a relocation: what is shown of it, and what becomes of it when the leader changes."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from kvstore.cli import progress
from kvstore.cli.operator import Operator
from kvstore.cli.progress import PATIENCE_S, Bar, Lines, Silent, follow
from kvstore.errors import DeadlineExceeded, NotLeader, Unavailable
from kvstore.wire.messages.relocation import GetRelocations, RelocationRow, Relocations

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message

MIB = 1 << 20
ROW = RelocationRow(
    "3-1", "drain", "w1", "", b"", 0, "", "running", True, 0, 0, 100, 100 * MIB, 0, 0,
    0.0, inf, "",
)  # fmt: skip


def at(done: int, **changes: object) -> RelocationRow:
    """So many MiB of a hundred are done."""
    sizes = {"done_bytes": done * MIB, "left_bytes": (100 - done) * MIB}
    return replace(ROW, **sizes, **changes)


class FakeOperator(Operator):
    """Answers one thing after the other, the last one over and over."""

    def __init__(self, *said: RelocationRow | Exception | None) -> None:
        self.said = list(said)
        self.now = 0.0
        self.asked: list[Message] = []

    def __exit__(self, *_: object) -> None:
        pass

    def ask(  # type: ignore[override]  # asked for one kind alone
        self, question: Message, want: type[Relocations]
    ) -> Relocations:
        assert want is Relocations
        self.asked.append(question)
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        return Relocations(() if said is None else (said,))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def follow(self, show: Silent, timeout_s: float = inf) -> RelocationRow:
        return follow(lambda: self, ROW, show, timeout_s, lambda: self.now, self.sleep)


def test_a_line_tells_of_each_tenth_and_of_what_it_waits_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fast = at(50, bytes_per_s=10.0 * MIB, eta_s=5.0)
    stuck = at(90, reason="no room", stuck_bytes=10 * MIB)
    asked = FakeOperator(at(4), at(5), fast, fast, stuck, at(100, state="done"))
    assert asked.follow(Lines()).state == "done"
    assert capsys.readouterr().out.splitlines() == [
        "drain 3-1 of w1: 0%, 0 B done, 100 MiB left",
        "drain 3-1 of w1: 50%, 50 MiB done, 50 MiB left, 10 MiB/s, 5 s to go",
        "drain 3-1 of w1: 90%, 90 MiB done, 10 MiB left (no room for 10 MiB)",
        "drain 3-1 of w1: 100%, 100 MiB done, done",
    ]
    assert set(asked.asked) == {GetRelocations("3-1")}


def test_what_a_worker_has_that_is_away_is_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    away = replace(at(50, reason="worker w1 is not there"), left_bytes=0)
    FakeOperator(at(50), away, at(100, state="done", eta_s=0.0)).follow(Lines())
    assert capsys.readouterr().out.splitlines()[1:] == [
        "drain 3-1 of w1: 50%, 50 MiB done, 50 MiB left",
        "drain 3-1 of w1: 50%, 50 MiB done, 50 MiB left (worker w1 is not there)",
        "drain 3-1 of w1: 100%, 100 MiB done, done",
    ]


def test_a_bar_is_drawn_for_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = progress.shown(as_json=False)
    assert isinstance(shown, Bar)
    FakeOperator(at(50), at(100, state="done")).follow(shown)
    drawn = capsys.readouterr().out
    assert "drain 3-1 of w1" in drawn
    assert "100.0/100.0 MiB" in drawn


def test_nothing_is_shown_where_the_result_is_wanted_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    FakeOperator(at(50), at(100, state="done")).follow(progress.shown(as_json=True))
    assert capsys.readouterr().out == ""
    assert isinstance(progress.shown(as_json=False), Lines)


def test_it_is_followed_from_leader_to_leader() -> None:
    asked = FakeOperator(at(50), Unavailable("gone"), NotLeader(), at(60), at(100, state="done"))
    assert asked.follow(Silent()).state == "done"


def test_it_is_given_up_when_nobody_leads_for_long() -> None:
    asked = FakeOperator(at(50), Unavailable("cannot reach m:1"))
    with pytest.raises(Unavailable, match="cannot reach m:1"):
        asked.follow(Silent())
    assert PATIENCE_S <= asked.now <= PATIENCE_S + 2.0


def test_what_another_master_has_forgotten_has_ended() -> None:
    row = FakeOperator(at(50), None).follow(Silent())
    assert (row.state, row.left_bytes, row.reason) == ("done", 0, "it ended under another master")


def test_waiting_has_an_end_and_says_that_it_goes_on() -> None:
    asked = FakeOperator(at(50))
    text = "drain 3-1 of w1 goes on after 7 s: 50 MiB left"
    with pytest.raises(DeadlineExceeded, match=text):
        asked.follow(Silent(), 7.0)
    assert asked.now == pytest.approx(7.0)
