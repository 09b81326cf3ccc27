"""Base class of messages. A message's tag is part of the protocol: never reused, never changed."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A frozen value that travels as a MessagePack array: [tag, field, ...].

    Subclasses name their tag (an int) as a class argument; frozen and array-like are inherited.
    """


def tag_of(message_type: type[Message]) -> int:
    """The tag that opens the encoded array."""
    tag = message_type.__struct_config__.tag
    assert isinstance(tag, int), message_type
    return tag
