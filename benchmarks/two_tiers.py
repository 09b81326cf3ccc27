"""What a drive below memory adds, and what each rule of what it takes costs in writes.

The replay is that of a pool as it is deployed: leases, copies ahead of eviction, pages brought up
at their second hit. Hit ratios are those of both tiers together.
"""

from __future__ import annotations

from itertools import repeat
from math import ceil
from typing import TYPE_CHECKING, Final

import msgspec

from benchmarks.optimum import session_hints
from kvstore import limits
from kvstore.hints import NO_HINTS
from kvstore.replica import Tier
from master.replay.figures import Figures, replay
from master.replay.pool import Setting, VirtualPool
from master.tunables import GIVEN, LEARNED
from policies.admission.budget import DAY_S, BudgetParameters

if TYPE_CHECKING:
    from benchmarks.harness import Figure, Report
    from kvstore.request_trace import Trace

KV_BYTES_PER_TOKEN: Final = 320 * 1024
"""Of a model of 70 billion parameters with grouped heads in bf16; for bytes written."""
HINTS_RIGHT: Final = 0.8
SEED: Final = 1


class ToReach(msgspec.Struct, frozen=True):
    """Of both tiers together."""

    percent: float
    """Of tokens, at least."""
    writes_per_s: float
    """Pages, at most."""


class TwoTiers(msgspec.Struct, frozen=True):
    """Pages of both tiers, and what is to be reached where that is known."""

    memory_pages: int
    drive_pages: int
    to_reach: ToReach | None = None
    """By a drive that takes everything, without hints."""
    to_reach_hinted: ToReach | None = None
    """By one that takes what hints recommend."""


class _Case(msgspec.Struct, frozen=True):
    admission: str
    hints: str = GIVEN
    is_hinted: bool = False
    """Whether the requests carry hints, HINTS_RIGHT of them right."""
    is_sized: bool = False
    """Whether the drive is as large as its endurance asks for, at the writes of ALL."""

    @property
    def whose(self) -> str:
        """What the hints are."""
        return f"{HINTS_RIGHT * 100:.0f} % right" if self.is_hinted else self.hints


ALL: Final = _Case("all")
HINTED: Final = _Case("learned:probability=0.5", is_hinted=True)
JUDGED: Final = (ALL, HINTED)
"""Held against what is to be reached."""
CASES: Final = (
    _Case("none"),
    ALL,
    _Case("budget"),
    _Case("budget", is_sized=True),
    _Case("second-touch"),
    _Case("learned", LEARNED),
    HINTED,
)


def compare(report: Report, trace: Trace, sizes: TwoTiers, name: str, *, quick: bool) -> None:
    """Replay every case, or those that are judged; ratios carry the `name` of the trace."""
    cases = JUDGED if quick else CASES
    found: dict[_Case, Figures] = {}
    rows: list[dict[str, Figure]] = []
    for case in cases:
        pages = _sized(found[ALL].nvme_pages_per_s) if case.is_sized else sizes.drive_pages
        found[case] = _replayed(trace, msgspec.structs.replace(sizes, drive_pages=pages), case)
        rows.append({"drive_pages": pages} | _row(case, found[case], trace))
    title = f"Two tiers, {sizes.memory_pages} pages of memory and {sizes.drive_pages} of a drive"
    report.table(title, rows)
    judged = (
        ("two_tiers", ALL, sizes.to_reach),
        ("two_tiers_hinted", HINTED, sizes.to_reach_hinted),
    )
    for kind, case, to_reach in judged:
        figures, at = found[case], f"{kind}/{name}/{sizes.memory_pages}+{sizes.drive_pages}"
        percent, writes_per_s = figures.hit_ratio * 100, figures.nvme_pages_per_s
        if to_reach is None:
            report.reported(f"{at}/percent", percent)
            report.reported(f"{at}/writes_per_s", writes_per_s)
        else:
            report.at_least(f"{at}/percent", percent, to_reach.percent)
            report.at_most(f"{at}/writes_per_s", writes_per_s, to_reach.writes_per_s)


def _sized(pages_per_s: float) -> int:
    """Pages of a drive that stands so many writes for all its life, by the default budget."""
    return ceil(pages_per_s * DAY_S / BudgetParameters().drive_writes_per_day / 1000) * 1000


def _replayed(trace: Trace, sizes: TwoTiers, case: _Case) -> Figures:
    setting = Setting(
        sizes.memory_pages, lease_ttl_s=limits.LEASE_TTL_S, nvme_pages=sizes.drive_pages,
        admission=case.admission, hints=case.hints,
    )  # fmt: skip
    hints = session_hints(trace, HINTS_RIGHT, SEED) if case.is_hinted else repeat(NO_HINTS)
    return replay(trace, VirtualPool(setting, trace.page_tokens), hints)


def _row(case: _Case, figures: Figures, trace: Trace) -> dict[str, Figure]:
    hits, lived_s = figures.hit_ratio_by_tier, figures.effective_ttl_s_by_tier
    written = figures.pages_written_by_tier.get(Tier.NVME, 0)
    return {
        "admission": case.admission,
        "hints": case.whose,
        "hit_ratio": figures.hit_ratio,
        "hit_ratio_dram": hits.get(Tier.DRAM, 0.0),
        "hit_ratio_nvme": hits.get(Tier.NVME, 0.0),
        "nvme_pages_per_s": figures.nvme_pages_per_s,
        "nvme_bytes_written": written * trace.page_tokens * KV_BYTES_PER_TOKEN,
        "promotions": figures.promotions,
        "evictions": figures.evictions,
        "copies_evicted": figures.copies_evicted,
        "expirations": figures.expirations,
        "effective_ttl_s_dram": lived_s.get(Tier.DRAM, "-"),
        "effective_ttl_s_nvme": lived_s.get(Tier.NVME, "-"),
    }
