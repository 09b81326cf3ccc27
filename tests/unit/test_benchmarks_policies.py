"""The policy lab as a whole, on a trace of a few requests: its tables, its file, its ends."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import policies, two_tiers
from benchmarks.policies import Timed
from policies.eviction.lrfu import Lrfu

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = {
    "hit_ratio", "evictions", "effective_ttl_s", "ghost_hits", "unreachable", "policy_us",
}  # fmt: skip
FIELDS_OF_TIERS = {
    "hit_ratio", "hit_ratio_dram", "hit_ratio_nvme", "nvme_pages_per_s", "nvme_bytes_written",
    "promotions", "evictions", "copies_evicted", "effective_ttl_s_dram", "effective_ttl_s_nvme",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten sessions of four pages that share the first; each comes twice."""
    file = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 1000 * turn,
            "input_length": 2048,
            "output_length": 1,
            "hash_ids": [0, *range(turn % 10 * 3 + 1, turn % 10 * 3 + 4)],
        }
        for turn in range(20)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(monkeypatch: pytest.MonkeyPatch, *given: str) -> int:
    monkeypatch.setattr(sys, "argv", ["policies.py", *given])
    return policies.main()


def test_tables_have_every_policy_beside_the_optimum(
    monkeypatch: pytest.MonkeyPatch, trace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    given = ("--trace", str(trace), "--capacities", "16,64", "--policies", "lrfu,lru")
    assert run(monkeypatch, *given, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    ratios = {row["policy"]: row for row in found["tables"]["Token hit ratio, %"]}
    assert {"lrfu", "lru", "optimum", "lrfu, exact", "lru, exact"} <= set(ratios)
    # All 31 pages fit 64: 9 hits of the shared page, then 10 of all four pages, of 80.
    assert all(row["64"] == pytest.approx(100 * 49 / 80) for row in ratios.values())
    assert all(row["16"] <= ratios["optimum"]["16"] for row in ratios.values())
    rows = found["tables"]["Deployed"]
    assert [(row["policy"], row["capacity_pages"]) for row in rows] == [
        ("lrfu", 16), ("lrfu", 64), ("lru", 16), ("lru", 64),
    ]  # fmt: skip
    assert all(set(row) >= FIELDS for row in rows)
    assert {ratio["name"] for ratio in found["ratios"]} >= {
        "points_below_exact/16", "unreachable_share", "policy_us_per_page_touch",
    }  # fmt: skip


def test_what_a_drive_adds_is_told_by_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, trace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    given = ("--trace", str(trace), "--capacities", "16", "--policies", "lrfu", "--tiers", "16,64")
    assert run(monkeypatch, *given, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    rows = found["tables"]["Two tiers, 16 pages of memory and 64 of a drive"]
    ratios = {row["admission"]: row for row in rows}
    assert [row["admission"] for row in rows] == [case.admission for case in two_tiers.CASES]
    # The drive that is sized by its endurance takes what `all` writes, for all its life.
    by_size = [row for row in rows if row["drive_pages"] != 64]
    assert [row["admission"] for row in by_size] == ["budget"]
    wanted = ratios["all"]["nvme_pages_per_s"] * 86_400 / 3
    assert wanted <= by_size[0]["drive_pages"] < wanted + 1000
    assert all(set(row) >= FIELDS_OF_TIERS for row in rows)
    assert ratios["none"]["nvme_bytes_written"] == 0
    # All 31 pages fit the drive.
    assert ratios["all"]["hit_ratio"] == pytest.approx(49 / 80)
    assert ratios["none"]["hit_ratio"] < 0.5
    assert ratios["all"]["nvme_bytes_written"] % (512 * two_tiers.KV_BYTES_PER_TOKEN) == 0
    assert {ratio["name"] for ratio in found["ratios"]} >= {
        "two_tiers/trace/16+64/percent", "two_tiers_hinted/trace/16+64/writes_per_s",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--policies", "nonsense"), "nonsense"),
        (("--policies", "lrfu:half=1"), "half"),
        (("--capacities", "7"), "capacity_pages"),
        (("--page-tokens", "0"), "page_tokens"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trace: Path,
    given: tuple[str, ...],
    said: str,
) -> None:
    assert run(monkeypatch, "--trace", str(trace), *given) == 2
    error = capsys.readouterr().err
    assert error.startswith("policies: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_timed_policy_is_the_policy() -> None:
    timed = Timed(Lrfu())
    assert timed.parameters == Lrfu().parameters
    assert timed.spent_ns == 0
    timed.resize(10)
    spent_ns = timed.spent_ns
    assert spent_ns > 0
    timed.resize(10)
    assert timed.spent_ns > spent_ns
