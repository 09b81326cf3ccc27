"""Draws curves into a PNG file. Owns matplotlib, which is loaded only when there is one to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

mpl.use("agg")


def draw_curves(
    file: Path,
    title: str,
    axes: tuple[str, str],
    curves: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Write a PNG: one line a name through its (x, y), x on a logarithmic axis.

    Lines whose name is in brackets, which others are compared with, are dashed.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    plot = figure.add_subplot(title=title, xlabel=axes[0], ylabel=axes[1], xscale="log")
    for name, points in curves.items():
        style = "--" if name.startswith("(") else "-"
        plot.plot(*zip(*sorted(points), strict=True), style, marker="o", label=name)
    plot.set_ylim(bottom=0)
    plot.grid(visible=True, alpha=0.3)
    plot.legend()
    figure.savefig(file, format="png", dpi=120)
