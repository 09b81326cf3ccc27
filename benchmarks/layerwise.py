"""How soon is a prompt's KV where its answer goes on: handed over at its end, or as it is computed?

SmolLM2, a prefill and a decode worker as they are, each in threads of this process, with a pool and
its master beside them. What the decode worker reads takes as long as over a link by which moving
the KV takes as long as computing it. Handed over at the end the one waits for the other; by chunks
(each chunk's pages as they are computed) or by groups of layers it should take little longer than
the longer of the two. From the request's admission until the KV is installed.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.harness import Case, Report, Sample, arguments, interleave
from benchmarks.pool import Pool
from kvstore import KVStore
from kvstore.client import tickets
from kvstore.client.descriptor import check_descriptor
from kvstore.connectors.transformers import PooledPrefix
from kvstore.wire.messages.tickets import FleetBeat, JoinFleet, Running
from workers import smollm
from workers.serve_kv import TicketKV
from workers.serve_messages import PrefillAsk, Sampling
from workers.serve_prefill import PrefillDesk

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from benchmarks.harness import Series
    from kvstore.client.locations import Locations
    from kvstore.client.outcomes import ReadOutcome
    from kvstore.client.tickets import Member
    from workers.generation import LanguageModel

AHEAD: Final = "[master]\nroute_ahead = 1e6\n"
"""Always, so that what is compared does not hang on what was measured before."""
CAPACITY_TOKENS: Final = 1 << 16
DEADLINE_S: Final = 120.0
FAST: Final = 1e12


class Way(NamedTuple):
    """How a prompt is handed over."""

    name: str
    groups: int
    is_ahead: bool


class Link:
    """A store whose reads take as long as over a link: what is read queues behind what was."""

    def __init__(self, store: KVStore) -> None:
        """As fast as the store."""
        self._store = store
        self._free_s = 0.0
        self.bytes_per_s = FAST
        self.moved_bytes = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- everything else is the store's
        return getattr(self._store, name)

    def read(
        self,
        locations: Locations,
        into: object,
        offsets: Sequence[int],
        *,
        part: int = 0,
    ) -> list[ReadOutcome]:
        """As the store's; later."""
        began_s = time.perf_counter()
        outcomes = self._store.read(locations, into, offsets, part=part)
        size = len(offsets) * locations.part_bytes(part)
        self.moved_bytes += size
        self._free_s = max(began_s, self._free_s) + size / self.bytes_per_s
        time.sleep(max(0.0, self._free_s - time.perf_counter()))
        return outcomes


class Fleet:
    """A prefill and a decode worker of one way, and the gateway's part by hand."""

    def __init__(self, language: LanguageModel, master: str, way: Way, link: Link) -> None:
        """Join."""
        self._way = way
        self._running: tuple[Running, ...] = ()
        self._store, self.link = KVStore.connect(master), link
        self._gives = self._kv(self._store, language)
        self._takes = self._kv(link, language)
        self._members = [self._join("prefill"), self._join("decode")]
        self._desk = PrefillDesk(language, self._store, self._gives, lambda: self._members[0])

    def _kv(self, store: Any, language: LanguageModel) -> TicketKV:  # noqa: ANN401 -- or a link
        groups = self._way.groups
        prefix = PooledPrefix(
            store, language.model, language.model_id, revision="bench", layer_groups=groups,
            salt=self._way.name,
        )  # fmt: skip
        return TicketKV(store, prefix)

    def _join(self, role: str) -> Member:
        room = (CAPACITY_TOKENS, 8) if role == "decode" else (0, 0)
        place = f"{role}:1", role, "", ""
        wish = JoinFleet(self._gives.opened.namespace.id, role, role, *place, *room)
        return self._store.carry_out(tickets.join_fleet(wish))

    def beat(self) -> None:
        """Both live."""
        for each, running in zip(self._members, ((), self._running), strict=True):
            life = each.namespace, each.worker, each.life
            message = FleetBeat(*life, 0, 0.0, 0.0, 0.0, 0.0, running)
            self._store.carry_out(tickets.beat(message))

    def hand_over(self, prompt: tuple[int, ...], name: str) -> float:
        """Seconds until a prompt's KV is at the decode worker."""
        opened, began_s = self._gives.opened, time.perf_counter()
        request = tickets.TicketRequest(
            opened, name, opened.chain(prompt), len(prompt), 8, DEADLINE_S, DEADLINE_S
        )
        ticket = self._store.carry_out(tickets.open_ticket(request)).ticket
        ask = PrefillAsk(ticket, name, prompt, Sampling(0.0, 1.0, 0), DEADLINE_S)
        is_staged = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            taking = thread.submit(self._take, ticket, prompt, is_staged)
            self._desk.run(ask, began_s, threading.Event())
            is_staged.set()
            taking.result()
        took_s = time.perf_counter() - began_s
        self._store.carry_out(tickets.cancel_ticket(ticket))
        return took_s

    def _take(self, ticket: int, prompt: tuple[int, ...], is_staged: threading.Event) -> None:
        carry_out, namespace = self._store.carry_out, self._takes.opened.namespace
        arriving = None
        if self._way.is_ahead:
            route = self._route(ticket)
            claim = tickets.claim_ticket(ticket, route, self._members[1], is_ahead=True)
            claimed = carry_out(claim)
            check_descriptor(claimed, namespace, prompt, is_ahead=True)
            self._running = (Running(ticket, claimed.token, 0),)
            arriving = self._takes.expect(prompt)
            self._takes.pull_ahead(ticket, claimed, arriving, threading.Event())
        assert is_staged.wait(DEADLINE_S)
        claimed = carry_out(tickets.claim_ticket(ticket, self._route(ticket), self._members[1]))
        self._running = (Running(ticket, claimed.token, 0),)
        tail = check_descriptor(claimed, namespace, prompt)
        pulled = self._takes.take_up(claimed, tail, (*prompt, *claimed.tokens), arriving)
        assert pulled.tokens == len(prompt), pulled.tokens
        self._running = ()

    def _route(self, ticket: int) -> int:
        routed = self._store.carry_out(tickets.await_route(ticket, 0))
        assert routed is not None
        return routed.route


@contextmanager
def beating(fleets: list[Fleet]) -> Iterator[None]:
    """All of them live, while the block runs."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.5):
            for fleet in fleets:
                fleet.beat()

    with ThreadPoolExecutor(1) as thread:
        for fleet in fleets:
            fleet.beat()
        going_on = thread.submit(beat)
        try:
            yield
        finally:
            is_over.set()
            going_on.result()


def main() -> int:
    """Measure and report."""
    options = arguments(__doc__ or "", _options)
    report = Report((__doc__ or "").splitlines()[0], options)
    rounds, tokens = (1, 512) if options.quick else (options.rounds, options.tokens)
    torch.set_num_threads(options.threads)
    language = smollm.load()
    report.parameters(
        rounds=rounds, tokens=tokens, groups=options.groups, threads=options.threads,
        torch=torch.__version__,
    )  # fmt: skip
    ways = [
        Way("at the end", 1, is_ahead=False),
        Way("by chunks", 1, is_ahead=True),
        Way(f"by {options.groups} groups of layers", options.groups, is_ahead=True),
    ]
    with Pool("2GiB", AHEAD) as pool:
        fleets = {
            way.name: Fleet(language, pool.master, way, Link(KVStore.connect(pool.master)))
            for way in ways
        }
        with beating(list(fleets.values())):
            _measure(report, fleets, rounds, tokens)
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each way (1 if --quick)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt (512 if --quick)")
    parser.add_argument("--groups", type=int, default=5, help="of layers")
    parser.add_argument("--threads", type=int, default=1, help="of torch")


def _measure(report: Report, fleets: dict[str, Fleet], rounds: int, tokens: int) -> None:
    first = next(iter(fleets.values()))
    computed_s = [first.hand_over(_prompt(tokens, -1 - i), f"alone {i}") for i in range(2)][-1]
    size = first.link.moved_bytes // 2
    for fleet in fleets.values():
        fleet.link.bytes_per_s = size / computed_s
    report.parameters(kv_mb=size / 1e6, prefill_s=computed_s, link_mb_per_s=size / computed_s / 1e6)
    cases = [
        Case(name, lambda i, fleet=fleet, name=name: _sample(fleet, name, tokens, i))
        for name, fleet in fleets.items()
    ]
    series = interleave(cases, rounds)
    report.table(f"{tokens} tokens", [_row(*each, computed_s) for each in series.items()])
    at_end = series["at the end"]
    for name, found in series.items():
        if name != "at the end":
            title = name.replace(" ", "_")
            report.reported(f"at_the_end_over_{title}", found.speedup_over(at_end))
            report.reported(f"{title}_over_longer_of_both", found.median_s / computed_s)


def _sample(fleet: Fleet, name: str, tokens: int, number: int) -> Sample:
    return Sample(fleet.hand_over(_prompt(tokens, number), f"{name} {number}"), tokens)


def _prompt(tokens: int, number: int) -> tuple[int, ...]:
    """Each like no other from its first page on."""
    return tuple((31 * i + 977 * number) % 30000 + 100 for i in range(tokens))


def _row(name: str, series: Series, computed_s: float) -> dict[str, str | float]:
    return {
        "handed over": name, "s until installed": series.median_s,
        "of the longer of both": series.median_s / computed_s,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
