"""Event rings as lines and back, and every line that is none."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import MalformedMessage
from kvstore.event_log import event_line, header_line, read_events, read_header
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Probe
from master import events

KINDS = {kind.__name__: kind for kind in get_args(events.Event)}

EVENTS = [
    events.SessionOpened(events.SessionId(1), "engine", "t", "n\n\u2028", bytes(range(16))),
    events.Request(events.SessionId(1), 7, Probe(b"\0" * 32, b"\xff" * 64)),
    events.CommandAnswered(events.CommandId(3), Done()),
    events.CommandAnswered(events.CommandId(4), None),
    events.Persisted(events.WriteId(9)),
    events.SessionClosed(events.SessionId(1)),
    events.Prolonged(12.5),
    events.Prolonged(float("inf")),
    events.Tick(),
]


def test_events_come_back_as_they_were() -> None:
    lines = [event_line(number / 3, event) for number, event in enumerate(EVENTS)]
    assert all(line.count("\n") == 1 for line in lines)
    found = list(read_events(lines, KINDS))
    assert found == [(number / 3, event) for number, event in enumerate(EVENTS)]


def test_every_kind_of_event_was_tried() -> None:
    assert {type(event).__name__ for event in EVENTS} == KINDS.keys()


def test_the_header_tells_about_the_process() -> None:
    line = header_line(role="master", epoch=3)
    assert read_header(line) == {"role": "master", "epoch": 3}


@pytest.mark.parametrize("line", ["", "x", "[]", "{}", '{"format": "other"}', "3"])
def test_another_file_is_refused(line: str) -> None:
    with pytest.raises(MalformedMessage):
        read_header(line)


GOOD = event_line(1.0, EVENTS[1])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "[" * 100_000,
        GOOD[:-3],
        GOOD.replace("Request", "Unknown"),
        GOOD.replace("request_id", "request"),
        GOOD.replace('"fields"', '"felds"'),
        GOOD.replace("1.0", '"x"'),
        GOOD.replace('{"message": "', '{"message": "!'),
        GOOD.replace('{"message": "', '{"message": "kQ'),
        '{"now_s": 1, "event": "Tick", "fields": []}',
        '{"now_s": 1, "event": "SessionClosed", "fields": {"session": [1]}}',
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(MalformedMessage, match=r"line 3|not JSON|not a JSON object"):
        list(read_events([GOOD, line], KINDS))


@given(st.text())
def test_any_text_is_events_or_malformed(text: str) -> None:
    with suppress(MalformedMessage):
        list(read_events(text.splitlines(), KINDS))
