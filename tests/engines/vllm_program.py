"""One vLLM engine, told what to do line by line: the program behind `tests.engines.vllm_engine`.

    python -m tests.engines.vllm_program DESCRIPTOR JSON

Reads a JSON command a line from standard input, answers each on DESCRIPTOR; vLLM's own words go
where they like.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from kvstore.connectors.vllm.hints import HINTS
from kvstore.connectors.vllm.stats import TOTALS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.connectors.vllm.foreign import Vllm

OURS: Final = "vllm:kvharbor_"
GUESSED: Final = "vllm:spec_decode_num_accepted_tokens"
IS_APART: Final = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"
POLL_S: Final = 0.01


def connector_counts(engine: LLM) -> dict[str, int]:
    """What both halves of the connector have counted; engines in this process only."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    halves = [scheduler.connector.scheduler_half, get_kv_transfer_group().worker_half]
    counts = dict.fromkeys(TOTALS, 0)
    for half in halves:
        for name, count in half.totals.items():
            counts[name] += count
    counts["open_requests"] = halves[0].open_requests
    counts["preemptions"] = scheduler.preempted_for_tests
    if engine.llm_engine.log_stats:
        found = {each.name: each for each in engine.get_metrics()}
        if GUESSED in found:
            counts["guessed"] = int(found[GUESSED].value)
    return counts


def metrics(engine: LLM) -> dict[str, int]:
    """What vLLM shows its operators of the connector, wherever its halves are."""
    shown = [each for each in engine.get_metrics() if each.name.startswith(OURS)]
    return {each.name.removeprefix(OURS): int(each.value) for each in shown}


def abort(engine: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """Ask for one prompt, and take it back once there is a file `when`; how many are left.

    An engine in this process runs by our steps alone, and is told between two of them.
    """
    core, when = engine.llm_engine, Path(command["when"])
    prompt = {"prompt_token_ids": command["prompt"]}
    core.add_request("taken back", prompt, SamplingParams(temperature=0.0, ignore_eos=True))
    while not when.exists():
        if IS_APART:
            time.sleep(POLL_S)
        else:
            core.step()
    core.abort_request(["taken back"])
    return {"left": core.get_num_unfinished_requests()}


def count_preemptions(engine: LLM) -> None:
    """Have the scheduler count what it preempts, which vLLM itself only logs."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    scheduler.preempted_for_tests = 0
    preempt = scheduler._preempt_request  # noqa: SLF001 -- vLLM has no public count

    def counted(*arguments: Vllm, **named: Vllm) -> Vllm:
        scheduler.preempted_for_tests += 1
        return preempt(*arguments, **named)

    scheduler._preempt_request = counted  # noqa: SLF001 -- likewise


def generate(engine: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of prompts that are given at once, and how many of each were in a cache."""
    prompts = [{"prompt_token_ids": each} for each in command["prompts"]]
    if command.get("salt"):
        prompts = [{**each, "cache_salt": command["salt"]} for each in prompts]
    wanted = SamplingParams(
        temperature=0.0, max_tokens=command["tokens"], ignore_eos=True,
        extra_args={"kv_transfer_params": {HINTS: command.get("hints")}},
    )  # fmt: skip
    adapter = LoRARequest(*command["adapter"]) if command.get("adapter") else None
    outputs = engine.generate(prompts, wanted, use_tqdm=False, lora_request=adapter)
    return {
        "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        "cached": [each.num_cached_tokens for each in outputs],
        "reasons": sorted({str(each.outputs[0].finish_reason) for each in outputs}),
    }


def answer(engine: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command."""
    if command["do"] == "generate":
        return generate(engine, command)
    if command["do"] == "forget":
        return {"forgot": engine.reset_prefix_cache()}
    if command["do"] == "abort":
        return abort(engine, command)
    if command["do"] == "metrics":
        return metrics(engine)
    assert command["do"] == "counts", command
    return connector_counts(engine)


def serve(answer: Callable[[LLM, dict[str, Any]], dict[str, Any]]) -> None:
    """Start the engine and answer until standard input ends."""
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    options = json.loads(sys.argv[2])
    engine = LLM(**options)
    if "kv_transfer_config" in options and not os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING"):
        raise SystemExit("say whether the engine has a process of its own")
    if not IS_APART and "kv_transfer_config" in options:
        count_preemptions(engine)
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=replies)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    serve(answer)
