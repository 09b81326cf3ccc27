"""Which eviction policy serves how much of a trace of requests, from pools of which size?

The trace is replayed through the master's own state machine under virtual time (`deployed`: runs of
pages, sampled victims), and page by page with every victim the right one (`exact`). Beside them:
the optimum of a policy that knows the future. Hit ratios are tokens served of all input tokens in
percent, from an empty pool on, full pages only. Without a trace a made-up one of chats is used;
for known published traces the figures to reach are known too.
"""

from __future__ import annotations

import sys
from itertools import repeat
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from benchmarks import traced
from benchmarks.exact import exact_hit_ratio
from benchmarks.harness import Report
from benchmarks.optimum import offline_optimum, session_ends, session_hints
from benchmarks.sessions import chat_trace
from benchmarks.two_tiers import HINTS_RIGHT, SEED, ToReach, TwoTiers, compare
from kvstore import limits
from kvstore.hints import NO_HINTS
from kvstore.replica import Tier
from kvstore.request_trace import TRACE_PAGE_TOKENS, Trace, read_trace
from master.replay.figures import Figures, replay
from master.replay.pool import Setting, VirtualPool, policy_written
from policies import registry

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from benchmarks.harness import Figure
    from kvstore.hints import Hints
    from policies.eviction.protocol import EvictionPolicy

DEFAULT: Final = "lrfu"
BASE: Final = "lru"
LONG_S: Final = 3600.0
QUICK_S: Final = 900.0
SESSIONS_PER_S: Final = 1.5
CAPACITIES: Final = (1000, 5000, 10_000, 30_000, 50_000)
QUICK_CAPACITIES: Final = (1000, 4000)
TIERS: Final = TwoTiers(5000, 15_000)
QUICK_TIERS: Final = TwoTiers(1000, 3000)
HINTED: Final = f"{DEFAULT}, hints 80 % right"
ENDED: Final = f"{DEFAULT}, ends of sessions 80 % right"
POINTS_MAX: Final = 0.3
"""Between the deployed variant and the exact one."""
UNREACHABLE_MAX: Final = 0.01
US_PER_TOUCH_MAX: Final = 5.0


class Published(msgspec.Struct, frozen=True):
    """Figures of a published trace at CAPACITIES, percent. Those to check the lab against count
    partial last pages; those to reach are full pages only, without hints and with."""

    name: str
    optimum: tuple[float, ...]
    lru: tuple[float, ...]
    to_reach: tuple[float, ...]
    to_reach_hinted: tuple[float, ...]
    two_tiers: TwoTiers


PUBLISHED: Final = {
    (12_031, 144_793_823): Published(
        "conversation",
        (19.44, 34.80, 37.36, 37.36, 37.36),
        (4.54, 11.40, 21.57, 33.22, 36.15),
        (8.1, 16.7, 23.4, 33.7, 36.2),
        (8.1, 20.4, 27.7, 35.1, 36.6),
        TwoTiers(10_000, 50_000, ToReach(36.3, 48.0), ToReach(31.0, 11.0)),
    ),
    (3993, 61_194_628): Published(
        "synthetic",
        (28.19, 53.59, 62.92, 65.12, 65.12),
        (8.57, 28.45, 43.18, 63.56, 65.12),
        (8.6, 28.5, 44.5, 63.7, 65.0),
        (9.8, 33.9, 51.5, 64.4, 65.0),
        TwoTiers(5000, 15_000),
    ),
}
"""By number of requests and of input tokens: a trace is known by what is in it."""


class Timed:
    """A policy, and the time that it takes itself. The clock's own costs are in it."""

    def __init__(self, policy: object) -> None:
        """Take the place of `policy`."""
        self.spent_ns = 0
        self._policy = policy

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- it is whatever the policy has
        """Whatever the policy has; calls are timed."""
        found = getattr(self._policy, name)
        if not callable(found):
            return found

        def timed(*given: object) -> object:
            started_ns = perf_counter_ns()
            answer = found(*given)
            self.spent_ns += perf_counter_ns() - started_ns
            return answer

        setattr(self, name, timed)
        return timed


class Deployed(msgspec.Struct, frozen=True):
    """One replay through the master."""

    figures: Figures
    policy_us: float
    """Of the policy itself, a page touched."""
    master_us: float
    """Of the whole replay, a page touched."""

    @property
    def percent(self) -> float:
        """Token hit ratio."""
        return self.figures.hit_ratio * 100


def main() -> int:
    """Run it."""
    return traced.run("policies", __doc__ or "", _options, _measure)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-tokens", type=int, default=TRACE_PAGE_TOKENS)
    parser.add_argument(
        "--policies",
        default=",".join(registry.EVICTION),
        help="by comma, each name:parameter=value:…",
    )
    parser.add_argument("--capacities", type=_numbers, help="pages, by comma")
    parser.add_argument("--tiers", type=_tiers, help="pages of memory and of a drive, by comma")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios as PNG")


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _tiers(text: str) -> TwoTiers:
    memory_pages, drive_pages = _numbers(text)
    return TwoTiers(memory_pages, drive_pages)


def _measure(options: argparse.Namespace) -> int:
    report = Report("Eviction policies on a trace of requests", options)
    policies = options.policies.split(",")
    for written in policies:
        _policy(written)  # a wrong one is said at once
    trace = _trace(options)
    published = PUBLISHED.get((len(trace.requests), trace.tokens))
    made_up = "made-up chats" if options.trace is None else str(options.trace)
    report.parameters(
        trace=published.name if published else made_up,
        requests=len(trace.requests),
        tokens=trace.tokens,
        pages=len(trace.parents),
        page_tokens=trace.page_tokens,
        seconds=trace.seconds,
    )
    capacities = _capacities(options)
    deployed = {
        (policy, pages): _deployed(trace, Setting(pages, policy))
        for policy in policies
        for pages in capacities
    }
    bounds = _bounds(trace, capacities, policies)
    report.table("Token hit ratio, %", _ratio_rows(deployed, bounds, capacities))
    report.table("Deployed", [_row(each) for each in deployed.values()])
    if DEFAULT in policies:
        _conditions(report, trace, deployed, capacities)
        _judge(report, deployed, bounds, published)
    if published:
        _check_lab(report, trace, published, capacities)
    usual = published.two_tiers if published else QUICK_TIERS if options.quick else TIERS
    sizes, name = options.tiers or usual, published.name if published else "trace"
    compare(report, trace, sizes, name, quick=options.quick)
    if options.plot:
        _plot(options.plot, deployed, bounds)
    return report.finish()


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace is not None:
        return read_trace(options.trace, options.page_tokens)
    seconds = QUICK_S if options.quick else LONG_S
    return chat_trace(SEED, seconds, SESSIONS_PER_S, options.page_tokens)


def _capacities(options: argparse.Namespace) -> list[int]:
    if options.capacities:
        return list(options.capacities)
    return list(QUICK_CAPACITIES if options.quick and options.trace is None else CAPACITIES)


def _deployed(
    trace: Trace, setting: Setting, hints: Iterable[Hints] = repeat(NO_HINTS)
) -> Deployed:
    pool = VirtualPool(setting, trace.page_tokens)
    timed = Timed(pool.master.core.eviction.policy)
    pool.master.core.eviction.policy = cast("Any", timed)
    started_s = perf_counter()
    figures = replay(trace, pool, hints)
    seconds, touches = perf_counter() - started_s, max(figures.page_touches, 1)
    return Deployed(figures, timed.spent_ns / 1e3 / touches, seconds * 1e6 / touches)


def _bounds(
    trace: Trace, capacities: Sequence[int], policies: Sequence[str]
) -> dict[str, dict[int, float]]:
    """Percent by name and capacity: the optimum, the policies page by page, and with hints."""
    bounds = {"optimum": {pages: offline_optimum(trace, pages) * 100 for pages in capacities}}
    for name in dict.fromkeys((BASE, *policies)):
        bounds[f"{name}, exact"] = {
            pages: exact_hit_ratio(trace, pages, _policy(name)) * 100 for pages in capacities
        }
    if DEFAULT in policies:
        for name, tell in ((HINTED, session_hints), (ENDED, session_ends)):
            hints = tell(trace, HINTS_RIGHT, SEED)
            bounds[name] = {
                pages: _deployed(trace, Setting(pages, DEFAULT), hints).percent
                for pages in capacities
            }
    return bounds


def _policy(written: str) -> EvictionPolicy:
    return registry.eviction(*policy_written(written))


def _ratio_rows(
    deployed: dict[tuple[str, int], Deployed],
    bounds: dict[str, dict[int, float]],
    capacities: Sequence[int],
) -> list[dict[str, Figure]]:
    rows: list[dict[str, Figure]] = []
    for policy in dict.fromkeys(policy for policy, _ in deployed):
        row: dict[str, Figure] = {"policy": policy}
        row |= {f"{pages}": deployed[policy, pages].percent for pages in capacities}
        rows.append(row)
    for name, values in bounds.items():
        rows.append({"policy": name} | {f"{pages}": values[pages] for pages in capacities})
    return rows


def _row(each: Deployed) -> dict[str, Figure]:
    """Names are those of the JSON file as well; ratios 0 to 1."""
    figures = each.figures
    return {
        "policy": figures.policy,
        "capacity_pages": figures.capacity_pages,
        "hit_ratio": figures.hit_ratio,
        "evictions": figures.evictions,
        "expirations": figures.expirations,
        "refused": figures.pages_refused,
        "effective_ttl_s": figures.effective_ttl_s_by_tier.get(Tier.DRAM, "-"),
        "ghost_hits": figures.ghost_hits,
        "unreachable": figures.unreachable_share,
        "policy_us": each.policy_us,
        "master_us": each.master_us,
    }


def _conditions(
    report: Report,
    trace: Trace,
    deployed: dict[tuple[str, int], Deployed],
    capacities: Sequence[int],
) -> None:
    """What the conditions of a real pool cost the default policy."""
    changes: dict[str, dict[str, float]] = {
        "leases of 10 s": {"lease_ttl_s": limits.LEASE_TTL_S},
        "watermarks of the defaults": {
            "watermark_high": limits.WATERMARK_HIGH,
            "watermark_low": limits.WATERMARK_LOW,
        },
    }
    rows: list[dict[str, Figure]] = []
    for name, changed in changes.items():
        row: dict[str, Figure] = {"condition": name}
        for pages in capacities:
            setting = msgspec.structs.replace(Setting(pages, DEFAULT), **changed)
            percent = _deployed(trace, setting).percent
            row[f"{pages}"] = percent - deployed[DEFAULT, pages].percent
        rows.append(row)
    report.table(f"{DEFAULT} under other conditions, points more", rows)


def _judge(
    report: Report,
    deployed: dict[tuple[str, int], Deployed],
    bounds: dict[str, dict[int, float]],
    published: Published | None,
) -> None:
    ours = {pages: each for (policy, pages), each in deployed.items() if policy == DEFAULT}
    for pages, each in ours.items():
        exact = bounds[f"{DEFAULT}, exact"][pages]
        report.at_most(f"points_below_exact/{pages}", exact - each.percent, POINTS_MAX)
        base = bounds[f"{BASE}, exact"][pages]
        report.reported(f"times_{BASE}/{pages}", each.percent / base if base else 0.0)
        if published and pages in CAPACITIES:
            at = CAPACITIES.index(pages)
            name = f"{published.name}/{pages}"
            report.at_least(f"percent/{name}", each.percent, published.to_reach[at])
            hinted = bounds[HINTED][pages]
            report.at_least(f"percent_hinted/{name}", hinted, published.to_reach_hinted[at])
            report.reported(f"percent_ends_told/{name}", bounds[ENDED][pages])
    unreachable = max(each.figures.unreachable_share for each in ours.values())
    report.at_most("unreachable_share", unreachable, UNREACHABLE_MAX)
    cost_us = max(each.policy_us for each in ours.values())
    report.at_most("policy_us_per_page_touch", cost_us, US_PER_TOUCH_MAX)


def _check_lab(
    report: Report, trace: Trace, published: Published, capacities: Sequence[int]
) -> None:
    """How far the lab's own figures are from published ones, which keep partial pages too."""
    off = 0.0
    for pages, optimum, lru in zip(CAPACITIES, published.optimum, published.lru, strict=True):
        if pages in capacities:
            found = exact_hit_ratio(trace, pages, registry.eviction(BASE), partial=True)
            off = max(off, abs(offline_optimum(trace, pages, partial=True) * 100 - optimum))
            off = max(off, abs(found * 100 - lru))
    report.at_most(f"points_off_published/{published.name}", off, 0.01)


def _plot(
    file: Path, deployed: dict[tuple[str, int], Deployed], bounds: dict[str, dict[int, float]]
) -> None:
    from benchmarks.plot import draw_curves

    curves: dict[str, list[tuple[float, float]]] = {}
    for (policy, pages), each in deployed.items():
        curves.setdefault(policy, []).append((pages, each.percent))
    for name, values in bounds.items():
        curves[f"({name})"] = list(values.items())
    draw_curves(file, "Tokens served from the pool", ("pages of the pool", "%"), curves)


if __name__ == "__main__":
    sys.exit(main())
