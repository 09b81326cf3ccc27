"""Which transport reaches which worker: opened once, remembered, tried again after a failure.

Order: shm on one host; the transfer engine where it is asked for; else our own stream; within
one kind the tier that is read faster, then the cheapest address, then the worker that has lately
been faster. A worker that kept silent comes after all others for a while. A configured transport
that this process cannot use stops the start.
"""

from __future__ import annotations

import os
import threading
import weakref
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Final, cast

from kvstore import limits
from kvstore.errors import ConfigError, KVStoreError
from kvstore.replica import Tier
from kvstore.transfer.context import TransferContext, TransportKind
from kvstore.transfer.transport import all_of
from kvstore.transfer.worker_load import WorkerLoads
from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.clock import Clock
    from kvstore.rpc.identity import Identity
    from kvstore.transfer.device import Block
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.transport import ReadSpan, Transport
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
"""After a failure: until then nobody dials, and pages that lie nowhere else are misses."""
LAST_RESORT_S: Final = 20.0
"""After a silence: until then a worker is only asked for what cannot be read elsewhere.

Ten times as long as the silence at least, so that what waits for it is a tenth at most. A worker
that is dead is gone from lookups long before.
"""
SORTED_MAX: Final = 4096
_COST_MAX: Final = 1 << 20
_LAST: Final = 1 << 40
"""Added to the rank of a last resort: more than any rank."""
_FAILED: Final = all_of(Outcome.TRANSPORT, 1)
_TIERS: Final[dict[str, int]] = {Tier.DRAM: 0, Tier.HBM: 1, Tier.NVME: 2}
"""By how fast host memory is filled from there; one that we do not know comes last."""

_ALL: Final[weakref.WeakSet[Choice]] = weakref.WeakSet()


def load_kind(name: str) -> TransportKind:
    """The module behind a transport's name, ready for use; ConfigError when there is none."""
    if name in BUILT_IN:
        module = BUILT_IN[name]
    else:
        # Only now: to load it takes a worker's start an eighth longer.
        from importlib.metadata import entry_points

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
        self,
        names: Sequence[str],
        identity: Callable[[], Identity],
        clock: Clock,
        random: Random | None = None,
    ) -> None:
        """Load the configured kinds. ConfigError when one is unknown or cannot be used here.

        `random` tells apart what is equally good; None is one of its own.
        """
        if not names:
            raise ConfigError("transports: at least one is needed")
        self._kinds = {name: load_kind(name) for name in dict.fromkeys(names)}
        known = list(BUILT_IN)
        self._order = {n: known.index(n) if n in known else len(known) for n in self._kinds}
        self._identity = identity
        self._clock = clock
        self._loads = WorkerLoads(random or Random(os.urandom(16)))
        self._mutex = threading.Lock()
        self._closed = False
        self._opened: dict[tuple[str, str], Transport] = {}
        self._dialling: dict[tuple[str, str], threading.Lock] = {}
        """Held while an address is dialled, which nobody waits for who wants another."""
        self._failed_until_s: dict[tuple[str, str], float] = {}
        self._last_until_s: dict[tuple[str, str], float] = {}
        """Until when an address is a last resort."""
        self._left: dict[str, dict[int, Block]] = {}
        """See TransferContext.left: by address, until the store's session ends."""
        self._sorted: dict[tuple[str, tuple[Address, ...]], list[Address]] = {}
        _ALL.add(self)

    def rank(
        self, segment: SegmentRef, timeout_s: float, kinds: frozenset[str] | None = None
    ) -> int | None:
        """How good the way to a segment is, lower is better; None when there is none now.

        With `kinds` a way of one of those. A last resort is not dialled to know: it may stall.
        """
        last: int | None = None
        for address in self._usable(segment):
            if kinds is not None and address.transport not in kinds:
                continue
            rank = self._rank_of(address, segment.tier)
            if self._is_last_resort(address):
                last = rank + _LAST if last is None else last
            elif self._open(address, segment, timeout_s) is not None:
                return rank
        return last

    def order(self, alike: Sequence[SegmentRef]) -> Sequence[int]:
        """Positions of segments of one rank, that of the worker to read from first."""
        return self._loads.order(alike)

    def note_read(self, by: Transport, span: ReadSpan, outcomes: bytes, took_s: float) -> None:
        """Learn from a read: its worker's speed, and whether its transport is of any use."""
        if not any(outcomes):
            self._loads.took(span.segment, len(span) * span.part_bytes, took_s)
        elif Outcome.TRANSPORT in outcomes:
            self._loads.failed(span.segment)
            if took_s >= limits.READ_STALL_MAX_S:
                self.avoid(by)
            elif nothing_moved(outcomes):
                self.drop(by)

    def transport(self, segment: SegmentRef, timeout_s: float) -> Transport | None:
        """The best way to a segment's worker that is open or can be opened now."""
        for address in self._usable(segment):
            found = self._open(address, segment, timeout_s)
            if found is not None:
                return found
        return None

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """As Transport.read, by the best way that there is now, and learn from it."""
        way = self.transport(span.segment, timeout_s)
        if way is None:
            return all_of(Outcome.TRANSPORT, len(span))
        began_s = self._clock.now_s()
        outcomes = way.read(span, into, timeout_s)
        self.note_read(way, span, outcomes, self._clock.now_s() - began_s)
        return outcomes

    def kind_of(self, transport: Transport) -> str:
        """The name of its kind, as configured; "closed" once it was dropped."""
        with self._mutex:
            opened = self._opened.items()
            return next((kind for (kind, _), each in opened if each is transport), "closed")

    def note_late(self, span: ReadSpan, after_s: float) -> None:
        """Learn that a read is not over yet, so that the next ones need not find that out."""
        self._loads.took(span.segment, len(span) * span.part_bytes, after_s)

    def drop(self, failed: Transport) -> None:
        """Close a transport that failed; it is opened anew, or the worker's next address is."""
        with self._mutex:
            self._opened = {k: t for k, t in self._opened.items() if t is not failed}
        failed.close()

    def avoid(self, silent: Transport) -> None:
        """Close a transport whose worker keeps silent; for a while nobody waits for it again."""
        with self._mutex:
            for key in [key for key, each in self._opened.items() if each is silent]:
                self._pause(key, was_silent=True)
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
        self._dialling = {}
        self._failed_until_s = {}
        self._last_until_s = {}

    def _pause(self, key: tuple[str, str], *, was_silent: bool) -> None:
        """Dial an address no more for a while; after a silence others come first for longer."""
        now_s = self._clock.now_s()
        self._failed_until_s[key] = now_s + TRY_AGAIN_S
        if was_silent:
            self._last_until_s[key] = now_s + LAST_RESORT_S

    def _is_last_resort(self, address: Address) -> bool:
        """Whether its worker kept silent lately. One that may not be dialled yet is no resort."""
        key = (address.transport, address.where)
        until_s = self._last_until_s.get(key)
        if until_s is None or key in self._opened:
            return False
        return self._failed_until_s.get(key, 0.0) <= self._clock.now_s() < until_s

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
        if self._clock.now_s() < self._failed_until_s.get(key, 0.0):
            return None
        with self._mutex:
            dialling = self._dialling.setdefault(key, threading.Lock())
        with dialling:
            transport = self._opened.get(key)
            failed = self._clock.now_s() < self._failed_until_s.get(key, 0.0)
            if transport is not None or failed or self._closed:
                return transport
            return self._dial(key, address, segment, timeout_s)

    def _dial(
        self, key: tuple[str, str], address: Address, segment: SegmentRef, timeout_s: float
    ) -> Transport | None:
        """Open a transport; None, and a pause, where that fails."""
        began_s = self._clock.now_s()
        left = self._left.setdefault(address.where, {})
        context = TransferContext(self._identity(), address, segment.addresses, left)
        kind = self._kinds[address.transport]
        try:
            transport = kind.open_transport(context, min(timeout_s, OPEN_TIMEOUT_S))
        except KVStoreError:
            took_s = self._clock.now_s() - began_s
            self._pause(key, was_silent=took_s >= limits.READ_STALL_MAX_S)
            return None
        with self._mutex:
            if not self._closed:
                self._last_until_s.pop(key, None)
                self._opened[key] = transport
                return transport
        transport.close()
        return None


def nothing_moved(outcomes: bytes) -> bool:
    """Whether every page failed for its transport."""
    return not outcomes.strip(_FAILED)


def _start_anew() -> None:
    for each in list(_ALL):
        each._start_anew()  # noqa: SLF001 — this module's own class, in its own fork hook


os.register_at_fork(after_in_child=_start_anew)
