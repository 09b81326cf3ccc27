"""Diagrams in the documents are drawn from the tables in the code."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvstore.replica import EXTENT_TRANSITIONS

ROOT: Final = Path(__file__).parents[2]
START: Final = "<!-- extent states -->\n"
STOP: Final = "<!-- /extent states -->"


def drawn() -> str:
    """The extent's states as a Mermaid diagram."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> FREE"]
    lines += [
        f"    {before.name} --> {after.name}: {event.value}"
        for (before, event), after in EXTENT_TRANSITIONS.items()
    ]
    return "\n".join([*lines, "```", ""])


def test_the_extent_diagram_is_the_table() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    shown = text.split(START)[1].split(STOP)[0]
    assert shown == drawn(), f"put this between the markers:\n{drawn()}"
