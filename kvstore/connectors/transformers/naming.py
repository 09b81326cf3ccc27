"""What a transformers model's KV is called: its content, and the names of its states.

Everything that changes the bytes of a cache without changing its shape goes into one of the two:
caches of the same name are interchangeable.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

import torch

from kvstore import limits
from kvstore.client.tensors import dtype_name
from kvstore.connectors.transformers.kinds import (
    KVShape,
    LayerShape,
    UnsupportedCache,
    has_full_attention_alone,
    shape_of_heads,
)
from kvstore.namespace import Attention, CacheGroup, Content, content_id, encode_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig, PreTrainedModel

POSITION_FIELDS: Final = (
    "alibi",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "position_embedding_type",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
"""Fields of a model's configuration that change its keys without changing its weights."""
ELSEWHERE: Final = frozenset(
    {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
)
"""Fields that change no key, or that a content has by itself."""
STATES_TAG: Final = b"kvh1.transformers.states"


def content_of(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    tenant: str,
    model_id: str,
    revision: str,
    adapter: str = "",
    salt: str = "",
) -> Content:
    """What must be equal for two models' caches to be interchangeable, from a configuration.

    `config` is that of the text decoder. Raises UnsupportedCache unless the model has full
    attention alone: the shapes of others are not in their configurations.
    """
    if config.is_encoder_decoder or not has_full_attention_alone(config):
        raise UnsupportedCache(
            f"{config.model_type}: from a configuration only decoders with full attention alone, "
            "want the model itself"
        )
    kv = (shape_of_heads(config),) * config.num_hidden_layers
    return content(
        config, kv, dtype=dtype, tenant=tenant, model_id=model_id, revision=revision,
        adapter=adapter, salt=salt,
    )  # fmt: skip


def content(
    config: PreTrainedConfig,
    kv: Sequence[KVShape],
    *,
    dtype: torch.dtype,
    tenant: str,
    model_id: str,
    revision: str,
    adapter: str = "",
    salt: str = "",
) -> Content:
    """The content of layers of these shapes, those of one shape in one group."""
    groups = tuple(_group(shape, kv.count(shape)) for shape in dict.fromkeys(kv))
    position = f"{_position(config)} config={_config_digest(config)}"
    name = dtype_name(dtype)
    return Content(
        tenant, model_id, revision, adapter, name, groups, position, salt
    )  # fmt: skip


def states_name(whole: Content, layers: Sequence[LayerShape], page_tokens: int) -> str:
    """Name of the opaque namespace of the windows and recurrent states of these layers.

    `whole` is the content of all layers' KV. Says how bytes lie, too: equal names, equal sizes.
    """
    shapes = json.dumps(
        [[layer.kind.__name__, layer.kv, [str(each) for each in layer.states]] for layer in layers]
    )
    named = encode_fields(
        STATES_TAG,
        [("content", content_id(whole)), ("layers", shapes), ("page_tokens", page_tokens)],
    )
    return f"transformers-states:{hashlib.sha256(named).hexdigest()}"


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 over names, types, shapes and bytes of all weights, in the order of their names."""
    digest = hashlib.sha256()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(named.items()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _group(shape: KVShape, layers: int) -> CacheGroup:
    if shape.attention is Attention.LATENT:
        return CacheGroup(shape.attention, layers, 1, shape.key_dim + shape.value_dim, 0)
    return CacheGroup(
        shape.attention, layers, shape.kv_heads, shape.key_dim, shape.value_dim, shape.window_tokens
    )


def _config_digest(config: PreTrainedConfig) -> str:
    """SHA-256 of all of a configuration but for what has nothing to do with what is computed.

    A norm's epsilon, an activation or how many experts a token has change KV, not the weights.
    """
    fields = {name: value for name, value in config.to_dict().items() if name not in ELSEWHERE}
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _position(config: PreTrainedConfig) -> str:
    """The position fields that the configuration has, as canonical text."""
    fields = {name: getattr(config, name, None) for name in POSITION_FIELDS}
    known = {name: value for name, value in fields.items() if value is not None}
    text = json.dumps(known, sort_keys=True, separators=(",", ":"))
    if len(text) <= limits.NAME_BYTES_MAX:
        return text
    # Factors per dimension can fill kilobytes; a digest tells them apart as well.
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
