"""`kvharbor plan`: sizes of a deployment from model, traffic and hardware. Needs no pool."""

from __future__ import annotations

from typing import Final

import msgspec
import typer  # noqa: TC002 -- it reads annotations when it runs

from kvstore.cli import output
from kvstore.cli import plan_options as options
from kvstore.cli.options import AsJson  # noqa: TC001 -- so are they
from kvstore.planner import arithmetic, checks
from kvstore.planner.decisions import Decision, decisions
from kvstore.planner.sizing import plan as sized
from kvstore.request_trace import TRACE_PAGE_TOKENS

EXAMPLE: Final = (
    "For example: kvharbor plan --model llama-2-7b --input 800 --output 200 --rate 4 "
    "--prefill-tokens-per-s 8000 --decode-batch 16 --decode-step-ms 30 --kv-memory 40GiB "
    "--link-gbit 100; or, for the bytes alone, --model llama-2-7b --input 2048"
)


def plan(  # noqa: PLR0913 -- each is an option of the command line
    context: typer.Context,
    model: options.Model = None,
    config: options.ConfigFile = None,
    layers: options.Layers = None,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = None,
    latent_dim: options.LatentDim = None,
    window: options.Window = None,
    window_layers: options.WindowLayers = None,
    dtype: options.Dtype = None,
    scale_bytes: options.ScaleBytes = None,
    trace: options.TraceFile = None,
    page_tokens: options.PageTokens = TRACE_PAGE_TOKENS,
    prompt: options.Prompt = None,
    prompt_p99: options.PromptP99 = None,
    answer: options.Answer = None,
    answer_p99: options.AnswerP99 = None,
    rate: options.Rate = None,
    peak_rate: options.PeakRate = None,
    reuse: options.Reuse = None,
    prefill_tokens_per_s: options.PrefillRate = None,
    decode_batch: options.DecodeBatch = None,
    decode_tokens_per_s: options.DecodeRate = None,
    decode_step_ms: options.StepMs = None,
    kv_memory: options.KvMemory = None,
    link_gbit: options.LinkGbit = None,
    rtt_us: options.RttUs = 50.0,
    hand_over_ms: options.HandOverMs = 5.0,
    ttft_ms: options.TtftMs = 500.0,
    tpot_ms: options.TpotMs = 50.0,
    workers: options.Workers = None,
    as_json: AsJson = False,
) -> None:
    """Size KV, links, staging, prefill and decode workers, and show the arithmetic.

    The model, its traffic (described, or recorded in a trace) and one worker of each kind as it
    was measured. Without traffic and workers: the bytes of a token and of a prompt.
    """
    shape = options.Shape(layers, kv_heads, head_dim, latent_dim, window, window_layers)
    kv = options.kv_of(model, config, shape, dtype, scale_bytes)
    described = options.Described(rate, peak_rate, prompt, prompt_p99, answer, answer_p99, reuse)
    decode = decode_batch, decode_tokens_per_s, decode_step_ms
    speeds = options.Speeds(prefill_tokens_per_s, *decode, kv_memory, link_gbit)
    found: dict[str, object]
    if trace is None and not _asks_for_more(described, speeds, workers):
        tokens = None if prompt is None else checks.positive("input", prompt)
        lines, answers = arithmetic.kv_lines(kv, tokens), []
        found = {"token_bytes": lines[0].value}
    else:
        traffic = options.traffic_of(trace, page_tokens, described)
        times = (rtt_us, hand_over_ms, ttft_ms, tpot_ms)
        hardware = options.hardware_of(speeds, times, workers)
        figures = sized(kv, traffic, hardware)
        lines = arithmetic.lines(kv, traffic, hardware, figures)
        answers = decisions(kv, traffic, hardware, figures)
        found = {"traffic": traffic, "hardware": hardware, "plan": figures}
    if as_json or context.obj:
        output.print_json({**found, "arithmetic": lines, "decisions": answers})
    else:
        _print(lines, answers)


def _asks_for_more(
    described: options.Described, speeds: options.Speeds, workers: int | None
) -> bool:
    more = [*msgspec.structs.astuple(speeds), workers]
    asked = msgspec.structs.replace(described, input=None)
    return any(value is not None for value in (*more, *msgspec.structs.astuple(asked)))


def _print(lines: list[arithmetic.Line], answers: list[Decision]) -> None:
    for line in lines:
        print(arithmetic.text(line))
    for number, each in enumerate(answers, 1):
        print(f"\n{number}. {each.question} {each.answer}")
        for reason in each.because:
            print(f"   - {reason}")
