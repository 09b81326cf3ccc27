"""Result files of benchmarks: what `--json` wrote."""

from __future__ import annotations

import json
from typing import Final

from benchmarks.harness import ROOT

RESULTS: Final = ROOT / "benchmarks" / "results"

Row = dict[str, str | float]
Document = dict[str, object]


def load(name: str) -> Document:
    """One result file."""
    document: Document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def tables(document: Document) -> dict[str, list[Row]]:
    """The tables of a result, by title."""
    found = document["tables"]
    assert isinstance(found, dict)
    return found


def parameters(document: Document) -> Row:
    """How a result was measured."""
    found = document["parameters"]
    assert isinstance(found, dict)
    return found


def origin(document: Document) -> str:
    """Where the figures come from."""
    machine = document["machine"]
    assert isinstance(machine, dict)
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    where += f", load {document['load']}" if "load" in document else ""  # older ones do not say
    return f"`python {document['command']}` at commit `{document['commit']}`; {where}."
