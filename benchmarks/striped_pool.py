"""A pool whose cold pages are in stripes over drives: what they take, and how long reads take.

Read one by one over TCP, from drives: pages whose holder is there, and in turns with them pages
whose holder was killed, which are decoded from others.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Case, Sample, interleave, size_name
from benchmarks.pool import PoolFailed
from kvstore import Hit, KVStore, Stored
from master.placing import RANKED_FOR_S
from tests.cluster.pages import Pages, content
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from benchmarks.harness import Series
    from kvstore.client.locations import Locations

PAGES: Final = 32
REPLICAS: Final = 3
"""What stripes of m = 2 are held against."""
WAIT_S: Final = 60.0
REST_S: Final = 1.0


class StripedPool:
    """A context manager: pages that were striped, of which one host is gone."""

    def __init__(self, folder: Path, code: tuple[int, int], page_bytes: int) -> None:
        """As many workers as a stripe has shards, and a drive of each."""
        self._k, self._m = code
        self._page_bytes = page_bytes
        (folder / "drives").mkdir()
        drive_bytes = PAGES * page_bytes + (128 << 20)
        master: dict[str, object] = {
            "replicas": 1, "placement": "most_free", "replication": "off",
            "erasure": "reed-solomon", "repair_after_s": 3600.0,
            "erasure_parameters": f"k={self._k}, m={self._m}, cold_after_s=2, left_s=0",
        }  # fmt: skip
        drives = f"{folder / 'drives'}:{drive_bytes}"
        worker: dict[str, object] = {"transports": ["tcp"], "nvme": [drives]}
        shape = Shape(
            masters=1, members=0, workers=self._k + self._m, master=master, worker=worker,
            dram="64MiB",
        )  # fmt: skip
        self._undo = ExitStack()
        self._rig = Rig(folder / "pool", shape)

    def __enter__(self) -> Self:
        with self._undo:
            self._undo.enter_context(self._rig)
            self._store = KVStore.connect(self._rig.addresses, transports=("tcp",))
            self._undo.callback(self._store.close)
            self._opened = self._store.open(content("stripes", self._page_bytes), Pages.layout())
            self._chains = [self._opened.chain([1 << 20, number, 0, 0]) for number in range(PAGES)]
            self._put()
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _put(self) -> None:
        """Slower than segments are ranked, so that each page goes to the emptiest: as many on every
        host, and some of the one that is killed in stripes as pages, not as parity only.
        """
        buffer = self._store.buffer(self._page_bytes)
        for number, chain in enumerate(self._chains):
            buffer.view[:] = random.Random(number).randbytes(self._page_bytes)
            if [*self._store.put(self._opened, chain, buffer, [0], tier="nvme")] != [Stored()]:
                raise PoolFailed("a page was not stored")
            time.sleep(2 * RANKED_FOR_S)
        until("pages are striped", self._is_striped, WAIT_S)

    def _count(self, name: str) -> int:
        return self._rig.status(0).counters.get(name, 0)

    def _is_striped(self) -> bool:
        """Whether most are, as far as pages lie on hosts enough, and no more are being made."""
        made = self._count("stripes_made")
        time.sleep(REST_S)
        is_most = made * self._k >= PAGES // 2 and made == self._count("stripes_made")
        return is_most and self._count("copied_pages_nvme") >= made * self._m

    def space(self) -> tuple[float, float]:
        """Bytes stored of each byte of a page in a stripe, and with replicas instead."""
        striped = self._count("stripes_made") * self._k
        sealed = sum(each.sealed_bytes for each in self._rig.status(0).segments)
        mine = sealed - (PAGES - striped) * self._page_bytes
        return mine / (striped * self._page_bytes), float(REPLICAS)

    def lose_one(self) -> None:
        """Kill a worker; its pages are decoded from then on."""
        self._rig.workers[0].kill()
        until("its pages are given by stripes", lambda: self._count("pages_degraded") > 0, WAIT_S)
        until("all of them", self._is_clean, WAIT_S)

    def _is_clean(self) -> bool:
        before = self._count("pages_degraded")
        time.sleep(0.5)
        return self._count("pages_degraded") == before

    def located(self) -> tuple[list[Locations], list[Locations]]:
        """Pages whose holder is there, and pages that are decoded."""
        plain: list[Locations] = []
        decoded: list[Locations] = []
        for chain in self._chains:
            match = self._store.match_prefix(self._opened, chain)
            if match.pages:
                (run,) = match.pieces[0].located.runs
                (decoded if run.copies[0].stripes else plain).append(match)
        return plain, decoded

    def read(self, rounds: int) -> dict[str, Series]:
        """Both kinds in turns, page by page."""
        into = bytearray(self._page_bytes)
        plain, decoded = self.located()
        if not decoded:
            raise PoolFailed("no page of the worker that was killed is in a stripe")

        def one(found: list[Locations], turn: int) -> Sample:
            match = found[turn % len(found)]
            began_s = time.perf_counter()
            outcomes = self._store.read(match, into, [0])
            seconds = time.perf_counter() - began_s
            if outcomes != [Hit()]:
                raise PoolFailed(f"read: {outcomes}")
            return Sample(seconds, self._page_bytes)

        cases = [
            Case("plain", lambda turn: one(plain, turn)),
            Case("decoded", lambda turn: one(decoded, turn)),
        ]
        return interleave(cases, rounds, warmups=8)

    def name(self) -> str:
        """Of the case."""
        return f"{self._k}+{self._m}/{size_name(self._page_bytes)}"
