"""Minutes of load under random faults from a seed: no byte may be wrong, and no page lost.

`python -m tests.cluster.chaos --reads 1000000 --seed 1`. Masters, etcd, workers and a network that
fails, clients that put, read, remove and are killed; it goes on until so many pages were read and
verified, in whole decks of all kinds of faults. Then all is healed, and every page that has to
be there is read. Exit 1 when one byte was wrong, a page was lost, a client got an answer that no
fault explains, or a call took longer than its deadline allows.

`--pool hosts` is a pool of six hosts with two replicas of each page, which loses one of them, with
its memory, after the other; in the end every page has its replicas again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from kvstore import Hit
from tests.cluster.history import MISSED, Call, History, Op, digest
from tests.cluster.load_client import SHARED, Document
from tests.cluster.nemesis import FAULTS, HOST_FAULTS, REPAIRED_S, deck
from tests.cluster.pages import content
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore import OpenedNamespace, PageChain
    from tests.cluster.history import Findings
    from tests.cluster.load_process import LoadProcess
    from tests.cluster.nemesis import Fault
    from tests.cluster.pages import Pages

CLIENTS: Final = 3
KILLED_CLIENTS_SHARE: Final = 0.15
FAULT_MEAN_S: Final = 1.5
FAULT_MAX_S: Final = 7.0
"""Most faults are over before anything is given up, some last until workers are lost."""
CALM_S: Final = (0.2, 1.2)
CALL_SLACK_S: Final = 3.0
"""Beyond a call's deadline, on a machine of few cores that runs everything at once."""


@dataclass(frozen=True)
class Pool:
    """What is put under load, and what may happen to it."""

    shape: Shape
    faults: Mapping[str, Fault]
    transports: tuple[str, ...]
    """Of each client."""
    replicas: int = 0
    """That clients ask for; then nothing happens before all pages have theirs."""


POOLS: Final = {
    "etcd": Pool(
        Shape(masters=2, workers=2, members=3, dram="128MiB", master={"lease_ttl_s": 3.0}),
        FAULTS,
        ("shm", "shm", "tcp"),
    ),
    "hosts": Pool(
        Shape(
            masters=2, workers=6, members=1, master={"lease_ttl_s": 3.0, "repair_after_s": 1.0},
            worker={"transports": ["tcp"], "scrub_bytes_per_s": "64MiB"},
        ),
        HOST_FAULTS,
        ("tcp", "tcp", "tcp"),
        replicas=2,
    ),
}  # fmt: skip


@dataclass
class Result:
    """What came of a run."""

    seconds: float
    faults: Counter[str]
    findings: Findings
    kept: int
    """Pages that had to be there, and were."""
    lost: int
    evicted: int
    deadline_s: float
    lacking: int = 0
    """Pages that have fewer replicas than they are to have."""

    def report(self) -> Iterator[str]:
        """For people."""
        found = self.findings
        faults = sum(self.faults.values())
        yield f"{self.seconds:.0f} s, {faults} faults of {len(self.faults)} kinds"
        yield from (f"  {count:3d} {kind}" for kind, count in sorted(self.faults.items()))
        yield f"pages put {found.puts}, not put {found.refused}, removed {found.removals}"
        yield f"pages read and verified {found.reads}, misses {found.misses}"
        yield f"pages with wrong bytes {found.wrong}"
        yield f"pages that had to be there {self.kept + self.lost}, lost {self.lost}"
        yield f"pages that lack replicas in the end {self.lacking}"
        yield f"longest time without a read {found.read_gap_s:.2f} s, a put {found.put_gap_s:.2f} s"
        yield f"longest call {found.longest_s:.2f} s"
        yield f"calls that raised: {dict(found.errors) or 'none'}"
        yield from found.stories

    def verdicts(self) -> list[str]:
        """Why this run is not good."""
        late_s = self.deadline_s + CALL_SLACK_S
        found = {
            "wrong bytes were read": self.findings.wrong,
            "pages were lost": self.lost,
            "pages were evicted, which hides losses": self.evicted,
            "pages lack replicas": self.lacking,
            f"a call took more than {late_s} s": self.findings.longest_s > late_s,
        }
        return [text for text, is_bad in found.items() if is_bad]


class Chaos:
    """One run."""

    def __init__(self, rig: Rig, draw: Random, pool: Pool) -> None:
        """Start the clients."""
        self._rig = rig
        self._draw = draw
        self._pool = pool
        self._loads = [self._client(number) for number in range(CLIENTS)]
        self._faults: Counter[str] = Counter()

    def _client(self, number: int) -> LoadProcess:
        pool = self._pool
        return self._rig.load(
            number, CLIENTS, transport=pool.transports[number], replicas=pool.replicas
        )

    def run(self, reads: int, seconds_max: float) -> Result:
        """Whole decks of faults until `reads` pages were read, but fail after `seconds_max`."""
        began_s = time.monotonic()
        read = -1
        while read < reads:
            assert time.monotonic() < began_s + seconds_max, f"{read} pages read so far"
            for kind in deck(self._draw, self._pool.faults):
                self._strike(kind)
            read = History(self._rig.calls()).check().reads
        self._rig.heal()
        until("all workers serve again", self._rig.is_serving)
        for load in self._loads:
            load.end()
        self._await_replicas()
        return self._judge(time.monotonic() - began_s)

    def _await_replicas(self) -> None:
        """Nothing is lost by losing one host more."""
        if self._pool.replicas:
            until("every page has its replicas", self._rig.has_replicas, REPAIRED_S)

    def _strike(self, kind: str) -> None:
        """One fault, from its beginning until a little after its end."""
        self._await_replicas()
        began_s = time.monotonic()
        undo = self._pool.faults[kind](self._rig, self._draw)
        self._faults[kind] += 1
        time.sleep(min(FAULT_MAX_S, self._draw.expovariate(1 / FAULT_MEAN_S)))
        undo()
        print(f"{time.monotonic() - began_s:5.1f} s  {kind}", flush=True)
        time.sleep(self._draw.uniform(*CALM_S))
        for number, load in enumerate(self._loads):
            if not load.is_running:
                load.end()  # says why
            if self._draw.random() < KILLED_CLIENTS_SHARE:
                load.kill()
                self._loads[number] = self._client(number)

    def _judge(self, seconds: float) -> Result:
        history = History(self._rig.calls())
        expected = set(history.expected())
        last = list(self._last_reads())
        seen = {k for call in last for k, r in zip(call.keys, call.results, strict=True) if r}
        status = self._rig.status(self._rig.leader())
        return Result(
            seconds,
            self._faults,
            History([*self._rig.calls(), *last]).check(),
            kept=len(expected & seen),
            lost=len(expected - seen),
            evicted=status.counters.get("pages_evicted", 0),
            deadline_s=self._loads[0].load.timeout_s,
            lacking=self._rig.lacking() if self._pool.replicas else 0,
        )

    def _last_reads(self) -> Iterator[Call]:
        """Read every page that any client may have put."""
        load = self._loads[0].load
        with self._rig.pages(self._pool.transports[0]) as pages:
            opened = pages.store.open(content(load.model, load.page_bytes), pages.layout())
            for owner in range(SHARED, CLIENTS):
                for number in range(load.documents):
                    chain = opened.chain(Document(owner, number).tokens(load.document_pages))
                    yield _read_all(pages, opened, chain)


def _read_all(pages: Pages, opened: OpenedNamespace, chain: PageChain) -> Call:
    """Read what is there of a chain, as one call of a history."""
    size = opened.namespace.page_bytes
    into = bytearray(len(chain) * size)
    began_s = time.monotonic()
    found = pages.store.lookup(opened, chain)
    outcomes = pages.store.read(found, into, range(0, len(into), size))
    results = tuple(
        digest(bytes(into[at * size : (at + 1) * size])) if outcome == Hit() else MISSED
        for at, outcome in enumerate(outcomes)
    )
    keys = tuple(key.hex() for key in chain)
    return Call(Op.READ, began_s, time.monotonic(), keys, (), results, "")


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", choices=POOLS, default="etcd", help="what is put under load")
    parser.add_argument("--reads", type=int, default=1_000_000, help="pages to read at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds-max", type=float, default=1800, help="give up after that")
    given = parser.parse_args()
    pool = POOLS[given.pool]
    print(f"pool {given.pool}, seed {given.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="kvharbor-chaos-") as folder,
        Rig(Path(folder) / "pool", pool.shape) as rig,
    ):
        result = Chaos(rig, Random(given.seed), pool).run(given.reads, given.seconds_max)
    print("\n".join(result.report()))
    verdicts = result.verdicts()
    print(f"seed {given.seed}: {'; '.join(verdicts) or 'all is well'}")
    return 1 if verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
