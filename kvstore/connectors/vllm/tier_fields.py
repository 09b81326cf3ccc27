"""What vLLM tells its cache tiers of its KV, as `EngineFields`, and what users tell ours.

Reads vLLM's OffloadingConfig by the names of its attributes, of the minor versions in `ENGINES`.
Everything that vLLM's own tiers name their files by is here, and what they leave out: weights,
hash and its seed, kernels' block layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from kvstore import limits
from kvstore.connectors.engine_lookups import DEADLINE_S
from kvstore.connectors.engine_model import config_digest, revision_of
from kvstore.connectors.engine_namespace import EngineFields
from kvstore.connectors.pool_settings import PoolSettings, read_settings
from kvstore.connectors.vllm.fields import hash_seed, platform
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.connectors.vllm.foreign import Vllm

WHERE: Final = "secondary_tiers"
NOT_YET: Final = "not known yet"
"""The hash of an engine that does not serve yet."""


class TierSettings(PoolSettings, frozen=True, kw_only=True):
    """All of it has defaults."""

    description_file: str = ""
    """Where to write what this engine's KV is called, for `kvharbor doctor engine`."""
    revision: str = ""
    """Names the model's weights; empty for a digest of them, about a second a gigabyte."""
    variant: str = ""
    """Names what vLLM does not tell a tier: quantisation on loading, changes to the model's
    configuration, a draft model, how pictures are read, the longest request of a model that
    rotates keys by it (longrope), dtypes of computation that differ from the cache's."""
    lookup_deadline_s: float = DEADLINE_S
    """A request is held back so long for the pool's answer; then it is computed without."""
    save_bytes_max: int = 256 * limits.MIB
    """Rows on their way to the pool, which vLLM cannot evict meanwhile; others are not saved."""
    locality: Literal["LOCAL", "REMOTE"] = "REMOTE"
    """What vLLM's events and requests call the pool's place."""


def tier_settings(given: Mapping[str, object]) -> TierSettings:
    """The settings; BadValue names the one that is wrong."""
    settings = read_settings(TierSettings, given, WHERE)
    if not 0 <= settings.lookup_deadline_s <= settings.timeout_s:
        want = f"0 to timeout_s, {settings.timeout_s}"
        raise BadValue(f"{WHERE}.lookup_deadline_s", settings.lookup_deadline_s, want)
    if settings.save_bytes_max < 0:
        raise BadValue(f"{WHERE}.save_bytes_max", settings.save_bytes_max, "0 or more bytes")
    return settings


def tier_fields(config: Vllm, row_bytes: int, version: str, settings: TierSettings) -> EngineFields:
    """The fields of an engine, but for its hash; BadValue names what has no rows.

    `config` is an OffloadingConfig; a row is a chunk of all layers and ranks, `row_bytes` long.
    """
    model, cache, parallel = config.model, config.cache, config.parallel
    if row_bytes > limits.CHUNK_BYTES:
        want = f"fewer: a row of {row_bytes} bytes exceeds {limits.CHUNK_BYTES}"
        raise BadValue("blocks_per_chunk", cache.blocks_per_chunk, want)
    rows = {
        "row_bytes": row_bytes,
        "blocks_per_chunk": cache.blocks_per_chunk,
        "pipeline_parallel": parallel.pp_size,
        "prefill_context_parallel": parallel.pcp_size,
        "decode_context_parallel": parallel.dcp_size,
        "world_size": parallel.world_size,
        "replicated_layout": config.replicated_layout,
        "canonical_layout": config.canonical_layout,
        "variant": settings.variant,
    }
    for number, group in enumerate(config.groups):
        rows[f"groups[{number}].tokens_per_block"] = group.tokens_per_block
        rows[f"groups[{number}].layers"] = ",".join(group.layer_names)
    return EngineFields(
        engine=f"vllm {'.'.join(version.split('.')[:2])}",
        model=model.name,
        revision=settings.revision or revision_of(model.name, None),
        tenant=settings.tenant,
        kv_dtype=model.dtype,
        compute_dtype="",
        quantization="",
        config_digest=_config_digest(Path(model.name)),
        hash_algorithm=NOT_YET,
        hash_seed=NOT_YET,
        block_tokens=cache.tokens_per_hash,
        tensor_parallel=parallel.tp_size,
        block_order=f"{config.kv_cache_layout} {platform()}",
        groups=(),
        rows={name: str(value) for name, value in rows.items()},
    )


def with_hash(fields: EngineFields, algorithm: str, environment: Mapping[str, str]) -> EngineFields:
    """The fields of an engine that serves, and so has chosen its hash."""
    return replace(fields, hash_algorithm=algorithm, hash_seed=hash_seed(algorithm, environment))


def _config_digest(folder: Path) -> str:
    """Of a model that is a folder; a model of a hub has it in its commit."""
    path = folder / "config.json"
    return config_digest(json.loads(path.read_bytes())) if path.is_file() else ""
