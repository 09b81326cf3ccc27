"""Rows between the memory of vLLM's own CPU tier and the pool, in threads beside the scheduler's.

Knows rows, keys and requests by name, and imports none of vLLM. Every method but `drain` and
`close` returns at once. Lookups, loads and saves have a thread each, so that no load waits behind
saves. A load goes straight into the rows, which vLLM looks at when it is told that they came.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from itertools import compress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Hit, Refused, Stored
from kvstore.connectors.leases import Leases
from kvstore.connectors.one_thread import OneThread
from kvstore.connectors.row_lookups import RowAnswer, RowLookups, RowQuestion
from kvstore.page import PageChain, engine_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvstore.client.locations import Found
    from kvstore.clock import Clock
    from kvstore.connectors.engine_pool import EnginePool, Reached

T = TypeVar("T")
PIECE_BYTES: Final = 32 * limits.MIB
"""Moved by one call, unless a row is larger: a call's deadline counts what it moves."""
CLOSE_TIMEOUT_S: Final = 30.0
"""More than a call and its piece may take."""
GOOD: Final = frozenset({"loaded_rows", "saved_rows", "known_rows"})
_NAMES: Final = {Stored: "saved_rows", AlreadyThere: "known_rows", Refused: "refused_rows"}


class Ended(NamedTuple):
    """A job that is over."""

    job: int
    is_load: bool
    keys: tuple[bytes, ...]
    became: tuple[str, ...]
    """For each row, what is counted of it; see tier.TOTALS."""

    @property
    def good(self) -> tuple[bytes, ...]:
        """Rows that came, or that are in the pool."""
        return tuple([k for k, name in zip(self.keys, self.became, strict=True) if name in GOOD])


class TierRows:
    """One tier, for the scheduler's thread."""

    def __init__(
        self,
        view: memoryview,
        pool: EnginePool,
        clock: Clock,
        *,
        timeout_s: float,
        deadline_s: float,
        save_bytes_max: int,
    ) -> None:
        """`view` is the tier's memory, a row for each chunk; `pool` has one namespace, of rows.

        A row is looked up for `deadline_s` at most; a call to the pool may take `timeout_s` beside
        the time that its bytes take. Saves hold up to `save_bytes_max`, or half of the memory.
        """
        assert view.strides is not None, "vLLM's rows lie at equal distances"
        self.row_bytes = view.strides[0]
        self._memory = view.cast("B")
        self._pool = pool
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._saves_max = min(save_bytes_max, len(self._memory) // 2) // self.row_bytes
        self._saving = 0
        self._lookups = RowLookups(deadline_s)
        self._leases = Leases(pool, clock, self._give_back)
        self._answers: SimpleQueue[RowAnswer] = SimpleQueue()
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._asking = OneThread("kvharbor-lookups")
        self._loading = OneThread("kvharbor-loads")
        self._storing = OneThread("kvharbor-saves")
        self._is_closing = False
        self._counts: Counter[str] = Counter()

    # Lookups.

    def is_there(self, request: str, key: bytes) -> bool | None:
        """Whether the pool has a row that the request wants; None: ask again."""
        now_s = self._clock.now_s()
        self._hear(now_s)
        hold = self._pool.is_worth_asking
        return self._lookups.is_there(request, key, now_s, hold=hold)

    def step_ended(self) -> None:
        """Ask the pool for all rows that the step wanted to know of."""
        self._hear(self._clock.now_s())
        question = self._lookups.question()
        if question is not None:
            self._counts["lookups"] += 1
            self._asking.run(lambda: self._answers.put(self._answered(question)))

    def request_ended(self, request: str) -> None:
        """Forget what it wanted to know."""
        self._leases.let_go(self._lookups.end(request))

    def _hear(self, now_s: float) -> None:
        while (answer := _taken(self._answers)) is not None:
            promised = self._lookups.hear(answer, now_s)
            self._leases.let_go(promised)  # what an older answer leased
            found = [*compress(answer.question.keys, answer.there or ())]
            self._leases.took(answer.lease_id, promised, found)

    def _answered(self, question: RowQuestion) -> RowAnswer:
        """In the thread for lookups."""
        number = self._leases.number()
        find = partial(self._found, keys=question.keys, lease_id=number)
        found = self._pool.call("a lookup", find, None, self._deadline_s)
        return RowAnswer(question, None if found is None else found.hits, number)

    def _found(self, pool: Reached, keys: Sequence[bytes], lease_id: int) -> Found:
        """Found rows are leased, long enough for a load that begins soon."""
        return pool.store.lookup(
            pool.opened[0], _chain(pool, keys), timeout_s=self._timeout_s, lease_id=lease_id
        )

    def _give_back(self, pool: Reached, keys: Sequence[bytes], lease_id: int) -> None:
        pool.store.give_back_lease(
            pool.opened[0], _chain(pool, keys), lease_id, timeout_s=self._timeout_s
        )

    # Loads and saves.

    def load(self, job: int, keys: Collection[bytes], chunks: Sequence[int]) -> None:
        """Bring rows to these chunks of the memory."""
        work = partial(self._in_pieces, "a load", self._read, "failed_load_rows")
        self._begin(self._loading, Ended(job, True, tuple(keys), ()), chunks, work, len(keys))

    def save(self, job: int, keys: Collection[bytes], chunks: Sequence[int]) -> None:
        """Store rows from these chunks; those behind too many others, or a pool away, are not."""
        room = self._saves_max - self._saving if self._pool.is_worth_asking else 0
        kept = max(0, min(room, len(keys)))
        self._saving += len(keys)
        work = partial(self._in_pieces, "a save", self._put, "failed_save_rows")
        self._begin(self._storing, Ended(job, False, tuple(keys), ()), chunks, work, kept)

    def ended(self) -> list[Ended]:
        """Jobs that are over since the last call; of rows that did not come nobody hears again."""
        ended: list[Ended] = []
        while (each := _taken(self._ended)) is not None:
            ended.append(each)
            self._count(each)
            if each.is_load:
                self._lookups.load_failed(set(each.keys).difference(each.good))
                self._lookups.leases_ended(each.keys)
                self._leases.let_go(each.keys)
            else:
                self._saving -= len(each.keys)
        return ended

    def _begin(
        self,
        thread: OneThread,
        job: Ended,
        chunks: Sequence[int],
        work: Callable[[Sequence[bytes], Sequence[int]], list[str]],
        kept: int,
    ) -> None:
        """Have the first `kept` rows of a job moved, and say that it has ended, in any case."""
        keys, places = job.keys[:kept], [chunk * self.row_bytes for chunk in chunks[:kept]]
        dropped = ["dropped_rows"] * (len(job.keys) - kept)

        def run() -> None:
            became = work(keys, places)
            self._ended.put(job._replace(became=(*became, *dropped)))

        if not kept or not thread.run(run):
            self._ended.put(job._replace(became=("dropped_rows",) * len(job.keys)))

    def _in_pieces(
        self,
        what: str,
        move: Callable[[Sequence[bytes], Sequence[int], Reached], list[str]],
        otherwise: str,
        keys: Sequence[bytes],
        places: Sequence[int],
    ) -> list[str]:
        """In a thread of ours: what became of the rows, moved by a few large calls."""
        step = max(1, PIECE_BYTES // self.row_bytes)
        became: list[str] = []
        for i in range(0, len(keys), step):
            some, there = keys[i : i + step], places[i : i + step]
            work = partial(move, some, there)
            moved = None if self._is_closing else self._pool.call(what, work, None)
            became += moved or [otherwise] * len(some)
        return became

    def _read(self, keys: Sequence[bytes], places: Sequence[int], pool: Reached) -> list[str]:
        """Verified rows into their places; the place of a row that did not come is nobody's."""
        came = [False] * len(keys)
        with self._leases.reading(keys) as number:
            found = self._found(pool, keys, number)
            if any(found.hits) and self._fits(found):  # V6
                timeout_s = self._timeout_for(len(keys))
                outcomes = pool.store.read(found, self._memory, places, timeout_s=timeout_s)
                came = [isinstance(each, Hit) for each in outcomes]
        return ["loaded_rows" if each else "failed_load_rows" for each in came]

    def _fits(self, found: Found) -> bool:
        """Whether everything found is of the size of a row: more would be other rows' places."""
        runs = [run for piece in found.pieces for run in piece.located.runs]
        return all(copy.part_bytes == self.row_bytes for run in runs for copy in run.copies)

    def _put(self, keys: Sequence[bytes], places: Sequence[int], pool: Reached) -> list[str]:
        outcomes = pool.store.put_objects(
            pool.opened[0], _chain(pool, keys), self._memory, places, self.row_bytes,
            wait=False, timeout_s=self._timeout_for(len(keys)),
        )  # fmt: skip
        return [_NAMES[type(each)] for each in outcomes]

    def _timeout_for(self, rows: int) -> float:
        return self._timeout_s + rows * self.row_bytes / limits.PUT_BYTES_PER_S_MIN

    # The rest.

    def _count(self, ended: Ended) -> None:
        self._counts.update(ended.became)
        for name in ("loaded", "saved"):
            self._counts[f"{name}_bytes"] += ended.became.count(f"{name}_rows") * self.row_bytes

    @property
    def totals(self) -> dict[str, int]:
        """Everything that was counted since the start, by the names of tier.TOTALS."""
        return {**self._counts, "circuit_opened": self._pool.times_opened}

    @property
    def open_rows(self) -> int:
        """Rows of which something is remembered."""
        return len(self._lookups)

    def drain(self) -> None:
        """Wait until every job is over, for as long as that takes: each call has a deadline."""
        for thread in (self._loading, self._storing):
            is_over = threading.Event()
            if thread.run(is_over.set):
                is_over.wait()

    def close(self) -> None:
        """End every job, threads and connection, and let go of the memory. Safe to repeat.

        TimeoutError where a call still moves rows: then vLLM must keep its memory mapped.
        """
        self._is_closing = True
        threads = (self._asking, self._loading, self._storing)
        are_over = [thread.close(CLOSE_TIMEOUT_S) for thread in threads]
        self._leases.close()
        self._pool.close()
        if not all(are_over):
            raise TimeoutError("a call to the pool still moves rows")
        self._memory.release()


def _taken(queue: SimpleQueue[T]) -> T | None:
    try:
        return queue.get_nowait()
    except Empty:
        return None


def _chain(pool: Reached, keys: Sequence[bytes]) -> PageChain:
    namespace = pool.opened[0].namespace.id
    return PageChain(b"".join([engine_key(namespace, bytes(each)) for each in keys]))
