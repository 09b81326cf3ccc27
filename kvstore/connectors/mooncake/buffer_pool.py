"""Mooncake's BufferPool: scratch memory that is registered with a store, lent for a while."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Self

from kvstore.connectors.mooncake.addresses import slices_of

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.connectors.mooncake.session import Session

DEFAULT_MAX_BYTES: Final = 1 << 30


class BufferLease:
    """Memory of a pool, until it is released, or its `with` ends."""

    def __init__(self, pool: BufferPool, memory: bytearray) -> None:
        """`memory` is the pool's."""
        self._pool = pool
        self._memory: bytearray | None = memory
        self.size = len(memory)
        self.ptr = slices_of(memory)[0][0]

    @property
    def buffer(self) -> memoryview:
        """The memory. RuntimeError once it was released."""
        if self._memory is None:
            raise RuntimeError("the lease was released")
        return memoryview(self._memory)

    def release(self) -> None:
        """Give the memory back; again: nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._pool.take_back(self.ptr, self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class BufferPool:
    """Lends memory up to a bound. Of Mooncake's other options none has a meaning here."""

    def __init__(
        self,
        store: Session,
        max_bytes: int = 0,
        *_: object,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        **__: object,
    ) -> None:
        """Register with `store` what is lent; 0 bytes stands for DEFAULT_MAX_BYTES."""
        self._store = store
        self._left = max_bytes or DEFAULT_MAX_BYTES
        self._blocks = block_on_exhaustion
        self._timeout_s = default_timeout
        self._changed = threading.Condition()
        self._lent = 0

    def acquire(
        self, size: int, block: bool | None = None, timeout: float | None = None
    ) -> BufferLease:
        """Lend so many bytes. RuntimeError where there are none left, and nobody waits for them."""
        if size <= 0:
            raise ValueError(f"size: got {size}, want at least 1")
        waits = self._blocks if block is None else block
        timeout_s = (self._timeout_s if timeout is None else timeout) if waits else 0.0
        with self._changed:
            if not self._changed.wait_for(lambda: self._left >= size, timeout_s):
                raise RuntimeError(f"{size} bytes: {self._left} are left")
            self._left -= size
            self._lent += 1
        lease = BufferLease(self, bytearray(size))
        self._store.register_buffer(lease.ptr, size)
        return lease

    def buffer(
        self, size: int, block: bool | None = None, timeout: float | None = None
    ) -> BufferLease:
        """As `acquire`, for a `with`."""
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Nothing: memory is made when it is lent."""

    def take_back(self, address: int, size: int) -> None:
        """For leases."""
        self._store.unregister_buffer(address)
        with self._changed:
            self._left += size
            self._lent -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """RuntimeError while something is lent."""
        if self._lent:
            raise RuntimeError(f"{self._lent} leases are active")
