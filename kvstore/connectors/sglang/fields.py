"""What SGLang says of an engine's KV, as `EngineFields` of rows; what has no rows is refused.

SGLang's page hashes are of tokens alone: everything else that decides on bytes is here. Reads
SGLang's objects by the names of their attributes, of the versions in `ENGINES`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.connectors.engine_model import (
    adapter_of,
    config_digest,
    file_digest,
    revision_of,
)
from kvstore.connectors.engine_namespace import EngineFields
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from kvstore.connectors.sglang.foreign import Sglang
    from kvstore.connectors.sglang.settings import Settings

ENGINES: Final = ("sglang 0.5.23",)
"""Engines whose objects are read here, and with which the tests run."""
HASH: Final = "sha256"
KEY_SCHEME: Final = "chain of pages, seeded by namespace v1"
"""How SGLang makes a page's digest: salts and the numbers of adapters are in the seed."""


class Facts(NamedTuple):
    """What a rank knows of its engine."""

    version: str
    model: Sglang
    """A ModelConfig."""
    arguments: Sglang
    """ServerArgs, as they were resolved."""
    ranks: int
    """Tensor-parallel ranks that have a copy of the model's attention among them."""
    stages: int
    context_ranks: int
    page_tokens: int
    kv_dtype: str
    """In which elements are kept."""
    layout: str
    """Of a page: in which order it has layers, keys, values and tokens."""
    pool: str
    """What SGLang calls pages of this kind."""
    page_bytes: int
    """Of one rank's share."""


def engine_fields(facts: Facts, settings: Settings) -> EngineFields:
    """The fields of an engine; BadValue where its weights have no name."""
    model, arguments = facts.model, facts.arguments
    return EngineFields(
        engine=f"sglang {facts.version}",
        model=arguments.model_path,
        revision=settings.revision or revision_of(arguments.model_path, arguments.revision),
        tenant=settings.tenant,
        kv_dtype=facts.kv_dtype,
        compute_dtype=plain(model.dtype),
        quantization=str(model.quantization or "none"),
        config_digest=config_digest(model.hf_config.to_dict()),
        hash_algorithm=HASH,
        hash_seed=KEY_SCHEME,
        block_tokens=facts.page_tokens,
        tensor_parallel=facts.ranks,
        block_order=facts.layout,
        groups=(),
        rows={
            "adapters": _adapters(arguments, settings),
            "attention_backends": _backends(arguments),
            "context_parallel": str(facts.context_ranks),
            "draft": _draft(arguments),
            "kv_cache_dtypes": _cache_dtypes(arguments),
            "kv_scales": _scales(arguments.quantization_param_path),
            "page_bytes": str(facts.page_bytes),
            "pipeline_parallel": str(facts.stages),
            "pool": facts.pool,
        },
    )


def _adapters(arguments: Sglang, settings: Settings) -> str:
    """Those that the engine starts with: SGLang numbers them by name and path, whatever is there.

    Those that are loaded later have numbers that nobody else draws.
    """
    found = [
        f"{each.lora_name} {each.lora_path} {settings.revision or adapter_of(each.lora_path)}"
        for each in arguments.lora_paths or ()
    ]
    return ", ".join(sorted(found)) or "none"


def _backends(arguments: Sglang) -> str:
    """Some lay a page's tokens out in ways of their own."""
    names = (
        arguments.attention_backend,
        arguments.prefill_attention_backend,
        arguments.decode_attention_backend,
    )
    return " ".join([str(name or "-") for name in names])


def _scales(path: str | None) -> str:
    """Keys and values are multiplied by them, wherever they lie."""
    return file_digest(Path(path)) if path else "none"


def _cache_dtypes(arguments: Sglang) -> str:
    """As they were asked for: SGLang's caches keep all that have 8 bits as uint8."""
    asked = arguments.kv_cache_dtype, arguments.speculative_draft_kv_cache_dtype
    return " ".join([str(name or "-") for name in asked])


def _draft(arguments: Sglang) -> str:
    """A draft model's KV may lie in the same pages."""
    if not arguments.speculative_algorithm:
        return "none"
    path, revision = (
        arguments.speculative_draft_model_path,
        arguments.speculative_draft_model_revision,
    )
    weights = revision_of(path, revision) if path else "its own"
    return f"{arguments.speculative_algorithm} {weights}"


def plain(dtype: object) -> str:
    """A dtype of torch's by its plain name."""
    return str(dtype).removeprefix("torch.")


def check_served(config: Sglang) -> None:
    """Refuse ranks whose pages are cut in ways that have no rows here, by BadValue."""
    if config.dcp_size != 1:
        raise BadValue("dcp_size", config.dcp_size, "1 with the kvharbor backend")
    if config.should_split_heads:
        raise BadValue("tp_lcm_size", config.tp_lcm_size, f"{config.tp_size}, the ranks, or none")
