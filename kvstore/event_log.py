"""Event rings as files: one JSON line an event, for people to read and simulators to replay.

Owns the form of the lines. Must not know any state machine: the reader hands in the event types
that it expects. A value is JSON's own, or {"bytes": base64}, or {"message": base64 of its wire
form}.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvstore.errors import MalformedMessage
from kvstore.wire.encoding import decode, encode
from kvstore.wire.messages.base import Message

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Event = TypeVar("Event", bound=msgspec.Struct)

FORMAT: Final = "kvharbor events 1"


def header_line(**facts: str | float) -> str:
    """The first line: the format, and facts about the process, such as role and epoch."""
    return json.dumps({"format": FORMAT, **facts}) + "\n"


def event_line(now_s: float, event: msgspec.Struct) -> str:
    """The line of an event that was handled at `now_s`."""
    fields = {name: _to_json(value) for name, value in msgspec.structs.asdict(event).items()}
    row = {"now_s": now_s, "event": type(event).__name__, "fields": fields}
    return json.dumps(row) + "\n"


def read_header(line: str) -> dict[str, object]:
    """The facts in the first line; MalformedMessage when the file is none of ours."""
    facts = _object(line)
    if facts.pop("format", None) != FORMAT:
        raise MalformedMessage(f"not a file of {FORMAT!r}: {line[:60]!r}")
    return facts


def read_events(
    lines: Iterable[str], kinds: Mapping[str, type[Event]]
) -> Iterator[tuple[float, Event]]:
    """(now, event) of every line after the header; MalformedMessage names the line."""
    for number, line in enumerate(lines, 2):
        row = _object(line)
        try:
            kind = kinds[str(row["event"])]
            now_s = float(str(row["now_s"]))
            fields = dict(_fields(row["fields"]))
            event = kind(**fields)
        except (KeyError, TypeError, ValueError, MalformedMessage) as error:
            raise MalformedMessage(f"line {number}: {error!r} in {line[:60]!r}") from error
        yield now_s, event


def _object(line: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"not JSON: {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise MalformedMessage(f"not a JSON object: {line[:60]!r}")
    return row


def _fields(value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        raise TypeError(f"fields: {value!r}")
    return ((str(name), _from_json(each)) for name, each in value.items())


def _to_json(value: object) -> object:
    match value:
        case Message():
            return {"message": base64.b64encode(encode(value)).decode()}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise AssertionError(f"no form for {value!r}")


def _from_json(value: object) -> object:
    match value:
        case {"message": str(text)}:
            return decode(base64.b64decode(text, validate=True))
        case {"bytes": str(text)}:
            return base64.b64decode(text, validate=True)
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(f"no value: {value!r}")
