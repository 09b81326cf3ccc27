"""Which page is staged where: the slots of the staging segment, who uses them, whose turn it is.

A slot is an extent of the staging segment. Its page may be overwritten once every session that was
told of it is done or had STAGING_LEASE_S, the slot used longest ago first. Pure: whether a view
still locks a slot, the caller finds out before it fills one. Must not know disks or bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvstore import limits
from kvstore.errors import InvariantBroken
from workers.events import ExtentGroup, Stretch

if TYPE_CHECKING:
    from kvstore.segment import Geometry

A_VIEW: Final = -1
"""In the place of a session: whoever holds a lock on the slot, for all that is known."""


class PageId(NamedTuple):
    """One page's part in one segment on disk; a generation is never used twice."""

    segment: str
    key: bytes
    part: int
    generation: int


class SlotState(Enum):
    """What is in a slot."""

    EMPTY = "empty"
    LOADING = "loading"
    STAGED = "staged"


class Chunk:
    """A stretch of the segment that is cut into slots of one size class."""

    __slots__ = ("in_use", "size_class", "slots", "start", "used_at")

    def __init__(self, start: int, size_class: int, slots: int) -> None:
        """Cut at payload offset `start`; every slot is empty."""
        self.start = start
        self.size_class = size_class
        self.slots = [Slot(self, start + i * size_class) for i in range(slots)]
        self.in_use = 0
        """Slots that are being loaded or have users."""
        self.used_at = 0
        """When a slot last ceased to be in use, as a count."""


class Slot:
    """One slot. `generation` is that of its present contents, never used twice in a segment."""

    __slots__ = ("chunk", "generation", "offset", "page", "state", "until_s", "users")

    def __init__(self, chunk: Chunk, offset: int) -> None:
        """Empty, at this payload offset."""
        self.chunk = chunk
        self.offset = offset
        self.state = SlotState.EMPTY
        self.page: PageId | None = None
        self.generation = 0
        self.users: set[int] = set()
        self.until_s = 0.0

    @property
    def stretch(self) -> Stretch:
        """Where it and its record lie."""
        slot = (self.offset - self.chunk.start) // self.chunk.size_class
        return Stretch(0, 1, self.chunk.start, slot, self.offset)


class Candidate(msgspec.Struct, frozen=True):
    """A slot to fill next, and the extents whose records must be made FREE before."""

    slot: Slot
    cut_up: tuple[ExtentGroup, ...] = ()


class Slots:
    """All slots of a staging segment. For one thread at a time."""

    def __init__(self, segment: str, geometry: Geometry) -> None:
        """Nothing is cut and nothing staged."""
        self._segment = segment
        self._geometry = geometry
        self._frames: list[Chunk | None] = [None] * geometry.frames
        self._frames_free = geometry.frames
        self._pages: dict[PageId, Slot] = {}
        self._empty: dict[int, list[Slot]] = {}
        self._idle: dict[int, dict[Slot, None]] = {}
        """By class: slots with contents that nobody uses, used longest ago first."""
        self._used: dict[int, Slot] = {}
        """By offset: staged slots with users, the first to run out first."""
        self._sessions: dict[int, dict[Slot, None]] = {}
        """The slots that each session uses, in the order in which it was told of them."""
        self._last_generation = 0
        self._ticks = 0

    def find(self, page: PageId) -> Slot | None:
        """The slot where the page is staged or being loaded."""
        return self._pages.get(page)

    def holds(self, session: int) -> bool:
        """Whether a session uses any slot."""
        return bool(self._sessions.get(session))

    def next_end_s(self) -> float | None:
        """When the next slot that has users will have none; None when none has."""
        return next((slot.until_s for slot in self._used.values()), None)

    def use(self, slot: Slot, session: int, now_s: float) -> None:
        """A session is told of a slot that is staged or being loaded."""
        if slot.state is SlotState.STAGED:
            self._start_use(slot, now_s)
        slot.users.add(session)
        self._sessions.setdefault(session, {})[slot] = None

    def candidate(self, size_class: int, now_s: float) -> Candidate | None:
        """A slot that may be filled if no view locks it: take it by `begin`, or say `viewed`.

        None while every slot is in use.
        """
        self._end_uses(now_s)
        if empty := self._empty.get(size_class):
            return Candidate(empty[-1])
        if self._frames_free >= self._geometry.chunk_frames(size_class):
            found = self._cut(size_class, only_free=True)
            if found is not None:
                return found
        if idle := self._idle.get(size_class):
            return Candidate(next(iter(idle)))
        return self._cut(size_class, only_free=False)

    def begin(self, slot: Slot, page: PageId, session: int) -> None:
        """The candidate is exclusively locked: it is being loaded with this page from here on."""
        self._take_out(slot)
        self._forget_page(slot)
        self._last_generation += 1
        slot.state, slot.page, slot.generation = SlotState.LOADING, page, self._last_generation
        slot.chunk.in_use += 1
        self._pages[page] = slot
        self.use(slot, session, 0.0)

    def viewed(self, slot: Slot, now_s: float) -> None:
        """The candidate is locked by a view: it counts as used anew."""
        self._take_out(slot)
        if slot.state is SlotState.EMPTY:
            slot.state = SlotState.STAGED  # with what lay there before the chunk was cut anew
        self.use(slot, A_VIEW, now_s)

    def staged(self, slot: Slot, now_s: float) -> None:
        """The slot holds its page."""
        slot.state = SlotState.STAGED
        slot.until_s = now_s + limits.STAGING_LEASE_S
        self._used[slot.offset] = slot
        if not slot.users:
            self._end_use(slot)

    def failed(self, slot: Slot) -> None:
        """The slot could not be loaded; it is empty."""
        self._drop_users(slot)
        self._forget_page(slot)
        slot.state = SlotState.EMPTY
        self._out_of_use(slot)
        self._empty.setdefault(slot.chunk.size_class, []).append(slot)

    def doubt(self, page: PageId) -> None:
        """Find the page here no more; who was told of it may go on as before."""
        slot = self._pages.get(page)
        if slot is not None and slot.state is SlotState.STAGED:
            self._forget_page(slot)

    def release(self, session: int, offset: int, generation: int) -> None:
        """A session is done with a slot. Strange, late and repeated ones change nothing."""
        slot = self._used.get(offset)
        if slot is not None and slot.generation == generation and session in slot.users:
            del self._sessions[session][slot]
            self._leave(slot, session)

    def forget(self, session: int) -> None:
        """A session is over: it uses nothing any more."""
        for slot in self._sessions.pop(session, ()):
            self._leave(slot, session)

    def check_invariants(self) -> None:
        """Raise InvariantBroken unless all tables agree, so that none outgrows the slots (I7)."""
        chunks = list(dict.fromkeys(chunk for chunk in self._frames if chunk is not None))
        slots = [slot for chunk in chunks for slot in chunk.slots]
        used = {s for s in slots if s.state is SlotState.LOADING or s.offset in self._used}
        idle = {slot for each in self._idle.values() for slot in each}
        empty = {slot for each in self._empty.values() for slot in each}
        if len(used) + len(idle) + len(empty) != len(slots) or used | idle | empty != set(slots):
            raise InvariantBroken("I7 a slot is not in use, idle or empty, or several of these")
        for chunk in chunks:
            if chunk.in_use != sum(slot in used for slot in chunk.slots):
                raise InvariantBroken(f"I7 chunk {chunk.start} says {chunk.in_use} are in use")
        if self._frames_free != self._frames.count(None):
            raise InvariantBroken(f"I7 {self._frames_free} frames are not free")
        if {s.page: s for s in slots if s.page is not None} != self._pages:
            raise InvariantBroken("I7 pages and slots differ")
        told = {(user, slot) for slot in slots for user in slot.users}
        if told != {(user, s) for user, each in self._sessions.items() for s in each}:
            raise InvariantBroken("I7 sessions and slots differ")
        if any(slot.users and slot not in used for slot in slots):
            raise InvariantBroken("I4 a slot that is not in use has users")

    # --- uses -------------------------------------------------------------------------------

    def _start_use(self, slot: Slot, now_s: float) -> None:
        if self._used.pop(slot.offset, None) is None:
            self._idle.get(slot.chunk.size_class, {}).pop(slot, None)
            slot.chunk.in_use += 1
        slot.until_s = now_s + limits.STAGING_LEASE_S
        self._used[slot.offset] = slot  # last: all uses are equally long

    def _leave(self, slot: Slot, session: int) -> None:
        slot.users.discard(session)
        if not slot.users and slot.state is SlotState.STAGED:
            self._end_use(slot)

    def _end_uses(self, now_s: float) -> None:
        while self._used:
            slot = next(iter(self._used.values()))
            if now_s < slot.until_s:
                return
            self._drop_users(slot)
            self._end_use(slot)

    def _end_use(self, slot: Slot) -> None:
        del self._used[slot.offset]
        self._out_of_use(slot)
        self._idle.setdefault(slot.chunk.size_class, {})[slot] = None

    def _out_of_use(self, slot: Slot) -> None:
        self._ticks += 1
        slot.chunk.in_use -= 1
        slot.chunk.used_at = self._ticks

    def _drop_users(self, slot: Slot) -> None:
        for session in slot.users:
            del self._sessions[session][slot]
        slot.users.clear()

    def _forget_page(self, slot: Slot) -> None:
        if slot.page is not None:
            del self._pages[slot.page]
            slot.page = None

    # --- space ------------------------------------------------------------------------------

    def _take_out(self, slot: Slot) -> None:
        """Take a candidate off the list that it came from."""
        if slot.state is SlotState.EMPTY:
            last = self._empty[slot.chunk.size_class].pop()
            assert last is slot, "the candidate"
        else:
            del self._idle[slot.chunk.size_class][slot]

    def _cut(self, size_class: int, *, only_free: bool) -> Candidate | None:
        """Cut a chunk where nothing is in use: what was used longest ago goes."""
        frames = self._geometry.chunk_frames(size_class)
        best: tuple[int, int] | None = None
        for first in range(0, len(self._frames), frames):
            owners = {chunk for chunk in self._frames[first : first + frames] if chunk is not None}
            if any(chunk.in_use for chunk in owners) or (only_free and owners):
                continue
            age = max((chunk.used_at for chunk in owners), default=0)
            if best is None or (age, first) < best:
                best = age, first
        if best is None:
            return None
        first = best[1]
        old = dict.fromkeys(c for c in self._frames[first : first + frames] if c is not None)
        for chunk in old:
            self._drop(chunk)
        start = first * self._geometry.frame_bytes
        chunk = Chunk(start, size_class, self._geometry.chunk_slots(size_class))
        self._frames[first : first + frames] = [chunk] * frames
        self._frames_free -= frames
        self._empty.setdefault(size_class, []).extend(reversed(chunk.slots))
        return Candidate(chunk.slots[0], tuple(self._group(each) for each in old))

    def _drop(self, chunk: Chunk) -> None:
        """Give a chunk's frames back; its pages are staged no more."""
        size_class = chunk.size_class
        for slot in chunk.slots:
            self._forget_page(slot)
            self._idle.get(size_class, {}).pop(slot, None)
        kept = [slot for slot in self._empty.get(size_class, ()) if slot.chunk is not chunk]
        self._empty[size_class] = kept
        frames = self._geometry.chunk_frames(size_class)
        first = chunk.start // self._geometry.frame_bytes
        self._frames[first : first + frames] = [None] * frames
        self._frames_free += frames

    def _group(self, chunk: Chunk) -> ExtentGroup:
        whole = Stretch(0, len(chunk.slots), chunk.start, 0, chunk.start)
        return ExtentGroup(self._segment, chunk.size_class, (whole,))
