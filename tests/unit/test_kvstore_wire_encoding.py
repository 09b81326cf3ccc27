"""The decoder yields a message or MalformedMessage, in memory bounded by what it was given."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import BadValue, MalformedMessage
from kvstore.wire.encoding import BODY_BYTES_MAX, decode, encode
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.hello import Failure, Welcome
from kvstore.wire.messages.reads import Probe
from tests.unit.golden_vectors import message_examples

EXAMPLES = sorted(message_examples().items())
BODIES = [encode(message) for _, message in EXAMPLES]


def decode_or_refuse(body: bytes) -> Message | None:
    try:
        return decode(body)
    except MalformedMessage:
        return None


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc0")
@example(b"\x90")
@example(b"\x91\x05\x00")
@example(b"\x91\xcc\xff")
@example(b"\x95\x01\xa1\xff\x01\x01\xc4\x00")
@example(b"\x91" * 5000)
@example(b"\x81\x05\x05")
def test_any_bytes_are_a_message_or_malformed(body: bytes) -> None:
    message = decode_or_refuse(body)
    assert message is None or isinstance(message, Message)


@given(st.sampled_from(BODIES), st.data())
def test_a_damaged_message_is_a_message_or_malformed(body: bytes, data: st.DataObject) -> None:
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4), "damages")):
        at = data.draw(st.integers(0, len(damaged)), "at")
        cut = data.draw(st.integers(0, 3), "cut")
        damaged[at : at + cut] = data.draw(st.binary(max_size=6), "put")
    message = decode_or_refuse(bytes(damaged))
    # What decodes can be encoded again, so a relay cannot be crashed either.
    assert message is None or decode(encode(message)) == message


@given(st.sampled_from(BODIES), st.data())
def test_a_truncated_message_is_malformed(body: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(MalformedMessage):
        decode(body[:length])


@given(st.sampled_from(BODIES), st.binary(min_size=1, max_size=20))
def test_bytes_after_a_message_are_malformed(body: bytes, rest: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(body + rest)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff\x05",  # an array of 4 billion entries
        b"\x92\x22\xdd\xff\xff\xff\xff\x01",  # AbortPut with as many generations
        b"\x93\x34\xc6\xff\xff\xff\xff",  # Probed with 4 GiB of bytes
        b"\x9c\x43" + b"\xa1a\x01\xcb" + bytes(8) + b"\x01" * 5 + b"\x90\x90\xdf\xff\xff\xff\xff",
    ],
)
def test_a_lying_length_takes_no_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


def test_more_than_a_frame_is_refused_both_ways() -> None:
    huge = Probe(b"", bytes(BODY_BYTES_MAX))
    with pytest.raises(BadValue, match="Probe"):
        encode(huge)
    with pytest.raises(MalformedMessage, match="at most"):
        decode(bytes(BODY_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "message",
    [
        Welcome(1 << 64, 0, b"", "", b""),
        Welcome(-(1 << 64), 0, b"", "", b""),
        Failure("\ud800", ""),
    ],
)
def test_what_cannot_travel_is_the_callers_error(message: Message) -> None:
    with pytest.raises(BadValue, match=type(message).__name__):
        encode(message)


@pytest.mark.parametrize("filler", [b"\x91", b"\xdd\x00\x00\x00\x01", b"\x81\x01", b"\xc4\x00"])
@pytest.mark.parametrize("start", [b"", b"\x93\x33", b"\x92\x22"])
def test_the_largest_garbage_is_refused_without_reading_on(start: bytes, filler: bytes) -> None:
    """Deep or long, at any place: quadratic or recursive work would never end here."""
    body = start + filler * ((BODY_BYTES_MAX - len(start)) // len(filler))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024
