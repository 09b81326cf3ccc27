"""Bytes to frames and back, without I/O.

Frame: u32 length of the rest | u16 version | u16 kind | u64 request id | MessagePack body.
Little-endian. Kind REQUEST expects a REPLY with the same id from the other side; either side of a
connection may send requests. Raw payload bytes, where a message announces them, follow its frame.
The greeting (messages/hello.py) is in version 0 for ever; what follows is in the version that
Welcome names, and a frame of any other version is malformed.
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

GREETING_VERSION: Final = 0
PROTOCOL_VERSION_MIN: Final = 1
PROTOCOL_VERSION: Final = 1
VERSION_LIMIT: Final = (1 << 16) - 1
HEADER: Final = struct.Struct("<IHHQ")
_HEADER_BYTES: Final = HEADER.size
_LENGTH_BYTES: Final = 4
_REST: Final = _HEADER_BYTES - _LENGTH_BYTES

_ROOM_MIN: Final = 16 * limits.KIB
"""A frame of 256 keys fits; a server holds this much for every session."""
_ROOM_KEPT_MAX: Final = 256 * limits.KIB
"""A buffer that grew beyond this is given back once it is empty."""
_SPACE_MIN: Final = 4 * limits.KIB


class FrameKind(IntEnum):
    """What a frame is to its receiver."""

    REQUEST = 1
    REPLY = 2


REQUEST: Final = FrameKind.REQUEST
REPLY: Final = FrameKind.REPLY
"""For the hot paths, where looking a member up by its class costs more than sending a byte."""
_KINDS: Final = {int(kind): kind for kind in FrameKind}


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One decoded frame."""

    kind: FrameKind
    request_id: int
    message: Message


def pack_frame(
    kind: FrameKind, request_id: int, message: Message, version: int = PROTOCOL_VERSION
) -> bytes:
    """One frame's bytes. BadValue when the message exceeds the frame limit."""
    body = encode(message)
    return HEADER.pack(len(body) + _REST, version, kind, request_id) + body


class FrameReader:
    """Collects received bytes and gives out whole frames and raw bytes, in order.

    The receiver fills `space()` and says how much came by `received()`. Memory stays within
    twice what a peer has really sent, and within twice `frame_bytes_max`, whatever it announces.
    After MalformedMessage the position in the stream is lost: close the connection.
    """

    __slots__ = ("_buffer", "_end", "_start", "_view", "frame_bytes_max", "version")

    def __init__(
        self,
        version: int = PROTOCOL_VERSION,
        frame_bytes_max: int = limits.FRAME_BYTES_MAX,
    ) -> None:
        """Expect frames of `version`, each of at most `frame_bytes_max` bytes after its length."""
        self.version = version
        self.frame_bytes_max = frame_bytes_max
        self._start = 0
        self._end = 0
        self._set_room(_ROOM_MIN)

    @property
    def buffered_bytes(self) -> int:
        """Bytes received and not yet given out."""
        return self._end - self._start

    def space(self) -> memoryview:
        """Where the next received bytes go: at least one byte, valid until the next call here."""
        room = len(self._buffer)
        if self._start == self._end:
            self._start = self._end = 0
            if room > _ROOM_KEPT_MAX:
                self._set_room(_ROOM_MIN)
        elif room - self._end < _SPACE_MIN:
            held = self._end - self._start
            self._move_to_front(room if held <= room // 2 else 2 * room)
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Note that `count` bytes of `space()` were filled."""
        self._end += count
        assert self._end <= len(self._buffer), (self._end, len(self._buffer))

    def next_frame(self) -> Frame | None:
        """The next frame, or None until more bytes have come. MalformedMessage on anything else."""
        start = self._start
        if self._end - start < _HEADER_BYTES:
            return None
        length, version, kind, request_id = HEADER.unpack_from(self._buffer, start)
        if version != self.version or kind not in _KINDS:
            raise MalformedMessage(
                f"frame of version {version} and kind {kind}, want version {self.version}"
            )
        if not _REST < length <= self.frame_bytes_max:
            raise MalformedMessage(
                f"frame length {length}, want {_REST + 1} to {self.frame_bytes_max}"
            )
        stop = start + _LENGTH_BYTES + length
        if self._end < stop:
            return None
        self._start = stop
        return Frame(_KINDS[kind], request_id, decode(self._view[start + _HEADER_BYTES : stop]))

    def take_raw(self, into: memoryview) -> int:
        """Move buffered bytes into the front of `into` (bytes, writable); how many there were."""
        count = min(len(into), self._end - self._start)
        into[:count] = self._view[self._start : self._start + count]
        self._start += count
        return count

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """All frames that `data` completes."""
        frames: list[Frame] = []
        rest = memoryview(data)
        while rest:
            space = self.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            self.received(count)
            while (frame := self.next_frame()) is not None:
                frames.append(frame)
        return frames

    def _set_room(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)

    def _move_to_front(self, room: int) -> None:
        """Make `room` bytes with the held ones in front. A new buffer: views of the old stay."""
        held = self._view[self._start : self._end]
        self._set_room(room)
        self._view[: len(held)] = held
        self._start, self._end = 0, len(held)
