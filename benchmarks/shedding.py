"""What does it cost to move a running request to another worker, against computing it again there?

SmolLM2: a request of which half was prompt and half was generated leaves one engine and goes on in
another. Handed on: what the pool does not have yet of its KV is put (all that was generated, or the
tail alone, where the answer's pages were kept as it grew), and the other engine takes it up.
Computed again: all of it, or, with the prompt's pages from the pool, what was generated. Each time
from the request's last step in the one to its next token in the other. What is handed on goes on as
if it had stayed, bit for bit; what is computed again, in other pieces than before, need not.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from benchmarks.harness import Case, Figure, Report, Sample, arguments, interleave
from benchmarks.pool import Pool
from kvstore import KVStore
from kvstore.connectors.transformers import PooledPrefix
from kvstore.wire.messages.tickets import TicketClaimed
from workers import smollm
from workers.chunked_prefill import prefill
from workers.engine import Engine, EngineRequest
from workers.one_by_one import OneByOne
from workers.serve_kv import TicketKV

if TYPE_CHECKING:
    import argparse

    from transformers import DynamicCache, PreTrainedModel

    from benchmarks.harness import Series
    from kvstore.client.tickets import HandOver

LENGTHS: Final = (256, 1024)
QUICK_LENGTHS: Final = (256,)
TTL_S: Final = 60.0
DRAM: Final = "3GiB"
"""All moves have room at once: pages that had to go would have to be computed."""


@dataclass(frozen=True)
class Running:
    """A request in the engine that it leaves."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    cache: DynamicCache
    """Of all but the last."""


class Workers:
    """The two, which meet in the pool alone."""

    def __init__(self, model: PreTrainedModel, *stores: KVStore) -> None:
        """Both compute with one model."""
        self._model = model
        self._stores = stores
        self._spaces = 0

    def hand_on(self, running: Running, _: int, *, is_kept: bool) -> Sample:
        """Put what is not there, take it up, and go on."""
        giver, taker = self._fresh(running, kept=len(running.tokens) if is_kept else 0)
        began_s = time.perf_counter()
        generated = running.tokens[running.prompt_tokens :]
        done = giver.hand_over(
            self._spaces, 1, running.tokens[:-1], generated, running.cache, TTL_S
        )
        claimed = _claimed(giver, running, done)
        held = len(done.chain) * giver.opened.namespace.layout.page_tokens
        pulled = taker.take_up(claimed, len(running.tokens) - 1 - held, running.tokens)
        assert pulled.tokens == len(running.tokens) - 1, pulled.tokens
        token = self._go_on(running, pulled.cache)
        took_s = time.perf_counter() - began_s
        assert token == self._go_on(running, copy.deepcopy(running.cache)), token
        return Sample(took_s)

    def compute(self, running: Running, _: int, *, is_known: bool) -> Sample:
        """From the prompt's pages, or from nothing."""
        taker = self._fresh(running, kept=0)[1]
        began_s = time.perf_counter()
        cache = taker.reuse(running.tokens[: running.prompt_tokens + 1]).cache if is_known else None
        self._go_on(running, cache)
        return Sample(time.perf_counter() - began_s)

    def _fresh(self, running: Running, kept: int) -> tuple[TicketKV, TicketKV]:
        """Both workers' ways to pages of their own, of which the prompt's are there, or `kept`."""
        self._spaces += 1
        both = [
            TicketKV(
                store,
                PooledPrefix(store, self._model, "benchmark", revision="1", salt=str(self._spaces)),
            )
            for store in self._stores
        ]
        both[0].keep(running.tokens[: max(kept, running.prompt_tokens)], running.cache)
        return both[0], both[1]

    def _go_on(self, running: Running, cache: DynamicCache | None) -> int:
        engine = Engine(OneByOne(self._model), capacity_tokens=2 * len(running.tokens))
        engine.add(EngineRequest("moved", running.tokens, 1), cache)
        generated = engine.step()
        while engine.running:
            generated = engine.step()
        return generated[0].token


def _claimed(kv: TicketKV, running: Running, done: HandOver) -> TicketClaimed:
    namespace = kv.opened.namespace
    return TicketClaimed(
        1, namespace.id, namespace.layout.page_tokens, running.prompt_tokens, done.chain.packed,
        done.tail, done.tokens,
    )  # fmt: skip


def main() -> int:
    """Measure and report."""
    options = arguments(__doc__ or "", _options)
    report = Report((__doc__ or "").splitlines()[0], options)
    rounds = 2 if options.quick else options.rounds
    torch.set_num_threads(options.threads)
    report.parameters(rounds=rounds, threads=options.threads, torch=torch.__version__)
    model = smollm.load().model
    with (
        Pool(DRAM) as pool, KVStore.connect(pool.master) as gives,
        KVStore.connect(pool.master) as takes,
    ):  # fmt: skip
        workers = Workers(model, gives, takes)
        for length in QUICK_LENGTHS if options.quick else LENGTHS:
            _measure(report, workers, _running(model, length), rounds)
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="moves of each way (2 if --quick)")
    parser.add_argument("--threads", type=int, default=1, help="of torch")


def _running(model: PreTrainedModel, length: int) -> Running:
    tokens = tuple((31 * i) % 1000 + 100 for i in range(length))
    cache = OneByOne(model).hold(None)
    for _ in prefill(model, cache, tokens[:-1]):
        pass
    return Running(tokens, length // 2, cache)


def _measure(report: Report, workers: Workers, running: Running, rounds: int) -> None:
    ways = {
        "handed on": partial(workers.hand_on, running, is_kept=False),
        "handed on, answer kept": partial(workers.hand_on, running, is_kept=True),
        "computed again": partial(workers.compute, running, is_known=False),
        "computed again, prompt known": partial(workers.compute, running, is_known=True),
    }
    series = interleave([Case(name, run) for name, run in ways.items()], rounds)
    length = len(running.tokens)
    report.table(
        f"{length} tokens, half of them generated", [_row(*each) for each in series.items()]
    )
    again = series["computed again, prompt known"]
    report.at_least(f"{length}/again_over_handed_on", series["handed on"].speedup_over(again), 1.0)
    kept = series["handed on, answer kept"].speedup_over(again)
    report.reported(f"{length}/again_over_handed_on_kept", kept)


def _row(name: str, series: Series) -> dict[str, Figure]:
    return {"request is": name, "ms to its next token": 1e3 * series.median_s}


if __name__ == "__main__":
    sys.exit(main())
