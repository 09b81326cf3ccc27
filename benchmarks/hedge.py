"""What do hedged reads save where workers stand still at random, and what do they cost?

Two workers hold the same pages and are stopped for some milliseconds at random moments: one of
them, both, or none. A client reads one page after the other over TCP, each at its moment of a
timetable, so that a read that waits for the one before counts as late as it is. With and without
hedging take turns, second by second, under the same kind of weather.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import KIB, Report, arguments
from benchmarks.pool import PoolFailed
from kvstore import Hit, KVStore
from tests.cluster.rig import Rig, Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Self

    from kvstore.client.counters import ClientCounters
    from kvstore.client.locations import Locations
    from tests.cluster.servers import Server

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
    """Stops each of these workers again and again, for as long as the context lasts."""

    def __init__(self, workers: Sequence[Server], seed: int) -> None:
        """The same seed gives the same pauses."""
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._stop, args=(each, random.Random(seed + i)), daemon=True)
            for i, each in enumerate(workers)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _stop(self, worker: Server, draw: random.Random) -> None:
        while not self._end.wait(draw.expovariate(1 / PAUSE_S)):
            worker.stop()
            self._end.wait(STOP_S)
            worker.go_on()


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
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvharbor-bench-"))
        shape = Shape(masters=1, workers=2, members=0)
        rig = undo.enter_context(Rig(Path(folder) / "pool", shape))
        readers = _readers(rig, undo)
        for weather, stopped in WEATHER.items():
            _compare(report, readers, rig.workers[:stopped], weather, rounds)
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="turns of each case (3 if --quick)")


def _readers(rig: Rig, undo: ExitStack) -> dict[str, Reader]:
    """Clients of both workers, which know by now how long reads take."""
    data = memoryview(random.Random(SEED).randbytes(PAGES * PAGE_BYTES))
    readers = {}
    for name, hedge in (("plain", False), ("hedged", True)):
        store = KVStore.connect(rig.addresses, transports=("tcp",), hedge=hedge)
        undo.callback(store.close)
        pages = _located(store, data)
        readers[name] = Reader(store, pages, data)
        for _ in range(WARM_UP_READS):
            readers[name].read()
    return readers


def _located(store: KVStore, data: memoryview) -> list[Locations]:
    """Put the pages on both workers, unless they are there; where each lies.

    Without a lease, which would end while they are read; nothing is evicted.
    """
    opened = store.open_opaque("hedge", ttl_s=float("inf"))
    names = opened.names([b"%d" % i for i in range(PAGES)])
    places = range(0, PAGES * PAGE_BYTES, PAGE_BYTES)
    store.put_objects(opened, names, data, places, PAGE_BYTES, replicas=2, replicas_now=True)
    found: list[Locations] = [
        store.lookup(opened, names.slice(i, i + 1), lease=False) for i in range(PAGES)
    ]
    for each in found:
        if len(each.pieces[0].located.segments) != 2:
            raise PoolFailed("put: a page lies not on both workers")
    return found


def _compare(
    report: Report, readers: dict[str, Reader], workers: Sequence[Server], weather: str, rounds: int
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
