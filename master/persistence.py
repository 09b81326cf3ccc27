"""Carries the core's Persist actions into the metadata store, in order, as few writes as can be.

Owns the queues of what is not durable yet. What others wait for (namespaces, tombstones, lenders,
pins) goes first, what is written behind (chunks' values) when nothing else waits: so nobody waits
for more of that than the one transaction under way, and each kind keeps its order. Actions travel
together, as many as fit one transaction; what is beyond its bounds is cut: a master that dies
between leaves its head. A store that is full or away is tried again for as long as it takes, while
the master goes on serving. Must not know what keys and values mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.coordination.metadata_store import WRITE_BYTES_MAX, WRITE_KEYS_MAX
from kvstore.errors import OutOfSpace, StaleEpoch, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kvstore.coordination.metadata_store import MetadataStore
    from master.events import Persist, WriteId

BATCHES_MAX: Final = 64
"""Of one kind. Beyond it actions join the last batch, however large that becomes: of each key only
the last value is kept, so that the core's own tables bound it (I7)."""
RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 2.0

_LOG = logging.getLogger(__name__)


class _Batch:
    """Actions that become durable together, unless they are too many."""

    __slots__ = ("_size", "values", "writes")

    def __init__(self) -> None:
        """Start with none."""
        self.values: dict[str, bytes | None] = {}
        """The last value of each key; None: deleted."""
        self.writes: list[WriteId] = []
        self._size = 0

    def takes(self, action: Persist) -> bool:
        """Whether one transaction would do with this action, too."""
        size = self._size + sum(len(value) for _, value in action.puts)
        keys = len(self.values) + len(action.puts) + len(action.deletes)
        return keys <= WRITE_KEYS_MAX and size <= WRITE_BYTES_MAX

    def add(self, action: Persist) -> None:
        """Make it the last one."""
        # Within one action, too, deletes come before puts.
        for key, value in (*((key, None) for key in action.deletes), *action.puts):
            self._size += len(value or b"") - len(self.values.get(key) or b"")
            self.values[key] = value
        self.writes.append(action.write)


class Persistence:
    """The queues and the one task, `run`, that empties them."""

    def __init__(
        self,
        store: MetadataStore,
        on_durable: Callable[[WriteId], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_durable` is called once for every action, from `run`, in the order of its kind."""
        self._store = store
        self._on_durable = on_durable
        self._sleep = sleep
        self._first: deque[_Batch] = deque()
        self._behind: deque[_Batch] = deque()
        self._more = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.failing: str | None = None
        """Why the last try to write failed; None while writes succeed."""
        self.pending = 0
        """Actions that are not durable yet."""
        self.writes = 0
        self.failures = 0

    def submit(self, action: Persist) -> None:
        """Queue an action."""
        queue = self._behind if action.behind else self._first
        if not queue or (not queue[-1].takes(action) and len(queue) < BATCHES_MAX):
            queue.append(_Batch())
        queue[-1].add(action)
        self.pending += 1
        self._empty.clear()
        self._more.set()

    async def run(self) -> None:
        """Write until cancelled. Raises StaleEpoch when another master leads, and our own bugs."""
        while True:
            await self._more.wait()
            self._more.clear()
            while queue := self._first or self._behind:
                await self._write_batch(queue.popleft())
            self._empty.set()

    async def drain(self) -> None:
        """Until nothing is pending; `run` must be running."""
        await self._empty.wait()

    async def _write_batch(self, batch: _Batch) -> None:
        for values in _cut(batch.values):
            await self._write(values)
        for write in batch.writes:
            self.pending -= 1
            self._on_durable(write)

    async def _write(self, values: dict[str, bytes | None]) -> None:
        puts = [(key, value) for key, value in values.items() if value is not None]
        deletes = [key for key, value in values.items() if value is None]
        delay_s = RETRY_MIN_S
        while True:
            try:
                await self._store.write(puts, deletes)
            except StaleEpoch:
                raise
            except (OutOfSpace, Unavailable) as error:
                self.failures += 1
                if self.failing is None:
                    _LOG.error("metadata is not persisted for now: %s", error)
                self.failing = str(error)
                await self._sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)
            else:
                break
        if self.failing is not None:
            _LOG.warning("metadata is persisted again")
        self.failing = None
        self.writes += 1


def _cut(values: dict[str, bytes | None]) -> Iterator[dict[str, bytes | None]]:
    """Pieces that fit one write each, in order."""
    piece: dict[str, bytes | None] = {}
    size = 0
    for key, value in values.items():
        size += len(value or b"")
        if len(piece) == WRITE_KEYS_MAX or size > WRITE_BYTES_MAX:
            yield piece
            piece, size = {}, len(value or b"")
        piece[key] = value
    yield piece
