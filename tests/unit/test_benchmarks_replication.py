"""The lab of replicas for heat: what it counts of ports, and that it can be run."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import replication
from benchmarks.replication import KV_BYTES_PER_TOKEN, SLICE_S, WORKERS, Case, Cluster, Served
from kvstore.request_trace import TraceRequest

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 512
PAGE_BYTES = TOKENS * KV_BYTES_PER_TOKEN
PAGES = (0, 1, 2, 3)


def replayed(case: Case, seconds: int, a_second: int = 2) -> Served:
    """The same four pages, again and again."""
    cluster = Cluster(case, 64, TOKENS)
    for number in range(seconds * a_second):
        cluster.serve(TraceRequest(number / a_second, 4 * TOKENS, PAGES), PAGES)
    return cluster.served(float(seconds))


def test_what_is_on_the_readers_host_takes_no_port() -> None:
    served = replayed(Case(1, "off"), 240)
    assert served.hit_ratio == pytest.approx(1 - 1 / 480)
    assert served.local_share == pytest.approx(1 / WORKERS, abs=0.05)
    assert served.imbalance == pytest.approx(WORKERS), "one host sends all of it"
    sent = 2 * 4 * PAGE_BYTES * (1 - served.local_share)
    assert served.busiest_bytes_per_s == pytest.approx(sent, rel=0.05)


def test_of_several_replicas_the_one_whose_host_is_idle_is_read() -> None:
    alone, four = (replayed(Case(replicas, "off"), 240) for replicas in (1, 4))
    assert four.copied_pages == 3 * 4
    assert four.imbalance == pytest.approx(alone.imbalance / 4, rel=0.1)


def test_the_port_of_the_lab_is_that_of_its_hosts() -> None:
    cool, hot = (replayed(Case(1, "enforce"), 240, rate) for rate in (2, 3))
    assert cool.wanted_for_heat == 0, "1.3 GB/s"
    assert hot.wanted_for_heat == 1, "2 GB/s"
    assert hot.copied_pages == 4
    assert hot.imbalance == pytest.approx(cool.imbalance / 2, rel=0.05)


def test_it_can_be_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    rows = [
        {"timestamp": 250 * n, "input_length": 2048, "output_length": 1, "hash_ids": list(PAGES)}
        for n in range(960)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--trace", str(trace), "--pages", "64", "--speeds", "2", "--json", str(file))
    monkeypatch.setattr(sys, "argv", ["replication.py", *given, "--check"])
    assert replication.main() == 0, capsys.readouterr().out
    names = [ratio["name"] for ratio in json.loads(file.read_text())["ratios"]]
    assert "busiest_port/2x/replicas=1/enforce" in names
    monkeypatch.setattr(sys, "argv", ["replication.py", "--trace", str(tmp_path / "none")])
    assert replication.main() != 0
    assert SLICE_S < 120 / 2, "the second half has slices"
