"""A pool of several masters over a real etcd, filled with pages: what is asked of it, how long it
keeps silent, and what filling it told etcd."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import KIB, MIB
from kvstore import KVStore, Miss, Stored
from kvstore.errors import Unavailable
from tests.cluster.pages import PAGE_TOKENS, Pages, content
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from kvstore import PageChain

PAGE_BYTES: Final = 4 * KIB
CHAIN_PAGES: Final = 256
SPARE: Final = 1.2
"""Memory of the worker over what is put into it, so that nothing is evicted."""
WAIT_S: Final = 60.0
IDLE_S: Final = 1.0
SETTLED_S: Final = 0.5
PAUSE_S: Final = 0.01
"""Between questions of who watches: it must not fill the pool."""


class NotStored(RuntimeError):
    """A page was refused."""


class Pool:
    """A rig, two clients of it, and the chains that were put: a context manager."""

    def __init__(self, pages: int, masters: int = 2, members: int = 3) -> None:
        """Prepare it for so many pages; without members of etcd metadata are in SQLite."""
        self.pages = pages
        self._undo = ExitStack()
        folder = Path(tempfile.mkdtemp(prefix="kvharbor-bench-"))
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        dram = max(128 * MIB, int(pages * PAGE_BYTES * SPARE) // MIB * MIB)
        shape = Shape(masters=masters, workers=1, members=members, dram=str(dram))
        self.rig = Rig(folder / "pool", shape)
        self.chains: list[PageChain] = []
        self._serial = 0

    def __enter__(self) -> Self:
        """Start and fill it."""
        with self._undo:
            self._undo.enter_context(self.rig)
            self._threads = self._undo.enter_context(ThreadPoolExecutor(2))
            self._reader, self._writer = (
                self._undo.enter_context(KVStore.connect(self.rig.addresses, timeout_s=WAIT_S))
                for _ in range(2)
            )
            self._opened = self._reader.open(content("failover", PAGE_BYTES), Pages.layout())
            self._source = self._writer.buffer(CHAIN_PAGES * PAGE_BYTES)
            self._source.view[:] = os.urandom(len(self._source.view))
            self._fill()
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _fill(self) -> None:
        while (left := self.pages - sum(map(len, self.chains))) > 0:
            self.chains.append(self._put(min(CHAIN_PAGES, left)))

    def _put(self, pages: int) -> PageChain:
        """Put pages that nobody has put."""
        self._serial += 1
        chain = self._opened.chain([self._serial, *range(pages * PAGE_TOKENS - 1)])
        offsets = range(0, pages * PAGE_BYTES, PAGE_BYTES)
        outcomes = self._writer.put(self._opened, chain, self._source, offsets)
        if outcomes != [Stored()] * pages:
            raise NotStored(str(outcomes[0]))
        return chain

    def found(self) -> int:
        """How many of the pages are found now."""
        return sum(map(self._found_of, self.chains))

    def is_first_gone(self) -> bool:
        """Whether no page of the first chain is found."""
        return not self._found_of(self.chains[0])

    def _found_of(self, chain: PageChain) -> int:
        return self._reader.match_prefix(self._opened, chain, lease=False).pages

    def ask(self) -> tuple[float, float]:
        """Seconds until a lookup is answered with a lease, and until a page is stored."""
        began_s = time.monotonic()

        def after(work: Callable[[], bool]) -> float:
            while not work():
                pass
            return time.monotonic() - began_s

        looking = self._threads.submit(after, self._is_leased)
        putting = self._threads.submit(after, self._is_stored)
        return looking.result(), putting.result()

    def _is_leased(self) -> bool:
        return bool(self._reader.match_prefix(self._opened, self.chains[0]).leased_until_s)

    def _is_stored(self) -> bool:
        try:
            self._put(1)
        except (NotStored, Unavailable):
            return False
        return True

    def watch(self, seconds: float) -> tuple[float, float]:
        """The longest time without a lookup that grants a lease, and without a put, in so long."""
        ends_s = time.monotonic() + seconds

        def gap(work: Callable[[], bool]) -> float:
            longest_s, last_s = 0.0, time.monotonic()
            while last_s < ends_s:
                if work():
                    now_s = time.monotonic()
                    longest_s, last_s = max(longest_s, now_s - last_s), now_s
                time.sleep(PAUSE_S)
            return longest_s

        looking = self._threads.submit(gap, self._is_leased)
        putting = self._threads.submit(gap, self._is_stored)
        return looking.result(), putting.result()

    def await_whole(self) -> None:
        """Until all pages are found; each is asked for again only while it is missed."""
        for chain in self.chains:
            until("all pages are found", partial(self._is_found, chain), WAIT_S)

    def _is_found(self, chain: PageChain) -> bool:
        return self._found_of(chain) == len(chain)

    def read_seconds(self) -> tuple[float, int]:
        """How long a copying read of one chain over tcp takes, and how many pages it misses."""
        into = bytearray(CHAIN_PAGES * PAGE_BYTES)
        offsets = range(0, len(into), PAGE_BYTES)
        began_s = time.monotonic()
        outcomes = self._streaming.read(self._located, into, offsets)
        return time.monotonic() - began_s, sum(isinstance(each, Miss) for each in outcomes)

    def prepare_read(self) -> None:
        """Look a chain up and connect to its worker by tcp."""
        self._streaming = self._undo.enter_context(
            KVStore.connect(self.rig.addresses, transports=("tcp",), timeout_s=WAIT_S)
        )
        self._located = self._streaming.match_prefix(self._opened, self.chains[0])
        assert self.read_seconds()[1] == 0


class Metered(Pool):
    """A pool that notes what filling it told etcd."""

    def _fill(self) -> None:
        idle = EtcdCounts.of(self.rig)
        time.sleep(IDLE_S)
        before = EtcdCounts.of(self.rig)
        super()._fill()
        self.fill_s = time.monotonic() - before.at_s
        last = EtcdCounts.of(self.rig)
        while True:
            time.sleep(SETTLED_S)
            after = EtcdCounts.of(self.rig)
            if after.revision == last.revision:
                break
            last = after
        self.stored_s = last.at_s - before.at_s
        rate = (before.nbytes - idle.nbytes) / (before.at_s - idle.at_s)
        self.etcd_writes = after.revision - before.revision
        self.etcd_bytes = after.nbytes - before.nbytes - rate * (after.at_s - before.at_s)


@dataclass(frozen=True)
class EtcdCounts:
    """What etcd has been told, by all its members."""

    at_s: float
    revision: int
    """Rises with every transaction that writes."""
    nbytes: int
    """Of all requests."""

    @classmethod
    def of(cls, rig: Rig) -> Self:
        """Now."""
        nbytes = 0
        for member in rig.etcd.members:
            with urllib.request.urlopen(f"http://{member.address}/metrics") as answer:
                for line in answer.read().decode().splitlines():
                    if line.startswith("etcd_network_client_grpc_received_bytes_total "):
                        nbytes += int(float(line.split()[1]))
        header = rig.etcd.members[0].ask("kv/range", key="AA==")["header"]
        return cls(time.monotonic(), int(header["revision"]), nbytes)
