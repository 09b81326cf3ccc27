"""What the demo concludes from its programs' reports: what went wrong, and a table of the rest.

Pure but for the table's looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from workers.demo_reports import DecodeReport, PrefillReport, Turn


def failures(prefill: PrefillReport, pooled: DecodeReport, alone: DecodeReport) -> list[str]:
    """Every way in which the runs differ, or in which the pool was of no use; empty is good."""
    found = [f"the prefill worker: {prefill.trouble}"] if prefill.trouble else []
    if len(pooled.turns) != len(alone.turns):
        found.append(f"{len(pooled.turns)} answers with the pool, {len(alone.turns)} without")
    for got, want in zip(pooled.turns, alone.turns, strict=False):
        found += _turn_failures(prefill, got, want)
    return found


def _turn_failures(prefill: PrefillReport, got: Turn, want: Turn) -> list[str]:
    found: list[str] = []
    if got.trouble:
        found.append(f"{got.question!r}: {got.trouble}")
    if got.reused_tokens < prefill.tokens:
        found.append(
            f"{got.question!r}: {got.reused_tokens} tokens reused, {prefill.tokens} handed over"
        )
    if (got.prompt_tokens, got.reused_tokens) != (want.prompt_tokens, want.reused_tokens):
        found.append(f"{got.question!r}: the prompts were split differently")
    if got.generated != want.generated:
        at = _first_difference(got.generated, want.generated)
        found.append(
            f"{got.question!r}: token {at} differs: {got.generated[at : at + 1]} with the pool, "
            f"{want.generated[at : at + 1]} without"
        )
    return found


def _first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


def table(pooled: DecodeReport, alone: DecodeReport) -> Table:
    """A row for every question."""
    made = Table(title="time to first token, computed and from the pool", title_justify="left")
    made.add_column("question")
    for name in (
        "prompt\ntokens", "reused\ntokens", "of those\ngenerated", "cold\ns", "from the\npool s",
        "faster", "moved\nMB", "pulled in\nms", "GB/s",
    ):  # fmt: skip
        made.add_column(name, justify="right")
    for got, want in zip(pooled.turns, alone.turns, strict=False):
        made.add_row(*_row(got, want))
    return made


def _row(got: Turn, want: Turn) -> list[str]:
    rate = got.bytes_moved / got.fetch_s / 1e9 if got.fetch_s else 0.0
    return [
        got.question,
        str(got.prompt_tokens),
        str(got.reused_tokens),
        str(got.reused_generated_tokens),
        f"{want.first_token_s:.2f}",
        f"{got.first_token_s:.2f}",
        f"{want.first_token_s / got.first_token_s:.1f}x",
        f"{got.bytes_moved / 1e6:.0f}",
        f"{got.fetch_s * 1e3:.0f}",
        f"{rate:.2f}",
    ]
