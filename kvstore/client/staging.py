"""Buffers that the store keeps for itself, for sources that workers cannot pull from."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.outcomes import PutOutcome, Refused
from kvstore.transfer.memory import copy_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.client.writes import PutRequest
    from kvstore.transfer.buffer import Buffer
    from kvstore.transfer.memory import Memory

STAGING_BYTES: Final = 32 * limits.MIB
IDLE_MAX: Final = 4


class Staging:
    """Copies pages into buffers of the store and puts them from there, slice by slice."""

    def __init__(self, new_buffer: Callable[[int], Buffer]) -> None:
        """Buffers are made when a put needs one, and kept for the next."""
        self._new_buffer = new_buffer
        self._idle: list[Buffer] = []

    def put(
        self,
        request: PutRequest,
        source: Memory,
        put: Callable[[PutRequest, Memory], list[PutOutcome]],
    ) -> list[PutOutcome]:
        """Put every page of `request` from `source`, whose bounds were checked."""
        page_bytes = sum(each.part_bytes for each in request.sources)
        step = max(1, STAGING_BYTES // page_bytes)
        outcomes: list[PutOutcome] = []
        with self._buffer(max(STAGING_BYTES, page_bytes)) as buffer:
            for first in range(0, request.pages, step):
                stop = min(first + step, request.pages)
                outcomes += put(_staged(request, source, buffer, first, stop), buffer.memory)
                last = outcomes[-1]
                if isinstance(last, Refused) and not request.opened.namespace.is_opaque:
                    # As within a put: the pages after a refused one would have no parent.
                    outcomes += [last] * (request.pages - stop)
                    break
        return outcomes

    @contextmanager
    def _buffer(self, size_bytes: int) -> Iterator[Buffer]:
        """A buffer for one put. List operations are atomic: a fork can never inherit a lock."""
        buffer = self._idle.pop() if self._idle else None
        if buffer is None or buffer.closed or buffer.size_bytes < size_bytes:
            buffer = self._new_buffer(size_bytes)
        yield buffer
        if len(self._idle) < IDLE_MAX:
            self._idle.append(buffer)


def _staged(
    request: PutRequest, source: Memory, buffer: Buffer, first: int, stop: int
) -> PutRequest:
    """Copy pages [first, stop) into the buffer; the request for them alone."""
    target = 0
    sources = []
    for each in request.sources:
        places = each.places[first:stop]
        for i, place in enumerate(places):
            to = buffer.address + target + i * each.part_bytes
            copy_bytes(to, source.address + place, each.part_bytes)
        end = target + len(places) * each.part_bytes
        staged = tuple(range(target, end, each.part_bytes))
        sources.append(msgspec.structs.replace(each, places=staged))
        target = end
    chain = request.chain.slice(first, stop)
    return msgspec.structs.replace(request, chain=chain, sources=tuple(sources))
