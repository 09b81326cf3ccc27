"""What the demo lets pass: nothing but equal tokens from a pool that was of use."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from kvstore.errors import ConfigError
from workers.demo_reports import DecodeReport, PrefillReport, Turn, read_report, write_report
from workers.demo_verdict import failures, table

if TYPE_CHECKING:
    from pathlib import Path

PREFILL = PrefillReport(1, "n", 128, 0, 2.0, 2, 1000, 0.1, "")
TURN = Turn("Why?", 150, 128, 3, (5, 6, 7), "So.", 0.25, 0.01, 10_000_000, 1, "")
ALONE = msgspec.structs.replace(TURN, first_token_s=2.5, fetch_s=2.3, bytes_moved=0)


def report(*turns: Turn) -> DecodeReport:
    return DecodeReport(1, turns)


def changed(**fields: object) -> Turn:
    return msgspec.structs.replace(TURN, **fields)


def test_equal_tokens_pass() -> None:
    assert failures(PREFILL, report(TURN, TURN), report(ALONE, ALONE)) == []


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        (changed(generated=(5, 9, 7)), r"token 1 differs: \(9,\) with the pool, \(6,\) without"),
        (changed(generated=(5, 6)), r"token 2 differs: \(\) with the pool, \(7,\) without"),
        (changed(generated=(5, 6, 7, 8)), r"token 3 differs: \(8,\) with the pool, \(\) without"),
        (changed(reused_tokens=64), "64 tokens reused, 128 handed over"),
        (changed(prompt_tokens=151), "split differently"),
        (changed(trouble="checksum"), "checksum"),
    ],
)
def test_whatever_is_wrong_is_said(turn: Turn, text: str) -> None:
    found = failures(PREFILL, report(TURN, turn), report(ALONE, ALONE))
    (line,) = [line for line in found if "split" not in line or "split" in text]
    assert re.search(text, line)
    assert "'Why?'" in line


def test_a_prefill_in_trouble_and_missing_answers_fail() -> None:
    troubled = msgspec.structs.replace(PREFILL, trouble="out_of_space")
    found = failures(troubled, report(TURN), report())
    assert found == ["the prefill worker: out_of_space", "1 answers with the pool, 0 without"]


def test_the_table_has_the_figures() -> None:
    shown = io.StringIO()
    Console(width=140, file=shown).print(table(report(TURN), report(ALONE)))
    for figure in ("Why?", "150", "128", "2.50", "0.25", "10.0x", "10", "1.00"):
        assert figure in shown.getvalue()


def test_reports_travel_as_files(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for each in (PREFILL, report(TURN)):
        write_report(path, each)
        assert read_report(path, type(each)) == each


@pytest.mark.parametrize("text", ["", "{}", '{"pid": "x", "turns": []}', "[1]"])
def test_what_is_no_report_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"report\.json"):
        read_report(path, DecodeReport)
    with pytest.raises(ConfigError, match="missing"):
        read_report(tmp_path / "missing", DecodeReport)
