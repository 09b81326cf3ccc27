"""Real vLLM engines with a pool behind vLLM's own CPU tier: right tokens, and no hang, always.

What is compared is what an engine computes when nothing is in any cache: its first answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.cluster.servers import until
from tests.engines.vllm_engine import BLOCK, PATIENT, VllmEngine
from tests.engines.worst import LENGTH, PROMPT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.cluster.up import Up

HIT: Final = (LENGTH - 1) // BLOCK * BLOCK
TIER: Final = ("KvharborTier", "kvstore.connectors.vllm.tier")
PAUSING: Final = ("PausingTier", "tests.engines.vllm_tiering")
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
        **own: object,
    ) -> None:
        """Remember how to start it; `own` are the tier's settings."""
        kind, module = tier
        tiers = [{"type": kind, "module_path": module, "masters": masters, **PATIENT, **own}]
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.engines.vllm_tiering",
                "cpu_bytes_to_use": CPU_TIER_BYTES,
                "secondary_tiers": tiers,
            },
        }
        super().__init__(
            model, folder=folder, environment=environment, own_process=own_process,
            options={**(options or {}), "kv_transfer_config": transfer},
        )  # fmt: skip

    def is_warm(self, cold: list[list[int]]) -> bool:
        """Whether the pool gives it the whole prompt; its tokens are right either way."""
        self.forget()
        came = self.generate([PROMPT])
        assert came.tokens == cold
        return came.cached == [HIT]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("grouped", "float32"), ("windows", "float32"), ("latent", "bfloat16")],
)
def test_tokens_are_the_same_cold_warm_and_in_another_engine(
    kind: str, dtype: str, model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    model, options = model_of(kind), {"dtype": dtype}
    with TierEngine(model, pool.master, folder=tmp_path, options=options) as first:
        cold, local = first.generate([PROMPT]), first.generate([PROMPT])
        assert (cold.cached, local.cached) == ([0], [HIT])
        until("all is in the pool", lambda: first.is_warm(local.tokens))
        counts = first.counts()
        assert counts["loaded_rows"] >= HIT // BLOCK
        assert not counts.get("failed_load_rows")
        assert counts["open_rows"] == 0
    apart = kind == "grouped"  # scheduler and worker, as vLLM serves by default
    with TierEngine(
        model, pool.master, folder=tmp_path, options=options, own_process=apart
    ) as second:
        assert second.generate([PROMPT]) == local
