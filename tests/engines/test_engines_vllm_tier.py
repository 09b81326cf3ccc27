"""Real vLLM engines with a pool behind vLLM's own CPU tier: right tokens, and no hang, always.

What is compared is what an engine computes when nothing is in any cache: its first answer.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pytest

from tests.cluster.servers import until
from tests.cluster.up import Up, remove_segments
from tests.engines.conftest import DRAM
from tests.engines.vllm_engine import BLOCK, PATIENT, VllmEngine
from tests.engines.worst import LENGTH, PROMPT, RETRY_S, Pausing, spoil
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HIT: Final = (LENGTH - 1) // BLOCK * BLOCK
TIER: Final = ("KvharborTier", "kvstore.connectors.vllm.tier")
PAUSING: Final = ("PausingTier", "tests.engines.vllm_tiering")
EVENTS: Final = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
CPU_TIER_BYTES: Final = 64 << 20


class TierEngine(VllmEngine):
    """One whose pool is a tier."""

    program = "tests.engines.vllm_tier_program"

    def __init__(
        self,
        model: Path,
        masters: str,
        *,
        folder: Path,
        tier: tuple[str, str] = TIER,
        environment: dict[str, str] | None = None,
        own_process: bool = False,
        options: Mapping[str, object] | None = None,
        chunk: int = 1,
        **own: object,
    ) -> None:
        """Remember how to start it; `chunk` blocks are a row, `own` are the tier's settings."""
        kind, module = tier
        name = uuid4().hex
        self._memory = Path(f"/dev/shm/vllm_offload_{name}.mmap")
        tiers = [{"type": kind, "module_path": module, "masters": masters, **PATIENT, **own}]
        transfer = {
            "kv_connector": "OffloadingConnector",
            "engine_id": name,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.engines.vllm_tiering",
                "cpu_bytes_to_use": CPU_TIER_BYTES,
                "blocks_per_chunk": chunk,
                "secondary_tiers": tiers,
            },
        }
        super().__init__(
            model, folder=folder, environment=environment, own_process=own_process,
            options={**(options or {}), "kv_transfer_config": transfer},
        )  # fmt: skip

    def __exit__(self, kind: object = None, *_: object) -> None:
        """End it; an engine whose start has failed leaves the memory of vLLM's tier behind."""
        super().__exit__(kind)
        self._memory.unlink(missing_ok=True)

    def is_warm(self, cold: list[list[int]]) -> bool:
        """Whether the pool gives it the whole prompt; its tokens are right either way."""
        self.forget()
        came = self.generate([PROMPT])
        assert came.tokens == cold
        return came.cached == [HIT]


@pytest.mark.parametrize(
    ("kind", "dtype", "chunk"),
    [("grouped", "float32", 2), ("windows", "float32", 1), ("latent", "bfloat16", 1)],
)
def test_tokens_are_the_same_cold_warm_and_in_another_engine(
    kind: str, dtype: str, chunk: int, model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    def engine(*, own_process: bool = False) -> TierEngine:
        return TierEngine(
            model_of(kind), pool.master, folder=tmp_path, options={"dtype": dtype}, chunk=chunk,
            own_process=own_process,
        )  # fmt: skip

    with engine() as first:
        cold, local = first.generate([PROMPT]), first.generate([PROMPT])
        assert (cold.cached, local.cached) == ([0], [HIT])
        until("all is in the pool", lambda: first.is_warm(local.tokens))
        counts = first.counts()
        assert counts["loaded_rows"] >= HIT // BLOCK // chunk
        assert not counts.get("failed_load_rows")
        assert counts["open_rows"] == 0
    apart = kind == "grouped"  # scheduler and worker, as vLLM serves by default
    with engine(own_process=apart) as second:
        assert second.generate([PROMPT]) == local


def test_what_happens_between_lookup_and_load_costs_time_alone(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    pausing = Pausing(tmp_path)
    with TierEngine(
        model_of("windows"), pool.master, folder=tmp_path, tier=PAUSING,
        environment=pausing.environment, options=EVENTS,
    ) as engine:  # fmt: skip
        cold = engine.generate([PROMPT]).tokens

        def failed(do_worst: Callable[[], object]) -> int:
            """Rows that do not come, when the worst happens to a pool that has all of it."""
            until("all is in the pool", lambda: engine.is_warm(cold), RETRY_S)
            before = engine.counts().get("failed_load_rows", 0)
            assert pausing.generate(engine, do_worst).tokens == cold
            return engine.counts().get("failed_load_rows", 0) - before

        assert failed(lambda: None) == 0
        assert failed(pausing.remove.touch) > 0  # all rows but the first are removed
        pausing.remove.unlink()
        # A worker's memory is read without its help; a master that says nothing is one timeout.
        assert failed(lambda: pool.stop("worker")) == 0
        os.kill(pool.pid("worker"), signal.SIGCONT)
        assert failed(lambda: pool.stop("master")) > 0
        assert engine.counts()["circuit_opened"] >= 1
        os.kill(pool.pid("master"), signal.SIGCONT)
        assert failed(lambda: spoil(pool)) > 0
        until("what was spoilt is there anew", lambda: engine.is_warm(cold), RETRY_S)
        counts = engine.counts()
        assert counts["open_rows"] == 0
        assert counts["told_rows"] == counts["saved_rows"] + counts.get("known_rows", 0)


def test_an_engine_serves_without_its_pool_and_finds_it_again(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The pool is absent at first; then its worker dies while rows are on their way."""
    port, data_dir, pausing = free_port(), tmp_path / "pool", Pausing(tmp_path)
    with TierEngine(
        model_of("grouped"), f"127.0.0.1:{port}", folder=tmp_path, tier=PAUSING,
        environment=pausing.environment,
    ) as engine:  # fmt: skip
        cold = engine.generate([PROMPT]).tokens
        assert not engine.is_warm(cold)
        try:
            for _ in range(2):
                with Up(data_dir, f"--listen=127.0.0.1:{port}", dram=DRAM) as up:
                    until("the pool is of use", lambda: engine.is_warm(cold), RETRY_S)
                    kill = partial(os.kill, up.pid("worker"), signal.SIGKILL)
                    assert pausing.generate(engine, kill).tokens == cold
                assert not engine.is_warm(cold)
        finally:
            remove_segments(data_dir)
        assert engine.counts()["open_rows"] == 0
    assert "serving goes on without the pool" in engine.log()
    assert "the pool answers again" in engine.log()


def test_a_setting_that_is_unknown_or_wrong_is_named_at_the_start(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = TierEngine(model_of("grouped"), "127.0.0.1:1", folder=tmp_path, mastres="127.0.0.1:2")
    with pytest.raises(AssertionError, match="unknown field `mastres`"), engine:
        pass
