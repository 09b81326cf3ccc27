"""What do prefill and decode in different workers cost and give, beside workers that do both?

Requests come at random moments through a gateway, on this machine: times to the first token and
between tokens, how many answers meet both objectives, with prompts that share documents and with
those that do not, and what becomes of a service that is asked for more than it can do. All fleets
have the same cores, so separation cannot add throughput here; what it changes is who waits for
whom. The colocation policy is `always`: workers that can do both hand nothing over while they have
room. Separate ones hand a prompt over at its end (a decode worker is chosen once all of it is
computed: `route_ahead = 0`), by chunks (one is chosen at once, and pulls the pages of each chunk
while the next is computed), or by layers (as by chunks; and in a chunk each group of layers is
pulled while the next is computed). All is moved by shared memory, a hundred times faster than it is
computed: what an early hand-over saves where both take as long is benchmarks/layerwise.py's
question. Then the same at the size of a cluster, in virtual time (benchmarks.pd_cluster).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks import traced
from benchmarks.harness import MIB, Report
from benchmarks.pd_cluster import simulate
from benchmarks.serving_load import Lengths, Objective, Served, middle, requests, send
from benchmarks.serving_pool import Pools, Shape
from benchmarks.sessions import chat_trace
from kvstore.errors import BadValue
from kvstore.namespace import Attention, CacheGroup
from kvstore.planner.kv_bytes import kv_format, token_bytes
from kvstore.planner.models import MODELS
from kvstore.request_trace import Trace, read_trace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.harness import Figure

TOGETHER: Final = Shape("both", ("both",), threads=2)
AT_END: Final = Shape("1p1d, at the end", ("prefill", "decode"))
ALWAYS: Final = 1e6
"""As `route_ahead`: what is compared does not hang on what was measured before."""
BY_CHUNKS: Final = replace(AT_END, name="1p1d, by chunks", route_ahead=ALWAYS)
TINY_LAYERS: Final = replace(BY_CHUNKS, name="1p1d, by layers", layer_groups=2)
LAYERS: Final = replace(TINY_LAYERS, layer_groups=5)
TWO: Final = Shape("1p2d, at the end", ("prefill", "decode", "decode"))
LOAD: Final = 0.7
"""Of what the slowest fleet can do: what all are compared at."""
FACTORS: Final = (1, 2, 4)
"""Of what a fleet can do."""
IN_FLIGHT: Final = 12
"""While it is measured what a fleet can do."""
ADMITTED: Final = 24
"""Requests whose KV a fleet admits at once."""
OCCUPANCY: Final = 0.8
"""Of its room for KV, that is: as the pool's configuration has it."""
SEED: Final = 20
PARTS: Final = ("cluster", "tiny", "smollm")
"""Two of them with real processes of that model; --quick has no smollm."""
WORKLOADS: Final = {"own documents": False, "shared documents": True}


class Setting(NamedTuple):
    """A model, the fleets that serve it, what they are asked, and what their users expect."""

    model: str
    groups: tuple[CacheGroup, ...]
    shapes: tuple[Shape, ...]
    pushed: tuple[Shape, ...]
    """Those of them that are asked for more than they can do."""
    lengths: Lengths
    objective: Objective
    seconds: float
    """Of each load."""
    rounds: int
    dram: str

    @property
    def kv_bytes(self) -> int:
        """Of a token."""
        return token_bytes(self.groups, kv_format("float32"))


TINY: Final = Setting(
    "tiny", (CacheGroup(Attention.FULL, 4, 2, 16, 16),),
    (TOGETHER, AT_END, BY_CHUNKS, TINY_LAYERS, TWO), (TOGETHER, AT_END, TINY_LAYERS),
    Lengths(range(32, 127), 384, 64, 32, 4), Objective(0.5, 0.05), 5.0, 3, "512MiB",
)  # fmt: skip
SMOLLM: Final = Setting(
    "smollm", MODELS["smollm2-135m"].groups,
    (TOGETHER, AT_END, BY_CHUNKS, LAYERS), (TOGETHER, AT_END, LAYERS),
    Lengths(range(1000, 40_000), 320, 32, 16, 4), Objective(6.0, 0.5), 30.0, 1, "3GiB",
)  # fmt: skip
QUICK: Final = TINY._replace(
    shapes=(TOGETHER, AT_END, TINY_LAYERS), pushed=(TINY_LAYERS,), seconds=1.0, rounds=1
)


class Cluster(NamedTuple):
    """What is modelled: so many workers, and requests of the trace, or seconds of made-up chats."""

    workers: int
    requests: int
    seconds: float


CLUSTER: Final = Cluster(8, 2000, 600.0)
QUICK_CLUSTER: Final = Cluster(4, 100, 60.0)
CHATS_PER_S: Final = 1.5


def main() -> int:
    """Measure and report."""
    return traced.run("pd", (__doc__ or "").splitlines()[0], _options, _run)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help="what is measured, by comma")


def _run(options: argparse.Namespace) -> int:
    parts = options.parts.split(",")
    for part in parts:
        if part not in PARTS:
            raise BadValue("--parts", part, f"some of {', '.join(PARTS)}")
    report = Report("Prefill and decode in different workers, beside workers that do both", options)
    if "cluster" in parts:
        cluster = QUICK_CLUSTER if options.quick else CLUSTER
        report.parameters(trace="made-up chats" if options.trace is None else options.trace.stem)
        simulate(report, _trace(options.trace, cluster), cluster.workers)
    for setting in (QUICK,) if options.quick else (TINY, SMOLLM):
        if setting.model in parts:
            _measure(report, setting)
    return report.finish()


def _trace(file: Path | None, cluster: Cluster) -> Trace:
    """The first requests of a file, or made-up chats."""
    if file is None:
        return chat_trace(SEED, cluster.seconds, CHATS_PER_S)
    whole, found = read_trace(file), Trace()
    for request in whole.requests[: cluster.requests]:
        found.add(request)
    return found


def _measure(report: Report, setting: Setting) -> None:
    lengths, objective = setting.lengths, setting.objective
    tokens = lengths.document + lengths.question + lengths.answer
    report.parameters(**{
        f"{setting.model}_{name}": value
        for name, value in {
            "document_tokens": lengths.document, "question_tokens": lengths.question,
            "answer_tokens_max": lengths.answer, "documents_shared": lengths.documents,
            "kv_bytes_a_token": setting.kv_bytes, "first_token_objective_s": objective.first_s,
            "token_objective_s": objective.token_s, "admitted": ADMITTED,
            "seconds_a_load": setting.seconds, "rounds": setting.rounds, "seed": SEED,
            "layer_groups": max(shape.layer_groups for shape in setting.shapes),
        }.items()
    })  # fmt: skip
    kv_tokens = int(ADMITTED * tokens / OCCUPANCY)
    pools = Pools(setting.model, setting.shapes, setting.dram, kv_tokens, objective.first_s)
    with pools:
        Lab(report, pools, setting).run()


class Lab:
    """The fleets of one model, and how they fare."""

    def __init__(self, report: Report, pools: Pools, setting: Setting) -> None:
        """Measure nothing yet."""
        self._report = report
        self._pools = pools
        self._setting = setting
        self._seed = SEED
        self._failed = 0
        self._left_over = 0
        self._differing = 0

    def run(self) -> None:
        """All loads, and what came of them."""
        rates = self._capacities()
        self._compare(LOAD * min(rates.values()))
        for shape in self._setting.pushed:
            self._overload(shape, rates[shape.name])
        name = self._setting.model
        self._report.at_most(f"{name}/requests_that_failed", self._failed, 0)
        self._report.at_most(f"{name}/left_over_by_requests", self._left_over, 0)
        self._report.at_most(f"{name}/answers_that_differ_between_fleets", self._differing, 0)

    def _load(
        self, shape: Shape, rate: float, count: int, *, shared: bool = False, in_flight: int = 0
    ) -> Served:
        """Ask one fleet; what no load has asked before."""
        lengths = self._setting.lengths
        if not shared:
            lengths = replace(lengths, documents=0)
        asked = requests(self._seed, rate, count, lengths)
        clock = self._pools.clock(shape)
        began_s, cpu_s = time.perf_counter(), clock.now_s()
        outcomes = send(self._pools.gateways[shape.name], asked, in_flight)
        served = Served(outcomes, time.perf_counter() - began_s, clock.now_s() - cpu_s)
        self._failed += len(served.failed())
        self._left_over += self._pools.left_over()
        return served

    def _capacities(self) -> dict[str, float]:
        """Requests a second that each fleet answers while some always wait."""
        rates: dict[str, float] = {}
        rows: list[dict[str, Figure]] = []
        for shape in self._setting.shapes:
            warm = self._some_always(shape, IN_FLIGHT)  # which tells how many make a while, too
            count = max(2 * IN_FLIGHT, round(warm.rate * self._setting.seconds))
            served = self._some_always(shape, count)
            rates[shape.name] = served.rate
            tokens = sum(each.tokens for each in served.complete()) / served.seconds
            rows.append({
                "fleet": shape.name, "workers": len(shape.roles), "threads each": shape.threads,
                "requests": len(served.outcomes), "requests/s": served.rate,
                "answer tokens/s": tokens,
                "cpu ms/request": 1e3 * served.cpu_s / len(served.complete()),
            })  # fmt: skip
        self._report.table(f"{self._setting.model}: {IN_FLIGHT} requests at any time", rows)
        return rates

    def _some_always(self, shape: Shape, count: int) -> Served:
        """So many requests of one fleet, as fast as it answers."""
        self._seed += 1
        return self._load(shape, 1.0, count, in_flight=IN_FLIGHT)

    def _compare(self, rate: float) -> None:
        """All fleets at one rate, in turns."""
        setting, shapes = self._setting, self._setting.shapes
        count = max(IN_FLIGHT, round(rate * setting.seconds))
        found: dict[tuple[str, str], list[Served]] = {}
        for number in range(setting.rounds):
            turn = number % len(shapes)
            for workload, shared in WORKLOADS.items():
                self._seed += 1
                for shape in (*shapes[turn:], *shapes[:turn]):
                    served = self._load(shape, rate, count, shared=shared)
                    found.setdefault((workload, shape.name), []).append(served)
        self._report.table(
            f"{setting.model}: {rate:.2f} requests/s",
            [self._times(*key, Served.all_of(each)) for key, each in found.items()],
        )
        self._report.table(
            f"{setting.model}: stages, medians",
            [self._stages(*key, Served.all_of(each)) for key, each in found.items()],
        )
        self._differing += sum(
            differing([found[workload, shape.name] for shape in shapes]) for workload in WORKLOADS
        )
        self._ratios(found)

    def _times(self, workload: str, fleet: str, served: Served) -> dict[str, Figure]:
        return {
            "prompts with": workload, "fleet": fleet, "requests": len(served.outcomes),
            **{f"first p{p} ms": 1e3 * served.first_s(p) for p in (50, 95, 99)},
            **{f"token p{p} ms": 1e3 * served.token_s(p) for p in (50, 95, 99)},
            "second p50 ms": 1e3 * served.second_s(50), "pause p99 ms": 1e3 * served.pause_s(99),
            "met both %": 100 * served.met(self._setting.objective) / len(served.outcomes),
            "goodput/s": served.met(self._setting.objective) / served.seconds,
        }  # fmt: skip

    def _stages(self, workload: str, fleet: str, served: Served) -> dict[str, Figure]:
        """Milliseconds. Moved is what an answer's worker had to bring into its batch; what it
        had brought before its answer was asked for took no time of it.
        """
        done = [each.timings for each in served.complete()]
        stages = ("queue", "prefill", "route", "install", "decode")
        row: dict[str, Figure] = {"prompts with": workload, "fleet": fleet}
        row |= {
            f"{stage} ms": 1e3 * middle(each[f"{stage}_s"] for each in done) for stage in stages
        }
        row["reused tokens"] = middle(each["reused_tokens"] for each in done)
        prompt = self._setting.lengths.document + self._setting.lengths.question
        moved = [
            (self._setting.kv_bytes * (prompt if each["routes"] else each["reused_tokens"]), each)
            for each in done
            if each["install_s"]  # an answer of one token has gone nowhere
        ]
        row["moved MiB"] = middle(nbytes / MIB for nbytes, _ in moved)
        row["MiB/s"] = middle(nbytes / MIB / each["install_s"] for nbytes, each in moved)
        return row

    def _ratios(self, found: dict[tuple[str, str], list[Served]]) -> None:
        """Round by round."""
        own, shared = WORKLOADS
        for shape in self._setting.shapes:
            loads = found[own, shape.name]
            self._reported("first_p50", shape, "shared_over_own", found[shared, shape.name], loads)
            if shape is not TOGETHER:
                together = found[own, TOGETHER.name]
                for what in ("first_p50", "token_p50", "pause_p99"):
                    self._reported(what, shape, "over_both", loads, together)
            if shape.route_ahead:
                at_end = found[own, AT_END.name]
                self._reported("handed_over_p50", shape, "over_at_the_end", loads, at_end)

    def _reported(
        self, what: str, shape: Shape, title: str, a: list[Served], b: list[Served]
    ) -> None:
        name = f"{self._setting.model}/{what}/{shape.name}/{title}"
        self._report.reported(name.replace(" ", "_"), over(a, b, MEASURES[what]))

    def _overload(self, shape: Shape, rate: float) -> None:
        """One fleet asked for as much as it can do, and for more."""
        setting, rows, good = self._setting, [], []
        for factor in FACTORS:
            self._seed += 1
            count = max(IN_FLIGHT, round(factor * rate * setting.seconds))
            served = self._load(shape, factor * rate, count)
            good.append(served.met(setting.objective) / served.seconds)
            rows.append(_overload_row(factor, factor * rate, served, good[-1]))
        self._report.table(f"{setting.model}: {shape.name} asked for more than it can do", rows)
        name = f"{setting.model}/goodput/{shape.name}/{FACTORS[-1]}x_over_1x"
        self._report.reported(name, good[-1] / good[0] if good[0] else 0.0)


def _overload_row(factor: int, rate: float, served: Served, good: float) -> dict[str, Figure]:
    refused, complete = served.refused(), served.complete()
    reasons = Counter(each.reason for each in refused)
    return {
        "asked for": f"{factor}x", "requests/s": rate, "requests": len(served.outcomes),
        "refused %": 100 * len(refused) / len(served.outcomes),
        "why": ", ".join(sorted(reasons)) or "-",
        "refused p50 ms": 1e3 * middle(each.ended_s for each in refused),
        "refused max ms": 1e3 * max((each.ended_s for each in refused), default=0.0),
        "first p50 ms": 1e3 * served.first_s(50), "first p99 ms": 1e3 * served.first_s(99),
        "first max ms": 1e3 * max((each.first_s for each in complete), default=0.0),
        "answers/s": len(complete) / served.seconds, "goodput/s": good,
    }  # fmt: skip


MEASURES: Final[dict[str, Callable[[Served], float]]] = {
    "first_p50": lambda served: served.first_s(50),
    "token_p50": lambda served: served.token_s(50),
    "pause_p99": lambda served: served.pause_s(99),
    "handed_over_p50": Served.handed_over_s,
}
"""Seconds."""


def over(a: list[Served], b: list[Served], of: Callable[[Served], float]) -> float:
    """How many times as much: median over the rounds."""
    return median(of(x) / of(y) for x, y in zip(a, b, strict=True))


def differing(fleets: list[list[Served]]) -> int:
    """Requests that did not get the same answer of all fleets that answered them."""
    answers = zip(*([o for load in loads for o in load.outcomes] for loads in fleets), strict=True)
    return sum(len({each.text for each in same if each.is_complete}) > 1 for same in answers)


if __name__ == "__main__":
    sys.exit(main())
