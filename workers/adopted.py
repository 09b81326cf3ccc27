"""Extents that a start takes over, in columns: a million of them take 40 MB, and none is kept as
an object. What else their records say is read from the record table when it is asked for.
"""

from __future__ import annotations

from array import array
from itertools import compress
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.record import Record


class AdoptedExtent(msgspec.Struct, frozen=True, gc=False):
    """One SEALED extent: what the worker's table keeps of its record."""

    offset: int
    size_class: int
    generation: int
    checksum: int


class Adopted:
    """AdoptedExtents in the order of their records."""

    __slots__ = ("_columns", "places")

    def __init__(self) -> None:
        """None yet."""
        self.places = array("Q")
        """Where their records lie, by file offset: in ascending order."""
        self._columns = array("Q"), array("Q"), array("Q"), array("Q")

    def add(self, at: int, record: Record) -> None:
        """Take in a proven record, which lies behind the last one."""
        self.places.append(at)
        fields = record.offset, record.size_class, record.generation, record.checksum
        for column, field in zip(self._columns, fields, strict=True):
            column.append(field)

    def drop(self, is_unwanted: Callable[[AdoptedExtent], bool]) -> int:
        """Forget these; how many there were."""
        before = len(self)
        kept = [not is_unwanted(each) for each in self]
        for column in (self.places, *self._columns):
            column[:] = array("Q", compress(column, kept))
        return before - len(self)

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[AdoptedExtent]:
        return map(AdoptedExtent, *self._columns)
