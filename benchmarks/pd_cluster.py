"""Prefill and decode apart and together at the size of a cluster: a trace, and modelled workers.

Requests go through the master's own state machine under virtual time; only what computing and links
take is made up, from the parameters here. They are round ones of a model of 8 billion weights, with
queries in groups (131 072 bytes of KV a token), on accelerators with 80 GB, and of links of 100
Gbit/s. Chunks of 256 tokens suit workers that do both best: of the answers of eight of them 67, 71
and 66 % were in time with 128, 256 and 512.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from benchmarks.harness import GB
from kvstore.planner.kv_bytes import kv_format, token_bytes
from kvstore.planner.models import MODELS
from kvstore.request_trace import Trace
from master.replay.engines import FleetShape
from master.replay.serving import Demand, replay_serving
from master.replay.serving_report import ServingReport, Slo, percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness import Figure, Report
    from master.replay.serving_report import Served

MODEL: Final = "llama-3.1-8b"
WORKER: Final = FleetShape(
    tokens_per_s=8000.0, chunk_tokens=256, step_s=0.012, step_token_s=1e-7,
    capacity_tokens=450_000, batch_max=256, pool_pages=4096,
    token_bytes=token_bytes(MODELS[MODEL].groups, kv_format("bfloat16")),
    link_bytes_per_s=12.5 * GB, rtt_s=1e-4,
)  # fmt: skip
OBJECTIVE: Final = Slo(5.0, 0.05)
PATIENCE_S: Final = 30.0
"""Under overload: clients that are throttled come again for so long."""
FACTORS: Final = (1, 2, 4)


class Fleet(NamedTuple):
    """Workers, and what the master is told besides."""

    name: str
    shape: FleetShape
    changed: dict[str, object]


def fleets(workers: int) -> list[Fleet]:
    """So many workers in several ways."""
    decodes = max(1, round(workers * 0.3))
    apart = replace(WORKER, prefills=workers - decodes, decodes=decodes)
    name = f"{workers - decodes}p{decodes}d"
    together = replace(WORKER, both=workers)
    return [
        Fleet(f"{workers}x both, alone", together, {"colocation": "always"}),
        Fleet(f"{workers}x both, handing over", together, {}),
        Fleet(name, apart, {}),
        Fleet(f"{name}, layer by layer", replace(apart, layerwise=True), {}),
    ]


def simulate(report: Report, trace: Trace, workers: int) -> None:
    """All fleets, with and without equal pages; then two of them asked for more: where each runs
    all of a request, and where prompts are handed over at their end.
    """
    report.parameters(
        cluster_model=MODEL, cluster_workers=workers, cluster_requests=len(trace.requests),
        cluster_seconds=trace.seconds, cluster_first_token_objective_s=OBJECTIVE.ttft_s,
        cluster_token_objective_s=OBJECTIVE.tpot_s, cluster_patience_s=PATIENCE_S,
        **{f"cluster_{name}": getattr(WORKER, name) for name in (
            "tokens_per_s", "chunk_tokens", "step_s", "step_token_s", "capacity_tokens",
            "batch_max", "pool_pages", "token_bytes", "link_bytes_per_s", "rtt_s",
        )},
    )  # fmt: skip
    found: dict[tuple[str, bool], ServingReport] = {}
    for fleet in fleets(workers):
        for reuse in (True, False):
            demand = Demand(trace, OBJECTIVE, reuse=reuse)
            found[fleet.name, reuse] = replay_serving(demand, fleet.shape, fleet.changed)
    report.table("cluster, modelled", [_row(*key, each) for key, each in found.items()])
    together, _, apart, layered = (each.name for each in fleets(workers))
    for reuse, title in ((True, "reuse"), (False, "no_reuse")):
        good = {name: found[name, reuse].good(OBJECTIVE) for name in (together, apart, layered)}
        base = good[together] or 1
        report.reported(f"cluster/goodput/{title}/apart_over_together", good[apart] / base)
        report.reported(f"cluster/goodput/{title}/layered_over_together", good[layered] / base)
    for fleet in (fleets(workers)[0], fleets(workers)[2]):
        _overload(report, trace, fleet)


def faster(trace: Trace, factor: float) -> Trace:
    """The same requests, so many times as many a second."""
    found = Trace(trace.page_tokens)
    for request in trace.requests:
        found.add(replace(request, at_s=request.at_s / factor))
    return found


def _row(fleet: str, reuse: bool, served: ServingReport) -> dict[str, Figure]:
    done = _done(served)
    tokens = sum(each.request.tokens for each in done)
    return {
        "fleet": fleet, "reuse": "yes" if reuse else "no",
        **{f"first p{p} s": percentile([e.ttft_s for e in done], p / 100) for p in (50, 95, 99)},
        **{f"token p{p} ms": 1e3 * percentile([e.tpot_s for e in done], p / 100)
           for p in (50, 95, 99)},
        "throttled %": _percent(sum(bool(e.throttles) for e in served.served), served),
        "met both %": _percent(served.good(OBJECTIVE), served),
        "reused %": 100 * sum(each.reused_tokens for each in done) / max(1, tokens),
        "GB/request": sum(each.moved_bytes for each in done) / GB / max(1, len(done)),
        "install p50 ms": 1e3 * percentile([e.install_s for e in done], 0.5),
        "install p99 ms": 1e3 * percentile([e.install_s for e in done], 0.99),
        "GB/s": _bandwidth(done),
    }  # fmt: skip


def _done(served: ServingReport) -> list[Served]:
    return [each for each in served.served if not each.failure]


def _percent(count: int, served: ServingReport) -> float:
    return 100 * count / len(served.served)


def _bandwidth(done: Sequence[Served]) -> float:
    """Of installing, in GB/s. Waiting at ports is in it; what was pulled while it was computed is
    not, so that layer by layer it may be more than a link's."""
    speeds = [
        each.request.tokens * WORKER.token_bytes / each.install_s / GB
        for each in done
        if each.routes and each.install_s
    ]
    return percentile(speeds, 0.5)


def _overload(report: Report, trace: Trace, fleet: Fleet) -> None:
    rows: list[dict[str, Figure]] = []
    good: list[float] = []
    for factor in FACTORS:
        demand = Demand(faster(trace, factor), OBJECTIVE, patience_s=PATIENCE_S)
        served = replay_serving(demand, fleet.shape, fleet.changed)
        good.append(served.goodput_per_s(OBJECTIVE))
        done = _done(served)
        throttled = sum(bool(each.throttles) for each in served.served)
        rows.append({
            "asked for": f"{factor}x", "requests/s": len(trace.requests) * factor / trace.seconds,
            "throttled %": _percent(throttled, served),
            "given up %": _percent(sum(bool(each.failure) for each in served.served), served),
            "why": ", ".join(sorted(served.throttled())) or "-",
            "failed": sum(each.failure not in {"", "throttled"} for each in served.served),
            "first p50 s": percentile([each.ttft_s for each in done], 0.5),
            "first p99 s": percentile([each.ttft_s for each in done], 0.99),
            "first max s": max((each.ttft_s for each in done), default=0.0),
            "goodput/s": good[-1],
        })  # fmt: skip
    report.table(f"cluster, modelled: {fleet.name} asked for more than the trace does", rows)
    name = f"cluster/goodput/{fleet.name}/{FACTORS[-1]}x_over_1x"
    report.reported(name, good[-1] / good[0] if good[0] else 0.0)
