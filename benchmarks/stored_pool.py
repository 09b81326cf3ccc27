"""A pool as the metadata store knows it, and what its takeover costs the core of a new master.

No process and no network: values of chunks are made as a master writes them, a core restores them
and meets workers that list the same digests. Times are the processor's. `stored_pool` and
`take_over` are for benchmarks of whole takeovers, too, `stored_pool` and `Heir` for those of what a
core does with many pages; run as a program this prints what the core's part takes.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.harness import KIB, Report, arguments
from benchmarks.pool import layout_of
from kvstore import limits
from kvstore.ids import KEY_BYTES, ROOT_PARENT, Epoch, generation_of
from kvstore.segment import check_geometry
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.membership import (
    ChunkDigest,
    InventoryEnd,
    InventoryWanted,
    OfferInventory,
    RegisterWorker,
    SegmentOffer,
)
from kvstore.wire.messages.namespaces import OpenNamespace
from master.chunk_values import Asked, ChainRow, ChunkValue, encode_chunk, key_of
from master.events import Persist, Persisted, Reply, Request, SessionId, SessionOpened, Tick
from master.pool_time import Life
from master.state import MasterState
from master.tunables import Tunables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.namespace import Content, Layout
    from kvstore.segment import Geometry
    from kvstore.wire.messages.base import Message
    from master.events import Event

PART_BYTES: Final = 64 * KIB
RUN_PAGES: Final = 64
SEGMENTS: Final = 4
SIZES: Final = (10_000, 100_000, 1_000_000)
"""Pages; all of it takes three seconds, so the short form is no other."""
WORKER: Final = "w"
SESSION: Final = SessionId(1)
EVENT_TARGET_MS: Final = 5.0
PAGE_TARGET_US: Final = 3.0


@dataclass(frozen=True)
class StoredPool:
    """What the store holds, and what its workers list."""

    entries: list[tuple[str, bytes]]
    geometry: Geometry
    digests: dict[str, dict[str, tuple[ChunkDigest, ...]]]
    """By worker and segment."""


@dataclass
class Takeover:
    """What it cost a core."""

    pages: int = 0
    restore_s: float = 0.0
    """To take the entries in."""
    compare_s: float = 0.0
    """In events, until every segment is LIVE."""
    longest_event_s: float = 0.0
    stored_bytes: int = 0


def stored_pool(pages: int, workers: tuple[str, ...] = (WORKER,)) -> StoredPool:
    """A pool of chains of RUN_PAGES, about so many pages in all, on each of these workers."""
    content, layout = layout_of(PART_BYTES)
    slots = limits.CHUNK_BYTES // PART_BYTES
    chunks = -(-pages // SEGMENTS // slots)
    geometry = check_geometry((chunks + -(-chunks // 4)) * limits.CHUNK_BYTES)  # nothing is evicted
    core = MasterState(Tunables(), Epoch(1))
    entries = _opened(core, content, layout)
    digests: dict[str, dict[str, tuple[ChunkDigest, ...]]] = {}
    pieces = [
        (os.urandom(slots * KEY_BYTES), os.urandom(slots * 8)) for _ in range(SEGMENTS * chunks)
    ]
    for number, worker in enumerate(workers):
        names = [f"{worker}-{each}" for each in range(SEGMENTS)]
        entries.append(
            (f"workers/{worker}", b"".join(bytes((len(name),)) + name.encode() for name in names))
        )
        digests[worker] = {}
        for at, name in enumerate(names):
            first = number * len(pieces) + at * chunks
            mine = pieces[at * chunks : (at + 1) * chunks]
            values = [_value(slots, first + each, *piece) for each, piece in enumerate(mine)]
            digests[worker][name] = tuple(_stored(entries, name, values))
    return StoredPool(entries, geometry, digests)


def _stored(
    entries: list[tuple[str, bytes]], name: str, values: list[ChunkValue]
) -> Iterator[ChunkDigest]:
    """Add a segment's chunks to the entries; what its worker lists."""
    for number, value in enumerate(values):
        start, digest = number * limits.CHUNK_BYTES, value.digest()
        entries.append((key_of(name, start), encode_chunk(value, digest)))
        yield ChunkDigest(start, PART_BYTES, digest)


def _opened(core: MasterState, content: Content, layout: Layout) -> list[tuple[str, bytes]]:
    """What a master stores of the namespace."""
    core.handle(SessionOpened(SESSION, "engine", content.tenant, "e", b"e"), 0.0)
    actions = core.handle(Request(SESSION, 1, OpenNamespace(content, layout)), 0.0)
    return [entry for each in actions if isinstance(each, Persist) for entry in each.puts]


def _value(slots: int, chunk: int, keys: bytes, checksums: bytes) -> ChunkValue:
    asked = Asked(Life(limits.PAGE_TTL_S, 0.0, limits.PAGE_TTL_S))
    rows = [
        ChainRow(
            slot, min(RUN_PAGES, slots - slot), 0, 1, PART_BYTES,
            generation_of(Epoch(1), (chunk + 1) * slots + slot), ROOT_PARENT, asked,
        )
        for slot in range(0, slots, RUN_PAGES)
    ]  # fmt: skip
    return ChunkValue(PART_BYTES, rows, keys, checksums)


class Heir:
    """A new master's core, and what its events take."""

    def __init__(self, pool: StoredPool, tunables: Tunables) -> None:
        """Restore what is stored."""
        self.now = 1.0
        self.spent_s = self.longest_event_s = 0.0
        """Since the last `begin`."""
        self._requests = 0
        self.master = MasterState(tunables, Epoch(2), pool.entries)

    @property
    def pages(self) -> int:
        """In the directory."""
        return sum(known.tree.pages for known in self.master.core.namespaces)

    def begin(self) -> None:
        """Count anew."""
        self.spent_s = self.longest_event_s = 0.0

    def feed(self, event: Event) -> list[Message]:
        """Handle an event, and those that follow at once; the replies."""
        began_s = time.process_time()
        actions = self.master.handle(event, self.now)
        spent_s = time.process_time() - began_s
        self.spent_s += spent_s
        self.longest_event_s = max(self.longest_event_s, spent_s)
        replies = [action.message for action in actions if isinstance(action, Reply)]
        for action in actions:
            if isinstance(action, Persist):
                replies += self.feed(Persisted(action.write))
        return replies

    def ask(self, message: Message, session: SessionId = SESSION) -> Message:
        """Send a request and let ticks come until it is answered."""
        self._requests += 1
        replies = self.feed(Request(session, self._requests, message))
        while not replies:
            replies = self.feed(Tick())
        assert not isinstance(replies[0], Failure), replies[0]
        return replies[0]

    def meet(self, pool: StoredPool, worker: str, session: SessionId = SESSION) -> None:
        """Let a worker come, on a host of its own, that lists what is stored of it."""
        self.feed(SessionOpened(session, "worker", "", worker, worker.encode()))
        segments = pool.digests[worker]
        offers = tuple(SegmentOffer(name, 1, "dram", pool.geometry) for name in segments)
        self.ask(RegisterWorker(worker, f"host-{worker}", (), offers), session)
        for name, digests in segments.items():
            answer = self.ask(OfferInventory(name, 1, digests), session)
            assert answer == InventoryWanted(()), answer
            self.ask(InventoryEnd(name, 1), session)


def take_over(pool: StoredPool) -> Takeover:
    """Let a new core take the pool over, as far as that is the core's work."""
    took = Takeover()
    began_s = time.process_time()
    heir = Heir(pool, Tunables())
    took.restore_s = time.process_time() - began_s
    took.stored_bytes = sum(len(value) for _, value in pool.entries)
    for worker in pool.digests:
        heir.meet(pool, worker)
    took.compare_s, took.longest_event_s = heir.spent_s, heir.longest_event_s
    took.pages = heir.pages
    return took


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", lambda _: None)
    report = Report("What a takeover costs the core of a new master", options)
    report.parameters(run_pages=RUN_PAGES, part_kib=PART_BYTES // KIB, segments=SEGMENTS)
    gc.freeze()  # as a master does
    taken = [take_over(stored_pool(pages)) for pages in SIZES]
    report.table(
        "Takeovers",
        [
            {
                "pages": each.pages,
                "restore s": each.restore_s,
                "compare s": each.compare_s,
                "us/page": 1e6 * (each.restore_s + each.compare_s) / each.pages,
                "longest event ms": 1e3 * each.longest_event_s,
                "stored bytes/page": each.stored_bytes / each.pages,
            }
            for each in taken
        ],
    )
    last = taken[-1]
    report.at_most(
        "us_a_page", 1e6 * (last.restore_s + last.compare_s) / last.pages, PAGE_TARGET_US
    )
    report.at_most("longest_event_ms", 1e3 * last.longest_event_s, EVENT_TARGET_MS)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
