"""Diagrams and tables in the documents are those of the code."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import pytest

from kvstore.replica import EXTENT_TRANSITIONS
from master.leadership import LEADERSHIP_TRANSITIONS
from master.tickets import TICKET_TRANSITIONS
from tests.simulation import leader_mutants, mutants

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).parents[2]
State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def drawn(table: Mapping[tuple[State, Event], State]) -> str:
    """The table as a Mermaid diagram; it begins in the state that comes first."""
    first, _ = next(iter(table))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [
        f"    {before.name} --> {after.name}: {event.value}"
        for (before, event), after in table.items()
    ]
    return "\n".join([*lines, "```", ""])


DIAGRAMS: Final = {
    "extent states": drawn(EXTENT_TRANSITIONS),
    "leadership": drawn(LEADERSHIP_TRANSITIONS),
    "ticket states": drawn(TICKET_TRANSITIONS),
}


@pytest.mark.parametrize("name", DIAGRAMS)
def test_the_diagram_is_the_table(name: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    shown = text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0]
    want = DIAGRAMS[name]
    assert shown == want, f"put this between the markers:\n{want}"


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
    assert all(hasattr(mutants, name) or hasattr(leader_mutants, name) for name in scenes)
    want = {name: set(each.noticed_by) for name, each in mutants.MUTANTS.items()}
    assert {name: shown[name] for name in shown.keys() - scenes} == want
