"""One vLLM engine that is told what to serve, and when each token came: `peers.vllm_engine` has it.

    python -P -m benchmarks.peers.vllm_child DESCRIPTOR OPTIONS

Runs where vLLM is installed. Reads a JSON command a line from standard input, answers each on
DESCRIPTOR. The engine has a process of its own, as vLLM serves by default, so that what is measured
here is what a server's clients would see without HTTP.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Sequence

FORGET_TRIES: Final = 400
FORGET_PAUSE_S: Final = 0.05


class Serving:
    """The engine, for requests that come at once."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Start it."""
        self._front = LLM(**options)
        self._engine = self._front.llm_engine
        self._number = 0

    def serve(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        """Seconds until each request's tokens came since all were given, and what was cached."""
        wanted = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        began_s = time.perf_counter()
        names: list[str] = []
        for prompt in prompts:
            self._number += 1
            names.append(str(self._number))
            self._engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, wanted)
        came: dict[str, list[float]] = {name: [] for name in names}
        said: dict[str, list[int]] = {name: [] for name in names}
        cached: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_s = time.perf_counter() - began_s
            for each in outputs:
                new = each.outputs[0].token_ids
                came[each.request_id] += [now_s] * len(new)
                said[each.request_id] += new
                cached[each.request_id] = each.num_cached_tokens or 0
        return {
            "came_s": [came[name] for name in names],
            "tokens": [said[name] for name in names],
            "cached": [cached[name] for name in names],
        }

    def forget(self) -> dict[str, Any]:
        """Empty the engine's own prefix cache: blocks may be held until saved, or by a step."""
        for tries in range(FORGET_TRIES):
            if self._front.reset_prefix_cache():
                return {"tries": tries}
            time.sleep(FORGET_PAUSE_S)
            self.serve([[5, 6, 7]], 2)
        raise RuntimeError(f"blocks are still held after {FORGET_TRIES} tries")

    def close(self) -> None:
        """End the engine's process."""
        self._engine.engine_core.shutdown()


def main() -> None:
    """Start the engine and answer until standard input ends."""
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    serving = Serving(json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "forget":
            answer = serving.forget()
        else:
            answer = serving.serve(command["prompts"], command["tokens"])
        print(json.dumps(answer), file=replies)
    serving.close()


if __name__ == "__main__":
    main()
