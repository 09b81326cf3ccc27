"""Base class of messages. A message's tag is part of the protocol: never reused, never changed."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A frozen value that travels as a MessagePack array: [tag, field, ...].

    Subclasses name their tag (an int) as a class argument; the rest is inherited. Nothing that
    comes off the wire is part of a cycle: the garbage collector need not look at it.
    """


def tag_of(message_type: type[Message]) -> int:
    """The tag that opens the encoded array."""
    tag = message_type.__struct_config__.tag
    assert isinstance(tag, int), message_type
    return tag
