"""The MetadataStore port: durable metadata, and which master may write it.

Owns the contract that every adapter and the fake pass (tests/contract). Knows nothing of what the
values mean: keys are short text with slashes, values are bytes that the master encodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvstore.errors import BadValue
from kvstore.ids import Epoch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

Entry = tuple[str, bytes]
"""A key and its value."""

EPOCH_MAX: Final = (1 << 32) - 1
"""A generation packs the epoch in 32 bits."""
KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 1 << 20
WRITE_KEYS_MAX: Final = 127
"""Keys put and deleted by one write: etcd takes 128 operations, and one of them is the store's."""
WRITE_BYTES_MAX: Final = 1 << 20
"""All values of one write: etcd takes 1.5 MiB a request, keys and encoding included."""
RESERVED_KEYS: Final = frozenset({"config", "epoch", "leader"})
"""The store's own, whatever its adapter keeps in them."""


class Candidate(msgspec.Struct, frozen=True):
    """A master that wants to lead: its name, and the addresses that clients and workers dial."""

    name: str
    where: tuple[str, ...]
    above: Epoch = Epoch(0)
    """An epoch that it wins is higher than this one: somebody has seen it, though the place may
    have forgotten."""


class Leader(msgspec.Struct, frozen=True):
    """The master that leads in an epoch."""

    epoch: Epoch
    name: str
    where: tuple[str, ...]


class Term(msgspec.Struct, frozen=True):
    """A leadership that was won."""

    epoch: Epoch
    lease_s: float
    """It ends that long after the last `campaign` or `renew` that succeeded was called; inf: only
    when another master raises the epoch."""


class MetadataStore(Protocol):
    """Durable metadata under one epoch at a time (I10).

    Winning a campaign raises the epoch durably, so an epoch is never handed out twice, whatever
    dies; where the place itself was put back to an earlier state, candidates know of higher ones.
    The holder of a lower one can no longer write. A store object is opened once, used by
    one event loop, and serves any number of terms, one after another; nothing blocks that loop.
    """

    async def open(self) -> None:
        """Reach the place and see that it is this cluster's.

        ConfigError when the place or what lies there cannot be used; AccessDenied when it refuses
        us; Unavailable when it cannot be reached now: `open` may be tried again.
        """
        ...

    async def campaign(self, candidate: Candidate) -> Term | Leader:
        """Try once to lead: the term that was won, or who leads.

        Unavailable when nobody can tell; the try may then have succeeded, and what it won ends
        by itself.
        """
        ...

    async def renew(self) -> None:
        """Let the lease of the term start anew, counted from before this call.

        StaleEpoch when the term is over for good, Unavailable when nobody can tell.
        """
        ...

    def load(self, prefix: str) -> AsyncIterator[list[Entry]]:
        """Every entry whose key starts with `prefix`, in the order of the keys, page by page.

        All pages are of one moment. Unavailable, or its like, when that cannot be had: start over.
        """
        ...

    async def write(self, puts: Sequence[Entry], deletes: Sequence[str]) -> None:
        """Delete, then put, all or nothing, durable on return. A key that is absent is no error.

        The caller keeps to the bounds above, puts no key twice, and touches none of
        RESERVED_KEYS, else BadValue. StaleEpoch, and no effect, when the term is over.
        OutOfSpace and Unavailable leave the old values in place, or the new ones where the answer
        was lost; the same write may be tried again, and never takes effect after a later one.
        """
        ...

    async def resign(self) -> None:
        """End the term at once, so that another may lead. Raises nothing of the store's."""
        ...

    async def close(self) -> None:
        """End use of the store; what was written stays. Safe to repeat."""
        ...


def require_writable(puts: Sequence[Entry], deletes: Sequence[str]) -> None:
    """Raise BadValue where a write breaks a rule of the port."""
    for key, value in puts:
        if len(value) > VALUE_BYTES_MAX:
            raise BadValue(key, f"{len(value)} bytes", f"at most {VALUE_BYTES_MAX}")
    size = sum(len(value) for _, value in puts)
    if size > WRITE_BYTES_MAX:
        raise BadValue("values", f"{size} bytes", f"at most {WRITE_BYTES_MAX}")
    put = {key for key, _ in puts}
    if len(put) < len(puts):
        raise BadValue("puts", f"{len(puts)} of {len(put)} keys", "each key once")
    keys = put.union(deletes)
    if len(keys) > WRITE_KEYS_MAX:
        raise BadValue("keys", len(keys), f"at most {WRITE_KEYS_MAX}")
    for key in keys:
        if key in RESERVED_KEYS or not 0 < len(key.encode()) <= KEY_BYTES_MAX:
            raise BadValue("key", key, f"1 to {KEY_BYTES_MAX} bytes, and not the store's own")
