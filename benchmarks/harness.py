"""What every benchmark does the same way: arguments, machine, interleaved blocks, ratios, JSON.

Figures of different blocks of time are not comparable on a shared machine, so cases are measured
in turns: every round runs every case once, in an order that rotates, and a ratio of two cases is
the median of the ratios round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

GB: Final = 1e9
KIB: Final = 1024
MIB: Final = 1024 * KIB
ROOT: Final = Path(__file__).resolve().parent.parent

Figure = str | int | float


@dataclass(frozen=True)
class Sample:
    """One run of one case. `cpu_s` is the processor time of all processes that took part."""

    seconds: float
    nbytes: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Case:
    """Something that can be run again and again; it is told the number of its round."""

    name: str
    run: Callable[[int], Sample]


@dataclass
class Series:
    """All samples of one case, in the order of the rounds."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median seconds of a run."""
        return median(sample.seconds for sample in self.samples)

    @property
    def p99_s(self) -> float:
        """Seconds that one run in a hundred exceeds (the slowest of fewer than a hundred)."""
        ordered = sorted(sample.seconds for sample in self.samples)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]

    @property
    def gb_per_s(self) -> float:
        """Median throughput."""
        return median(sample.nbytes / sample.seconds for sample in self.samples) / GB

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor seconds of a gigabyte, over the whole series."""
        moved = sum(sample.nbytes for sample in self.samples) / GB
        return sum(sample.cpu_s for sample in self.samples) / moved if moved else 0.0

    def speedup_over(self, other: Series) -> float:
        """How many times faster than `other`: median over the rounds, bytes taken into account."""
        pairs = zip(self.samples, other.samples, strict=True)
        return median(
            (b.seconds / max(b.nbytes, 1)) / (a.seconds / max(a.nbytes, 1)) for a, b in pairs
        )

    def time_over(self, other: Series) -> float:
        """Its seconds as a fraction of `other`'s: median over the rounds."""
        pairs = zip(self.samples, other.samples, strict=True)
        return median(a.seconds / b.seconds for a, b in pairs)


def interleave(cases: Sequence[Case], rounds: int, warmups: int = 1) -> dict[str, Series]:
    """Run every case once a round, in a rotating order; the warm-up rounds are not kept."""
    series = {case.name: Series() for case in cases}
    for number in range(-warmups, rounds):
        start = number % len(cases)
        for case in (*cases[start:], *cases[:start]):
            sample = case.run(number + warmups)
            if number >= 0:
                series[case.name].samples.append(sample)
    return series


class ProcessClock:
    """Processor time of a fixed set of processes, in seconds; exact to microseconds."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Raises OSError later, at `now_s`, when one of them has ended."""
        # The clock of another process, as clock_getcpuclockid(3) names it: its complemented pid
        # shifted by 3, with 2 (scheduler time) in the low bits.
        self._clocks = [(~pid << 3) | 2 for pid in pids]

    def now_s(self) -> float:
        """User and system time so far, summed over the processes."""
        return sum(time.clock_gettime(clock) for clock in self._clocks)


def memory_bytes(pid: int) -> int:
    """Memory that a process has for itself alone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"process {pid} tells no RssAnon")


def arguments(
    question: str, extra: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Parse the command line that all benchmarks share, and what `extra` adds to it."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--quick", action="store_true", help="short form, at most 45 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit 1 if a ratio falls short")
    extra(parser)
    return parser.parse_args()


def machine() -> dict[str, Figure]:
    """Describe where the figures come from."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            cpu = value.strip()
            break
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Name the commit that was measured; a `+` says that the checkout differs from it."""

    def git(*args: str) -> str:
        run = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    return (head or "unknown") + ("+" if git("status", "--porcelain", "-uno") else "")


class Report:
    """Collects what a benchmark found, prints it as it goes, and ends with the ratios."""

    def __init__(self, question: str, options: argparse.Namespace) -> None:
        """Print the question, the machine, the commit and the parameters."""
        self._options = options
        self._started_s = time.perf_counter()
        self._machine, self._commit = machine(), commit()
        # Of the minutes before: what the machine had to do besides.
        self._load = round(os.getloadavg()[1], 1)
        self._parameters: dict[str, Figure] = {}
        self._tables: dict[str, list[dict[str, Figure]]] = {}
        self._ratios: list[dict[str, Figure]] = []
        print(f"# {question}")
        print(f"machine {', '.join(f'{k} {v}' for k, v in self._machine.items())}")
        print(f"load {self._load}")
        print(f"commit {self._commit}")

    def parameters(self, **values: Figure) -> None:
        """Record and print how it was measured."""
        self._parameters.update(values)
        print(f"parameters {', '.join(f'{k} {v}' for k, v in values.items())}", flush=True)

    def table(self, title: str, rows: Sequence[Mapping[str, Figure]]) -> None:
        """Record and print rows; all have the columns of the first."""
        self._tables[title] = [dict(row) for row in rows]
        columns = list(rows[0])
        cells = [columns, *([_shown(row[name]) for name in columns] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        print(f"\n## {title}")
        for line in cells:
            padded = [
                text.rjust(w) if i else text.ljust(w)
                for i, (text, w) in enumerate(zip(line, widths, strict=True))
            ]
            print("  ".join(padded).rstrip(), flush=True)

    def at_least(self, name: str, value: float, target: float) -> None:
        """Record a ratio that should not be smaller than its target."""
        self._ratio(name, value, ">=", target, value >= target)

    def at_most(self, name: str, value: float, target: float) -> None:
        """Record a ratio that should not be larger than its target."""
        self._ratio(name, value, "<=", target, value <= target)

    def reported(self, name: str, value: float) -> None:
        """Record a ratio that nothing is promised about."""
        self._ratio(name, value, "", 0.0, met=True)

    def _ratio(self, name: str, value: float, sense: str, target: float, met: bool) -> None:
        entry: dict[str, Figure] = {"name": name, "value": round(value, 4), "met": met}
        entry |= {"sense": sense, "target": target} if sense else {"sense": "none"}
        self._ratios.append(entry)

    def finish(self) -> int:
        """Print the ratios, write the JSON file, and say with which status to exit."""
        print()
        for ratio in self._ratios:
            target = f"{ratio['sense']}{ratio['target']}" if "target" in ratio else "none"
            verdict = "" if ratio["met"] else "  (short)"
            print(f"ratio {ratio['name']} {ratio['value']:.3f} target {target}{verdict}")
        seconds = round(time.perf_counter() - self._started_s, 1)
        if self._options.json:
            self._options.json.write_text(json.dumps(self._document(seconds), indent=1) + "\n")
        short = [ratio["name"] for ratio in self._ratios if not ratio["met"]]
        print(f"{len(self._ratios)} ratios, {len(short)} short of their target, {seconds} s")
        return 1 if short and self._options.check else 0

    def _document(self, seconds: float) -> dict[str, object]:
        return {
            "command": " ".join(sys.argv),
            "machine": self._machine,
            "load": self._load,
            "commit": self._commit,
            "seconds": seconds,
            "parameters": self._parameters,
            "tables": self._tables,
            "ratios": self._ratios,
        }


def _shown(value: Figure) -> str:
    if isinstance(value, float):
        return (
            f"{value:.4f}"
            if abs(value) < 0.01
            else f"{value:.2f}"
            if abs(value) < 1e3
            else f"{value:.0f}"
        )
    return str(value)


def size_name(nbytes: int) -> str:
    """Write a size as people do: 64KiB, 4MiB."""
    return f"{nbytes // MIB}MiB" if nbytes >= MIB else f"{nbytes // KIB}KiB"
