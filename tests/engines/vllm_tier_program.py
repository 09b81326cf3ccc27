"""As vllm_program, for an engine whose pool is a tier behind vLLM's own.

What a tier has to do goes on in an engine's steps: commands that wait for it make some.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kvstore.connectors.vllm.tier import PREFIX
from tests.engines.vllm_program import generate, serve

if TYPE_CHECKING:
    from vllm import LLM

SOME: Final[dict[str, Any]] = {"prompts": [[5, 6, 7]], "tokens": 1}
"""Less than a block: nothing of it is kept."""
TRIES: Final = 200
PAUSE_S: Final = 0.02


def forget(engine: LLM) -> bool:
    """Have engine and vLLM's tier forget everything; what is on its way has to end first."""
    for _ in range(TRIES):
        generate(engine, SOME)
        if engine.reset_prefix_cache(reset_connector=True):
            return True
        time.sleep(PAUSE_S)
    return False


def answer(engine: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command."""
    if command["do"] == "generate":
        return generate(engine, command)
    if command["do"] == "forget":
        return {"forgot": forget(engine)}
    assert command["do"] == "counts", command
    generate(engine, SOME)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    (tier,) = scheduler.connector.connector_scheduler.manager.secondary_tiers
    totals, told_rows = tier.rows.totals, getattr(tier, "told_rows", 0)
    assert {PREFIX + name for name in totals} <= set(tier.build_metric_definitions({})), totals
    return {**totals, "open_rows": tier.rows.open_rows, "told_rows": told_rows}


if __name__ == "__main__":
    serve(answer)
