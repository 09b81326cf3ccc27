"""What do hedged reads save where workers stand still at random, and what do they cost?

Two workers hold the same pages and are stopped for some milliseconds at random moments: one of
them, both, or none. A client reads one page after the other over TCP, each at its moment of a
timetable, so that a read that waits for the one before counts as late as it is. With and without
hedging take turns, second by second, under the same kind of weather.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import msgspec

from benchmarks.harness import KIB, Report, arguments
from benchmarks.pool import Pool, PoolFailed
from kvstore import Hit, KVStore, Stored

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Self

    from kvstore.client.counters import ClientCounters
    from kvstore.client.locations import Locations

PAGE_BYTES: Final = 256 * KIB
PAGES: Final = 64
READS_PER_S: Final = 250
TURN_S: Final = 1.0
STOP_S: Final = 0.02
PAUSE_S: Final = 0.4
"""Mean time between two stops of a worker."""
SEED: Final = 5
WARM_UP_READS: Final = 300
QUANTILES: Final = (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))
WEATHER: Final = {"none stops": 0, "one stops": 1, "both stop": 2}


class Stops:
    """Stops each of these processes again and again, for as long as the context lasts."""

    def __init__(self, pids: Sequence[int], seed: int) -> None:
        """The same seed gives the same pauses."""
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._stop, args=(pid, random.Random(seed + i)), daemon=True)
            for i, pid in enumerate(pids)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _stop(self, pid: int, draw: random.Random) -> None:
        while not self._end.wait(draw.expovariate(1 / PAUSE_S)):
            os.kill(pid, signal.SIGSTOP)
            self._end.wait(STOP_S)
            os.kill(pid, signal.SIGCONT)


class Reader:
    """A store, and the pages that it reads in turn."""

    def __init__(self, store: KVStore, pages: Sequence[Locations], data: memoryview) -> None:
        """`data` is what the pages hold, one after the other."""
        self.store = store
        self._pages = pages
        self._data = data
        self._into = memoryview(bytearray(PAGE_BYTES))
        self._next = 0

    def read(self) -> None:
        """Read the next page, and see that it is what was put."""
        number = self._next % len(self._pages)
        self._next += 1
        outcomes = self.store.read(self._pages[number], self._into, [0])
        want = self._data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        if outcomes != [Hit()] or self._into[:64] != want[:64]:
            raise PoolFailed(f"read: {outcomes}")

    def turn(self, seconds: float) -> list[float]:
        """Keep to the timetable for so long: seconds of each read, counted from its moment."""
        began_s = time.perf_counter()
        took_s: list[float] = []
        for i in range(int(seconds * READS_PER_S)):
            due_s = began_s + i / READS_PER_S
            time.sleep(max(0.0, due_s - time.perf_counter()))
            self.read()
            took_s.append(time.perf_counter() - due_s)
        return took_s


def main() -> int:
    """Run it; the exit status."""
    options = arguments(__doc__ or "", _options)
    report = Report("hedged reads of two replicas", options)
    rounds = 3 if options.quick else options.rounds
    report.parameters(
        page_bytes=PAGE_BYTES, reads_per_s=READS_PER_S, stop_s=STOP_S, pause_s=PAUSE_S,
        turns=rounds, turn_s=TURN_S, seed=SEED,
    )  # fmt: skip
    with ExitStack() as undo:
        pools = [undo.enter_context(Pool("128MiB")) for _ in range(2)]
        readers = _readers(pools, undo)
        for weather, stopped in WEATHER.items():
            workers = [pool.worker_pid for pool in pools][:stopped]
            _compare(report, readers, workers, weather, rounds)
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="turns of each case (3 if --quick)")


def _readers(pools: Sequence[Pool], undo: ExitStack) -> dict[str, Reader]:
    """Clients of both workers: each has put the same pages into its own pool."""
    data = memoryview(random.Random(SEED).randbytes(PAGES * PAGE_BYTES))
    found = [_put(pool, data) for pool in pools]
    pages = [_merged(one, other) for one, other in zip(*found, strict=True)]
    readers = {}
    for name, hedge in (("plain", False), ("hedged", True)):
        store = KVStore.connect(pools[0].master, transports=("tcp",), hedge=hedge)
        undo.callback(store.close)
        readers[name] = Reader(store, pages, data)
        for _ in range(WARM_UP_READS):
            readers[name].read()
    return readers


def _put(pool: Pool, data: memoryview) -> list[Locations]:
    """Put all pages as objects; where each lies, without a lease, since nothing is evicted."""
    with KVStore.connect(pool.master, transports=("tcp",)) as store:
        opened = store.open_opaque("hedge", ttl_s=float("inf"))
        names = opened.names([b"%d" % i for i in range(PAGES)])
        places = range(0, PAGES * PAGE_BYTES, PAGE_BYTES)
        if store.put_objects(opened, names, data, places, PAGE_BYTES) != [Stored()] * PAGES:
            raise PoolFailed("put")
        each = [names.slice(i, i + 1) for i in range(PAGES)]
        return [store.lookup(opened, name, lease=False) for name in each]


def _merged(one: Locations, other: Locations) -> Locations:
    """The page as one pool would locate it that has both workers."""
    (piece,), (beside,) = one.pieces, other.pieces
    (run,), (same,) = piece.located.runs, beside.located.runs
    (copy,) = same.copies
    first = len(piece.located.segments)
    replica = msgspec.structs.replace(copy, segment=copy.segment + first)
    segments = [
        msgspec.structs.replace(segment, worker=f"{segment.worker}-2")
        for segment in beside.located.segments
    ]
    located = msgspec.structs.replace(
        piece.located,
        segments=(*piece.located.segments, *segments),
        runs=(msgspec.structs.replace(run, copies=(*run.copies, replica)),),
    )
    whole = msgspec.structs.replace(piece, located=located)
    return msgspec.structs.replace(one, pieces=(whole,))


def _compare(
    report: Report, readers: dict[str, Reader], workers: Sequence[int], weather: str, rounds: int
) -> None:
    """Both kinds of reader, in turns."""
    took_s: dict[str, list[float]] = {name: [] for name in readers}
    before = readers["hedged"].store.counters()
    for number in range(rounds):
        names = list(readers)
        for name in names[number % 2 :] + names[: number % 2]:
            with Stops(workers, SEED + number):
                took_s[name] += readers[name].turn(TURN_S)
    rows = {name: _row(name, each) for name, each in took_s.items()}
    counters = readers["hedged"].store.counters()
    share = (counters.hedges - before.hedges) / len(took_s["hedged"])
    report.table(f"{weather}: ms of a read of 256 KiB", list(rows.values()))
    report.table(f"{weather}: hedges", [_hedges(before, counters)])
    for name, _ in QUANTILES:
        ratio = float(rows["hedged"][name]) / float(rows["plain"][name])
        if weather == "both stop" and name == "p99":
            report.at_most(f"{weather}/hedged_over_plain_{name}", ratio, 0.8)
        else:
            report.reported(f"{weather}/hedged_over_plain_{name}", ratio)
    report.at_most(f"{weather}/share_hedged", share, 0.06)


def _row(name: str, took_s: Sequence[float]) -> dict[str, str | int | float]:
    ordered = sorted(took_s)
    row: dict[str, str | int | float] = {"reads": name, "times": len(ordered)}
    for label, quantile in QUANTILES:
        row[label] = 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * quantile))]
    return row | {"max": 1e3 * ordered[-1]}


def _hedges(before: ClientCounters, after: ClientCounters) -> dict[str, str | int | float]:
    names = ("hedgeable_reads", "hedges", "hedges_won", "hedges_withheld")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
