"""How long is a pool away when its leader dies, and what does that cost, beside Mooncake Store?

Real masters, a real worker and a real etcd of three members, all on this machine. The leader is
killed again and again; each time clients that were connected to it ask at once, and the clock stops
at the first lookup that is answered with a lease, and at the first page that is stored. Then the
leader hands over, a member of etcd that leads is stopped, the worker is killed; and what is written
to etcd for a thousand pages. The peer's master is killed and started again at once, and so is one
of ours that has no other beside it.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.failover_pool import PAGE_BYTES, Metered, Pool
from benchmarks.harness import KIB, MIB, Report, arguments
from benchmarks.peers import mooncake_store
from benchmarks.peers.mooncake_store import MooncakeStore
from tests.cluster.servers import until

if TYPE_CHECKING:
    import argparse

PAGES: Final = 10 * 1024
PHASE_S: Final = 0.5
"""A kill comes at a random moment of so long: the leader renews its lease that often."""
STOPPED_S: Final = 4.0
"""So long a member of etcd is stopped: twice what a leader's lease lasts."""
SEED: Final = 5
PEER_SEGMENT: Final = 256 * MIB
PEER_PAGE_BYTES: Final = 64 * KIB
PEER_BATCH: Final = 64
PEER_BATCHES: Final = 4


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", _options)
    report = Report("When a leader dies, beside Mooncake Store", options)
    sizes = [PAGES] if options.quick else [PAGES, 100_000, 1_000_000]
    kills, few = (3, 1) if options.quick else (options.kills, 5)
    report.parameters(
        peer=f"Mooncake Store {mooncake_store.version()}",
        kills=kills,
        page=PAGE_BYTES,
        pages=", ".join(map(str, sizes)),
        etcd_members=3,
    )
    with Metered(sizes[0]) as pool:
        _kills(report, pool, kills)
        _losses(report, pool, few)
        takeovers = [_takeover(pool)]
    for pages in sizes[1:]:
        with Metered(pages) as pool:
            takeovers.append(_takeover(pool))
    report.table("Takeovers by a leader that hands over, and what etcd was told", takeovers)
    report.at_most(f"takeover/{sizes[-1]}_s", float(takeovers[-1]["all found s"]), 5.0)
    report.reported(f"etcd/bytes_a_page/{sizes[-1]}", float(takeovers[-1]["etcd bytes/page"]))
    _restarts(report, few)
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20, help="of the leader (3 if --quick)")


@dataclass
class Times:
    """What repeated losses of one kind cost."""

    seconds: list[float] = field(default_factory=list)

    def row(self, what: str) -> dict[str, str | int | float]:
        """For a table."""
        ordered = sorted(self.seconds)
        return {
            "what": what,
            "times": len(ordered),
            "p50 s": median(ordered),
            "p99 s": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            "max s": ordered[-1],
        }


def _kills(report: Report, pool: Pool, kills: int) -> None:
    """kill -9 of the leader, with another master standing by."""
    draw = random.Random(SEED)
    lookups, puts, whole = Times(), Times(), Times()
    lost = 0
    for _ in range(kills):
        rig = pool.rig
        master = rig.masters[rig.leader()]
        time.sleep(draw.uniform(0, PHASE_S))
        master.kill()
        began_s = time.monotonic()
        lookup_s, put_s = pool.ask()
        lookups.seconds.append(lookup_s)
        puts.seconds.append(put_s)
        pool.await_whole()
        whole.seconds.append(time.monotonic() - began_s)
        lost = max(lost, pool.pages - pool.found())
        master.start()
    rows = [lookups.row("first lookup"), puts.row("first put"), whole.row("every page found")]
    report.table(f"kill -9 of the leader, {pool.pages} pages", rows)
    worst = max(*lookups.seconds, *puts.seconds)
    report.at_most("kill/lookup_or_put_max_s", worst, 3.5)
    report.at_most("kill/lookup_p50_s", median(lookups.seconds), 2.8)
    report.at_most("kill/put_p50_s", median(puts.seconds), 2.8)
    report.at_most("kill/pages_lost", lost, 0)


def _losses(report: Report, pool: Pool, rounds: int) -> None:
    """The leading member of etcd is stopped; the worker is killed."""
    rig = pool.rig
    lookups, puts, gone, met = Times(), Times(), Times(), Times()
    for _ in range(rounds):
        member = rig.etcd.leader()
        member.freeze()
        lookup_s, put_s = pool.watch(STOPPED_S)
        lookups.seconds.append(lookup_s)
        puts.seconds.append(put_s)
        member.thaw()
    for _ in range(rounds):
        pool.prepare_read()
        rig.workers[0].kill()
        read_s, misses = pool.read_seconds()
        assert misses, "a dead worker's pages were read over tcp"
        met.seconds.append(read_s)
        gone.seconds.append(until("its pages are gone", pool.is_first_gone))
        rig.workers[0].start()
        pool.await_whole()
    rows = [
        lookups.row("etcd's leader stopped: without a leased lookup"),
        puts.row("etcd's leader stopped: without a put"),
        met.row("worker killed: a read of its pages is a miss"),
        gone.row("worker killed: no lookup finds them"),
    ]
    report.table("Other losses", rows)
    report.at_most("etcd_leader_stopped/max_s", max(*lookups.seconds, *puts.seconds), 10.0)
    report.at_most("worker_killed/read_is_a_miss_s", max(met.seconds), 0.2)
    report.at_most("worker_killed/pages_gone_s", max(gone.seconds), 3.0)


def _takeover(pool: Metered) -> dict[str, str | int | float]:
    """The leader hands over: no lease has to end first, so what is left is the takeover."""
    rig = pool.rig
    master = rig.masters[rig.leader()]
    master.terminate()
    began_s = time.monotonic()
    lookup_s, put_s = pool.ask()
    pool.await_whole()
    whole_s = time.monotonic() - began_s
    master.wait()
    thousands = pool.pages / 1000
    return {
        "pages": pool.pages,
        "first lookup s": lookup_s,
        "first put s": put_s,
        "all found s": whole_s,
        "put in s": pool.fill_s,
        "in etcd after s": pool.stored_s,
        "etcd writes/1000 pages": pool.etcd_writes / thousands,
        "etcd bytes/page": pool.etcd_bytes / pool.pages,
    }


def _restarts(report: Report, rounds: int) -> None:
    """A master without another beside it is killed and started again at once: ours, and theirs."""
    rows: list[dict[str, str | int | float]] = []
    ours = _our_restarts(rounds)
    theirs, share = _their_restarts(rounds)
    for who, (lookups, puts), kept in (("kvharbor", ours, 1.0), ("mooncake store", theirs, share)):
        for what, times in (("first lookup", lookups), ("first put", puts)):
            rows.append({"who": who, "keys kept": kept, **times.row(what)})
    report.table("A single master, killed and started again at once", rows)
    for what, our, their in zip(("lookup", "put"), ours, theirs, strict=True):
        value = median(our.seconds) / median(their.seconds)
        report.reported(f"restart/{what}/mooncake", value)
    report.reported("restart/keys_lost_by_mooncake", 1 - share)


def _our_restarts(rounds: int) -> tuple[Times, Times]:
    lookups, puts = Times(), Times()
    with Pool(PEER_BATCH * PEER_BATCHES, masters=1, members=0) as pool:
        (master,) = pool.rig.masters
        for _ in range(rounds):
            master.kill()
            began_s = time.monotonic()
            master.launch()
            launched_s = time.monotonic() - began_s
            lookup_s, put_s = pool.ask()
            lookups.seconds.append(launched_s + lookup_s)
            puts.seconds.append(launched_s + put_s)
            pool.await_whole()
    return lookups, puts


def _their_restarts(rounds: int) -> tuple[tuple[Times, Times], float]:
    """Times, and the share of the keys that was still there afterwards."""
    lookups, puts = Times(), Times()
    kept = 0
    with MooncakeStore(PEER_SEGMENT, pools=(True,)) as peer:
        asked = peer.requesters[True]
        for turn in range(rounds):
            label = f"kept/{turn}"
            for batch in range(PEER_BATCHES):
                stored = asked.tried(label, batch, PEER_PAGE_BYTES, PEER_BATCH)
                assert stored == PEER_BATCH, stored
            began_s = time.monotonic()
            peer.restart_master()
            while asked.found(label, 0, PEER_BATCH) < 0:
                pass
            lookups.seconds.append(time.monotonic() - began_s)
            tries = 0
            while not asked.tried(f"new/{turn}", tries, PEER_PAGE_BYTES, 1):
                tries += 1
            puts.seconds.append(time.monotonic() - began_s)
            kept += sum(asked.found(label, each, PEER_BATCH) for each in range(PEER_BATCHES))
    return (lookups, puts), kept / (rounds * PEER_BATCHES * PEER_BATCH)


if __name__ == "__main__":
    sys.exit(main())
