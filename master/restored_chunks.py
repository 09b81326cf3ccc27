"""Values of chunks that an earlier master stored, or that this one made when it lost their segment,
kept as they are until that is back.

They are believed of nothing: a worker's digest or records say what is there, and the values then
spare sending the records, and know how long pages were to live. Nothing is kept twice: a value
goes when its chunk has been compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.coordination.metadata_store import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.errors import CorruptPage
from master.chunk_values import chunk_head, decode_chunk, place_of

if TYPE_CHECKING:
    from kvstore.record import Record
    from master.chunk_values import ChunkValue
    from master.core import Core
    from master.pool_time import Life
    from master.segments import Segment

ASIDE: Final = "aside/"

Lives = dict[int, tuple[int, "Life"]]
"""By offset: a generation, and how long the page lives that has it."""


class Restored:
    """Values by segment and chunk start."""

    __slots__ = ("_values", "damaged")

    def __init__(self) -> None:
        """Start with none."""
        self._values: dict[str, dict[int, bytes]] = {}
        self.damaged: list[str] = []
        """Keys of values that were set aside."""

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

    def lives(self, segment: Segment, start: int, size_class: int) -> Lives:
        """How long the pages of a chunk live, in pool time, as far as that was stored."""
        value = self.get(segment.id, start)
        if value is None or value.size_class != size_class:
            return {}
        return {
            start + slot * size_class: (row.generation, row.life)
            for row in value.rows
            for slot in range(row.slot, row.slot + row.count)
        }


def life_of(lives: Lives, record: Record) -> Life | None:
    """The stored life of a record's page: an extent has a generation but once."""
    found = lives.get(record.offset)
    return found[1] if found is not None and found[0] == record.generation else None


def restore_chunk(core: Core, key: str, value: bytes) -> None:
    """Take in one durable value. One that is damaged is set aside: its chunk's records tell all.

    A stranger's, which no master could have written, stays where it is.
    """
    try:
        segment, start = place_of(key)
        head = chunk_head(value)
    except CorruptPage:
        core.counters["chunk_values_set_aside"] += 1
        core.restored.damaged.append(key)
        aside = ASIDE + key
        if len(value) <= VALUE_BYTES_MAX and len(aside.encode()) <= KEY_BYTES_MAX:
            core.persist(puts=((aside, value),), deletes=(key,), behind=True)
        return
    core.restored.add(segment, start, value)
    core.saving.stored.setdefault(segment, {})[start] = head.digest
