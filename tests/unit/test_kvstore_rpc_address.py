"""Addresses as text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from kvstore.rpc.address import TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("127.0.0.1:7700", TcpAddress("127.0.0.1", 7700)),
        ("localhost:0", TcpAddress("localhost", 0)),
        ("[::1]:65535", TcpAddress("::1", 65535)),
        ("pool-1.example.org:1", TcpAddress("pool-1.example.org", 1)),
        ("unix:/run/kvharbor/worker.sock", UnixAddress("/run/kvharbor/worker.sock")),
        ("unix:relative", UnixAddress("relative")),
    ],
)
def test_addresses_come_back(text: str, want: TcpAddress | UnixAddress) -> None:
    assert parse_address(text) == want
    assert str(want) == text


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "host", "host:", ":7700", "host:port", "host:70000", "host:-1", "host:7\uff17",
        "h:" + "9" * 5000, "::1:7700", "http://host:80", "unix:", "unix:" + "x" * 108, "unix:a\0b",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadValue, match="address"):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        assert parse_address(str(parse_address(text))) == parse_address(text)
    except BadValue:
        return
