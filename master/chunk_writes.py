"""Makes the values of chunks that are due and hands them to the metadata store.

A value is made in steps while its chunk goes on changing: each of its rows was true at some time,
and because a generation is never used twice, rows whose (slot, generation) are a worker's are true
for good. What changed meanwhile makes the chunk due again. So the worker's digest decides at a
takeover, and neither a value that is out of date nor one that mixes two moments can be believed.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.ids import KEY_BYTES
from master.chunk_values import Asked, ChainRow, ChunkValue, encode_chunk, key_of
from master.packed import WORD, pack_words, word, words
from master.pool_time import KEY as CLOCK
from master.pool_time import Life
from master.segments import SegmentState
from master.write_behind import CLOCK_EVERY_S

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from master.chunks import Chunk
    from master.core import Core
    from master.directory import Stretch
    from master.run import Copy
    from master.segments import Segment
    from master.write_behind import Place

CHUNKS_PER_TICK: Final = 4
ROWS_PER_STEP: Final = 256
SLOTS_PER_STEP: Final = 512
DELETES_PER_WRITE: Final = 64
_CLOCK_PLACE: Final = ("", 0)
"""Under which the write of pool time alone counts."""


def look(core: Core) -> None:
    """Write what is due and within the budget."""
    saving = core.saving
    for _ in range(CHUNKS_PER_TICK):
        place = saving.take_due(core.tunables.metadata_bytes_per_s)
        if place is None:
            break
        core.start(_write(core, place))
    if core.now >= _clock_due_s(core):
        saving.writing[_CLOCK_PLACE] = core.now
        _persist(core, _CLOCK_PLACE, None)


def next_look_s(core: Core) -> float:
    """When something will be due and may be written."""
    next_s = core.saving.next_s(core.tunables.metadata_bytes_per_s)
    return min(next_s, _clock_due_s(core))


def _clock_due_s(core: Core) -> float:
    """Pool time matters once there is a value whose lives are in it; each value takes it along."""
    saving = core.saving
    if saving.writing or not any(saving.stored.values()):
        return inf
    return saving.clock_s + CLOCK_EVERY_S


def forget(core: Core, segment: str) -> None:
    """A segment is given up: nothing of it stays in the store."""
    core.restored.forget(segment)
    starts = core.saving.forget(segment)
    for at in range(0, len(starts), DELETES_PER_WRITE):
        keys = tuple(key_of(segment, start) for start in starts[at : at + DELETES_PER_WRITE])
        core.persist(deletes=keys, behind=True)


def keep_chunk(core: Core, segment: Segment, chunk: Chunk) -> Iterator[None]:
    """A job: keep what a chunk of a lost segment holds, as a new leader would, until it is back."""
    sheet = _Sheet(core, segment, chunk)
    yield from sheet.fill()
    value = sheet.value()
    if value.rows:
        core.restored.add(segment.id, chunk.start, encode_chunk(value, value.digest()))


def drop_orphans(core: Core) -> None:
    """Forget what earlier masters stored of segments that no worker lends any more."""
    for segment in core.restored.segments():
        if segment not in core.lenders.absent:
            core.counters["chunk_values_orphaned"] += len(core.saving.stored[segment])
            forget(core, segment)


def _write(core: Core, place: Place) -> Iterator[None]:
    """A job: bring one chunk's value up to date, unless it is."""
    name, start = place
    saving, segment = core.saving, core.segments.get(name)
    if segment is None or segment.state is not SegmentState.LIVE:
        saving.done(place)
        return
    stored = saving.stored.setdefault(name, {})
    chunk = segment.allocator.chunks.get(start)
    if chunk is None or chunk.next_sealed(0) is None:
        if stored.pop(start, None) is None:
            saving.done(place)
        else:
            core.counters["chunk_values_deleted"] += 1
            core.persist(deletes=(key_of(*place),), then=lambda: saving.done(place), behind=True)
        return
    digest = chunk.sealed_digest()
    if digest == stored.get(start):
        saving.done(place)
        return
    sheet = _Sheet(core, segment, chunk)
    is_of_one_moment = True
    for _ in sheet.fill():
        yield
        is_of_one_moment = False
        gone = segment.allocator.chunks.get(start) is not chunk
        if gone or segment.state is not SegmentState.LIVE:
            saving.done(place)
            return
    value = sheet.value()
    stored[start] = digest = digest if is_of_one_moment else value.digest()
    _persist(core, place, encode_chunk(value, digest))
    core.counters["chunk_rows_written"] += len(value.keys) // KEY_BYTES


def _persist(core: Core, place: Place, value: bytes | None) -> None:
    """Store a value, and pool time with it."""
    saving = core.saving
    puts: tuple[tuple[str, bytes], ...] = ((CLOCK, core.pool_time.value(core.now)),)
    if value is not None:
        puts = ((key_of(*place), value), *puts)
        saving.budget.spend(len(value))
        core.counters["chunk_values_written"] += 1
        core.counters["chunk_bytes_written"] += len(value)
    saving.clock_s = core.now
    core.persist(puts, then=lambda: saving.done(place), behind=True)


class _Sheet:
    """A value in the making."""

    def __init__(self, core: Core, segment: Segment, chunk: Chunk) -> None:
        """Start empty."""
        self._core = core
        self._segment = segment
        self._chunk = chunk
        self._rows: list[ChainRow] = []
        self._keys: list[bytes] = []
        self._checksums: list[bytes] = []

    def value(self) -> ChunkValue:
        """What was added."""
        columns = b"".join(self._keys), b"".join(self._checksums)
        return ChunkValue(self._chunk.size_class, self._rows, *columns)

    def fill(self) -> Iterator[None]:
        """Add every SEALED extent, in steps."""
        slot, rows = 0, 0
        while (found := self._chunk.next_sealed(slot)) is not None:
            slot = found[0]
            count = min(found[1] - slot, SLOTS_PER_STEP)
            count = _alike(self._chunk.namespaces[slot : slot + count])
            self._add(slot, count)
            slot += count
            if len(self._rows) - rows >= ROWS_PER_STEP:
                rows = len(self._rows)
                yield

    def _add(self, slot: int, count: int) -> None:
        """Add neighbouring SEALED extents of one namespace."""
        keys = bytes(self._chunk.keys[slot * KEY_BYTES : (slot + count) * KEY_BYTES])
        self._keys.append(keys)
        for stretch in self._core.tree(self._chunk.namespaces[slot]).stretches(keys):
            self._add_stretch(stretch, slot + stretch.first)

    def _add_stretch(self, stretch: Stretch, slot: int) -> None:
        """Add pages that follow each other in a run, the first of which lies in `slot`."""
        run, page, chunk = stretch.run, stretch.page, self._chunk
        stop = page + stretch.count
        offset = chunk.offset(slot)
        offsets = pack_words(
            range(offset, offset + stretch.count * chunk.size_class, chunk.size_class)
        )
        life = self._core.pool_time.stored(Life(run.ttl_s, run.created_s, run.expires_s))
        asked = Asked(life, run.replicas)
        done = 0
        while page < stop:
            copy = run.copy_at(self._segment, page, chunk.offset(slot))
            generation = chunk.generations[slot]
            count = _length(copy, page, offsets[done * WORD :], generation)
            parent = run.key(page - 1) if page else run.parent
            self._rows.append(
                ChainRow(
                    slot,
                    count,
                    copy.part,
                    run.namespace,
                    copy.part_bytes,
                    generation,
                    parent,
                    asked,
                )
            )
            self._checksums.append(copy.checksums[page * WORD : (page + count) * WORD])
            page, slot, done = page + count, slot + count, done + count


def _alike(entries: array[int]) -> int:
    """How many of the leading entries are equal; there is one."""
    first = entries[0]
    if entries.count(first) == len(entries):
        return len(entries)
    return next(i for i, entry in enumerate(entries) if entry != first)


def _length(copy: Copy, page: int, offsets: bytes, generation: int) -> int:
    """How many pages from `page` on the copy has at these offsets, in one generation."""
    count = len(offsets) // WORD
    if count == 1 or copy.generation(page + 1) != generation:
        return 1
    at = slice(page * WORD, (page + count) * WORD)
    if copy.offsets[at] == offsets and copy.generations[at] == word(generation) * count:
        return count
    theirs = zip(words(copy.offsets[at]), words(copy.generations[at]), strict=True)
    ours = ((offset, generation) for offset in words(offsets))
    return next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
