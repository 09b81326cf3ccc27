"""The README's figures are those of the committed results."""

from __future__ import annotations

from benchmarks.results.readme_table import README, updated


def test_the_measured_table_is_made_from_the_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert updated(text) == text, "run `python -m benchmarks.results.readme_table`"
