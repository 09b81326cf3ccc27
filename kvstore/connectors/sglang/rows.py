"""Pages of an engine as rows of an opaque namespace: found, read and written many at a time.

Knows no engine. A row is named by whoever brings it, and gathered from, or scattered to, any
number of pieces of memory. Whatever is in trouble is a miss, or is not stored. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter
from itertools import compress
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Hit, Stored
from kvstore.client.staging import STAGING_BYTES, SpareBuffers
from kvstore.connectors.leases import Leases
from kvstore.page import PageChain, engine_key
from kvstore.transfer.memory import copy_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client.locations import Locations
    from kvstore.client.outcomes import PutOutcome
    from kvstore.clock import Clock
    from kvstore.connectors.engine_pool import EnginePool, EngineStore, Reached
    from kvstore.namespace import Namespace

T = TypeVar("T")
Pieces = tuple[tuple[int, int], ...]
"""(address, bytes) of the pieces of memory that together are one row, in order."""

MOVES_MAX: Final = 1024
"""Moves that are remembered for who asks; older ones are forgotten."""


class Move(NamedTuple):
    """Rows that were read, or written, by one call."""

    rows: int
    bytes_per_s: float


class Rows:
    """All rows of one namespace."""

    def __init__(
        self,
        pool: EnginePool,
        namespace: Namespace,
        clock: Clock,
        timeout_s: float,
        is_right: Callable[[], bool] = lambda: True,
    ) -> None:
        """Ask nobody yet. The pool's only namespace is this one.

        Once the namespace is not right for the engine any more, nothing is there for it (V7).
        """
        self._is_right = is_right
        self._pool = pool
        self._namespace = namespace
        self._clock = clock
        self._timeout_s = timeout_s
        self._leases = Leases(pool, clock, self._give_back)
        self._mutex = threading.Lock()
        self._spare: tuple[EngineStore, SpareBuffers] | None = None
        self.counts: Counter[str] = Counter()
        """Rows and bytes by what became of them."""
        self._moves: dict[str, list[Move]] = {"read": [], "written": []}

    # Finding.

    def there(
        self, names: Sequence[bytes], late_s: float = inf, holder: object = None
    ) -> list[bool] | None:
        """Which rows are there, and leased until they are read, or lapse; None: in trouble.

        A `holder` has them leased until it lets go instead; of what it was promised before it has
        let go by that. Answers that take longer than `late_s` are trouble, where some in a row do.
        """
        number = self._leases.number()
        found = self._call(
            "a lookup", lambda pool: self._find(pool, names, number).hits, None, late_s
        )
        if holder is not None:
            self.let_go(holder)
        there = [*compress(names, found or ())]
        self._leases.took(number, there if holder is None or not there else [holder], there)
        self._count(lookups=1, found_rows=len(there))
        return found

    def _call(
        self, what: str, work: Callable[[Reached], T], otherwise: T, late_s: float = inf
    ) -> T:
        return self._pool.call(what, work, otherwise, late_s) if self._is_right() else otherwise

    def let_go(self, holder: object) -> None:
        """What was found for it is of no use to it any more."""
        self._leases.let_go([holder])

    def _find(self, pool: Reached, names: Sequence[bytes], lease_id: int) -> Locations:
        return pool.store.lookup(
            pool.opened[0], self._chain(names), timeout_s=self._timeout_s, lease_id=lease_id
        )

    def _give_back(self, pool: Reached, names: Sequence[bytes], lease_id: int) -> None:
        pool.store.give_back_lease(
            pool.opened[0], self._chain(names), lease_id, timeout_s=self._timeout_s
        )

    def _chain(self, names: Sequence[bytes]) -> PageChain:
        return PageChain(b"".join([engine_key(self._namespace.id, name) for name in names]))

    # Reading.

    def read(self, names: Sequence[bytes], size: int, targets: Sequence[Pieces]) -> list[bool]:
        """Bring rows of `size` bytes to these pieces; nothing is touched but by verified bytes."""
        begun_s = self._clock.now_s()
        came: list[bool] = []
        step = max(1, STAGING_BYTES // size)
        for first in range(0, len(names), step):
            some, into = names[first : first + step], targets[first : first + step]
            came += self._read(some, size, into) or [False] * len(some)
        self._leases.let_go(names)
        rows = sum(came)
        self._note("read", rows, size, begun_s)
        self._count(
            loaded_rows=rows, loaded_bytes=rows * size, failed_load_rows=len(came) - rows
        )  # fmt: skip
        return came

    def _read(
        self, names: Sequence[bytes], size: int, targets: Sequence[Pieces]
    ) -> list[bool] | None:
        return self._call("a load", lambda pool: self._read_from(pool, names, size, targets), None)

    def _read_from(
        self, pool: Reached, names: Sequence[bytes], size: int, targets: Sequence[Pieces]
    ) -> list[bool]:
        with self._leases.reading(names) as number:
            found = self._find(pool, names, number)
            if any(held != size for held in _sizes(found)):
                return [False] * len(names)
            places = range(0, len(names) * size, size)
            with self._buffers(pool.store).take(max(STAGING_BYTES, len(names) * size)) as buffer:
                outcomes = pool.store.read(
                    found, buffer, places[: found.pages], timeout_s=self._patience_s(names, size)
                )
                came = [isinstance(outcome, Hit) for outcome in outcomes]
                for there, place, pieces in zip(came, places, targets, strict=True):
                    if there:  # V4
                        _scatter(buffer.address + place, pieces)
            return came

    # Writing.

    def write(self, names: Sequence[bytes], size: int, sources: Sequence[Pieces]) -> list[bool]:
        """Store rows of `size` bytes; whether each is there now."""
        begun_s = self._clock.now_s()
        stored: list[bool] = []
        step = max(1, STAGING_BYTES // size)
        for first in range(0, len(names), step):
            some, of = names[first : first + step], sources[first : first + step]
            stored += self._write(some, size, of)
        self._note("written", sum(stored), size, begun_s)
        return stored

    def _write(self, names: Sequence[bytes], size: int, sources: Sequence[Pieces]) -> list[bool]:
        outcomes = self._call(
            "a save", lambda pool: self._write_to(pool, names, size, sources), None
        )
        if outcomes is None:
            self._count(failed_save_rows=len(names))
            return [False] * len(names)
        saved = sum(isinstance(outcome, Stored) for outcome in outcomes)
        known = sum(isinstance(outcome, AlreadyThere) for outcome in outcomes)
        self._count(
            saved_rows=saved, saved_bytes=saved * size, known_rows=known,
            refused_rows=len(outcomes) - saved - known,
        )  # fmt: skip
        return [isinstance(outcome, Stored | AlreadyThere) for outcome in outcomes]

    def _write_to(
        self, pool: Reached, names: Sequence[bytes], size: int, sources: Sequence[Pieces]
    ) -> list[PutOutcome]:
        with self._buffers(pool.store).take(max(STAGING_BYTES, len(names) * size)) as buffer:
            places = range(0, len(names) * size, size)
            for place, pieces in zip(places, sources, strict=True):
                _gather(pieces, buffer.address + place)
            return pool.store.put_objects(
                pool.opened[0], self._chain(names), buffer, places, size, wait=False,
                timeout_s=self._patience_s(names, size),
            )  # fmt: skip

    # The rest.

    def clear(self) -> int:
        """Take all rows of the namespace out, whoever stored them: how many there were."""
        return self._pool.call("clearing", self._clear, 0)

    @staticmethod
    def _clear(pool: Reached) -> int:
        (opened,) = pool.opened
        return sum(
            sum(pool.store.remove(opened, chain)) for chain in pool.store.list_objects(opened)
        )

    def take_moves(self, kind: str) -> list[Move]:
        """What was "read", or "written", since this was last asked."""
        with self._mutex:
            moves, self._moves[kind] = self._moves[kind], []
            return moves

    @property
    def totals(self) -> dict[str, int]:
        """Everything that was counted since the start."""
        return {**self.counts, "circuit_opened": self._pool.times_opened}

    def close(self) -> None:
        """Let leases, buffers and the connection go; what is asked later is a miss."""
        self._leases.close()
        self._pool.close()

    def _patience_s(self, names: Sequence[bytes], size: int) -> float:
        return self._timeout_s + len(names) * size / limits.PUT_BYTES_PER_S_MIN

    def _buffers(self, store: EngineStore) -> SpareBuffers:
        """Those of this store: another one's have gone with it."""
        with self._mutex:
            if self._spare is None or self._spare[0] is not store:
                self._spare = store, SpareBuffers(store.buffer)
            return self._spare[1]

    def _note(self, kind: str, rows: int, size: int, begun_s: float) -> None:
        took_s = self._clock.now_s() - begun_s
        if not rows or took_s <= 0:
            return
        with self._mutex:
            moves = self._moves[kind]
            moves.append(Move(rows, rows * size / took_s))
            del moves[:-MOVES_MAX]

    def _count(self, **counts: int) -> None:
        with self._mutex:
            self.counts.update(counts)


def _sizes(found: Locations) -> set[int]:
    """Bytes of the rows that were found."""
    runs = [run for piece in found.pieces for run in piece.located.runs]
    return {copy.part_bytes for run in runs for copy in run.copies}


def _gather(pieces: Pieces, to: int) -> None:
    for address, size in pieces:
        copy_bytes(to, address, size)
        to += size


def _scatter(source: int, pieces: Pieces) -> None:
    for address, size in pieces:
        copy_bytes(address, source, size)
        source += size
