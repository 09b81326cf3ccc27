"""A vLLM engine in a process of its own, for tests: started, told what to do, and ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.engines.program import ANSWER_S, Program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

POLL_S: Final = 0.05
CONNECTOR: Final = "kvstore.connectors.vllm.connector"
BLOCK: Final = 32
PATIENT: Final = {"timeout_s": 5.0, "lookup_deadline_s": 5.0}
"""On a machine that others keep busy an answer may be late, and a test waits for a hit."""


class Generated(NamedTuple):
    """What became of prompts that were given at once."""

    tokens: list[list[int]]
    cached: list[int]
    """Prompt tokens that were not computed, for each."""


class VllmEngine(Program):
    """A context manager around one engine."""

    program = "tests.engines.vllm_program"

    def __init__(
        self,
        model: Path,
        masters: str | None = None,
        *,
        folder: Path,
        connector: tuple[str, str] = ("KvharborConnector", CONNECTOR),
        extra: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
        own_process: bool = False,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Remember how to start it; without `masters` it has no connector."""
        self._adapters: list[Path] = []
        settings: dict[str, object] = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "seed": 0,
            "block_size": BLOCK,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256_cbor",
            **(options or {}),
        }
        if masters is not None:
            name, module = connector
            settings["kv_transfer_config"] = {
                "kv_connector": name,
                "kv_connector_module_path": module,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"masters": masters, **PATIENT, **(extra or {})},
            }
        own_environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process)),
            **(environment or {}),
        }
        super().__init__(self.program, settings, own_environment, folder=folder)

    def begin_generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int = 24,
        salt: str = "",
        adapter: Path | None = None,
        hints: object = None,
    ) -> None:
        """Tell it to go on from prompts that are given at once; `end_generate` has the answer."""
        if adapter is not None and adapter not in self._adapters:
            self._adapters.append(adapter)
        named = adapter and (adapter.name, self._adapters.index(adapter) + 1, str(adapter))
        self.tell(
            do="generate", prompts=prompts, tokens=tokens, salt=salt, adapter=named,
            hints=hints,
        )  # fmt: skip

    def end_generate(self) -> Generated:
        """What became of them."""
        said = self.reply()
        assert said["reasons"] == ["length"], said["reasons"]
        return Generated(said["tokens"], said["cached"])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int = 24,
        salt: str = "",
        adapter: Path | None = None,
        hints: object = None,
    ) -> Generated:
        """Go on from prompts that are given at once, with a LoRA adapter where one is named."""
        self.begin_generate(prompts, tokens, salt, adapter, hints)
        return self.end_generate()

    def forget(self) -> None:
        """Have it drop its own prefix cache."""
        self.tell(do="forget")
        assert self.reply() == {"forgot": True}

    def counts(self) -> dict[str, int]:
        """What the connector has counted; of engines in the program's own process."""
        self.tell(do="counts")
        return self.reply()

    def metrics(self) -> dict[str, int]:
        """What the connector has counted, by vLLM's metrics; of engines that keep any."""
        self.tell(do="metrics")
        return self.reply()

    def await_saved(self, pages: int) -> None:
        """Wait until so many pages were saved, or found to be there, since the start."""
        ends_s = time.monotonic() + ANSWER_S
        while True:
            counts = self.counts()
            if counts.get("saved_pages", 0) + counts.get("known_pages", 0) >= pages:
                return
            assert time.monotonic() < ends_s, counts
            time.sleep(POLL_S)
