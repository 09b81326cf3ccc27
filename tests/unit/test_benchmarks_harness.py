"""What every benchmark relies on: turns, ratios, exit status, the JSON file."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

import pytest

from benchmarks.harness import (
    Case,
    ProcessClock,
    Report,
    Sample,
    Series,
    interleave,
    machine,
    size_name,
)
from benchmarks.regions import Region, Ring, fill, memcpy, same

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def series(*seconds: float, nbytes: int = 1000) -> Series:
    return Series([Sample(each, nbytes, each / 2) for each in seconds])


def report(check: bool = False, file: Path | None = None) -> Report:
    return Report("question", argparse.Namespace(check=check, json=file))


def test_every_round_runs_every_case_once_in_a_rotating_order() -> None:
    ran: list[tuple[str, int]] = []

    def case(name: str) -> Case:
        def run(turn: int) -> Sample:
            ran.append((name, turn))
            return Sample(float(turn))

        return Case(name, run)

    found = interleave([case("a"), case("b"), case("c")], rounds=3, warmups=1)
    orders = ["".join(name for name, turn in ran if turn == each) for each in range(4)]
    assert sorted("".join(sorted(order)) for order in orders) == ["abc"] * 4
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert [sample.seconds for sample in found["b"].samples] == [1.0, 2.0, 3.0]


def test_ratios_are_medians_of_the_rounds_so_that_one_bad_round_counts_little() -> None:
    ours, theirs = series(1.0, 2.0, 50.0), series(4.0, 8.0, 8.0)
    assert ours.speedup_over(theirs) == 4.0
    assert ours.time_over(theirs) == 0.25
    assert series(1.0, nbytes=500).speedup_over(series(4.0, nbytes=1000)) == 2.0
    assert ours.median_s == 2.0
    assert ours.p99_s == 50.0
    assert series(1e-6, 2e-6, nbytes=1000).cpu_s_per_gb == pytest.approx(0.75)
    assert series(1e-6, nbytes=1000).gb_per_s == pytest.approx(1.0)


@pytest.mark.parametrize(("check", "status"), [(False, 0), (True, 1)])
def test_a_ratio_that_falls_short_fails_only_a_check(
    check: bool, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made = report(check)
    made.at_least("fast", 3.9, 4.0)
    made.at_most("cheap", 0.2, 0.5)
    made.reported("known", 1.0)
    assert made.finish() == status
    said = capsys.readouterr().out.splitlines()
    assert "ratio fast 3.900 target >=4.0  (short)" in said
    assert "ratio cheap 0.200 target <=0.5" in said
    assert "ratio known 1.000 target none" in said


def test_a_check_without_shortfall_passes() -> None:
    made = report(check=True)
    made.at_least("fast", 4.0, 4.0)
    made.at_most("cheap", 0.5, 0.5)
    assert made.finish() == 0


def test_the_json_file_holds_all_that_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(os, "getloadavg", lambda: (9.9, 1.25, 0.1))
    made = report(file=file)
    made.parameters(rounds=3)
    made.table("Table", [{"who": "us", "GB/s": 1.5}])
    made.at_least("fast", 5.0, 4.0)
    made.finish()
    written = json.loads(file.read_text())
    assert written["parameters"] == {"rounds": 3}
    assert written["tables"] == {"Table": [{"who": "us", "GB/s": 1.5}]}
    assert (written["machine"], written["load"]) == (machine(), 1.2)
    assert [ratio["name"] for ratio in written["ratios"]] == ["fast"]
    assert written["commit"]


def test_the_clock_of_another_process_is_read() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ProcessClock([pid]).now_s() < 1.0
    before = ProcessClock([os.getpid()]).now_s()
    sum(range(100_000))
    assert ProcessClock([os.getpid()]).now_s() > before
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("nbytes", "name"), [(4096, "4KiB"), (65536, "64KiB"), (MIB, "1MiB"), (16 * MIB, "16MiB")]
)
def test_sizes_are_named_as_people_do(nbytes: int, name: str) -> None:
    assert size_name(nbytes) == name


def test_batches_go_around_the_ring_without_overlap() -> None:
    ring = Ring(0, 10 * MIB)
    turns = [ring.offsets(turn, MIB, 4) for turn in range(3)]
    assert turns == [[0, MIB, 2 * MIB, 3 * MIB], [4 * MIB, 5 * MIB, 6 * MIB, 7 * MIB], turns[0]]


def test_the_yardstick_copies_every_byte() -> None:
    source, into = Region(4 * MIB, seed=3), Region(4 * MIB)
    assert memcpy(source, into, 0, MIB, 2).nbytes == 2 * MIB
    assert same(source.address, into.address, 2 * MIB)
    assert not same(source.address + 2 * MIB, into.address + 2 * MIB, MIB)


def test_bytes_are_a_function_of_seed_and_place() -> None:
    first, again, other = bytearray(40 * MIB), bytearray(40 * MIB), bytearray(MIB)
    fill(memoryview(first), 1)
    fill(memoryview(again), 1)
    fill(memoryview(other), 2)
    assert first == again
    assert first[:MIB] != other
    assert len({bytes(first[i * 16 * MIB : i * 16 * MIB + MIB]) for i in range(3)}) == 3
