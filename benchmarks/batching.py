"""How many tokens a second do requests get that decode together, and do they keep their bits?

SmolLM2 with one, four and eight requests of 64 to 120 tokens, in float32 and bfloat16: a step of
an engine that computes rows one by one, of one that multiplies all rows at once, and of one that
multiplies block by block. What `workers.batching` uses is the first form that is exact.
"""

from __future__ import annotations

import copy
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.harness import Case, Figure, Report, Sample, Series, arguments, interleave
from workers import smollm
from workers.batching import Batched, Multiply, at_once, exact_form, in_blocks
from workers.chunked_prefill import prefill
from workers.engine import ROWS_MAX, AnyEngine, Engine, EngineRequest
from workers.one_by_one import OneByOne

if TYPE_CHECKING:
    import argparse

    from transformers import DynamicCache, PreTrainedModel

    from workers.engine import Forward

ROWS: Final = (1, 4, ROWS_MAX)
PROMPT_TOKENS: Final = 64
MORE_TOKENS: Final = 8
"""Of each further request's prompt."""
GENERATED_MAX: Final = 1000
FORMS: Final[dict[str, Multiply]] = {"at_once": at_once, "in_blocks": in_blocks}
ALONE: Final = "one_by_one"


def main() -> int:
    """Measure and report."""
    options = arguments(__doc__ or "", _options)
    report = Report((__doc__ or "").splitlines()[0], options)
    rounds = 2 if options.quick else options.rounds
    torch.set_num_threads(options.threads)
    report.parameters(rounds=rounds, threads=options.threads, torch=torch.__version__)
    language = smollm.load()
    for dtype in (torch.float32, torch.bfloat16):
        _compare(report, str(dtype).removeprefix("torch."), language.model.to(dtype), rounds)
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="steps of each case (2 if --quick)")
    parser.add_argument("--threads", type=int, default=1, help="of torch")


def _compare(report: Report, name: str, model: PreTrainedModel, rounds: int) -> None:
    """All ways of one dtype, step by step in turns."""
    prompts = _prompts(model)
    exact = {way: exact_form(model, ROWS_MAX, (form,)) is not None for way, form in FORMS.items()}
    ways: dict[str, Forward[Any]] = {way: Batched(model, form) for way, form in FORMS.items()}
    ways[ALONE] = OneByOne(model)
    cases = [
        _case(f"{way}/{rows}", _engine(forward, prompts[:rows]))
        for rows in ROWS
        for way, forward in ways.items()
    ]
    series = interleave(cases, rounds)
    table = [
        _row(way, rows, exact.get(way, True), series[f"{way}/{rows}"])
        for rows in ROWS
        for way in ways
    ]
    report.table(f"{name}: a step", table)
    used = next((form for form, kept in exact.items() if kept), ALONE)
    for rows in ROWS:
        faster = series[f"{used}/{rows}"].speedup_over(series[f"{ALONE}/{rows}"])
        title = f"{name}/{rows}_rows/{used}_over_{ALONE}"
        if rows == ROWS_MAX:
            report.at_least(title, faster, 2.0)
        else:
            report.reported(title, faster)


def _prompts(model: PreTrainedModel) -> list[tuple[list[int], DynamicCache]]:
    """Tokens of each request, and the KV of all but the last."""
    prompts = []
    for i in range(ROWS_MAX):
        tokens = [(31 * i + 7 * j) % 1000 + 100 for j in range(PROMPT_TOKENS + MORE_TOKENS * i)]
        cache = OneByOne(model).hold(None)
        for _ in prefill(model, cache, tokens[:-1]):
            pass
        prompts.append((tokens, cache))
    return prompts


def _engine(forward: Forward[Any], prompts: list[tuple[list[int], DynamicCache]]) -> AnyEngine:
    engine: AnyEngine = Engine(forward, capacity_tokens=2 * ROWS_MAX * GENERATED_MAX)
    for i, (tokens, cache) in enumerate(prompts):
        engine.add(EngineRequest(str(i), tuple(tokens), GENERATED_MAX), copy.deepcopy(cache))
    return engine


def _case(name: str, engine: AnyEngine) -> Case:
    def run(_: int) -> Sample:
        started = time.perf_counter()
        engine.step()
        return Sample(time.perf_counter() - started)

    return Case(name, run)


def _row(way: str, rows: int, exact: bool, series: Series) -> dict[str, Figure]:
    return {
        "products": way,
        "rows": rows,
        "ms a step": 1e3 * series.median_s,
        "tokens/s": rows / series.median_s,
        "own bits": "yes" if exact else "no",
    }


if __name__ == "__main__":
    sys.exit(main())
