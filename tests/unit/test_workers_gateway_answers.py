"""Errors in the form that OpenAI's clients read."""

from __future__ import annotations

import pytest

from kvstore.errors import (
    AccessDenied,
    BadValue,
    DeadlineExceeded,
    Fenced,
    KVStoreError,
    NotLeader,
    OutOfSpace,
    Throttled,
    Unavailable,
    UnknownTicket,
    error_from_wire,
)
from workers.gateway_answers import error_body, status_of


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (BadValue("top_p", 7, "less"), 400, "invalid_request_error", "top_p", "bad_value"),
        (error_from_wire("bad_value", "x"), 400, "invalid_request_error", None, "bad_value"),
        (Throttled(1.0, "staging", "full"), 429, "rate_limit_error", None, "staging"),
        (DeadlineExceeded("x"), 504, "server_error", None, "deadline_exceeded"),
        (Unavailable("x"), 503, "server_error", None, "unavailable"),
        (OutOfSpace("x"), 503, "server_error", None, "out_of_space"),
        (NotLeader(), 503, "server_error", None, "not_leader"),
        (Fenced("x"), 503, "server_error", None, "fenced"),
        (UnknownTicket("x"), 503, "server_error", None, "unknown_ticket"),
        (AccessDenied("x"), 500, "server_error", None, "access_denied"),
    ],
)
def test_each_error_has_its_status_and_form(
    error: KVStoreError, status: int, kind: str, param: str | None, code: str
) -> None:
    assert status_of(error) == status
    body = {"message": str(error), "type": kind, "param": param, "code": code}
    assert error_body(error) == {"error": body}
