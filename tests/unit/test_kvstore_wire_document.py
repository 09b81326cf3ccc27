"""The generated document names every message, field, error and tag, and what they mean."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.wire import document
from kvstore.wire.messages import REGISTRY
from kvstore.wire.messages.base import Message, tag_of
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from pathlib import Path

TEXT = document.protocol()


@pytest.mark.parametrize("kind", REGISTRY.values())
def test_every_message_is_there_with_its_fields(kind: type[Message]) -> None:
    heading = f"### {kind.__name__} ({tag_of(kind)})"
    assert TEXT.count(heading + "\n") == 1
    section = TEXT.partition(heading)[2].partition("\n##")[0]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == [
        field.name for field in msgspec.structs.fields(kind)
    ]
    assert f"| {tag_of(kind)} | {kind.__name__} |" in TEXT


def test_docstrings_of_fields_and_members_are_there() -> None:
    assert "| `role` | `str` | engine, worker, master or operator. |" in TEXT
    busy = f"| `BUSY` | `{Outcome.BUSY.value}` | A reader holds the extent"
    assert busy in TEXT


def test_values_errors_and_frames_are_there() -> None:
    for piece in (
        "u32 length of the rest | u16 version",
        "### Geometry",
        "### Content",
        "| `out_of_space` | OutOfSpace | The pool or a bounded table is full",
        "Retired, never to be used again:",
    ):
        assert piece in TEXT


def test_the_program_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "P.md"
    monkeypatch.setattr(sys, "argv", ["document", str(target)])
    document.main()
    assert target.read_text(encoding="utf-8") == TEXT
