"""How evenly do hosts serve the reads of a trace, with and without replicas for what is read much?

A cluster of hosts, each with a worker and an engine, is replayed through the master's own state
machine under virtual time. Requests come to the engines at random; an engine reads each run of
pages from its own host, which takes no port, else from the replica whose host has sent least
lately. Page sizes, ports and the rate of copies stand in the same proportion as those of a real
pool, so that figures are given as those would be. Reads are all that is counted of a port: neither
puts nor copies. Without a trace a made-up one of chats is used.
"""

from __future__ import annotations

import sys
from itertools import chain
from math import exp
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec

from benchmarks import traced
from benchmarks.harness import GB, Report
from benchmarks.sessions import chat_trace
from kvstore import limits
from kvstore.request_trace import TRACE_PAGE_TOKENS, Trace, TraceRequest, read_trace
from master.replay.pool import PUT_WAIT_S, Setting, VirtualPool, policy_written

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benchmarks.harness import Figure

SEED: Final = 1
QUICK_S: Final = 1200.0
LONG_S: Final = 2400.0
SESSIONS_PER_S: Final = 2.0
WORKERS: Final = 10
CAPACITY_PAGES: Final = 5000
QUICK_PAGES: Final = 1000
SPEED: Final = 5.0
"""Times as many requests a second as the trace has."""
QUICK_SPEED: Final = 10.0
"""The made-up trace is of a smaller service."""
KV_BYTES_PER_TOKEN: Final = 320 * 1024
"""Of a model of 70 G parameters with grouped heads, in 16 bits."""
PORT_BYTES_PER_S: Final = 3e9
LATELY_S: Final = 1.0
SLICE_S: Final = 15.0
WARM: Final = 0.5
"""Share of the trace after which it is measured."""


class Case(msgspec.Struct, frozen=True):
    """How many replicas pages have."""

    replicas: int
    policy: str

    @property
    def name(self) -> str:
        """As ratios say it."""
        return f"replicas={self.replicas}/{self.policy.replace(':', ',')}"


CASES: Final = (
    Case(1, "off"),
    Case(1, "enforce"),
    Case(2, "off"),
    Case(2, "enforce"),
)

JUDGED: Final = CASES[1]
"""Where every other page has one replica, those that are hot make a difference."""
BUSIEST_MAX: Final = 0.9
HITS_MIN: Final = 0.98
"""Times what it is without."""


class Served(msgspec.Struct, frozen=True):
    """What one replay found. Bytes are those of real pages."""

    hit_ratio: float
    local_share: float
    """Of the bytes read, those that lay on the reader's host."""
    mean_bytes_per_s: float
    """Sent by a host, over all of them."""
    busiest_bytes_per_s: float
    """Sent by the host that sent most, over all of the time that is measured."""
    worst_bytes_per_s: float
    """Sent by a host within a slice of time, at most: chance has more part in that than heat, since
    one long prompt may be read from one host."""
    copied_pages: int
    wanted_for_heat: int

    @property
    def imbalance(self) -> float:
        """How many times what a host sends in the mean the busiest one does."""
        return self.busiest_bytes_per_s / self.mean_bytes_per_s if self.mean_bytes_per_s else 0.0


class Cluster:
    """A pool, its engines, and what each host sends."""

    def __init__(self, case: Case, pages: int, page_tokens: int) -> None:
        """Begin empty."""
        self.page_bytes = page_tokens * KV_BYTES_PER_TOKEN
        scale = 1 / KV_BYTES_PER_TOKEN  # pages of the virtual pool have a byte a token
        name, parameters = policy_written(case.policy)
        if name != "off":
            parameters = {"port_bytes_per_s": str(PORT_BYTES_PER_S * scale)} | parameters
        changed = {
            "replicas": case.replicas,
            "replication": name,
            "replication_parameters": parameters,
            "copy_bytes_per_s": max(1, int(limits.COPY_BYTES_PER_S * scale)),
        }
        setting = Setting(
            pages, lease_ttl_s=limits.LEASE_TTL_S, watermark_high=limits.WATERMARK_HIGH,
            watermark_low=limits.WATERMARK_LOW, workers=WORKERS,
        )  # fmt: skip
        self.pool = VirtualPool(setting, page_tokens, changed)
        self.hits = self.touches = self.local = self.read = 0
        self.slices: dict[int, list[int]] = {}
        """Pages sent by each host, by slice of time."""
        self._lately = [0.0] * WORKERS
        self._lately_at_s = 0.0
        self._random = Random(SEED)

    def serve(self, request: TraceRequest, pages: Sequence[int]) -> None:
        """One request: read what is there, put the rest."""
        self.pool.advance(max(request.at_s, self.pool.now_s + PUT_WAIT_S))
        number = self._random.randrange(WORKERS)
        engine, count = self.pool.engine(number), 0
        for found in self.pool.located(pages, reader=engine):
            hosts = [int(segment.host.partition("-")[2]) for segment in found.segments]
            for run in found.runs:
                self._read(number, {hosts[copy.segment] for copy in run.copies}, run.count)
                count += run.count
        missing = pages[count:]
        if missing:
            self.pool.put(missing, pages[count - 1] if count else None, writer=engine)
        self.hits += count
        self.touches += len(pages)

    def _read(self, number: int, hosts: set[int], pages: int) -> None:
        self.read += pages
        if number in hosts:
            self.local += pages
            return
        now_s = self.pool.now_s
        fade = exp((self._lately_at_s - now_s) / LATELY_S)
        self._lately, self._lately_at_s = [sent * fade for sent in self._lately], now_s
        host = min(sorted(hosts), key=self._lately.__getitem__)
        self._lately[host] += pages
        sent = self.slices.setdefault(int(now_s / SLICE_S), [0] * WORKERS)
        sent[host] += pages

    def served(self, seconds: float) -> Served:
        """After all requests, within so much time."""
        first, last = int(seconds * WARM / SLICE_S) + 1, int(seconds / SLICE_S)
        slices = [self.slices.get(number, [0] * WORKERS) for number in range(first, last)]
        scale = self.page_bytes / SLICE_S
        counters = self.pool.master.core.counters
        return Served(
            self.hits / max(1, self.touches),
            self.local / max(1, self.read),
            fmean(chain.from_iterable(slices)) * scale,
            max(map(fmean, zip(*slices, strict=True))) * scale,
            max(map(max, slices)) * scale,
            counters["copied_pages_dram"],
            counters["replicas_for_heat_wanted"],
        )


def main() -> int:
    """Run it."""
    return traced.run("replication", __doc__ or "", _options, _measure)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, help="at most, from the start of the trace")
    parser.add_argument("--speeds", default=None, help="times as many a second, by comma")
    parser.add_argument("--pages", type=int, help="that each host holds")
    parser.add_argument(
        "--policies", help="by comma, each name:parameter=value:…, for one and two replicas"
    )


def _measure(options: argparse.Namespace) -> int:
    report = Report("Replicas for what is read much", options)
    trace = _trace(options)
    pages = options.pages or (QUICK_PAGES if options.quick else CAPACITY_PAGES)
    policies = options.policies.split(",") if options.policies else []
    cases = [Case(replicas, policy) for policy in policies for replicas in (1, 2)]
    cases = cases or list(CASES[:2] if options.quick else CASES)
    report.parameters(
        trace="made-up chats" if options.trace is None else str(options.trace),
        requests=len(trace.requests),
        seconds=trace.seconds,
        hosts=WORKERS,
        pages_a_host=pages,
        page_mib=trace.page_tokens * KV_BYTES_PER_TOKEN / 2**20,
        port_gb_per_s=PORT_BYTES_PER_S / GB,
        kv_copies_gb_per_s=limits.COPY_BYTES_PER_S / GB,
    )
    usual = QUICK_SPEED if options.quick else SPEED
    for speed in map(float, options.speeds.split(",")) if options.speeds else [usual]:
        found = {case: _served(_hurried(trace, speed), case, pages) for case in cases}
        title = f"{speed:.0f} times the requests of the trace"
        report.table(title, [_row(case, served) for case, served in found.items()])
        _judge(report, found, speed)
    return report.finish()


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace is None:
        trace = chat_trace(SEED, QUICK_S if options.quick else LONG_S, SESSIONS_PER_S)
    else:
        trace = read_trace(options.trace, TRACE_PAGE_TOKENS)
    del trace.requests[options.requests or len(trace.requests) :]
    return trace


def _hurried(trace: Trace, speed: float) -> list[tuple[TraceRequest, tuple[int, ...]]]:
    """The same requests within less time, and their full pages."""
    return [
        (msgspec.structs.replace(request, at_s=request.at_s / speed), trace.full_pages(request))
        for request in trace.requests
    ]


def _served(requests: list[tuple[TraceRequest, tuple[int, ...]]], case: Case, pages: int) -> Served:
    cluster = Cluster(case, pages, TRACE_PAGE_TOKENS)
    for request, full in requests:
        cluster.serve(request, full)
    return cluster.served(requests[-1][0].at_s)


def _row(case: Case, served: Served) -> dict[str, Figure]:
    return {
        "replicas": case.replicas,
        "policy": case.policy,
        "hit_ratio": served.hit_ratio,
        "local_share": served.local_share,
        "mean_gb_per_s": served.mean_bytes_per_s / GB,
        "busiest_gb_per_s": served.busiest_bytes_per_s / GB,
        "worst_gb_per_s": served.worst_bytes_per_s / GB,
        "imbalance": served.imbalance,
        "copied_pages": served.copied_pages,
        "wanted_for_heat": served.wanted_for_heat,
    }


def _judge(report: Report, found: dict[Case, Served], speed: float) -> None:
    for case, served in found.items():
        off = found.get(Case(case.replicas, "off"))
        if off is not None and case.policy != "off":
            busiest = served.busiest_bytes_per_s / off.busiest_bytes_per_s
            name = f"{speed:.0f}x/{case.name}"
            if case == JUDGED and speed > 1.0:
                report.at_most(f"busiest_port/{name}", busiest, BUSIEST_MAX)
            else:
                report.reported(f"busiest_port/{name}", busiest)
            report.at_least(f"hits/{name}", served.hit_ratio / off.hit_ratio, HITS_MIN)


if __name__ == "__main__":
    sys.exit(main())
