"""Messages to MessagePack bytes and back. The decoder yields a message or MalformedMessage."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue, MalformedMessage
from kvstore.wire.messages import REGISTRY

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message

BODY_BYTES_MAX: Final = limits.FRAME_BYTES_MAX - 64
"""What is left of a frame for its message; 64 covers the header."""

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(
    reduce(or_, REGISTRY.values())
)


def encode(message: Message) -> bytes:
    """The message's bytes. BadValue for a number or text that cannot travel, or too many bytes."""
    try:
        body = _ENCODER.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise BadValue(type(message).__name__, str(error), "64-bit numbers and UTF-8") from error
    if len(body) > BODY_BYTES_MAX:
        raise BadValue(type(message).__name__, len(body), f"at most {BODY_BYTES_MAX} bytes")
    return body


def decode(body: bytes | memoryview) -> Message:
    """The message in `body`; MalformedMessage for anything else, whatever the bytes."""
    if len(body) > BODY_BYTES_MAX:
        raise MalformedMessage(f"{len(body)} bytes, at most {BODY_BYTES_MAX} are allowed")
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MalformedMessage(str(error)) from error
