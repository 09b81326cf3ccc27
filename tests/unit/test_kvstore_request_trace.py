"""Trace files: what is read, and that whatever is wrong is said with line and field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import BadValue, ConfigError
from kvstore.request_trace import NO_PARENT, Trace, parse_trace, read_trace

if TYPE_CHECKING:
    from pathlib import Path


def line(timestamp: object, tokens: object, pages: object, **more: object) -> str:
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": 1, "hash_ids": pages}
    return json.dumps(row | more)


GOOD = [line(0, 1024, [0, 1]), line(3000, 1100, [0, 1, 2]), "\n", line(3000, 5, [])]


def test_requests_come_with_seconds_tokens_and_full_pages(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(GOOD))
    trace = read_trace(file)
    assert [request.at_s for request in trace.requests] == [0.0, 3.0, 3.0]
    assert [trace.full_pages(request) for request in trace.requests] == [(0, 1), (0, 1), ()]
    assert trace.requests[1].pages == (0, 1, 2)
    assert trace.parents == {0: NO_PARENT, 1: 0, 2: 1}
    assert (trace.tokens, trace.seconds) == (1024 + 1100 + 5, 3.0)
    assert [request.new_tokens for request in trace.requests] == [1, 1, 1]


def test_a_trace_without_lengths_of_answers_can_be_replayed() -> None:
    (request,) = parse_trace(['{"timestamp": 0, "input_length": 5, "hash_ids": []}'], "x").requests
    assert request.new_tokens == 0


def test_a_page_is_as_long_as_said() -> None:
    trace = parse_trace([line(0, 33, [7, 8, 9])], "made up", page_tokens=16)
    assert trace.full_pages(trace.requests[0]) == (7, 8)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("{", "line"),
        ("[]", "line"),
        (line(None, 1024, [0, 1]), "timestamp"),
        (line(-1, 1024, [0, 1]), "timestamp"),
        (line(True, 1024, [0, 1]), "timestamp"),
        (line(float("nan"), 1024, [0, 1]), "timestamp"),
        (line(1e300, 1024, [0, 1]), "timestamp"),
        (line(0, 1024, [0, 1]), "timestamp"),
        (line(5000, "1024", [0, 1]), "input_length"),
        (line(5000, -1, []), "input_length"),
        (line(5000, 1 << 63, []), "input_length"),
        (line(5000, 1024.5, [0, 1]), "input_length"),
        (line(5000, 0, [], output_length=None), "output_length"),
        (line(5000, 0, [], output_length=-1), "output_length"),
        (line(5000, 1024, None), "hash_ids"),
        (line(5000, 1024, "01"), "hash_ids"),
        (line(5000, 1024, [0, "1"]), "hash_ids"),
        (line(5000, 1024, [0, -1]), "hash_ids"),
        (line(5000, 1024, [0, 1 << 63]), "hash_ids"),
        (line(5000, 1024, [0]), "hash_ids"),
        (line(5000, 1024, [0, 1, 2]), "hash_ids"),
        (line(5000, 1025, [0, 1, 2, 3]), "hash_ids"),
        (line(5000, 1024, [4, 4]), "hash_ids"),
        (line(5000, 1024, [1, 0]), "hash_ids"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(bad: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^made up, line 5: {field}: got .*, want "):
        parse_trace([*GOOD, bad], "made up")


def test_a_file_without_requests_or_text_or_at_all_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with pytest.raises(ConfigError, match=r"trace\.jsonl: No such file"):
        read_trace(file)
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl: not a text file"):
        read_trace(file)
    file.write_text("\n \n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl: no requests"):
        read_trace(file)


@pytest.mark.parametrize("tokens", [0, -1, 4097])
def test_pages_of_no_size_are_refused(tokens: int) -> None:
    with pytest.raises(BadValue, match="page_tokens"):
        Trace(tokens)
