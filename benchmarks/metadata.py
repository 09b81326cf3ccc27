"""What does it cost to ask for pages and to note them, beside Mooncake Store's batch_is_exist?

Masters of their own are filled with 10 k, 100 k and 1 M pages through a synthetic worker over the
real rpc, and asked in turns: probe, match_prefix and lookup of 1, 16, 256 and 1000 keys of a chain,
and of 256 keys from as many chains. Then what a put's metadata costs, what a page takes in memory,
what a victim of eviction costs, and how long the longest call took while the master filled up.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.filled_master import CHAIN_PAGES, FILL_PAGES, Fill, Filled
from benchmarks.harness import (
    KIB,
    MIB,
    Case,
    ProcessClock,
    Report,
    Sample,
    Series,
    arguments,
    interleave,
    memory_bytes,
)
from benchmarks.peers import mooncake_store
from benchmarks.peers.mooncake_store import MooncakeStore, Requester
from kvstore.page import PageChain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence


KEYS: Final = (1, 16, 256, 1000)
PUT_PAGES: Final = 64
CALLS_A_ROUND: Final = 20
RANDOM_KEYS: Final = 256
PEER_PAGE_BYTES: Final = 1 * KIB
PEER_BATCH: Final = 1000
PEER_SEGMENT_BYTES: Final = 512 * MIB
PUTS_BATCHES: Final = 400
VICTIMS: Final = 20_000
EVICTION_PUTS: Final = 16
SETTLE_S: Final = 0.5
"""For what the master does in the background after the last put."""

PROBE_TARGETS: Final = {1: 0.8, 16: 0.8, 256: 0.4, 1000: 0.3}
MATCH_TARGETS: Final = {1: 0.6, 16: 0.6, 256: 0.6, 1000: 0.5}


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", _options)
    report = Report("Metadata, beside Mooncake Store", options)
    sizes = [10_000, 1_000_000] if options.quick else [10_000, 100_000, 1_000_000]
    rounds = 15 if options.quick else options.rounds
    peer_keys = 10_000 if options.quick else 100_000
    report.parameters(
        peer=f"Mooncake Store {mooncake_store.version()}",
        rounds=rounds,
        calls_a_round=CALLS_A_ROUND,
        chain_pages=CHAIN_PAGES,
        peer_keys=peer_keys,
    )
    with ExitStack() as undo:
        filled = [Filled(pages) for pages in sizes]
        for each in filled:
            undo.callback(each.close)
        fills = [each.fill() for each in filled]
        peer = undo.enter_context(MooncakeStore(PEER_SEGMENT_BYTES, pools=(True,)))
        requester, peer_row = _fill_peer(peer, peer_keys)
        _judge_fills(report, filled, fills, peer_row)
        _lookups(report, filled, requester, rounds)
        _puts(report, filled)
        _evictions(report, filled[-1])
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=60, help="of each case (15 if --quick)")


def _fill_peer(peer: MooncakeStore, keys: int) -> tuple[Requester, dict[str, str | int | float]]:
    requester = peer.requesters[True]
    before = memory_bytes(peer.master_pid)
    seconds = sum(
        requester.put("meta", turn, PEER_PAGE_BYTES, PEER_BATCH).seconds
        for turn in range(keys // PEER_BATCH)
    )
    taken = (memory_bytes(peer.master_pid) - before) / keys
    return requester, {
        "who": "mooncake store",
        "pages": keys,
        "pages/s": keys / seconds,
        "pages/core s": "-",
        "bytes/page": taken,
        "p99.9 call ms": "-",
        "longest call ms": "-",
    }


def _judge_fills(
    report: Report,
    filled: Sequence[Filled],
    fills: Sequence[Fill],
    peer_row: dict[str, str | int | float],
) -> None:
    rows: list[dict[str, str | int | float]] = []
    for each, fill in zip(filled, fills, strict=True):
        ordered = sorted(fill.calls_s)
        rows.append(
            {
                "who": "kvharbor",
                "pages": each.pages,
                "pages/s": fill.pages / fill.seconds,
                "pages/core s": fill.pages_per_core_s,
                "bytes/page": fill.memory_bytes / fill.pages,
                "p99.9 call ms": ordered[len(ordered) * 999 // 1000] * 1e3,
                "longest call ms": ordered[-1] * 1e3,
            }
        )
    report.table(f"Filling up, {FILL_PAGES} pages a put", [*rows, peer_row])
    largest = fills[-1]
    report.at_most("memory/bytes_a_page", largest.memory_bytes / largest.pages, 500)
    # A call waits for whatever stalls the loop; the rest of the longest is the machine's.
    ordered = sorted(largest.calls_s)
    report.at_most("stall/ms", ordered[len(ordered) * 999 // 1000] * 1e3, 5.0)


def _lookups(report: Report, filled: Sequence[Filled], requester: Requester, rounds: int) -> None:
    cases: list[Case] = []
    for keys in KEYS:
        cases.append(Case(f"peer/{keys}", _exists(requester, keys)))
        for each in filled:
            cases += _asking(each, keys)
    cases += [Case(f"random/{each.pages}", _random(each)) for each in filled]
    found = interleave(cases, rounds)
    names = ("probe", "match_prefix", "lookup")
    rows: list[dict[str, str | int | float]] = []
    for keys in KEYS:
        peer = found[f"peer/{keys}"]
        rows.append(_latency_row("mooncake store", "batch_is_exist", 0, keys, peer))
        for each in filled:
            rows += [
                _latency_row("kvharbor", op, each.pages, keys, found[f"{op}/{keys}/{each.pages}"])
                for op in names
            ]
        _judge_lookups(report, filled, found, keys)
    rows += [
        _latency_row("kvharbor", "probe, random", each.pages, RANDOM_KEYS,
                     found[f"random/{each.pages}"])
        for each in filled
    ]  # fmt: skip
    report.table("Calls, microseconds", rows)
    small, large = filled[0].pages, filled[-1].pages
    value = found[f"random/{large}"].time_over(found[f"random/{small}"])
    report.at_most(f"growth/random/{RANDOM_KEYS}", value, 2.5)


def _latency_row(
    who: str, op: str, pages: int, keys: int, series: Series
) -> dict[str, str | int | float]:
    return {
        "who": who,
        "call": op,
        "pool": pages or "-",
        "keys": keys,
        "p50 us": series.median_s * 1e6,
        "p99 us": series.p99_s * 1e6,
    }


def _judge_lookups(
    report: Report, filled: Sequence[Filled], found: dict[str, Series], keys: int
) -> None:
    small, large = filled[0].pages, filled[-1].pages
    peer = found[f"peer/{keys}"]
    middle = filled[-2].pages
    probe, match = found[f"probe/{keys}/{middle}"], found[f"match_prefix/{keys}/{middle}"]
    report.at_most(f"probe/{keys}/mooncake", probe.time_over(peer), PROBE_TARGETS[keys])
    report.at_most(f"match/{keys}/mooncake", match.time_over(peer), MATCH_TARGETS[keys])
    for op in ("probe", "match_prefix"):
        value = found[f"{op}/{keys}/{large}"].time_over(found[f"{op}/{keys}/{small}"])
        report.at_most(f"growth/{op}/{keys}", value, 1.3)


def _block(call: Callable[[int], object]) -> Sample:
    """The median of some calls; each is told its number."""
    times: list[float] = []
    for number in range(CALLS_A_ROUND):
        started = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - started)
    return Sample(median(times))


def _asking(filled: Filled, keys: int) -> list[Case]:
    """Each call is about another chain, so that no cache of the processor's helps more than it
    would in use."""
    store, opened = filled.store, filled.opened
    whole = [chain for chain in filled.chains if len(chain) >= keys]
    chains = [chain.slice(0, keys) for chain in random.Random(keys).choices(whole, k=64)]

    def probe(turn: int) -> Sample:
        sample = _block(lambda i: store.probe(opened, chains[(turn + i) % len(chains)]))
        assert all(store.probe(opened, chains[turn % len(chains)]))
        return sample

    def match(turn: int) -> Sample:
        sample = _block(lambda i: store.match_prefix(opened, chains[(turn + i) % len(chains)]))
        assert store.match_prefix(opened, chains[turn % len(chains)]).pages == keys
        return sample

    def lookup(turn: int) -> Sample:
        return _block(lambda i: store.lookup(opened, chains[(turn + i) % len(chains)]))

    calls = {"probe": probe, "match_prefix": match, "lookup": lookup}
    return [Case(f"{op}/{keys}/{filled.pages}", call) for op, call in calls.items()]


def _random(filled: Filled) -> Callable[[int], Sample]:
    draw = random.Random(1)
    batches = [
        PageChain(
            b"".join(
                chain.key(draw.randrange(len(chain)))
                for chain in draw.choices(filled.chains, k=RANDOM_KEYS)
            )
        )
        for _ in range(32)
    ]
    store, opened = filled.store, filled.opened
    return lambda turn: _block(lambda i: store.probe(opened, batches[(turn + i) % len(batches)]))


def _exists(requester: Requester, keys: int) -> Callable[[int], Sample]:
    return lambda turn: Sample(median(requester.exists("meta", turn % 10, keys, CALLS_A_ROUND)))


def _puts(report: Report, filled: Sequence[Filled]) -> None:
    """BeginPut and Sealed of short chains: what a prefill worker's put costs the master."""
    rows: list[dict[str, str | int | float]] = []
    for each in filled:
        fill = Fill()
        for _ in range(min(PUTS_BATCHES, each.pages // 10 // PUT_PAGES)):
            each.put(each.fresh_chain(PUT_PAGES), PUT_PAGES, fill)
        rows.append(
            {
                "pool": each.pages,
                "pages/s, one client": fill.pages / fill.seconds,
                "pages/core s": fill.pages_per_core_s,
                "put p50 us": median(fill.calls_s) * 2e6,
            }
        )
        if each is filled[-1]:
            report.at_least("puts/pages_a_core_second", fill.pages_per_core_s, 150_000)
    report.table(f"Metadata of puts, {PUT_PAGES} pages a put", rows)


def _evictions(report: Report, filled: Filled) -> None:
    """Go on putting into a full segment: what that costs beyond the puts is the victims' cost."""
    plain, rest = Fill(), Fill()
    while not _evicted(filled):
        rest = Fill()
        for _ in range(EVICTION_PUTS):
            filled.put(filled.fresh_chain(FILL_PAGES), FILL_PAGES, rest)
        if not _evicted(filled):
            plain.add(rest)
    clock, full = ProcessClock([filled.master.pid]), Fill()
    start, cpu_s = _evicted(filled), clock.now_s()
    while _evicted(filled) - start < VICTIMS:
        for _ in range(EVICTION_PUTS):
            filled.put(filled.fresh_chain(FILL_PAGES), FILL_PAGES, full)
    time.sleep(SETTLE_S)
    cpu_s, victims = clock.now_s() - cpu_s, _evicted(filled) - start
    cost_us = (cpu_s - plain.cpu_s / plain.pages * full.pages) / victims * 1e6
    row = {
        "pool": filled.pages,
        "pages put": full.pages,
        "victims": victims,
        "us a victim": cost_us,
        "longest call ms": max(full.calls_s) * 1e3,
    }
    report.table("Eviction, cost of the master's processor beyond the puts'", [row])
    report.at_most("eviction/us_a_victim", cost_us, 30.0)


def _evicted(filled: Filled) -> int:
    return filled.store.stat().counters.get("pages_evicted", 0)


if __name__ == "__main__":
    sys.exit(main())
