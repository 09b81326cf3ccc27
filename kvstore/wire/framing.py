"""Bytes to frames and back, without I/O.

Frame: u32 length of the rest | u16 version | u16 kind | u64 request id | MessagePack body.
Little-endian. Kind REQUEST expects a REPLY with the same id from the other side; either side of a
connection may send requests. Raw payload bytes, where a message announces them, follow its frame.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec

from kvstore import limits
from kvstore.errors import MalformedMessage
from kvstore.wire.encoding import decode, encode
from kvstore.wire.messages.base import Message

PROTOCOL_VERSION: Final = 1
PROTOCOL_VERSION_MIN: Final = 1
HEADER: Final = struct.Struct("<IHHQ")
_REST: Final = HEADER.size - 4


class FrameKind(IntEnum):
    """What a frame is to its receiver."""

    REQUEST = 1
    REPLY = 2


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One decoded frame."""

    kind: FrameKind
    request_id: int
    message: Message


def pack_frame(kind: FrameKind, request_id: int, message: Message) -> bytes:
    """One frame's bytes. MalformedMessage when the message exceeds the frame limit."""
    body = encode(message)
    if len(body) > limits.FRAME_BYTES_MAX - HEADER.size:
        raise MalformedMessage(f"{type(message).__name__}: {len(body)} bytes exceed a frame")
    return HEADER.pack(len(body) + _REST, PROTOCOL_VERSION, kind, request_id) + body


def body_length(header: bytes | memoryview) -> int:
    """Bytes of body that follow this HEADER.size long header; checks everything in it."""
    length, version, kind, _ = HEADER.unpack(header)
    if not _REST < length <= limits.FRAME_BYTES_MAX:
        raise MalformedMessage(f"frame length {length}, want {_REST + 1} to the frame limit")
    if not PROTOCOL_VERSION_MIN <= version <= PROTOCOL_VERSION:
        raise MalformedMessage(
            f"frame version {version}, want {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}"
        )
    if kind not in (FrameKind.REQUEST, FrameKind.REPLY):
        raise MalformedMessage(f"frame kind {kind}, want 1 or 2")
    return int(length) - _REST


def unpack_frame(header: bytes | memoryview, body: bytes | memoryview) -> Frame:
    """The frame of a checked header and its whole body."""
    _, _, kind, request_id = HEADER.unpack(header)
    return Frame(FrameKind(kind), request_id, decode(body))


class FrameReader:
    """Collects received bytes and yields whole frames; for event loops that get data in pieces."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        """Start with nothing received."""
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Frames completed by `data`. MalformedMessage ends the connection: state is undefined."""
        self._buffer += data
        frames: list[Frame] = []
        start, size = 0, len(self._buffer)
        while size - start >= HEADER.size:
            header = bytes(self._buffer[start : start + HEADER.size])
            stop = start + HEADER.size + body_length(header)
            if size < stop:
                break
            frames.append(unpack_frame(header, bytes(self._buffer[start + HEADER.size : stop])))
            start = stop
        del self._buffer[:start]
        return frames
