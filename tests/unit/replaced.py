"""A message with another value of one field. Not a test."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from kvstore.wire.messages.base import Message

M = TypeVar("M", bound=Message)


def replaced(message: M, field: str, value: object) -> M:
    """The field may be one of a struct in the message: tail.key."""
    outer, _, inner = field.partition(".")
    if inner:
        value = replace(getattr(message, outer), **{inner: value})
    return replace(message, **{outer: value})
