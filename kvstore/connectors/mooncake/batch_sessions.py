"""Sessions over several calls: objects that are put, or read, range by range.

Ranges of a put are collected here and stored when it ends: nobody sees half an object. What a get
session reads was verified whole when it began, and stays as it was.
"""

from __future__ import annotations

import threading
from operator import index
from typing import TYPE_CHECKING, NamedTuple

from kvstore.connectors.mooncake.addresses import is_memory, lengths_agree, scatter, slices_of
from kvstore.connectors.mooncake.codes import Code
from kvstore.connectors.mooncake.objects import Value
from kvstore.connectors.mooncake.pointer_calls import PointerCalls
from kvstore.connectors.mooncake.session import name_of
from kvstore.connectors.mooncake.values import DEFAULT_CONFIG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.mooncake.values import BufferHandle, ReplicateConfig


class _Draft(NamedTuple):
    """An object that is being put."""

    value: bytearray
    config: ReplicateConfig


class BatchSessions(PointerCalls):
    """Keys of open sessions, and what they hold in this process's memory."""

    def __init__(self) -> None:
        """No session is open."""
        super().__init__()
        self._mutex = threading.Lock()
        self._drafts: dict[str, _Draft] = {}
        self._reading: dict[str, BufferHandle] = {}

    def close(self) -> int:
        """End all sessions, and let the pool go."""
        with self._mutex:
            self._drafts.clear()
            self._reading.clear()
        return super().close()

    def batch_put_session_start(
        self,
        keys: Sequence[str],
        sizes: Sequence[int],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """Begin objects of these sizes; a code for each. What is there already is refused."""
        if not lengths_agree(keys, sizes):
            return [Code.INVALID_PARAMS] * len(keys)
        codes = self.batch_is_exist(keys)
        with self._mutex:
            for at, (key, size) in enumerate(zip(keys, sizes, strict=True)):
                if codes[at] == 1 or key in self._drafts:
                    codes[at] = Code.OBJECT_ALREADY_EXISTS
                elif size <= 0:
                    codes[at] = Code.INVALID_PARAMS
                elif codes[at] == 0:
                    codes[at] = self._begin(key, size, config)
        return codes

    def _begin(self, key: str, size: int, config: ReplicateConfig) -> int:
        try:
            self._drafts[key] = _Draft(bytearray(size), config)
        except (MemoryError, OverflowError):
            return Code.NO_AVAILABLE_HANDLE
        return Code.OK

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy stretches of memory to offsets of objects that are being put.

        Bytes or a code for each.
        """
        if not lengths_agree(keys, all_buffer_ptrs, all_sizes, all_dst_offsets):
            return [Code.INVALID_PARAMS] * len(keys)
        results: list[int] = []
        for key, *row in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True):
            with self._mutex:
                draft = self._drafts.get(key)
                results.append(
                    Code.OBJECT_NOT_FOUND if draft is None else _copy(draft.value, row, inward=True)
                )
        return results

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Store them; a code for each. The session of each has ended then."""
        with self._mutex:
            drafts = [self._drafts.pop(key, None) for key in keys]
        codes: list[int] = [Code.OBJECT_NOT_FOUND] * len(keys)
        for at, (key, draft) in enumerate(zip(keys, drafts, strict=True)):
            if draft is not None:
                value = Value(name_of(key), slices_of(draft.value))
                codes[at] = self._store([value], draft.config)[0]
        return codes

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Give them up; a code for each."""
        with self._mutex:
            gone = [self._drafts.pop(key, None) for key in keys]
        return [Code.OBJECT_NOT_FOUND if draft is None else Code.OK for draft in gone]

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Read these objects, to be copied by ranges; a code for each."""
        handles = self.batch_get_buffer(keys)
        with self._mutex:
            self._reading |= {
                key: handle for key, handle in zip(keys, handles, strict=True) if handle is not None
            }
        return [Code.OBJECT_NOT_FOUND if handle is None else Code.OK for handle in handles]

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy ranges of objects of a session to stretches of memory; bytes or a code for each."""
        if not lengths_agree(keys, all_buffer_ptrs, all_sizes, all_src_offsets):
            return [Code.INVALID_PARAMS] * len(keys)
        results: list[int] = []
        for key, *row in zip(keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True):
            with self._mutex:
                handle = self._reading.get(key)
            if handle is None:
                results.append(Code.OBJECT_NOT_FOUND)
                continue
            results.append(_copy(handle, row, inward=False))
        return results

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Let these objects go."""
        with self._mutex:
            for key in keys:
                self._reading.pop(key, None)
        return Code.OK


def _copy(value: bytearray, row: Sequence[Sequence[int]], *, inward: bool) -> int:
    """Copy ranges into a value or out of it: their bytes; a code, and none, where one is wrong."""
    if not lengths_agree(*row):
        return Code.INVALID_PARAMS
    ranges = list(zip(*[map(index, column) for column in row], strict=True))
    for address, size, offset in ranges:
        if not is_memory(address, size) or not 0 <= offset <= len(value) - size:
            return Code.INVALID_PARAMS
    ((base, _),) = slices_of(value)
    for address, size, offset in ranges:
        source, to = (address, base + offset) if inward else (base + offset, address)
        scatter(source, ((to, size),))
    return sum(size for _, size, _ in ranges)
