"""Messages to MessagePack bytes and back. The decoder yields a message or MalformedMessage."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import MalformedMessage
from kvstore.wire.messages import REGISTRY

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(
    reduce(or_, REGISTRY.values())
)


def encode(message: Message) -> bytes:
    """The message's bytes. A message larger than a frame is our bug or the caller's batch."""
    return _ENCODER.encode(message)


def decode(body: bytes | memoryview) -> Message:
    """The message in `body`; MalformedMessage for anything else, whatever the bytes."""
    if len(body) > limits.FRAME_BYTES_MAX:
        raise MalformedMessage(f"{len(body)} bytes, at most {limits.FRAME_BYTES_MAX} are allowed")
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MalformedMessage(str(error)) from error
