"""Real vLLM engines with a pool: their tokens are those of an engine without one, always."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client.store import KVStore
from tests.cluster.servers import until
from tests.engines.models import text
from tests.engines.vllm_engine import BLOCK, VllmEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.up import Up

LENGTH = 200
SHARED = 5
PRESSURE = [text(SHARED * BLOCK) + text(40 + 17 * i, seed=i + 1) for i in range(12)]
RESTORED = [(len(each) - 1) // BLOCK for each in PRESSURE]
"""Blocks of each that can come from the pool: the last token has to be computed."""
PROMPT = text(LENGTH)
HIT = (LENGTH - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("kind", "groups", "dtype"),
    [
        ("grouped", 1, "float32"),
        ("experts", 1, "float32"),
        ("windows", 2, "float32"),
        ("latent", 1, "bfloat16"),  # some processors have kernels for these 16 bits only
    ],
)
def test_tokens_are_the_same_cold_warm_and_in_another_engine(
    kind: str,
    groups: int,
    dtype: str,
    model_of: Callable[[str], Path],
    pool: Up,
    tmp_path: Path,
) -> None:
    model, options = model_of(kind), {"dtype": dtype}
    with VllmEngine(model, folder=tmp_path, options=options) as alone:
        cold, local = alone.generate([PROMPT]), alone.generate([PROMPT])
        assert local.cached == [HIT]
    with VllmEngine(model, pool.master, folder=tmp_path, options=options) as first:
        assert first.generate([PROMPT]) == cold
        assert first.generate([PROMPT]) == local
        first.await_saved(groups * (HIT // BLOCK))
        first.forget()
        assert first.generate([PROMPT]) == local
        salted = first.generate([PROMPT], salt="another tenant")
        assert salted == cold
        counts = first.counts()
        # vLLM may take smaller blocks than it is told, for latents.
        assert counts["promised_pages"] >= HIT // BLOCK
        assert not counts.get("failed_load_pages")
        assert counts["open_requests"] == 0
    least: dict[str, object] = {"load_tokens_min": HIT}
    with VllmEngine(model, pool.master, folder=tmp_path, options=options, extra=least) as second:
        # A block less is there, too, and is not worth a load here.
        assert second.generate([PROMPT[: HIT - BLOCK + 1]]).cached == [0]
        second.forget()
        assert second.generate([PROMPT]) == local
        assert second.generate([PROMPT], salt="another tenant") == local


def test_tokens_are_the_same_under_pressure(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    """Prompts in pieces, and requests that are preempted, lose their blocks and are resumed."""
    small = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 128, "max_model_len": 640}

    def engine_of(masters: str | None) -> VllmEngine:
        return VllmEngine(model_of("grouped"), masters, folder=tmp_path, options=small)

    with engine_of(None) as alone:
        right = alone.generate(PRESSURE, tokens=96).tokens
    with engine_of(pool.master) as engine:
        assert engine.generate(PRESSURE, tokens=96).tokens == right
        engine.forget()
        warm = engine.generate(PRESSURE, tokens=96)
        counts = engine.counts()
    assert warm.tokens == right
    assert warm.cached == [BLOCK * blocks for blocks in RESTORED]
    assert counts["preemptions"] > 0
    # Each block that differs once, those that all begin with at least once.
    assert counts["loaded_pages"] >= SHARED + sum(blocks - SHARED for blocks in RESTORED)
    assert not counts.get("failed_load_pages")
    assert counts["open_requests"] == 0


def test_engines_with_processes_of_their_own_share_a_pool(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    """As vLLM serves by default: scheduler and worker apart from the program that asks."""
    model = model_of("grouped")
    with (
        VllmEngine(model, pool.master, folder=tmp_path, own_process=True) as one,
        VllmEngine(model, pool.master, folder=tmp_path, own_process=True) as other,
    ):
        cold = one.generate([PROMPT], hints={"priority": 1})
        assert cold.cached == [0]
        until("its pages are in the pool", lambda: pages_of(pool.master) >= HIT // BLOCK)
        until("hints came with them, and at the end", lambda: told(pool.master, "priority") >= 2)
        warm = other.generate([PROMPT])
        assert warm.cached == [HIT]
        assert warm.tokens == one.generate([PROMPT], hints={"session_closed": True}).tokens
        until("its session has ended", lambda: told(pool.master, "session_closed") == 1)
        assert warm.tokens == one.generate([PROMPT], hints={"session_ended": True}).tokens
        assert "hints: got 'session_ended', want one of" in one.log()


def told(master: str, hint: str) -> int:
    """How many requests to the pool have brought this hint."""
    with KVStore.connect(master) as store:
        return store.stat().counters.get(f"hints_{hint}", 0)


def pages_of(master: str) -> int:
    """How many pages the pool has."""
    with KVStore.connect(master) as store:
        return store.stat().pages
