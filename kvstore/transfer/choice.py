"""Which transport reaches which worker: opened once, remembered, tried again after a failure.

Order: shm on one host; the transfer engine where it is asked for; else our own stream; within
one kind the tier that is read faster, then the cheapest address. A configured transport that this
process cannot use stops the start.
"""

from __future__ import annotations

import os
import threading
import weakref
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, cast

from kvstore.errors import ConfigError, KVStoreError
from kvstore.replica import Tier
from kvstore.transfer.context import TransferContext, TransportKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.clock import Clock
    from kvstore.rpc.identity import Identity
    from kvstore.transfer.device import Block
    from kvstore.transfer.transport import Transport
    from kvstore.wire.messages.common import Address, SegmentRef

ENTRY_POINT_GROUP: Final = "kvharbor.transports"
BUILT_IN: Final = {
    "shm": "kvstore.transfer.shm",
    "mooncake": "kvstore.transfer.mooncake",
    "tcp": "kvstore.transfer.tcp",
}
"""Best first. Other transports come after these, through the entry point group."""
MEMORY_ONLY: Final = frozenset({"mooncake"})
"""Kinds that read memory without the worker's help, and so nothing of its disks."""
MEMORY: Final = frozenset((Tier.DRAM, Tier.HBM))
OPEN_TIMEOUT_S: Final = 5.0
TRY_AGAIN_S: Final = 2.0
SORTED_MAX: Final = 4096
_COST_MAX: Final = 1 << 20
_TIERS: Final[dict[str, int]] = {Tier.DRAM: 0, Tier.HBM: 1, Tier.NVME: 2}
"""By how fast host memory is filled from there; one that we do not know comes last."""

_ALL: Final[weakref.WeakSet[Choice]] = weakref.WeakSet()


def load_kind(name: str) -> TransportKind:
    """The module behind a transport's name, ready for use; ConfigError when there is none."""
    if name in BUILT_IN:
        module = BUILT_IN[name]
    else:
        found = entry_points(group=ENTRY_POINT_GROUP, name=name)
        if not found:
            raise ConfigError(f"transports: {name!r} is unknown, want any of {sorted(BUILT_IN)}")
        module = next(iter(found)).value
    try:
        kind = cast("TransportKind", import_module(module))
    except ImportError as error:
        raise ConfigError(f"transport {name}: cannot be loaded: {error}") from error
    kind.require()
    return kind


class Choice:
    """The transports of one store in one process. Thread-safe."""

    def __init__(
        self, names: Sequence[str], identity: Callable[[], Identity], clock: Clock
    ) -> None:
        """Load the configured kinds. ConfigError when one is unknown or cannot be used here."""
        if not names:
            raise ConfigError("transports: at least one is needed")
        self._kinds = {name: load_kind(name) for name in dict.fromkeys(names)}
        known = list(BUILT_IN)
        self._order = {n: known.index(n) if n in known else len(known) for n in self._kinds}
        self._identity = identity
        self._clock = clock
        self._mutex = threading.Lock()
        self._closed = False
        self._opened: dict[tuple[str, str], Transport] = {}
        self._failed_until_s: dict[tuple[str, str], float] = {}
        self._left: dict[str, dict[int, Block]] = {}
        """See TransferContext.left: by address, until the store's session ends."""
        self._sorted: dict[tuple[str, tuple[Address, ...]], list[Address]] = {}
        _ALL.add(self)

    def rank(self, segment: SegmentRef, timeout_s: float) -> int | None:
        """How good the way to a segment is, lower is better; None when there is none now."""
        for address in self._usable(segment):
            if self._open(address, segment, timeout_s) is not None:
                return self._rank_of(address, segment.tier)
        return None

    def transport(self, segment: SegmentRef, timeout_s: float) -> Transport | None:
        """The best way to a segment's worker that is open or can be opened now."""
        for address in self._usable(segment):
            found = self._open(address, segment, timeout_s)
            if found is not None:
                return found
        return None

    def kind_of(self, transport: Transport) -> str:
        """The name of its kind, as configured; "closed" once it was dropped."""
        with self._mutex:
            opened = self._opened.items()
            return next((kind for (kind, _), each in opened if each is transport), "closed")

    def drop(self, failed: Transport) -> None:
        """Close a transport that failed; it is opened anew, or the worker's next address is."""
        with self._mutex:
            self._opened = {k: t for k, t in self._opened.items() if t is not failed}
        failed.close()

    def avoid(self, silent: Transport) -> None:
        """Close a transport whose worker keeps silent; for a while nobody waits for it again."""
        until_s = self._clock.now_s() + TRY_AGAIN_S
        with self._mutex:
            keys = [key for key, each in self._opened.items() if each is silent]
            self._failed_until_s.update(dict.fromkeys(keys, until_s))
        self.drop(silent)

    def close(self) -> None:
        """End all of them; nothing is opened any more. Safe to repeat."""
        with self._mutex:
            self._closed = True
            opened, self._opened = self._opened, {}
        for transport in opened.values():
            transport.close()
        self._left = {}

    def _start_anew(self) -> None:
        """In a forked child: forget every transport. Their sockets were closed by their owners."""
        self._mutex = threading.Lock()
        self._opened = {}
        self._failed_until_s = {}

    def _rank_of(self, address: Address, tier: str) -> int:
        kind = self._order[address.transport] * (len(_TIERS) + 1) + _TIERS.get(tier, len(_TIERS))
        return kind * _COST_MAX + min(address.cost, _COST_MAX - 1)

    def _usable(self, segment: SegmentRef) -> list[Address]:
        """Addresses of a configured kind, best first; worked out once, since every read asks."""
        known = tier, addresses = segment.tier, segment.addresses
        found = self._sorted.get(known)
        if found is None:
            kinds = self._kinds.keys() - (frozenset() if tier in MEMORY else MEMORY_ONLY)
            usable = (a for a in addresses if a.transport in kinds)
            found = sorted(usable, key=lambda address: self._rank_of(address, tier))
            if len(self._sorted) >= SORTED_MAX:
                self._sorted = {}
            self._sorted[known] = found
        return found

    def _open(self, address: Address, segment: SegmentRef, timeout_s: float) -> Transport | None:
        """The transport of an address; None while it could not be opened a moment ago."""
        key = (address.transport, address.where)
        transport = self._opened.get(key)
        if transport is not None:
            return transport
        left = self._left.setdefault(address.where, {})
        context = TransferContext(self._identity(), address, segment.addresses, left)
        with self._mutex:
            transport = self._opened.get(key)
            failed = self._clock.now_s() < self._failed_until_s.get(key, 0.0)
            if transport is not None or failed or self._closed:
                return transport
            try:
                transport = self._kinds[address.transport].open_transport(
                    context, min(timeout_s, OPEN_TIMEOUT_S)
                )
            except KVStoreError:
                self._failed_until_s[key] = self._clock.now_s() + TRY_AGAIN_S
                return None
            self._opened[key] = transport
            return transport


def _start_anew() -> None:
    for each in list(_ALL):
        each._start_anew()  # noqa: SLF001 — this module's own class, in its own fork hook


os.register_at_fork(after_in_child=_start_anew)
