"""A plot is a PNG with something on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.plot import draw_curves

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


def test_curves_are_written_as_png(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.png", "two.png")]
    axes = ("pages", "%")
    draw_curves(files[0], "title", axes, {"a": [(10, 1.0), (1, 0.5)]})
    draw_curves(files[1], "title", axes, {"a": [(10, 1.0), (1, 0.5)], "b": [(1, 2.0)]})
    drawn = [file.read_bytes() for file in files]
    assert all(each.startswith(PNG) for each in drawn)
    assert drawn[0] != drawn[1]
