"""The MetadataStore port: durable metadata and the epoch of the master that may write it.

Owns the contract that every adapter and the fake pass (tests/contract). Knows nothing of what the
values mean: keys are short text with slashes, values are bytes that the master encodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.ids import Epoch

Entry = tuple[str, bytes]
"""A key and its value."""

VALUE_BYTES_MAX: Final = 1 << 20
"""What every store must hold in one value, and may refuse beyond (etcd's transaction bound)."""


class MetadataStore(Protocol):
    """Durable metadata under one epoch at a time (I10).

    Opening raises the epoch durably, so an epoch is never handed out twice, whatever dies. The
    holder of a lower one can no longer write. A store object is opened once and used by one
    event loop; nothing blocks that loop.
    """

    async def open(self) -> Epoch:
        """Raise the epoch, durably, and return it.

        ConfigError when the place or what lies there cannot be used; Unavailable when it cannot
        be reached now.
        """
        ...

    async def load(self, prefix: str) -> list[Entry]:
        """Every entry whose key starts with `prefix`, in the order of the keys."""
        ...

    async def write(self, puts: Sequence[Entry], deletes: Sequence[str]) -> None:
        """Delete, then put, all or nothing, durable on return. A key that is absent is no error.

        StaleEpoch, and no effect, when a higher epoch was raised since `open`. OutOfSpace or
        Unavailable leave the old values in place; the same write may be tried again.
        """
        ...

    async def close(self) -> None:
        """End use of the store; what was written stays. Safe to repeat."""
        ...
