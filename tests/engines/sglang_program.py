"""One SGLang engine, told what to do line by line: the program behind `sglang_engine`.

python -m tests.engines.sglang_program DESCRIPTOR JSON
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.engines.sglang_cpu import CpuEngine, fork_from_here


def generate(engine: CpuEngine, command: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of prompts that are given at once, and how much of each was in which cache."""
    wanted = {"temperature": 0, "max_new_tokens": command["tokens"], "ignore_eos": True}
    salts = [command["salt"]] * len(command["prompts"]) if command["salt"] else None
    outputs = engine.generate(
        input_ids=command["prompts"], sampling_params=wanted, cache_salt=salts
    )  # fmt: skip
    told = [each["meta_info"] for each in outputs]
    return {
        "tokens": [each["output_ids"] for each in outputs],
        "cached": [each["cached_tokens"] for each in told],
        "storage": [(each.get("cached_tokens_details") or {}).get("storage", 0) for each in told],
    }


def answer(engine: CpuEngine, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command."""
    if command["do"] == "generate":
        return generate(engine, command)
    if command["do"] == "forget":
        return {"forgot": engine.flush_cache().success}
    if command["do"] == "reload":
        done, told = engine.update_weights_from_disk(command["model"])[:2]
        return {"reloaded": done or told}
    assert command["do"] == "clear", command
    cleared = engine.tokenizer_manager.clear_hicache_storage()
    return {"cleared": engine.loop.run_until_complete(cleared).success}


def main() -> None:
    """Start the engine and answer until standard input ends."""
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    fork_from_here()
    engine = CpuEngine(**json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=replies)
    engine.shutdown()


if __name__ == "__main__":
    main()
