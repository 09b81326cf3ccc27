"""Removed generations that an absent holder may still list: never re-adopted (I29).

Owns the keys `tombstones/<segment>`: rows of page key and highest generation removed. A row goes
when the holder has confirmed that the extent is free, or the segment is forgotten.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX: Final = "tombstones/"
EVERY_PAGE: Final = bytes(32)
"""Key of the row of a segment that was given up; no page has it, it is the root's parent."""
_ROW: Final = struct.Struct("<32sQ")


class Tombstones:
    """Rows by segment. A segment whose rows changed is dirty until `take_dirty`."""

    __slots__ = ("_dirty", "_rows")

    def __init__(self) -> None:
        """Start with none."""
        self._rows: dict[str, dict[bytes, int]] = {}
        self._dirty: dict[str, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[tuple[str, bytes, int]]:
        return ((s, key, g) for s, rows in self._rows.items() for key, g in rows.items())

    def has_room(self, rows: int) -> bool:
        """Whether so many more rows stay within the bound (I7)."""
        return len(self) + rows <= limits.TOMBSTONES_MAX

    def add(self, segment: str, key: bytes, generation: int) -> None:
        """This and lower generations of `key` are gone from `segment`."""
        rows = self._rows.setdefault(segment, {})
        if rows.get(key, 0) < generation:
            rows[key] = generation
            self._dirty[segment] = None

    def covers(self, segment: str, key: bytes, generation: int) -> bool:
        """Whether this generation was removed."""
        rows = self._rows.get(segment)
        return rows is not None and generation <= max(rows.get(key, 0), rows.get(EVERY_PAGE, 0))

    def clear(self, segment: str, key: bytes, generation: int) -> None:
        """The holder has freed this generation, and so has no lower one."""
        rows = self._rows.get(segment)
        if rows is not None and 0 < rows.get(key, 0) <= generation and key != EVERY_PAGE:
            del rows[key]
            self._dirty[segment] = None

    def keep_only(self, segment: str, keys: set[bytes]) -> None:
        """The holder lists none but these any more."""
        rows = self._rows.get(segment, {})
        for key in [key for key in rows if key not in keys and key != EVERY_PAGE]:
            del rows[key]
            self._dirty[segment] = None

    def forget(self, segment: str, generation: int) -> None:
        """The segment is given up: if it ever comes back, nothing up to this generation does."""
        self._rows[segment] = {EVERY_PAGE: generation}
        self._dirty[segment] = None

    @property
    def is_dirty(self) -> bool:
        """Whether rows have changed since they were last written."""
        return bool(self._dirty)

    def take_dirty(self) -> tuple[tuple[tuple[str, bytes], ...], tuple[str, ...]]:
        """(values to write, values to delete) of the segments that changed."""
        puts: list[tuple[str, bytes]] = []
        deletes: list[str] = []
        for segment in self._dirty:
            rows = self._rows[segment]
            if rows:
                value = b"".join(_ROW.pack(key, generation) for key, generation in rows.items())
                puts.append((PREFIX + segment, value))
            else:
                del self._rows[segment]
                deletes.append(PREFIX + segment)
        self._dirty.clear()
        return tuple(puts), tuple(deletes)

    def restore(self, key: str, value: bytes) -> None:
        """Take in one durable value; ConfigError when it is not ours."""
        if len(value) % _ROW.size:
            raise ConfigError(f"metadata value {key}: {len(value)} bytes are not whole rows")
        self._rows[key.removeprefix(PREFIX)] = dict(_ROW.iter_unpack(value))
