"""An SGLang engine in processes of its own, for tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.cluster.servers import until
from tests.engines.program import Program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PAGE: Final = 16
BACKEND: Final = {
    "backend_name": "kvharbor",
    "module_path": "kvstore.connectors.sglang.storage",
    "class_name": "KvharborStorage",
    "prefetch_threshold": PAGE,
}
PATIENT: Final = {"timeout_s": 5.0}
"""On a machine that others keep busy an answer may be late, and a test waits for a hit."""


class Generated(NamedTuple):
    """What became of prompts that were given at once."""

    tokens: list[list[int]]
    cached: list[int]
    """Prompt tokens that were not computed, for each."""
    storage: list[int]
    """Those of them that came from the pool."""


def hicache(
    masters: str, *, in_pieces: bool = True, layout: str = "page_first_direct", **ours: object
) -> dict[str, object]:
    """Options of an engine whose hierarchical cache has the pool as its third tier."""
    extra = {
        **BACKEND,
        "interface_v1": int(in_pieces),
        "kvharbor": {"masters": masters, **PATIENT, **ours},
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": layout,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def linked(masters: str, **ours: object) -> dict[str, object]:
    """Options of an engine that reaches the pool from the device's memory."""
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KvharborLinker",
            "linker_module_path": "kvstore.connectors.sglang.linker",
            "linker_extra_config": {"masters": masters, **PATIENT, **ours},
        },
    }


class SglangEngine(Program):
    """A context manager around one engine."""

    def __init__(
        self,
        model: Path,
        cache: Mapping[str, object] | None = None,
        *,
        folder: Path,
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Remember how to start it; `cache` are the options of what is beside its own cache."""
        options = {
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": 4096,
            "max_running_requests": 4,
            "page_size": PAGE,
            "mem_fraction_static": 0.8,  # of what others leave; max_total_tokens decides
            "log_level": "info",
            "enable_cache_report": True,
            "tp_size": ranks,
            "random_seed": 0,
            **(cache or {}),
        }
        cores = "|".join(str(rank) for rank in range(ranks))
        given = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": cores,
            **(environment or {}),
        }
        super().__init__("tests.engines.sglang_program", options, given, folder=folder)

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int = 24, salt: str = ""
    ) -> Generated:
        """Go on from prompts that are given at once."""
        self.tell(do="generate", prompts=prompts, tokens=tokens, salt=salt)
        return Generated(**self.reply())

    def forget(self) -> None:
        """Have it drop its own caches, of device and host: it refuses until it is idle."""

        def forgot() -> bool:
            self.tell(do="forget")
            return self.reply() == {"forgot": True}

        until("the engine forgets", forgot)

    def reload(self, model: Path) -> None:
        """Have it read weights from there, while it runs: it drops its own caches as well."""
        self.tell(do="reload", model=str(model))
        assert self.reply() == {"reloaded": True}

    def clear(self) -> None:
        """Have it drop what it, and its like, have in the pool."""
        self.tell(do="clear")
        assert self.reply() == {"cleared": True}
