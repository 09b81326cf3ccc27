"""`kvharbor trace replay` as a user runs it: a table, one JSON line, and what ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.cli.output import print_replayed
from kvstore.cli.trace import replay

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests that share their two pages, and one more page."""
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at, "input_length": 512 * len(pages), "output_length": 1, "hash_ids": pages}
        for at, pages in ((0, [0, 1]), (3000, [0, 1, 2]))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(*given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvstore.cli.main", *given]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_json_line_has_every_pool_in_the_order_asked_for(trace: Path) -> None:
    sizes = ("--capacity", "8", "--capacity", "4")
    done = run("trace", "replay", str(trace), *sizes, "--policy", "lrfu", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["trace"] == str(trace)
    assert [pool["capacity_pages"] for pool in found["pools"]] == [8, 4]
    assert {pool["policy"] for pool in found["pools"]} == {"lrfu"}
    assert found["pools"][0]["hit_ratio"] == pytest.approx(2 / 5)
    assert found["pools"][0]["pages_written_by_tier"] == {"dram": 3}


def test_the_table_has_a_line_a_pool(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    returncode, pools = replay(["--capacity=8", str(trace)])
    assert returncode == 0
    print_replayed(pools)
    heading, *rows = [line for line in capsys.readouterr().out.splitlines() if line.split()]
    assert "hit ratio" in heading
    assert rows[-1].split()[:3] == ["lrfu", "8", "0.4"]


def test_a_drive_below_memory_is_replayed_too(trace: Path) -> None:
    options = ("--capacity", "8", "--nvme-capacity", "16", "--nvme-admission", "all")
    more = ("--watermark-demote", "0.1", "--hints", "learned", "--lease-ttl-s", "10", "--json")
    done = run("trace", "replay", str(trace), *options, *more)
    assert (done.returncode, done.stderr) == (0, "")
    pool = json.loads(done.stdout)["pools"][0]
    assert (pool["nvme_pages"], pool["admission"]) == (16, "all")
    assert pool["pages_written_by_tier"]["dram"] == 3
    assert pool["pages_written_by_tier"]["nvme"] > 0


def test_a_wrong_line_ends_it_with_one_line_that_says_where(trace: Path) -> None:
    trace.write_text(trace.read_text() + '{"timestamp": 1}\n')
    done = run("trace", "replay", str(trace), "--capacity", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"kvharbor trace replay: {trace}, line 3: input_length: got None, "
        "want a whole number from 0 to below 9223372036854775808\n"
    )


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(("--capacity", "7"), "capacity_pages"), (("--policy", "nonsense"), "nonsense")],
)
def test_a_wrong_option_is_named(trace: Path, wrong: tuple[str, str], named: str) -> None:
    done = run("trace", "replay", str(trace), "--capacity", "8", *wrong)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
