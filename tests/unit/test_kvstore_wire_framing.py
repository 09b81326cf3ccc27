"""Frames from bytes cut anywhere, raw bytes after them, and nothing but MalformedMessage."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import limits
from kvstore.errors import BadValue, MalformedMessage
from kvstore.wire.framing import (
    GREETING_VERSION,
    HEADER,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Frame,
    FrameKind,
    FrameReader,
    pack_frame,
)
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Probe, Probed
from tests.unit.golden_vectors import message_examples

EXAMPLES = [message for _, message in sorted(message_examples().items())]

frames = st.builds(
    Frame,
    st.sampled_from(FrameKind),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from(EXAMPLES),
)


def packed(frame: Frame) -> bytes:
    return pack_frame(frame.kind, frame.request_id, frame.message)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 1 << 16), max_size=12))
def test_frames_do_not_depend_on_how_they_arrive(sent: list[Frame], cuts: list[int]) -> None:
    reader = FrameReader()
    data = b"".join(map(packed, sent))
    got = [frame for piece in pieces(data, cuts) for frame in reader.feed(piece)]
    assert got == sent
    assert reader.buffered_bytes == 0


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_any_bytes_are_frames_or_malformed(received: list[bytes]) -> None:
    reader = FrameReader()
    try:
        for piece in received:
            reader.feed(piece)
    except MalformedMessage:
        return
    assert reader.buffered_bytes <= sum(map(len, received))


@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_damaged_frames_are_frames_or_malformed(sent: list[Frame], data: st.DataObject) -> None:
    damaged = bytearray(b"".join(map(packed, sent)))
    at = data.draw(st.integers(0, len(damaged) - 1), "at")
    damaged[at] ^= data.draw(st.integers(1, 255), "flip")
    try:
        got = FrameReader().feed(bytes(damaged))
    except MalformedMessage:
        return
    assert len(got) <= len(sent) + 1


def header(length: int, version: int = PROTOCOL_VERSION, kind: int = 1) -> bytes:
    return HEADER.pack(length, version, kind, 7)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (header(12), "frame length 12"),
        (header(0), "frame length 0"),
        (header(limits.FRAME_BYTES_MAX + 1), "frame length 8388609"),
        (header(20, version=PROTOCOL_VERSION + 1), "version 2"),
        (header(20, version=GREETING_VERSION), "version 0"),
        (header(20, kind=0), "kind 0"),
        (header(20, kind=3), "kind 3"),
        (b"GET / HTTP/1.1\r\n\r\n", "version"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(20), "version"),
    ],
)
def test_a_bad_header_is_named(data: bytes, named: str) -> None:
    with pytest.raises(MalformedMessage, match=named):
        FrameReader().feed(data)


def test_the_limit_of_a_greeting_is_small() -> None:
    reader = FrameReader(GREETING_VERSION, limits.HELLO_BYTES_MAX)
    with pytest.raises(MalformedMessage, match="frame length"):
        reader.feed(header(limits.HELLO_BYTES_MAX + 1, GREETING_VERSION))


def test_versions_are_at_most_two_apart_from_the_greeting() -> None:
    assert GREETING_VERSION < PROTOCOL_VERSION_MIN <= PROTOCOL_VERSION
    assert PROTOCOL_VERSION - PROTOCOL_VERSION_MIN <= 1


def test_a_reader_set_to_another_version_takes_only_that() -> None:
    reader = FrameReader(2)
    assert reader.feed(pack_frame(FrameKind.REPLY, 1, Done(), version=2)) == [
        Frame(FrameKind.REPLY, 1, Done())
    ]
    with pytest.raises(MalformedMessage):
        reader.feed(pack_frame(FrameKind.REPLY, 1, Done(), version=1))


def test_an_announced_length_takes_no_memory_before_the_bytes_come() -> None:
    reader = FrameReader()
    tracemalloc.start()
    try:
        reader.feed(header(limits.FRAME_BYTES_MAX))
        assert tracemalloc.get_traced_memory()[1] < 64 * limits.KIB
        sent = 100_000
        for _ in range(100):
            reader.feed(bytes(sent // 100))
        assert tracemalloc.get_traced_memory()[1] < 4 * sent
    finally:
        tracemalloc.stop()


def test_the_largest_frame_passes_and_its_memory_is_given_back() -> None:
    reader = FrameReader()
    largest = Probe(b"n" * 32, bytes(limits.FRAME_BYTES_MAX - 1000))
    frame = pack_frame(FrameKind.REQUEST, 1, largest)
    tracemalloc.start()
    try:
        half = len(frame) // 2
        assert reader.feed(frame[:half]) == []
        assert reader.feed(frame[half:])[0].message == largest
        reader.space()
        assert tracemalloc.get_traced_memory()[0] < 256 * limits.KIB
    finally:
        tracemalloc.stop()
    with pytest.raises(BadValue):
        pack_frame(FrameKind.REQUEST, 1, Probe(b"", bytes(limits.FRAME_BYTES_MAX)))


@given(
    st.binary(min_size=1, max_size=60_000),
    st.lists(st.integers(0, 1 << 17), max_size=6),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=8),
)
def test_raw_bytes_between_frames_come_out_whole(
    raw: bytes, cuts: list[int], sizes: list[int]
) -> None:
    before, after = Probed(b"\1"), Probed(b"\0" * 300)
    data = b"".join(
        (
            pack_frame(FrameKind.REPLY, 1, before),
            raw,
            pack_frame(FrameKind.REPLY, 2, after),
        )
    )
    reader = FrameReader()
    taken = bytearray()
    messages: list[object] = []
    for piece in pieces(data, cuts):
        rest = memoryview(piece)
        while rest:
            space = reader.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            reader.received(count)
            rest = rest[count:]
            _take_in(reader, messages, taken, len(raw), sizes)
    assert messages == [before, after]
    assert taken == raw


def _take_in(
    reader: FrameReader, messages: list[object], taken: bytearray, wanted: int, sizes: list[int]
) -> None:
    if not messages and (frame := reader.next_frame()):
        messages.append(frame.message)
    while messages and len(taken) < wanted and reader.buffered_bytes:
        into = bytearray(min(wanted - len(taken), sizes[len(taken) % len(sizes)]))
        count = reader.take_raw(memoryview(into))
        taken += into[:count]
    if len(taken) == wanted and messages and (frame := reader.next_frame()):
        messages.append(frame.message)
