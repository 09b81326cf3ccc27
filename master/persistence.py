"""Carries the core's Persist actions into the metadata store, in order, as few writes as can be.

Owns the queue of what is not durable yet. Neighbouring actions travel in one transaction, and one
that is beyond a transaction's bounds is cut: a master that dies between leaves its head. A store
that is full or away is tried again for as long as it takes, while the master goes on serving. Must
not know what keys and values mean.
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
    from master.events import Persist, TicketId

PENDING_MAX: Final = 65_536
RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 2.0

_LOG = logging.getLogger(__name__)


class Persistence:
    """The queue and the one task, `run`, that empties it."""

    def __init__(
        self,
        store: MetadataStore,
        on_durable: Callable[[TicketId], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_durable` is called once for every action, in their order, from `run`."""
        self._store = store
        self._on_durable = on_durable
        self._sleep = sleep
        self._pending: deque[Persist] = deque()
        self._more = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.failing: str | None = None
        """Why the last try to write failed; None while writes succeed."""
        self.writes = 0
        self.failures = 0

    @property
    def pending(self) -> int:
        """Actions that are not durable yet."""
        return len(self._pending)

    def submit(self, action: Persist) -> None:
        """Queue an action. Unavailable when the store has been too slow for too long (I7)."""
        if len(self._pending) >= PENDING_MAX:
            raise Unavailable(f"{PENDING_MAX} metadata writes wait for the store: {self.failing}")
        self._pending.append(action)
        self._empty.clear()
        self._more.set()

    async def run(self) -> None:
        """Write until cancelled. Raises StaleEpoch when another master leads, and our own bugs."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._pending:
                await self._write_some()
            self._empty.set()

    async def drain(self) -> None:
        """Until nothing is pending; `run` must be running."""
        await self._empty.wait()

    async def _write_some(self) -> None:
        """Write the longest head of the queue that fits one transaction, trying until it is in."""
        count, last = self._head()
        for values in _cut(last):
            await self._write(values)
        for _ in range(count):
            self._on_durable(self._pending.popleft().ticket)

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

    def _head(self) -> tuple[int, dict[str, bytes | None]]:
        """How many actions to write at once, and the last value of each key (None: deleted)."""
        last: dict[str, bytes | None] = {}
        count = size = 0
        for action in self._pending:
            size += sum(len(value) for _, value in action.puts)
            keys = len(last) + len(action.puts) + len(action.deletes)
            if count and (keys > WRITE_KEYS_MAX or size > WRITE_BYTES_MAX):
                break
            count += 1
            # Within one action, too, deletes come before puts.
            last.update(dict.fromkeys(action.deletes))
            last.update(action.puts)
        return count, last


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
