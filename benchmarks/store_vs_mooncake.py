"""How fast do pages go in and out, beside Mooncake Store on the same machine at the same time?

Page sizes from 64 KiB to 16 MiB; put, get, zero-copy get; our transports shm, tcp and mooncake;
whole batches, small batches, single pages; processor seconds of a gigabyte, over all processes
that take part. The yardstick of one-host figures is memcpy of the same pages by one thread.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.harness import (
    KIB,
    MIB,
    Case,
    Report,
    Sample,
    Series,
    arguments,
    interleave,
    size_name,
)
from benchmarks.peers import mooncake_store
from benchmarks.peers.mooncake_store import MooncakeStore, Requester
from benchmarks.pool import Client, Pool
from benchmarks.regions import ROTATING_BYTES, Region, memcpy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

SIZES: Final = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
BATCH_BYTES: Final = 32 * MIB
SMALL_BATCH_BYTES: Final = MIB
SINGLES: Final = (64 * KIB, MIB)
SINGLES_A_ROUND: Final = 10
SINGLE_ROUNDS: Final = 16
SMALL_ROUNDS: Final = 32
KEPT: Final = ROTATING_BYTES // BATCH_BYTES
"""Batches that stay in the stores: enough to go around the ring, few enough to fit."""
DRAM: Final = "1536MiB"
SEGMENT_BYTES: Final = 768 * MIB
CONFIG: Final = '[worker]\ntransports = ["shm", "tcp", "mooncake"]\n'
TRANSPORTS: Final = ("shm", "tcp", "mooncake")
PEERS: Final = {True: "mooncake store", False: "mooncake store, no pool"}

Op = "Callable[[str, int, int, int], Sample]"


@dataclass(frozen=True)
class Setting:
    """Everything that takes part, and how often each case runs."""

    clients: dict[str, Client]
    requesters: dict[bool, Requester]
    into: Region
    rounds: int
    quick: bool

    def without_pool(self, pages: int) -> bool:
        """Whether requesters without connection pool take part.

        Not with hundreds of pages in the quick form: so many connections at once overflow the
        owner's backlog, and a round takes seconds.
        """
        return not self.quick or pages <= 128

    def kept(self, turn: int) -> int:
        """The put of a kept batch that get number `turn` reads."""
        return self.rounds - (self.rounds - turn) % KEPT


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", _options)
    report = Report("Pages in and out, beside Mooncake Store", options)
    rounds = 8 if options.quick else options.rounds
    report.parameters(
        peer=f"Mooncake Store {mooncake_store.version()}",
        rounds=rounds,
        batch=size_name(BATCH_BYTES),
        rotating=size_name(ROTATING_BYTES),
        page_tokens=16,
    )
    into = Region(ROTATING_BYTES)
    with MooncakeStore(SEGMENT_BYTES) as peer, Pool(DRAM, CONFIG) as pool:
        clients = {name: Client(pool, name, ROTATING_BYTES, into) for name in TRANSPORTS}
        try:
            setting = Setting(clients, peer.requesters, into, rounds, options.quick)
            _batches(report, setting)
            _small_batches(report, setting)
            _singles(report, setting)
        finally:
            for client in clients.values():
                client.close()
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=24, help="of each case (8 if --quick)")


def _batches(report: Report, setting: Setting) -> None:
    rows: list[dict[str, str | int | float]] = []
    for page_bytes in SIZES:
        pages = BATCH_BYTES // page_bytes
        label = f"batch/{page_bytes}"
        puts = _put_round(setting, label, page_bytes, pages)
        gets = _get_round(setting, label, page_bytes, pages)
        _forget(setting, label, page_bytes, pages)
        for op, series in (("put", puts), ("get", gets)):
            rows += [_row(page_bytes, op, name, each) for name, each in series.items()]
        _judge_batches(report, page_bytes, puts, gets)
    report.table(f"Batches of {size_name(BATCH_BYTES)}", rows)


def _row(page_bytes: int, op: str, name: str, series: Series) -> dict[str, str | int | float]:
    return {
        "page": size_name(page_bytes),
        "op": op,
        "who": name,
        "GB/s": series.gb_per_s,
        "median ms": series.median_s * 1e3,
        "p99 ms": series.p99_s * 1e3,
        "cpu s/GB": series.cpu_s_per_gb,
    }


def _put_round(setting: Setting, label: str, page_bytes: int, pages: int) -> dict[str, Series]:
    """Puts in turns. What shm and the first requester put stays, to be read afterwards."""
    cases = [_memcpy_case(setting, page_bytes, pages)]
    for name, client in setting.clients.items():
        keep = name == "shm"
        cases.append(Case(name, _putting(client, label, page_bytes, pages, keep=keep)))
    shm = setting.clients["shm"]
    if pages % 2 == 0:
        cases.append(Case("shm, 2 threads", _putting_by_two(shm, label, page_bytes, pages)))
    for pool, requester in setting.requesters.items():
        if pool or setting.without_pool(pages):
            run = _peer_putting(requester, label, page_bytes, pages, keep=pool)
            cases.append(Case(PEERS[pool], run))
    return interleave(cases, setting.rounds)


def _get_round(setting: Setting, label: str, page_bytes: int, pages: int) -> dict[str, Series]:
    cases = [_memcpy_case(setting, page_bytes, pages)]
    for name, client in setting.clients.items():
        cases.append(Case(name, _kept(setting, client.get, f"{label}/shm", page_bytes, pages)))
    view = setting.clients["shm"].view
    cases.append(Case("shm, zero-copy", _kept(setting, view, f"{label}/shm", page_bytes, pages)))
    for pool, requester in setting.requesters.items():
        if pool or setting.without_pool(pages):
            run = _kept(setting, requester.get, label, page_bytes, pages)
            cases.append(Case(PEERS[pool], run))
    return interleave(cases, setting.rounds)


def _kept(
    setting: Setting,
    op: Callable[[str, int, int, int], Sample],
    label: str,
    page_bytes: int,
    pages: int,
) -> Callable[[int], Sample]:
    return lambda turn: op(label, setting.kept(turn), page_bytes, pages)


def _memcpy_case(setting: Setting, page_bytes: int, pages: int) -> Case:
    source = setting.clients["shm"].ring
    return Case("memcpy", lambda turn: memcpy(source, setting.into, turn, page_bytes, pages))


def _turns(
    op: Callable[[str, int, int, int], Sample], label: str, page_bytes: int, pages: int
) -> Callable[[int], Sample]:
    return lambda turn: op(label, turn, page_bytes, pages)


def _putting(
    client: Client, label: str, page_bytes: int, pages: int, *, keep: bool
) -> Callable[[int], Sample]:
    own = f"{label}/{client.transport}"

    def run(turn: int) -> Sample:
        sample = client.put(own, turn, page_bytes, pages)
        old = turn - KEPT if keep else turn
        if old >= 0:
            client.remove(own, old, page_bytes, pages)
        return sample

    return run


def _putting_by_two(
    client: Client, label: str, page_bytes: int, pages: int
) -> Callable[[int], Sample]:
    own = f"{label}/two"

    def run(turn: int) -> Sample:
        sample = client.put_by_two(own, turn, page_bytes, pages)
        for side in range(2):
            client.remove(f"{own}/{side}", turn, page_bytes, pages // 2)
        return sample

    return run


def _peer_putting(
    requester: Requester, label: str, page_bytes: int, pages: int, *, keep: bool
) -> Callable[[int], Sample]:
    own = label if keep else f"{label}/other"

    def run(turn: int) -> Sample:
        sample = requester.put(own, turn, page_bytes, pages)
        old = turn - KEPT if keep else turn
        if old >= 0:
            requester.remove(own, old, pages)
        return sample

    return run


def _forget(setting: Setting, label: str, page_bytes: int, pages: int) -> None:
    """Take out what the rounds left: a full store answers with misses."""
    for turn in range(max(0, setting.rounds + 1 - KEPT), setting.rounds + 1):
        setting.clients["shm"].remove(f"{label}/shm", turn, page_bytes, pages)
        setting.requesters[True].remove(label, turn, pages)


def _judge_batches(
    report: Report, page_bytes: int, puts: dict[str, Series], gets: dict[str, Series]
) -> None:
    name = size_name(page_bytes)
    put_peer, get_peer = _best_peer(puts), _best_peer(gets)
    if page_bytes >= 256 * KIB:
        report.at_least(f"get/shm/{name}/mooncake", gets["shm"].speedup_over(get_peer), 4.0)
        report.at_least(f"get/shm/{name}/memcpy", gets["shm"].speedup_over(gets["memcpy"]), 0.75)
        report.at_least(f"put/shm/{name}/mooncake", puts["shm"].speedup_over(put_peer), 4.0)
        report.at_least(f"put/shm/{name}/memcpy", puts["shm"].speedup_over(puts["memcpy"]), 0.6)
        two = puts.get("shm, 2 threads")
        if two is not None:
            report.at_least(f"put/shm2/{name}/memcpy", two.speedup_over(puts["memcpy"]), 0.85)
        views = gets["shm, zero-copy"]
        report.at_least(f"view/shm/{name}/memcpy", views.speedup_over(gets["memcpy"]), 1.5)
        report.at_least(f"get/tcp/{name}/mooncake", gets["tcp"].speedup_over(get_peer), 1.5)
        report.at_least(f"put/tcp/{name}/mooncake", puts["tcp"].speedup_over(put_peer), 2.0)
        for op, series, peer in (("get", gets, get_peer), ("put", puts, put_peer)):
            cpu = series["tcp"].cpu_s_per_gb / peer.cpu_s_per_gb
            report.at_most(f"{op}/tcp/{name}/cpu", cpu, 0.5)
    for op, series, peer in (("get", gets, get_peer), ("put", puts, put_peer)):
        report.reported(f"{op}/mooncake/{name}/mooncake", series["mooncake"].speedup_over(peer))


def _best_peer(series: dict[str, Series]) -> Series:
    """The better of the peer's two ways, so that nobody can say we chose the worse."""
    return max((series[n] for n in PEERS.values() if n in series), key=lambda s: s.gb_per_s)


def _small_batches(report: Report, setting: Setting) -> None:
    """1 MiB batches of 64 KiB pages, where round trips count."""
    page_bytes = 64 * KIB
    pages = SMALL_BATCH_BYTES // page_bytes
    puts, gets = _both(setting, "small", page_bytes, pages, SMALL_ROUNDS, single=False)
    rows = [
        _row(page_bytes, op, name, each)
        for op, series in (("put", puts), ("get", gets))
        for name, each in series.items()
    ]
    report.table(f"Batches of {size_name(SMALL_BATCH_BYTES)}", rows)
    for op, series in (("get", gets), ("put", puts)):
        peer = _best_peer(series)
        report.at_least(f"{op}/shm/small/mooncake", series["shm"].speedup_over(peer), 2.0)
        report.at_least(f"{op}/tcp/small/mooncake", series["tcp"].speedup_over(peer), 1.3)


def _singles(report: Report, setting: Setting) -> None:
    """One page a call, as a latency."""
    rows: list[dict[str, str | int | float]] = []
    targets = {64 * KIB: {"get": 0.35, "put": 0.6}, MIB: {"get": 0.15, "put": 0.3}}
    for page_bytes in SINGLES:
        both = _both(setting, "single", page_bytes, SINGLES_A_ROUND, SINGLE_ROUNDS, single=True)
        for op, series in zip(("put", "get"), both, strict=True):
            rows += [
                {
                    "page": size_name(page_bytes),
                    "op": op,
                    "who": name,
                    "median us": each.median_s * 1e6,
                    "p99 us": each.p99_s * 1e6,
                }
                for name, each in series.items()
            ]
            peer = min((series[n] for n in PEERS.values()), key=lambda s: s.median_s)
            value = series["shm"].time_over(peer)
            name = f"{op}1/shm/{size_name(page_bytes)}/mooncake_time"
            report.at_most(name, value, targets[page_bytes][op])
            for other in ("tcp", "mooncake"):
                name = f"{op}1/{other}/{size_name(page_bytes)}/mooncake_time"
                report.reported(name, series[other].time_over(peer))
    report.table("Single pages", rows)


def _both(
    setting: Setting, kind: str, page_bytes: int, pages: int, rounds: int, *, single: bool
) -> tuple[dict[str, Series], dict[str, Series]]:
    """Puts, then gets of what was put, then all taken out; each by its own keys."""
    label = f"{kind}/{page_bytes}"
    puts: list[Case] = []
    gets: list[Case] = []
    for name, client in setting.clients.items():
        put, get = (client.put_each, client.get_each) if single else (client.put, client.get)
        puts.append(Case(name, _turns(put, f"{label}/{name}", page_bytes, pages)))
        gets.append(Case(name, _turns(get, f"{label}/{name}", page_bytes, pages)))
    for pool, requester in setting.requesters.items():
        put, get = requester.put, requester.get
        if single:
            put, get = requester.put_each, requester.get_each
        puts.append(Case(PEERS[pool], _turns(put, f"{label}/{pool}", page_bytes, pages)))
        gets.append(Case(PEERS[pool], _turns(get, f"{label}/{pool}", page_bytes, pages)))
    found = interleave(puts, rounds), interleave(gets, rounds)
    for turn in range(rounds + 1):
        for name, client in setting.clients.items():
            if not single:
                client.remove(f"{label}/{name}", turn, page_bytes, pages)
                continue
            for i in range(pages):
                client.remove(f"{label}/{name}/{i}", turn, page_bytes, 1)
        for pool, requester in setting.requesters.items():
            requester.remove(f"{label}/{pool}", turn, pages)
    return found


if __name__ == "__main__":
    sys.exit(main())
