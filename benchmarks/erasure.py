"""What do parity and a degraded read cost, beside copying the same bytes?

A stripe is k parts and m parts of parity. In turns, one thread copies the k parts of a stripe,
makes its parity, and rebuilds one lost part, and m of them, from k others. GB/s are of the k
parts. Stripes lie one after the other in memory that no cache holds. Then the same in a pool: six
workers over drives, one of which is killed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import KIB, MIB, Case, Report, Sample, arguments, interleave, size_name
from benchmarks.regions import ROTATING_BYTES, Region, memcpy
from benchmarks.striped_pool import StripedPool
from kvstore.erasure import STRIP_BYTES, decode, encode

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from benchmarks.harness import Figure, Series

CODES: Final = ((4, 2), (8, 3))
PART_BYTES: Final = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
BATCH_BYTES: Final = 32 * MIB
"""Of data in one sample, in whole stripes."""
TARGET: Final = 0.3
"""Of memcpy, for parts of 1 MiB and more: then parity costs less than the second replica's copy
over any network, and a degraded read little beside fetching k parts."""

POOL_PAGE_BYTES: Final = 1 * MIB
SPACE_TARGET: Final = 0.55
"""Of three replicas, which survive as many hosts as m = 2: a half, and records."""
SLOWER_TARGET: Final = 6.0
"""Times a plain read: k shards come, as many bytes each as the page has, and are decoded."""


class Stripes:
    """As many stripes of one code and part size as one sample takes."""

    def __init__(self, code: tuple[int, int], part_bytes: int, data: Region, into: Region) -> None:
        """Parity is made once, for what is decoded later."""
        self._code = code
        self._part_bytes = part_bytes
        self._data, self._into = data, into
        self._stripes = BATCH_BYTES // (code[0] * part_bytes)
        self._parity = Region(self._stripes * code[1] * part_bytes)
        self._made_of = -1

    @property
    def stripe_bytes(self) -> int:
        """Of data."""
        return self._code[0] * self._part_bytes

    def copy(self, turn: int) -> Sample:
        """All data parts, one by one: the yardstick."""
        parts = self._stripes * self._code[0]
        return memcpy(self._data, self._into, turn, self._part_bytes, parts)

    def encode(self, turn: int) -> Sample:
        """Make the parity of each stripe."""
        self._made_of = turn
        return self._timed(turn, lambda data, parity: encode(*self._code, data, parity))

    def rebuild(self, turn: int, lost: int) -> Sample:
        """Make the first so many data parts of each stripe from the others, and compare one."""
        if self._made_of != turn:
            self.encode(turn)
        into = self._views(self._into, 0, lost)

        def rebuilt(data: list[memoryview], parity: list[memoryview]) -> None:
            have = {i: view for i, view in enumerate((*data, *parity)) if i >= lost}
            decode(*self._code, have, dict(enumerate(into)))

        sample = self._timed(turn, rebuilt)
        if into[0] != self._stripe(turn, self._stripes - 1)[0]:
            raise RuntimeError("a rebuilt part differs from the one that was lost")
        return sample

    def _timed(
        self, turn: int, work: Callable[[list[memoryview], list[memoryview]], None]
    ) -> Sample:
        m, size = self._code[1], self._part_bytes
        stripes = [
            (self._stripe(turn, number), self._views(self._parity, number * m * size, m))
            for number in range(self._stripes)
        ]
        started, cpu = time.perf_counter(), time.process_time()
        for data, parity in stripes:
            work(data, parity)
        seconds = time.perf_counter() - started
        return Sample(seconds, self._stripes * self.stripe_bytes, time.process_time() - cpu)

    def _stripe(self, turn: int, number: int) -> list[memoryview]:
        k, size = self._code[0], self._part_bytes
        first = self._data.offsets(turn, size, self._stripes * k)[number * k]
        return self._views(self._data, first, k)

    def _views(self, region: Region, start: int, parts: int) -> list[memoryview]:
        size = self._part_bytes
        return [region.view[start + i * size : start + (i + 1) * size] for i in range(parts)]

    def series(self, rounds: int) -> dict[str, Series]:
        """Every case in turns."""
        m = self._code[1]
        return interleave(
            [
                Case("memcpy", self.copy),
                Case("encode", self.encode),
                Case("rebuild-1", lambda turn: self.rebuild(turn, 1)),
                Case(f"rebuild-{m}", lambda turn: self.rebuild(turn, m)),
            ],
            rounds,
        )


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", _options)
    report = Report("Parity and degraded reads, beside memcpy", options)
    rounds = 5 if options.quick else options.rounds
    report.parameters(
        batch=size_name(BATCH_BYTES), strip=size_name(STRIP_BYTES), threads=1, rounds=rounds
    )
    data, into = Region(ROTATING_BYTES, seed=1), Region(ROTATING_BYTES)
    for k, m in CODES:
        rows: list[dict[str, Figure]] = []
        for part_bytes in PART_BYTES:
            stripes = Stripes((k, m), part_bytes, data, into)
            series = stripes.series(rounds)
            rows += _rows(stripes, part_bytes, series)
            for name, each in series.items():
                if name != "memcpy":
                    value = each.speedup_over(series["memcpy"])
                    _tell(report, f"{name}/{k}+{m}/{size_name(part_bytes)}", value, part_bytes)
        report.table(f"Code {k}+{m}", rows)
    _pool(report, 100 if options.quick else 500)
    return report.finish()


def _pool(report: Report, rounds: int) -> None:
    """Space, and reads of pages whose holder is gone beside those of others."""
    with (
        tempfile.TemporaryDirectory(prefix="kvharbor-bench-", dir="/var/tmp") as folder,
        StripedPool(Path(folder), CODES[0], POOL_PAGE_BYTES) as pool,
    ):
        stored, of_replicas = pool.space()
        pool.lose_one()
        series = pool.read(rounds)
        rows: list[dict[str, Figure]] = [
            {"page": name, "p50 us": each.median_s * 1e6, "p99 us": each.p99_s * 1e6}
            for name, each in series.items()
        ]
        report.table(f"Reads of single pages, {pool.name()}, over TCP from drives", rows)
        report.at_most(f"space/{pool.name()}/replicas", stored / of_replicas, SPACE_TARGET)
        slower = series["decoded"].time_over(series["plain"])
        report.at_most(f"degraded-read/{pool.name()}/plain", slower, SLOWER_TARGET)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=24, help="of each case (5 if --quick)")


def _tell(report: Report, name: str, value: float, part_bytes: int) -> None:
    if part_bytes >= MIB:
        report.at_least(f"{name}/memcpy", value, TARGET)
    else:
        report.reported(f"{name}/memcpy", value)


def _rows(stripes: Stripes, part_bytes: int, series: dict[str, Series]) -> list[dict[str, Figure]]:
    """Seconds of a stripe stand beside, because a degraded read waits for one."""
    return [
        {
            "part": size_name(part_bytes),
            "op": name,
            "GB/s": each.gb_per_s,
            "us a stripe": stripes.stripe_bytes / each.gb_per_s / 1e3,
            "cpu s/GB": each.cpu_s_per_gb,
        }
        for name, each in series.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
