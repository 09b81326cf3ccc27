"""Buffers that the store keeps for itself: workers cannot pull from any other memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.outcomes import PutOutcome, Refused
from kvstore.transfer.memory import copy_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from kvstore.client.writes import PutRequest
    from kvstore.transfer.buffer import Buffer
    from kvstore.transfer.memory import Memory

STAGING_BYTES: Final = 32 * limits.MIB
"""Memory that one call stages at a time: enough for full speed, little enough to stay cached."""
IDLE_MAX: Final = 4
"""Buffers kept for the next calls: making one costs page faults over all its bytes."""


class Slice:
    """Some pages of a put, and the store's buffer that they are to be copied to first."""

    def __init__(self, request: PutRequest, source: Memory, buffer: Buffer) -> None:
        """The places of `request` are still those in `source`; nothing is copied yet."""
        self._request = request
        self._source = source
        self._buffer = buffer

    @property
    def memory(self) -> Memory:
        """What the pages are put from."""
        return self._buffer.memory

    def fill(self) -> PutRequest:
        """Copy the pages; the request with their places in `memory`. May take milliseconds."""
        target = 0
        sources = []
        for each in self._request.sources:
            size = each.part_bytes
            for i, place in enumerate(each.places):
                to = self._buffer.address + target + i * size
                copy_bytes(to, self._source.address + place, size)
            end = target + len(each.places) * size
            sources.append(msgspec.structs.replace(each, places=tuple(range(target, end, size))))
            target = end
        return msgspec.structs.replace(self._request, sources=tuple(sources))


class SpareBuffers:
    """Buffers that are made when a call needs one and kept for the next."""

    def __init__(self, new_buffer: Callable[[int], Buffer]) -> None:
        """Make none yet."""
        self._new_buffer = new_buffer
        self._idle: list[Buffer] = []

    @contextmanager
    def take(self, size_bytes: int) -> Iterator[Buffer]:
        """One of at least so many bytes, for one call.

        List operations are atomic: no fork can inherit a held lock, and no thread a spare twice.
        """
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = self._new_buffer(size_bytes)
        # A forked child finds its parent's buffers closed.
        if buffer.closed or buffer.size_bytes < size_bytes:
            buffer.close()
            buffer = self._new_buffer(size_bytes)
        try:
            yield buffer
        finally:
            if len(self._idle) < IDLE_MAX:
                self._idle.append(buffer)
            else:
                buffer.close()

    def close(self) -> None:
        """Close those that are idle."""
        while self._idle:
            self._idle.pop().close()


class Staging:
    """A store's own buffers for puts from memory that workers cannot pull from."""

    def __init__(self, new_buffer: Callable[[int], Buffer]) -> None:
        """Make none yet."""
        self._spare = SpareBuffers(new_buffer)

    def take(self, size_bytes: int) -> AbstractContextManager[Buffer]:
        """One of at least so many bytes, for one call."""
        return self._spare.take(max(STAGING_BYTES, size_bytes))

    def slices(self, request: PutRequest, source: Memory) -> Iterator[Slice]:
        """The whole of a put whose bounds were checked, in slices that fit a buffer.

        Each slice must be done with before the next is taken.
        """
        page_bytes = sum(each.part_bytes for each in request.sources)
        step = max(1, STAGING_BYTES // page_bytes)
        with self.take(page_bytes) as buffer:
            for first in range(0, request.pages, step):
                stop = min(first + step, request.pages)
                yield Slice(_pages_of(request, first, stop), source, buffer)


def _pages_of(request: PutRequest, first: int, stop: int) -> PutRequest:
    """Pages [first, stop) of a put as a put of their own."""
    sources = tuple(
        msgspec.structs.replace(each, places=each.places[first:stop]) for each in request.sources
    )
    chain = request.chain.slice(first, stop)
    return msgspec.structs.replace(request, chain=chain, sources=sources)


def is_stopped(request: PutRequest, outcomes: list[PutOutcome]) -> bool:
    """Whether later slices are pointless; their pages then get the last outcome.

    As within one put: pages after a refused one would have no parent.
    """
    last = outcomes[-1]
    if not isinstance(last, Refused) or request.opened.namespace.is_opaque:
        return False
    outcomes += [last] * (request.pages - len(outcomes))
    return True
