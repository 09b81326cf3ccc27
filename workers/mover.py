"""Pulls that the leader asks for: pages moved between segments here, or copied from other workers.

Owns the few threads that carry them out, so that neither clients' threads nor the control link ever
wait for them, they take no more of the machine than these threads, and a peer that hangs holds up
no move. Decides nothing.
"""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING

import msgspec

from kvstore.errors import Unavailable
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.puts import ExtentSource, PeerSource, StripeSource
from workers.disk_pull import DiskSource
from workers.extent_sources import HbmSource, MemorySource
from workers.guarded_threads import GuardedThreads
from workers.parity import hashed
from workers.tiers.hbm import HbmSegment
from workers.tiers.nvme import NvmeSegment

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from workers.events import ComputeParity, StartPull
    from workers.ingest import Source
    from workers.peer_source import PeerReads
    from workers.service import Service


class MoverThreads(msgspec.Struct, frozen=True):
    """How many moves, and how many copies from other workers, go on at once."""

    moves: int
    copies: int


class Mover:
    """Carries moves and copies out, a few of each at a time, in the order in which they came."""

    def __init__(self, service: Service, threads: MoverThreads, peers: PeerReads) -> None:
        """Own `peers`. Threads start as they are needed."""
        self._service = service
        self._peers = peers
        self._moves = GuardedThreads(threads.moves, "worker-mover", service.broken)
        self._copies = GuardedThreads(threads.copies, "worker-copier", service.broken)
        self._closing = threading.Event()

    def begin(self, start: StartPull) -> None:
        """Carry one out soon. For any thread; waits for nothing."""
        is_copy = isinstance(start.message.source, PeerSource | StripeSource)
        (self._copies if is_copy else self._moves).begin(self._run, start)

    def compute(self, action: ComputeParity) -> None:
        """Answer a HashParity soon; it has its turn among the copies."""
        self._copies.begin(self._compute, action)

    def close(self) -> None:
        """End what runs; what has not begun never does."""
        self._closing.set()
        self._service.pulls.cancel_all()
        self._moves.close(cancel=True)
        self._copies.close(cancel=True)
        self._peers.close()

    def _run(self, start: StartPull) -> None:
        if self._closing.is_set():
            self._service.pulls.cancel(start.pull)
        self._service.dispatch(self._service.carry_out(start, self._source(start)))

    def _compute(self, action: ComputeParity) -> None:
        answer: Message = Failure(Unavailable.code, "it was not computed")
        try:
            if not self._closing.is_set():
                answer = hashed(self._peers, action.message)
        finally:
            self._service.answer(action.command, answer)

    def _source(self, start: StartPull) -> Source:
        source = start.message.source
        if isinstance(source, PeerSource | StripeSource):
            return self._peers.source(start)
        assert isinstance(source, ExtentSource), "the state machine lets no other through"
        segment = self._service.segments[source.segment]
        if isinstance(segment, NvmeSegment):
            return DiskSource(segment, start)
        if isinstance(segment, HbmSegment):
            return HbmSource(segment, start)
        return MemorySource(segment, array("Q", source.offsets))
