"""Our side: a standalone pool as `kvharbor up` starts it, and what one client does with it.

Every put uses fresh keys, every outcome is checked, and what is read is compared with what was put.
Keys are made before the clock starts, as the peer's are; looking pages up is inside.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from benchmarks.harness import KIB, ProcessClock, Sample
from benchmarks.regions import Region, Ring, fill, same
from kvstore import Content, Hit, KVStore, Layout, Stored
from kvstore.cli.places import places_of
from kvstore.namespace import Attention, CacheGroup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.page import PageChain
    from kvstore.transfer.buffer import Buffer

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
PAGE_TOKENS: Final = 16
LAYER_BYTES: Final = 8 * KIB
SEED: Final = 11
_libc: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1


class PoolFailed(RuntimeError):
    """Our pool answered something that would make its figures worthless."""


class Pool(AbstractContextManager["Pool"]):
    """A running standalone pool; leaving the context stops it and removes what it left."""

    def __init__(self, dram: str, config: str = "") -> None:
        """Start it and wait until it takes pages."""
        self._folder = Path(tempfile.mkdtemp(prefix="kvharbor-bench-"))
        self._segments = places_of(self._folder).segment_dir
        options = [f"--data-dir={self._folder}", f"--dram={dram}", "--json"]
        options += [f"--{name}=127.0.0.1:0" for name in ("listen", "worker-listen")]
        options += ["--admin=off", "--worker-admin=off"]
        if config:
            file = self._folder / "pool.toml"
            file.write_text(config)
            options.append(f"--config={file}")
        command = [str(Path(sys.executable).parent / "kvharbor"), "up", *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, preexec_fn=_end_with_parent
        )
        try:
            ready = self._ready()
        except BaseException:
            self.close()
            raise
        self.master = str(ready["master"]["listen"])
        self._servers = [int(ready["master"]["pid"]), int(ready["worker"]["pid"])]

    def _ready(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_TIMEOUT_S)[0]:
            raise PoolFailed(f"kvharbor up was not ready within {START_TIMEOUT_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise PoolFailed(f"kvharbor up ended with {self._process.wait()}")
        ready: dict[str, Any] = json.loads(line)
        return ready

    @property
    def master_pid(self) -> int:
        """For its memory."""
        return self._servers[0]

    @property
    def pids(self) -> list[int]:
        """The processes that work for it."""
        return list(self._servers)

    def clock(self) -> ProcessClock:
        """Processor time of all that works for a call now: this process, servers, children."""
        pids = [os.getpid(), *self._servers]
        return ProcessClock([*pids, *(child for pid in pids for child in _children(pid))])

    def close(self) -> None:
        """Stop the pool, whatever state it is in."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.rmtree(self._segments, ignore_errors=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _children(pid: int) -> list[int]:
    """Engine processes: children of a server or of this process that run our engine's program."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [
            int(child)
            for child in listing.read_text().split()
            if b"mooncake_child" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
    return found


def layout_of(page_bytes: int) -> tuple[Content, Layout]:
    """A model whose pages have that many bytes, a multiple of LAYER_BYTES, in one part."""
    layers, rest = divmod(page_bytes, LAYER_BYTES)
    assert not rest, page_bytes
    group = CacheGroup(Attention.FULL, layers, 1, 128, 128)
    content = Content("default", "benchmark", "", "", "float16", (group,), "")
    return content, Layout(page_tokens=PAGE_TOKENS)


class Client:
    """One store that uses one transport, with a ring of source pages and one to read into."""

    def __init__(self, pool: Pool, transport: str, source_bytes: int, into: Region) -> None:
        """Connect; `into` may be shared by clients that take turns."""
        self._pool = pool
        self.transport = transport
        self.store = KVStore.connect(pool.master, transports=(transport,))
        self.source: Buffer = self.store.buffer(source_bytes)
        fill(self.source.view, SEED)
        self.ring = Ring(self.source.address, source_bytes)
        self._into = into
        self._chains: dict[tuple[str, int], PageChain] = {}
        self._opened: dict[int, OpenedNamespace] = {}
        self._threads = ThreadPoolExecutor(2)

    def close(self) -> None:
        """Let everything go."""
        self._threads.shutdown()
        self.store.close()

    def opened(self, page_bytes: int) -> OpenedNamespace:
        """The namespace of pages of this size."""
        if page_bytes not in self._opened:
            self._opened[page_bytes] = self.store.open(*layout_of(page_bytes))
        return self._opened[page_bytes]

    def chain(self, label: str, turn: int, page_bytes: int, pages: int) -> PageChain:
        """Keys that only this label and turn have."""
        key = f"{label}/{page_bytes}/{pages}", turn
        if key not in self._chains:
            name = hashlib.shake_128(f"{key[0]}/{turn}".encode()).digest(4 * PAGE_TOKENS)
            tokens = [*array("I", name), *range(PAGE_TOKENS * (pages - 1))]
            self._chains[key] = self.opened(page_bytes).chain(tokens)
        return self._chains[key]

    def put(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Store a batch as one chain."""
        opened, chain = self.opened(page_bytes), self.chain(label, turn, page_bytes, pages)
        offsets = self.ring.offsets(turn, page_bytes, pages)
        with _Timed(self._pool, page_bytes * pages) as timed:
            outcomes = self.store.put(opened, chain, self.source, offsets)
        _require(outcomes, Stored, "put")
        return timed.sample

    def put_by_two(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Store a batch as two chains from two threads."""
        opened = self.opened(page_bytes)
        half = pages // 2
        chains = [self.chain(f"{label}/{i}", turn, page_bytes, half) for i in range(2)]
        offsets = self.ring.offsets(turn, page_bytes, pages)
        sides = [offsets[:half], offsets[half:]]

        def store(side: int) -> Sequence[object]:
            return self.store.put(opened, chains[side], self.source, sides[side])

        with _Timed(self._pool, page_bytes * half * 2) as timed:
            outcomes = list(self._threads.map(store, range(2)))
        for each in outcomes:
            _require(each, Stored, "put")
        return timed.sample

    def put_each(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Store pages one by one, each a chain of its own; the sample is one page's share."""
        opened = self.opened(page_bytes)
        chains = [self.chain(f"{label}/{i}", turn, page_bytes, 1) for i in range(pages)]
        offsets = self.ring.offsets(turn, page_bytes, pages)
        results = []
        with _Timed(self._pool, page_bytes * pages) as timed:
            for chain, offset in zip(chains, offsets, strict=True):
                results.append(self.store.put(opened, chain, self.source, [offset]))
        for outcomes in results:
            _require(outcomes, Stored, "put")
        return timed.share(pages)

    def get(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Find a batch and copy it out."""
        opened, chain = self.opened(page_bytes), self.chain(label, turn, page_bytes, pages)
        offsets = self._into.offsets(turn, page_bytes, pages)
        self._wipe(offsets)
        with _Timed(self._pool, page_bytes * pages) as timed:
            match = self.store.match_prefix(opened, chain)
            outcomes = self.store.read(match, self._into.view, offsets)
        if len(outcomes) != pages:
            raise PoolFailed(f"match_prefix: {len(outcomes)} of {pages} pages")
        _require(outcomes, Hit, "read")
        self._compare(turn, page_bytes, pages)
        return timed.sample

    def get_each(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Find and copy pages one by one; the sample is one page's share."""
        opened = self.opened(page_bytes)
        chains = [self.chain(f"{label}/{i}", turn, page_bytes, 1) for i in range(pages)]
        offsets = self._into.offsets(turn, page_bytes, pages)
        self._wipe(offsets)
        into, results = self._into.view, []
        with _Timed(self._pool, page_bytes * pages) as timed:
            for chain, offset in zip(chains, offsets, strict=True):
                match = self.store.match_prefix(opened, chain)
                results.append(self.store.read(match, into, [offset]))
        for outcomes in results:
            _require(outcomes, Hit, "read")
        self._compare(turn, page_bytes, pages)
        return timed.share(pages)

    def view(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Find a batch and hold verified views of it, without copying."""
        opened, chain = self.opened(page_bytes), self.chain(label, turn, page_bytes, pages)
        timed = _Timed(self._pool, page_bytes * pages)
        with timed:
            match = self.store.match_prefix(opened, chain)
            with self.store.views(match) as views:
                good = sum(isinstance(view, memoryview) for view in views)
                del views
        if good != pages:
            raise PoolFailed(f"views: {good} of {pages} pages")
        return timed.sample

    def remove(self, label: str, turn: int, page_bytes: int, pages: int) -> None:
        """Take a batch out again."""
        chain = self.chain(label, turn, page_bytes, pages)
        if not all(self.store.remove(self.opened(page_bytes), chain)):
            raise PoolFailed("remove: some pages were not there")

    def _wipe(self, offsets: list[int]) -> None:
        for at in offsets:
            ctypes.memset(self._into.address + at, 0, 64)

    def _compare(self, turn: int, page_bytes: int, pages: int) -> None:
        into = self._into.offsets(turn, page_bytes, pages)[0]
        source = self.ring.offsets(turn, page_bytes, pages)[0]
        if not same(self._into.address + into, self.ring.address + source, page_bytes * pages):
            raise PoolFailed("read: other bytes than were put")


class _Timed:
    """Seconds and processor seconds between entering and leaving."""

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self._clock = pool.clock()
        self._nbytes = nbytes
        self.sample = Sample(0.0)

    def __enter__(self) -> Self:
        self._cpu_s = self._clock.now_s()
        self._started_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return  # A process whose clock is asked for may be gone.
        seconds = time.perf_counter() - self._started_s
        self.sample = Sample(seconds, self._nbytes, self._clock.now_s() - self._cpu_s)

    def share(self, count: int) -> Sample:
        """One of `count` equal shares."""
        whole = self.sample
        return Sample(whole.seconds / count, whole.nbytes // count, whole.cpu_s / count)


def _require(outcomes: Sequence[object], kind: type, what: str) -> None:
    bad = [outcome for outcome in outcomes if not isinstance(outcome, kind)]
    if bad:
        raise PoolFailed(f"{what}: {len(bad)} of {len(outcomes)} pages failed, first {bad[0]!r}")
