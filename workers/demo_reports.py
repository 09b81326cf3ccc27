"""What the programs of the demo tell one another: reports as JSON files, checked when read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

Report = TypeVar("Report", bound=msgspec.Struct)


class PrefillReport(msgspec.Struct, frozen=True):
    """What a prefill worker computed and handed over."""

    pid: int
    namespace: str
    tokens: int
    """Tokens of whole pages, all of which were handed over."""
    reused_tokens: int
    prefill_s: float
    pages_stored: int
    bytes_moved: int
    store_s: float
    trouble: str


class Turn(msgspec.Struct, frozen=True):
    """One question and its answer."""

    question: str
    prompt_tokens: int
    reused_tokens: int
    """Tokens whose KV came out of the pool."""
    reused_generated_tokens: int
    """Those of them that were generated in earlier turns of the chat."""
    generated: tuple[int, ...]
    text: str
    first_token_s: float
    fetch_s: float
    bytes_moved: int
    pages_stored: int
    trouble: str


class DecodeReport(msgspec.Struct, frozen=True):
    """What a decode worker answered."""

    pid: int
    turns: tuple[Turn, ...]


def write_report(path: Path, report: msgspec.Struct) -> None:
    """Write it as one JSON object."""
    path.write_text(json.dumps(msgspec.to_builtins(report)), encoding="utf-8")


def read_report(path: Path, kind: type[Report]) -> Report:
    """Read it back. ConfigError naming the file when it is no such report."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), kind)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"report {path}: {error}") from error
