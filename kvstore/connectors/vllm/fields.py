"""What vLLM's configuration says of its KV, as `EngineFields`; what has no pages is refused.

Reads vLLM's objects by the names of their attributes, of the minor versions in `ENGINES`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import torch

from kvstore.block_hashes import VLLM_SEED
from kvstore.client.tensors import dtype_name
from kvstore.connectors.engine_model import config_digest, revision_of
from kvstore.connectors.engine_namespace import UNSEEDED, EngineFields, EngineGroup
from kvstore.errors import BadValue
from kvstore.namespace import Attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.connectors.vllm.foreign import Vllm
    from kvstore.connectors.vllm.settings import Settings

ENGINES: Final = ("vllm 0.32",)
"""Engines whose objects are read here, and with which the tests run."""
DEFAULT_SEED: Final = "the engine's own"
"""What vLLM seeds cryptographic hashes with unless PYTHONHASHSEED says otherwise."""
SEEDED: Final = "PYTHONHASHSEED="
PLAIN_DTYPES: Final = frozenset({"auto", "float32", "bfloat16", "float16"})
KINDS: Final = {
    "FullAttentionSpec": Attention.FULL,
    "MLAAttentionSpec": Attention.LATENT,
    "SlidingWindowSpec": Attention.SLIDING,
}
MEDIA: Final = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
"""Of a MultiModalConfig, by which one picture comes to other embeddings."""
TEMPERED_TOKENS: Final = 32768
"""Llama 4 of vLLM's tempers attention in engines that take longer requests."""
CPU_KINDS: Final = ("avx2", "avx512_f", "amx_tile")
"""Abilities of a processor by which vLLM chooses how it packs keys."""


def engine_fields(
    config: Vllm, cache: Vllm, version: str, settings: Settings, environment: Mapping[str, str]
) -> EngineFields:
    """The fields of an engine; BadValue names what this connector has no pages for.

    `config` is a VllmConfig, `cache` a KVCacheConfig.
    """
    model, caching = config.model_config, config.cache_config
    _check_supported(config, cache)
    groups = tuple(_group(config, group) for group in cache.kv_cache_groups)
    return EngineFields(
        engine=f"vllm {'.'.join(version.split('.')[:2])}",
        model=model.model,
        revision=settings.revision or revision_of(model.model, model.revision),
        tenant=settings.tenant,
        kv_dtype=dtype_name(cache.kv_cache_groups[0].kv_cache_spec.dtype),
        compute_dtype=dtype_name(model.dtype),
        quantization=str(model.quantization or "none"),
        config_digest=config_digest(model.hf_config.to_dict()),
        hash_algorithm=caching.prefix_caching_hash_algo,
        hash_seed=hash_seed(caching.prefix_caching_hash_algo, environment),
        block_tokens=caching.block_size,
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        block_order=f"{cache.kv_cache_layout} {platform()}",
        groups=groups,
        draft=_draft(config, settings),
        media=_media(model),
        reach=_reach(model.hf_config.to_dict(), model.max_model_len),
    )


def _draft(config: Vllm, settings: Settings) -> str:
    """Weights of a draft model of its own; guesses by n-grams or the model's own layers have none.

    Where the user names the weights, its name is enough.
    """
    guessing = config.speculative_config
    draft = guessing and guessing.draft_model_config
    if not draft or draft.model == config.model_config.model:
        return ""
    return f"{draft.model} {settings.revision or revision_of(draft.model, draft.revision)}"


def _media(model: Vllm) -> str:
    """What vLLM's hash of a picture leaves out: it has what requests say, not what the engine does.

    Empty of a model that takes none.
    """
    told = model.multimodal_config
    if told is None:
        return ""
    values = {name: value for name in MEDIA if (value := getattr(told, name))}
    return json.dumps(values, sort_keys=True, default=str)


def _reach(values: Mapping[str, object], longest: int) -> str:
    """On which side of a model's own lengths the longest request is that the engine takes.

    Some models rotate keys by other factors where that is beyond what they were trained with first
    (longrope), or temper their attention where it is long (Llama 4): short requests', too.
    """
    sides = [f"{'over' if longest > each else 'up to'} {each}" for each in sorted(_lengths(values))]
    return ", ".join(sides)


def _lengths(values: Mapping[str, object]) -> set[int]:
    found = {TEMPERED_TOKENS} if "attn_temperature_tuning" in values else set()
    for name, value in values.items():
        if name == "original_max_position_embeddings" and isinstance(value, int | float):
            found.add(int(value))
        elif isinstance(value, dict):
            found |= _lengths(value)
    return found


def _check_supported(config: Vllm, cache: Vllm) -> None:
    parallel, caching = config.parallel_config, config.cache_config
    for field in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, field) != 1:
            raise BadValue(field, getattr(parallel, field), "1 with the kvharbor connector")
    if caching.cache_dtype not in PLAIN_DTYPES:
        raise BadValue("kv_cache_dtype", caching.cache_dtype, f"one of {sorted(PLAIN_DTYPES)}")
    if not caching.enable_prefix_caching:
        raise BadValue("enable_prefix_caching", False, "True: the pool goes by its block hashes")
    hashed = cache.hash_block_size or caching.block_size
    for number, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        if type(spec).__name__ not in KINDS:
            kinds = ", ".join(KINDS)
            raise BadValue(f"groups[{number}]", type(spec).__name__, f"one of {kinds}")
        if spec.block_size != hashed:
            raise BadValue(f"groups[{number}].block_size", spec.block_size, f"{hashed}, as hashed")


def _group(config: Vllm, group: Vllm) -> EngineGroup:
    spec = group.kv_cache_spec
    kind = KINDS[type(spec).__name__]
    window = 0
    if kind is Attention.SLIDING:
        # What vLLM retains beyond the window it may read again.
        window = spec.sliding_window + spec.extra_retained_tokens
    made = EngineGroup(
        kind,
        tuple(group.layer_names),
        1 if kind is Attention.LATENT else _heads(config, spec),
        spec.head_size,
        0 if kind is Attention.LATENT else spec.head_size_v,
        window,
    )
    ranks = 1 if kind is Attention.LATENT else config.parallel_config.tensor_parallel_size
    heads = max(1, made.kv_heads // ranks)
    plain = spec.block_size * heads * (made.key_dim + made.value_dim) * spec.dtype.itemsize
    if spec.page_size_bytes != plain:
        raise BadValue("page_size_bytes", spec.page_size_bytes, f"{plain}: keys and values alone")
    return made


def _heads(config: Vllm, spec: Vllm) -> int:
    """KV heads of the whole model; ranks beyond their number hold copies."""
    total: int = config.model_config.get_total_num_kv_heads()
    ranks: int = config.parallel_config.tensor_parallel_size
    return total if total < ranks else spec.num_kv_heads * ranks


def hash_seed(algorithm: str, environment: Mapping[str, str]) -> str:
    """What an engine started with this environment seeds its block hashes with."""
    seed = environment.get("PYTHONHASHSEED")
    if seed is not None:
        return f"{SEEDED}{seed}"
    return UNSEEDED if algorithm.startswith("xxhash") else DEFAULT_SEED


def seed_of(described: str) -> str:
    """The text that vLLM hashes as its seed, of an engine whose `hash_seed` is this."""
    return VLLM_SEED if described == DEFAULT_SEED else described.removeprefix(SEEDED)


def platform() -> str:
    """What kernels choose the interior of a block by, beside its shape."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda {major}.{minor}"
    has = torch.cpu.get_capabilities()
    return " ".join(
        ["cpu", str(has["architecture"]), *(each for each in CPU_KINDS if has.get(each))]
    )
