"""Hints as they come with a request of vLLM's."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.connectors.vllm.hints import HINTS, hints_of
from kvstore.hints import Hints


class Request(msgspec.Struct):
    """As much of one as is read."""

    kv_transfer_params: dict[str, object] | None = None
    request_id: str = "r-1"
    num_tokens: int = 0
    block_hashes: tuple[bytes, ...] = ()


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {HINTS: None}])
def test_most_requests_have_none(params: dict[str, object] | None) -> None:
    assert hints_of(Request(params)) is None


def test_names_and_values_are_those_of_hints() -> None:
    written = {"session_closed": True, "tool_call_s": 20, "priority": -1}
    assert hints_of(Request({HINTS: written})) == Hints(None, True, 20, None, -1)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"tool_call_s": -1}, "tool_call_s: got -1, want 0 to 86400"),
        ({"tool_call_s": 1e6}, "tool_call_s: got 1000000.0, want 0 to 86400"),
        ({"ends": True}, "hints: got 'ends', want one of"),
        ("session_closed", "hints: got 'session_closed', want hints by their names"),
    ],
)
def test_nonsense_is_named_in_the_log_and_nobody_fails(
    written: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert hints_of(Request({HINTS: written})) is None
    assert f"kvharbor_hints of r-1: {said}" in caplog.text
