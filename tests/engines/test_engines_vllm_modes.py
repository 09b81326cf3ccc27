"""Ways to run vLLM that change what it computes, or how: its tokens stay those of its own cache."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.cluster.servers import until
from tests.engines.adapters import make_adapter
from tests.engines.models import text
from tests.engines.program import ANSWER_S, ROOT
from tests.engines.vllm_engine import BLOCK, VllmEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.up import Up
    from tests.engines.vllm_engine import Generated

LENGTH: Final = 200
PROMPT: Final = text(LENGTH)
REPEATED: Final = text(LENGTH // 10) * 10
HIT: Final = (LENGTH - 1) // BLOCK * BLOCK
GUESSED: Final = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
UNCOMPILED: Final = {"NUMBA_DISABLE_JIT": "1"}
"""What guesses tokens would be compiled for half a minute."""
CONVERTED: Final = "from workers.smollm import converted; print(converted())"
TOKENS: Final = 3 * BLOCK
"""So many that blocks are filled by tokens that were guessed."""
LONGER_HIT: Final = (LENGTH + TOKENS - 1) // BLOCK * BLOCK


def assert_the_same_by_the_pool(engine: VllmEngine, prompt: list[int]) -> dict[str, int]:
    """The prompt, and again with its answer: by the pool as by the engine's own cache."""
    cold = engine.generate([prompt], tokens=TOKENS)
    assert cold.cached == [0]
    for asked, hit in ((prompt, HIT), ([*prompt, *cold.tokens[0]], LONGER_HIT)):
        local = engine.generate([asked], tokens=TOKENS)
        assert local.cached == [hit]

        def is_the_same(asked: list[int] = asked, local: Generated = local) -> bool:
            engine.forget()
            return engine.generate([asked], tokens=TOKENS) == local

        until("all of it comes from the pool, and its tokens are the same", is_the_same)
    counts = engine.counts()
    assert counts["promised_pages"] >= 2 * HIT // BLOCK
    assert not counts.get("failed_load_pages")
    assert counts["open_requests"] == 0
    return counts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("grouped", {"enforce_eager": False}, id="compiled"),
        pytest.param("windows", {"dtype": "bfloat16"}, id="bfloat16"),
    ],
)
def test_tokens_by_the_pool_are_those_by_the_own_cache(
    kind: str,
    options: dict[str, object],
    model_of: Callable[[str], Path],
    pool: Up,
    tmp_path: Path,
) -> None:
    with VllmEngine(model_of(kind), pool.master, folder=tmp_path, options=options) as engine:
        assert_the_same_by_the_pool(engine, PROMPT)


def test_a_real_model_that_guesses_right_gives_the_same_tokens(pool: Up, tmp_path: Path) -> None:
    """SmolLM2, whose weights the environment of the other tests has, and converts once."""
    found = subprocess.run(
        [ROOT / ".venv/bin/python", "-P", "-c", CONVERTED],
        capture_output=True, text=True, check=True, timeout=ANSWER_S,
    )  # fmt: skip
    model = Path(found.stdout.splitlines()[-1])
    options = {"dtype": "bfloat16", "disable_log_stats": False, "speculative_config": GUESSED}
    with VllmEngine(
        model, pool.master, folder=tmp_path, options=options, environment=UNCOMPILED
    ) as engine:  # fmt: skip
        assert assert_the_same_by_the_pool(engine, REPEATED)["guessed"] > BLOCK


def test_adapters_share_nothing(model_of: Callable[[str], Path], pool: Up, tmp_path: Path) -> None:
    adapters = [None, *(make_adapter(tmp_path / f"adapter{i}", seed=i) for i in (1, 2))]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with VllmEngine(
        model_of("grouped"), pool.master, folder=tmp_path, options=options
    ) as engine:  # fmt: skip
        cold = [engine.generate([PROMPT], adapter=each) for each in adapters]
        assert [each.cached for each in cold] == [[0]] * 3
        assert len({str(each.tokens) for each in cold}) == 3
        local = [engine.generate([PROMPT], adapter=each) for each in adapters]
        engine.await_saved(3 * HIT // BLOCK)
        engine.forget()
        assert [engine.generate([PROMPT], adapter=each) for each in adapters] == local
        assert [each.cached for each in local] == [[HIT]] * 3
