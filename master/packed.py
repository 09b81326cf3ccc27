"""Packed columns: keys of 32 bytes, words of 8 bytes, little-endian. Pure functions on bytes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvstore.ids import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

WORD: Final = 8
NOT_THERE: Final = -1


def words(column: bytes) -> array[int]:
    """The entries of a packed column."""
    return array("Q", column)


def pack_words(values: Iterable[int]) -> bytes:
    """A packed column of these values."""
    return array("Q", values).tobytes()


def word(value: int) -> bytes:
    """A column of one entry."""
    return value.to_bytes(WORD, "little")


def split_keys(keys: bytes) -> list[bytes]:
    """The single keys of a packed column."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def index_of(keys: bytes, key: bytes) -> int:
    """Position of `key` among packed keys, NOT_THERE when it is not one of them."""
    if keys.startswith(key):
        return 0
    at = keys.find(key)
    while at % KEY_BYTES and at >= 0:
        at = keys.find(key, at + 1)
    return at // KEY_BYTES if at >= 0 else NOT_THERE


def common_bytes(held: bytes, at: int, asked: bytes, offset: int) -> int:
    """How many bytes of `asked` from `offset` on equal `held` from `at` on, in whole keys.

    The first key is known to be equal. One comparison where all are, a binary search where some
    are, never a loop over keys.
    """
    size = min(len(held) - at, len(asked) - offset)
    second = at + KEY_BYTES
    if size == KEY_BYTES or not asked.startswith(
        held[second : second + KEY_BYTES], offset + KEY_BYTES
    ):
        return KEY_BYTES
    if held[at : at + size] == asked[offset : offset + size]:
        return size
    low, high = 2 * KEY_BYTES, size
    while high - low > KEY_BYTES:
        middle = (low + high) // (2 * KEY_BYTES) * KEY_BYTES
        if held[at + low : at + middle] == asked[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low
