"""How soon does decode begin: with KV handed over at a prompt's end, or as it is computed?

SmolLM2, a prefill and a decode worker as they are, each in threads of this process, with a pool and
its master beside them. From the request's admission until the KV is installed, and until decode's
first token: the answer's second, for the first one comes from prefill with the prompt's end.

What the decode worker reads takes as long as over a link by which moving the KV takes as long as
computing it: it queues behind what was read before, and nothing else is slowed down. So stands a
pool worker that lends memory on prefill's host, where puts go first: KV crosses a network once, on
its way to decode. On a host of its own puts would cross one, too, but in every way alike: they
leave with each chunk while the next is computed, also of a prompt that is handed over at its end.

Handed over at the end, moving waits for computing; by chunks (each chunk's pages as they are
computed) or by groups of layers it should take little longer than the longer of the two, which is
what is handed over at the end takes where moving costs nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.harness import Case, Report, Sample, Series, arguments, interleave
from benchmarks.pool import Pool
from kvstore import KVStore
from kvstore.client import tickets
from kvstore.client.descriptor import check_descriptor
from kvstore.connectors.transformers import PooledPrefix
from kvstore.wire.messages.tickets import FleetBeat, JoinFleet, Running
from workers import smollm
from workers.batching import engine_of
from workers.engine import EngineRequest
from workers.serve_kv import TicketKV
from workers.serve_messages import PrefillAsk, Sampling
from workers.serve_prefill import PrefillDesk

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvstore.client.locations import Locations
    from kvstore.client.outcomes import ReadOutcome
    from kvstore.client.tickets import Member
    from workers.engine import AnyEngine
    from workers.generation import LanguageModel

AHEAD: Final = "[master]\nroute_ahead = 1e6\n"
"""Always, so that what is compared does not hang on what was measured before."""
ALONE: Final = "at the end, moved at once"
"""What computing takes, and then moving: neither can be shorter."""
AT_END: Final = "at the end"
CAPACITY_TOKENS: Final = 1 << 16
DEADLINE_S: Final = 120.0
FAST: Final = 1e12


class Way(NamedTuple):
    """How a prompt is handed over."""

    name: str
    groups: int
    is_ahead: bool


class Reached(NamedTuple):
    """Seconds since a request's admission."""

    installed_s: float
    token_s: float
    """Decode's first."""


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

    def __init__(
        self, language: LanguageModel, engine: AnyEngine, way: Way, store: KVStore, link: Link
    ) -> None:
        """Prefill uses the store, decode the link; fleets that take turns may share an engine."""
        self._way = way
        self._running: tuple[Running, ...] = ()
        self._store, self.link = store, link
        self._engine = engine
        self.reached: list[Reached] = []
        """Of all prompts so far."""
        self._gives = self._kv(self._store, language)
        self._takes = self._kv(link, language)
        self._members: list[Member] = []
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

    def join(self) -> None:
        """Both are there; they have to beat from now on."""
        self._members = [self._join("prefill"), self._join("decode")]

    def beat(self) -> None:
        """Both live."""
        for each, running in zip(self._members, ((), self._running), strict=True):
            life = each.namespace, each.worker, each.life
            message = FleetBeat(*life, 0, 0.0, 0.0, 0.0, 0.0, running)
            self._store.carry_out(tickets.beat(message))

    def hand_over(self, prompt: tuple[int, ...], name: str) -> None:
        """Compute a prompt at one worker and go on from it at the other."""
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
            installed_s, token_s = taking.result()
        self._store.carry_out(tickets.cancel_ticket(ticket))
        self.reached.append(Reached(installed_s - began_s, token_s - began_s))

    def _take(
        self, ticket: int, prompt: tuple[int, ...], is_staged: threading.Event
    ) -> tuple[float, float]:
        """When the KV was installed, and when decode's first token was there."""
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
        tokens = (*prompt, *claimed.tokens)
        pulled = self._takes.take_up(claimed, tail, tokens, arriving)
        assert pulled.tokens == len(prompt), pulled.tokens
        self._engine.add(EngineRequest(str(ticket), tokens, 1), pulled.cache)
        carry_out(tickets.install_ticket(ticket, claimed.token))
        installed_s = time.perf_counter()
        assert len(self._engine.step()) == 1
        self._running = ()
        return installed_s, time.perf_counter()

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
            fleet.join()
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
    engine = engine_of(language.model, capacity_tokens=CAPACITY_TOKENS, rows_max=1)
    report.parameters(
        rounds=rounds, tokens=tokens, groups=options.groups, threads=options.threads,
        torch=torch.__version__,
    )  # fmt: skip
    ways = [
        Way(ALONE, 1, is_ahead=False),
        Way(AT_END, 1, is_ahead=False),
        Way("by chunks", 1, is_ahead=True),
        Way(f"by {options.groups} groups of layers", options.groups, is_ahead=True),
    ]
    with Pool("2GiB", AHEAD) as pool, ExitStack() as undo:

        def connected() -> KVStore:
            return undo.enter_context(KVStore.connect(pool.master))

        fleets = {
            way.name: Fleet(language, engine, way, connected(), Link(connected())) for way in ways
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
    alone = fleets[ALONE]
    for i in range(2):
        alone.hand_over(_prompt(tokens, -1 - i), f"before {i}")
    size = alone.link.moved_bytes // 2
    speed = size / alone.reached[-1].installed_s
    report.parameters(kv_mb=size / 1e6, link_mb_per_s=speed / 1e6)
    for name, fleet in fleets.items():
        fleet.link.bytes_per_s = FAST if name == ALONE else speed
    cases = [
        Case(name, lambda i, fleet=fleet, name=name: _sample(fleet, name, tokens, i))
        for name, fleet in fleets.items()
    ]
    series = interleave(cases, rounds)
    installed = {name: _installed(fleet, rounds) for name, fleet in fleets.items()}
    rows = [_row(name, series[name], installed[name], installed[ALONE]) for name in fleets]
    report.table(f"{tokens} tokens", rows)
    for what, found in (("token", series), ("installed", installed)):
        for name in list(fleets)[2:]:
            faster = found[name].speedup_over(found[AT_END])
            report.reported(f"{what}/at_the_end_over_{name.replace(' ', '_')}", faster)


def _sample(fleet: Fleet, name: str, tokens: int, number: int) -> Sample:
    fleet.hand_over(_prompt(tokens, number), f"{name} {number}")
    return Sample(fleet.reached[-1].token_s)


def _installed(fleet: Fleet, rounds: int) -> Series:
    """Of the rounds that are counted."""
    return Series([Sample(each.installed_s) for each in fleet.reached[-rounds:]])


def _prompt(tokens: int, number: int) -> tuple[int, ...]:
    """Each like no other from its first page on."""
    return tuple((31 * i + 977 * number) % 30000 + 100 for i in range(tokens))


def _row(name: str, tokens: Series, installed: Series, alone: Series) -> dict[str, str | float]:
    return {
        "handed over": name, "s until installed": installed.median_s,
        "installed, of the longer": installed.time_over(alone),
        "s until decode's token": tokens.median_s,
        "decode's token, of the longer": tokens.time_over(alone),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
