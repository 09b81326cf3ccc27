"""How fast does a program of Mooncake Store's run on the pool, beside Mooncake Store itself?

The same program, in a process of its own, calls both libraries by the same names: batches put and
read, objects one by one, and whether names are there, which is what engines ask most.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.harness import (
    KIB,
    MIB,
    Case,
    Report,
    Sample,
    Series,
    arguments,
    interleave,
    size_name,
)
from benchmarks.peers import mooncake_store
from benchmarks.peers.mooncake_store import MooncakeStore, Requester, drop_in
from benchmarks.pool import Pool

if TYPE_CHECKING:
    import argparse

BATCHES: Final = ((64 * KIB, 16), (256 * KIB, 16), (MIB, 16), (MIB, 1))
"""Bytes of an object, and objects of a call."""
NAMES: Final = (1, 16, 256)
ASKED_A_ROUND: Final = 20
SEGMENT_BYTES: Final = 512 * MIB
DRAM: Final = "1GiB"
OURS: Final = "kvharbor"
PEER: Final = "mooncake store"


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", _options)
    report = Report("A program of Mooncake Store's, on the pool and on Mooncake Store", options)
    rounds = 10 if options.quick else options.rounds
    report.parameters(peer=f"Mooncake Store {mooncake_store.version()}", rounds=rounds)
    with ExitStack() as undo:
        peer = undo.enter_context(MooncakeStore(SEGMENT_BYTES, pools=(True,)))
        pool = undo.enter_context(Pool(DRAM))
        ours = undo.enter_context(drop_in(pool.master, pool.pids))
        sides = {OURS: ours, PEER: peer.requesters[True]}
        _moved(report, sides, rounds)
        _asked(report, sides, rounds)
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=24, help="of each case (10 if --quick)")


def _moved(report: Report, sides: dict[str, Requester], rounds: int) -> None:
    rows: list[dict[str, str | int | float]] = []
    for size, count in BATCHES:
        label = f"{size}/{count}"
        puts = interleave([_put(*side, label, size, count) for side in sides.items()], rounds)
        gets = interleave([_get(*side, label, size, count) for side in sides.items()], rounds)
        for turn in range(rounds + 1):
            for requester in sides.values():
                requester.remove(label, turn, count)
        for op, series in (("put", puts), ("get", gets)):
            rows += [_row(op, size, count, who, each) for who, each in series.items()]
            name = f"{op}/{count}x{size_name(size)}/time"
            report.at_most(name, series[OURS].time_over(series[PEER]), 1.0)
    report.table("Objects", rows)


def _put(who: str, requester: Requester, label: str, size: int, count: int) -> Case:
    return Case(who, lambda turn: requester.put(label, turn, size, count))


def _get(who: str, requester: Requester, label: str, size: int, count: int) -> Case:
    return Case(who, lambda turn: requester.get(label, turn, size, count))


def _row(op: str, size: int, count: int, who: str, series: Series) -> dict[str, str | int | float]:
    return {
        "op": op,
        "object": size_name(size),
        "a call": count,
        "who": who,
        "median us": series.median_s * 1e6,
        "p99 us": series.p99_s * 1e6,
        "GB/s": series.gb_per_s,
    }


def _asked(report: Report, sides: dict[str, Requester], rounds: int) -> None:
    rows: list[dict[str, str | int | float]] = []
    for count in NAMES:
        for requester in sides.values():
            requester.put("asked", count, KIB, count)
        cases = [_exists(*side, count) for side in sides.items()]
        series = interleave(cases, rounds)
        rows += [
            {"names": count, "who": who, "median us": each.median_s * 1e6}
            for who, each in series.items()
        ]
        report.at_most(f"exist/{count}/time", series[OURS].time_over(series[PEER]), 1.0)
    report.table("Whether names are there", rows)


def _exists(who: str, requester: Requester, count: int) -> Case:
    return Case(
        who,
        lambda _: Sample(median(requester.exists("asked", count, count, ASKED_A_ROUND))),
    )


if __name__ == "__main__":
    sys.exit(main())
