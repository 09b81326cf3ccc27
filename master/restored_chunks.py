"""Values of chunks that an earlier master stored, or that this one made when it lost their segment,
kept as they are until that is back.

They are believed of nothing: a worker's digest or records say what is there, and the values then
spare sending the records, and know how long pages were to live. Nothing is kept twice: a value
goes when its chunk has been compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from master.chunk_values import chunk_head, decode_chunk, place_of

if TYPE_CHECKING:
    from kvstore.record import Record
    from master.chunk_values import Asked, ChunkValue
    from master.core import Core
    from master.segments import Segment

AskedAt = dict[int, tuple[int, "Asked"]]
"""By offset: a generation, and what was asked for the page that has it."""


class Restored:
    """Values by segment and chunk start."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        """Start with none."""
        self._values: dict[str, dict[int, bytes]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    def segments(self) -> list[str]:
        """Those of which there are values."""
        return list(self._values)

    def add(self, segment: str, start: int, value: bytes) -> None:
        """Keep a value that is whole."""
        self._values.setdefault(segment, {})[start] = value

    def get(self, segment: str, start: int) -> ChunkValue | None:
        """The value of a chunk, if there is one."""
        value = self._values.get(segment, {}).get(start)
        return None if value is None else decode_chunk(value)

    def digest(self, segment: str, start: int) -> tuple[int, int] | None:
        """Size class and digest of a chunk, if there is a value of it."""
        value = self._values.get(segment, {}).get(start)
        if value is None:
            return None
        head = chunk_head(value)
        return head.size_class, head.digest

    def drop(self, segment: str, start: int) -> None:
        """A chunk has been compared."""
        self._values.get(segment, {}).pop(start, None)

    def forget(self, segment: str) -> None:
        """A segment has been compared, or is given up."""
        self._values.pop(segment, None)

    def latest_s(self) -> float:
        """When the youngest page of which there is a value came in, in pool time; 0 without any."""
        values = (value for chunks in self._values.values() for value in chunks.values())
        rows = (row for value in values for row in decode_chunk(value).rows)
        return max((row.asked.life.created_s for row in rows), default=0.0)

    def asked(self, segment: Segment, start: int, size_class: int) -> AskedAt:
        """What was asked for the pages of a chunk, as far as that was stored."""
        value = self.get(segment.id, start)
        if value is None or value.size_class != size_class:
            return {}
        return {
            start + slot * size_class: (row.generation, row.asked)
            for row in value.rows
            for slot in range(row.slot, row.slot + row.count)
        }


def asked_for(asked: AskedAt, record: Record) -> Asked | None:
    """What is stored of a record's page: an extent has a generation but once."""
    found = asked.get(record.offset)
    return found[1] if found is not None and found[0] == record.generation else None


def restore_chunk(core: Core, key: str, value: bytes) -> None:
    """Take in one durable value; CorruptPage when it is damaged: its chunk's records tell all."""
    segment, start = place_of(key)
    head = chunk_head(value)
    core.restored.add(segment, start, value)
    core.saving.stored.setdefault(segment, {})[start] = head.digest
