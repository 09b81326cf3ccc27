"""A master that knows a given number of pages, and what it cost to tell it."""

from __future__ import annotations

import os
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from benchmarks.harness import KIB, ProcessClock, memory_bytes
from benchmarks.pool import PAGE_TOKENS, layout_of
from benchmarks.synthetic_worker import TIMEOUT_S, Master
from kvstore import KVStore, limits
from kvstore.rpc.connection import Connection
from kvstore.rpc.identity import Identity, Role
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans

if TYPE_CHECKING:
    from kvstore.page import PageChain
    from kvstore.wire.messages.puts import PlanSpan

CHAIN_PAGES: Final = 1024
FILL_PAGES: Final = 256
PART_BYTES: Final = 8 * KIB
SPARE: Final = 1.10
"""Room beyond what is filled in, so that eviction begins when it is meant to."""


class Filled:
    """A master, the client that asks it, and the chains that it knows."""

    def __init__(self, pages: int) -> None:
        """Start it empty, with room for `pages` and a little more."""
        self.pages = pages
        capacity = int(pages * SPARE / limits.WATERMARK_HIGH) * PART_BYTES
        self.master = Master(capacity + 2 * limits.CHUNK_BYTES)
        self.store = KVStore.connect(self.master.address, transports=("tcp",), timeout_s=TIMEOUT_S)
        self.opened = self.store.open(*layout_of(PART_BYTES))
        identity = Identity(Role.ENGINE)
        self.line = Connection.open(self.master.address, identity, TIMEOUT_S)
        self.chains: list[PageChain] = []
        self._serial = 0

    def close(self) -> None:
        """End everything."""
        self.line.close()
        self.store.close()
        self.master.__exit__(None, None, None)

    def fresh_chain(self, pages: int) -> PageChain:
        """Keys that nobody has used."""
        self._serial += 1
        head = [self._serial] * PAGE_TOKENS
        return self.opened.chain([*head, *range(PAGE_TOKENS * (pages - 1))])

    def fill(self) -> Fill:
        """Put chains of CHAIN_PAGES until the master knows `pages`."""
        before = memory_bytes(self.master.pid)
        fill = Fill()
        while fill.pages < self.pages:
            chain = self.fresh_chain(min(CHAIN_PAGES, self.pages - fill.pages))
            self.put(chain, FILL_PAGES, fill)
            self.chains.append(chain)
        fill.memory_bytes = memory_bytes(self.master.pid) - before
        return fill

    def put(self, chain: PageChain, step: int, fill: Fill) -> None:
        """BeginPut and Sealed for a chain, `step` pages at a time; times go into `fill`."""
        clock = ProcessClock([self.master.pid])
        for start in range(0, len(chain), step):
            piece = chain.slice(start, min(start + step, len(chain)))
            message = BeginPut(
                os.urandom(16), self.opened.namespace.id,
                (PutChain(piece.parent, piece.packed),), (0,), (PART_BYTES,), TIMEOUT_S,
            )  # fmt: skip
            cpu_s, started_s = clock.now_s(), time.perf_counter()
            plans = self.line.call(message, TIMEOUT_S)
            planned_s = time.perf_counter()
            assert isinstance(plans, PutPlans), plans
            assert sum(span.count for span in plans.spans) == len(piece), plans
            for span in plans.spans:
                self._seal(span, plans, piece)
            sealed_s = time.perf_counter()
            fill.note(len(piece), planned_s - started_s, sealed_s - planned_s)
            fill.cpu_s += clock.now_s() - cpu_s

    def _seal(self, span: PlanSpan, plans: PutPlans, piece: PageChain) -> None:
        chain = piece.slice(span.first, span.first + span.count)
        worker = self.master.worker
        worker.finish_seal(worker.start_seal(span, plans, self.opened, chain))


@dataclass
class Fill:
    """What putting pages cost."""

    pages: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of the master."""
    memory_bytes: int = 0
    calls_s: array[float] = field(default_factory=lambda: array("d"))

    def note(self, pages: int, begin_s: float, seal_s: float) -> None:
        """Add one BeginPut and its Sealed."""
        self.pages += pages
        self.seconds += begin_s + seal_s
        self.calls_s.extend((begin_s, seal_s))

    def add(self, other: Fill) -> None:
        """Add all of another's."""
        self.pages += other.pages
        self.seconds += other.seconds
        self.cpu_s += other.cpu_s
        self.calls_s.extend(other.calls_s)

    @property
    def pages_per_core_s(self) -> float:
        """Pages of one second of the master's processor."""
        return self.pages / self.cpu_s
