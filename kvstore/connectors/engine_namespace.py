"""What must be equal for two engines to share KV: the fields, the namespaces made of them.

Pure, and knows no engine: adapters fill in `EngineFields`. One namespace for each cache group,
because groups keep different blocks; or one of opaque rows, where an engine's own cache tiers have
brought the groups and ranks of a run of tokens together, and call them by a digest. A difference
in any field is another namespace, so it is never a wrong hit; `differences` names it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.namespace import (
    OPAQUE_GROUP,
    Attention,
    CacheGroup,
    Content,
    Layout,
    Namespace,
    open_layout,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

UNSEEDED: Final = ""
"""`hash_seed` of an engine that draws one at its start: nobody else can have its hashes."""
PICKLED: Final = frozenset({"sha256"})
"""Hashes over pickled values: equal only among interpreters that pickle alike."""
RARE: Final = ("draft", "media", "reach")
"""Fields that most engines have nothing to say of."""
SEED_NEEDED: Final = frozenset({"xxhash", "xxhash_cbor"})


class EngineGroup(msgspec.Struct, frozen=True):
    """One cache group of an engine: layers whose blocks come and go together."""

    attention: Attention
    layers: tuple[str, ...]
    """Names, in the order in which a page has them."""
    kv_heads: int
    """Of the whole model, not of one rank."""
    key_dim: int
    value_dim: int
    window_tokens: int = 0


class EngineFields(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes the meaning, or the place, of an engine's KV bytes."""

    engine: str
    """Name and minor version."""
    model: str
    revision: str
    tenant: str
    kv_dtype: str
    compute_dtype: str
    quantization: str
    config_digest: str
    """Of the model's configuration, positions and windows included."""
    hash_algorithm: str
    hash_seed: str
    block_tokens: int
    tensor_parallel: int
    block_order: str
    """How the kernels lay a block out."""
    groups: tuple[EngineGroup, ...]
    """Empty of an engine that hands over rows."""
    draft: str = ""
    """The weights of a model of its own that guesses tokens: its KV may lie in the same pages."""
    media: str = ""
    """How an engine reads pictures and films, where it is told so and its hashes do not say it."""
    reach: str = ""
    """On which side its longest request is of lengths that change how the model computes any."""
    rows: dict[str, str] = {}
    """Of an engine that hands over rows: what else decides on their bytes, or keys, by name."""


def check_fields(fields: EngineFields, engines: Sequence[str]) -> None:
    """Refuse what can never share, by BadValue: unknown engines, hashes that nobody else has."""
    if fields.engine not in engines:
        raise BadValue("engine", fields.engine, f"one of {', '.join(engines)}")
    if fields.hash_algorithm in SEED_NEEDED and fields.hash_seed == UNSEEDED:
        raise BadValue(
            "hash_seed", "a random one", "PYTHONHASHSEED set alike for all engines, or sha256_cbor"
        )


def warnings(fields: EngineFields) -> list[str]:
    """What works, and yet may keep engines from sharing."""
    if fields.hash_algorithm in PICKLED:
        return [
            f"{fields.hash_algorithm} hashes pickled values: engines of other Python versions may "
            "not share; --prefix-caching-hash-algo sha256_cbor has no such limit"
        ]
    return []


def namespaces(fields: EngineFields) -> tuple[Namespace, ...]:
    """One for each group, in order, or one of rows. BadValue names a field that is wrong."""
    if fields.rows:
        return (_namespace(fields, OPAQUE_GROUP, {"rows": _digest(_canonical(fields.rows))}, ""),)
    return tuple(_of_group(fields, number) for number in range(len(fields.groups)))


def _of_group(fields: EngineFields, number: int) -> Namespace:
    group = fields.groups[number]
    shape = CacheGroup(
        group.attention, len(group.layers), group.kv_heads, group.key_dim, group.value_dim,
        group.window_tokens,
    )  # fmt: skip
    layers = _digest(_canonical(group.layers))
    return _namespace(fields, shape, {"layers": layers}, f" group={number}/{len(fields.groups)}")


def _namespace(
    fields: EngineFields, shape: CacheGroup, more: dict[str, str], which: str
) -> Namespace:
    rare = {name: text for name in RARE if (text := getattr(fields, name))}
    content = Content(
        tenant=fields.tenant,
        model=fields.model,
        revision=fields.revision,
        adapter="",  # adapters are in the engine's block hashes
        kv_dtype=fields.kv_dtype,
        groups=(shape,),
        position=_canonical(
            {
                "compute_dtype": fields.compute_dtype,
                "config": fields.config_digest,
                "quantization": fields.quantization,
                **rare,
                **more,
            }
        ),
    )
    hashed = f"{fields.hash_algorithm}/{_digest(fields.hash_seed)}"
    layout = Layout(
        page_tokens=fields.block_tokens,
        tensor_parallel=fields.tensor_parallel,
        order=fields.block_order,
        engine=f"{fields.engine} hash={hashed}{which}",
    )
    return open_layout(content, layout)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def described(fields: EngineFields) -> dict[str, str]:
    """Every field as text, by name, groups' by number: what `differences` compares."""
    found = {
        name: str(getattr(fields, name))
        for name in EngineFields.__struct_fields__
        if name not in ("groups", "rows")
    }
    found |= fields.rows
    for number, group in enumerate(fields.groups):
        for name in EngineGroup.__struct_fields__:
            value = getattr(group, name)
            text = ",".join(value) if name == "layers" else str(value)
            found[f"groups[{number}].{name}"] = text
    return found


def differences(ours: EngineFields, theirs: EngineFields) -> list[str]:
    """Why two engines do not share: each field that differs, with both values."""
    mine, yours = described(ours), described(theirs)
    return [
        f"{name}: {mine.get(name, '-')} here, {yours.get(name, '-')} there"
        for name in dict.fromkeys((*mine, *yours))
        if mine.get(name) != yours.get(name)
    ]


def as_text(fields: EngineFields) -> str:
    """The fields as JSON, which `of_text` reads."""
    return json.dumps(msgspec.to_builtins(fields), indent=1)


def of_text(text: str) -> EngineFields:
    """What `as_text` wrote; BadValue where it did not."""
    want = "a description that an engine's connector wrote"
    try:
        return msgspec.convert(json.loads(text), EngineFields)
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        raise BadValue("description", str(error), want) from error


def part_of(namespace: Namespace, tensor_rank: int) -> tuple[int, bool]:
    """The part of a page that a rank reads, and whether it is the one that writes it.

    Ranks that hold the same heads, or the same latent, share a part; the first of them writes.
    BadValue where a rank has several parts: its layers do not fit one chunk.
    """
    ranks = namespace.layout.tensor_parallel
    holders = 1 + max(part.tensor_rank for part in namespace.parts)
    if len(namespace.parts) != holders:
        raise BadValue(
            "block_tokens", namespace.layout.page_tokens, "so few that a rank's part fits a chunk"
        )
    part = tensor_rank * holders // ranks
    is_first = tensor_rank == 0 or (tensor_rank - 1) * holders // ranks != part
    return part, is_first
