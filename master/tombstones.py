"""Removed generations that an absent holder may still list: never re-adopted (I29).

Owns the keys `tombstones/<segment>`: rows of page key and highest generation removed. A row goes
when the holder has confirmed that the extent is free, or the segment is forgotten.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.coordination.metadata_store import VALUE_BYTES_MAX
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX: Final = "tombstones/"
EVERY_PAGE: Final = bytes(32)
"""Key of the row of a segment that was given up: ROOT_PARENT, which no put or remove may name."""
_ROW: Final = struct.Struct("<32sQ")
SEGMENT_ROWS_MAX: Final = VALUE_BYTES_MAX // _ROW.size // 2
"""Of one segment, when another remove begins: a segment's rows are one value, and removes that
have begun add to them."""


class Tombstones:
    """Rows by segment. A segment whose rows changed is dirty until `take_dirty`.

    Here a row is the set of generations whose extents are not known to be free yet: a page has
    an extent for each of its parts, and they come free one by one. Durable is the highest of them.
    """

    __slots__ = ("_dirty", "_rows")

    def __init__(self) -> None:
        """Start with none."""
        self._rows: dict[str, dict[bytes, set[int]]] = {}
        self._dirty: dict[str, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[tuple[str, bytes, int]]:
        return ((s, key, max(row)) for s, rows in self._rows.items() for key, row in rows.items())

    def has_room(self, pages: int, rows: int) -> bool:
        """Whether so many more rows, each page's in as many segments, stay within bounds (I7)."""
        fullest = max(map(len, self._rows.values()), default=0)
        return len(self) + rows <= limits.TOMBSTONES_MAX and fullest + pages <= SEGMENT_ROWS_MAX

    def add(self, segment: str, key: bytes, generation: int) -> None:
        """This and lower generations of `key` are gone from `segment`."""
        row = self._rows.setdefault(segment, {}).setdefault(key, set())
        if generation > max(row, default=0):
            self._dirty[segment] = None
        row.add(generation)

    def has_rows(self, segment: str) -> bool:
        """Whether anything was removed from this segment that it may still list."""
        return segment in self._rows

    def pages(self, segment: str) -> set[bytes]:
        """Those that were removed from it one by one."""
        return self._rows.get(segment, {}).keys() - {EVERY_PAGE}

    def covers(self, segment: str, key: bytes, generation: int) -> bool:
        """Whether this generation was removed."""
        rows = self._rows.get(segment)
        if rows is None:
            return False
        return generation <= max(*rows.get(key, ()), *rows.get(EVERY_PAGE, ()), 0, 0)

    def clear(self, segment: str, key: bytes, generation: int) -> None:
        """The holder has freed the extent that had this generation."""
        row = self._rows.get(segment, {}).get(key, set())
        if generation in row and key != EVERY_PAGE:
            self._keep(segment, key, row - {generation})

    def keep_only(self, segment: str, left: dict[bytes, set[int]]) -> None:
        """The holder's inventory is compared: of what was removed, only these extents are left."""
        rows = self._rows.get(segment, {})
        for key, row in list(rows.items()):
            if key != EVERY_PAGE:
                highest = max(row)
                self._keep(segment, key, {g for g in left.get(key, ()) if g <= highest})

    def _keep(self, segment: str, key: bytes, row: set[int]) -> None:
        rows = self._rows[segment]
        if not row:
            del rows[key]
            self._dirty[segment] = None
        elif row != rows[key]:
            if max(row) != max(rows[key]):
                self._dirty[segment] = None
            rows[key] = row

    def forget(self, segment: str, generation: int) -> None:
        """The segment is given up: if it ever comes back, nothing up to this generation does."""
        self._rows[segment] = {EVERY_PAGE: {generation}}
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
                value = b"".join(_ROW.pack(key, max(row)) for key, row in rows.items())
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
        rows = {page: {generation} for page, generation in _ROW.iter_unpack(value)}
        self._rows[key.removeprefix(PREFIX)] = rows
