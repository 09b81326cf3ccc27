"""Diagrams and tables in the documents are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvstore.replica import EXTENT_TRANSITIONS
from tests.simulation import mutants

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


def test_the_table_of_checks_has_every_mutant_beside_what_notices_it() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("<!-- simulation checks -->\n")[1].split("<!-- /simulation checks -->")[0]
    shown: dict[str, set[str]] = {}
    for line in table.splitlines()[2:]:
        number, _, where, names = (cell.strip() for cell in line.strip("|").split("|"))
        for file in re.findall(r"\w+\.py", where):
            assert (ROOT / "tests/simulation" / file).exists(), file
        for name in names.split(", ") if names != "–" else ():
            shown.setdefault(name, set()).add(number)
    scenes = {name for name, numbers in shown.items() if numbers == {"scene"}}
    assert all(hasattr(mutants, name) for name in scenes)
    want = {name: set(each.noticed_by) for name, each in mutants.MUTANTS.items()}
    assert {name: shown[name] for name in shown.keys() - scenes} == want
