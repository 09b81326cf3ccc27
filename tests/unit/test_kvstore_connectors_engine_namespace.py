"""What keeps two engines apart: every field, by name; and what is refused outright."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.connectors.engine_namespace import (
    UNSEEDED,
    EngineFields,
    EngineGroup,
    check_fields,
    described,
    differences,
    namespaces,
    part_of,
    warnings,
)
from kvstore.errors import BadValue
from kvstore.namespace import Attention

FULL = EngineGroup(Attention.FULL, ("layers.0", "layers.2"), 4, 32, 32)
SLIDING = EngineGroup(Attention.SLIDING, ("layers.1", "layers.3"), 4, 32, 32, 64)
LATENT = EngineGroup(Attention.LATENT, ("layers.0",), 1, 576, 0)
FIELDS = EngineFields(
    engine="vllm 0.32",
    model="m",
    revision="r1",
    tenant="default",
    kv_dtype="bfloat16",
    compute_dtype="bfloat16",
    quantization="none",
    config_digest="c1",
    hash_algorithm="sha256_cbor",
    hash_seed="s1",
    block_tokens=32,
    tensor_parallel=1,
    block_order="NHD cpu",
    groups=(FULL, SLIDING),
)
OTHER = {
    "engine": "vllm 0.33",
    "model": "n",
    "revision": "r2",
    "tenant": "other",
    "kv_dtype": "float16",
    "compute_dtype": "float16",
    "quantization": "awq",
    "config_digest": "c2",
    "hash_algorithm": "sha256",
    "hash_seed": "s2",
    "block_tokens": 64,
    "tensor_parallel": 2,
    "block_order": "HND cpu",
    "groups": (FULL, msgspec.structs.replace(SLIDING, window_tokens=128)),
    "draft": "d sha256:1",
    "media": '{"mm_processor_kwargs": {"num_crops": 4}}',
    "reach": "over 4096",
    "rows": {"row_bytes": "4096"},
}
ROWS = {"row_bytes": "4096", "layers": "l0,l1"}


def changed(**fields: object) -> EngineFields:
    made: EngineFields = msgspec.structs.replace(FIELDS, **fields)
    return made


def ids(fields: EngineFields) -> set[bytes]:
    return {bytes(each.id) for each in namespaces(fields)}


def test_every_field_is_tried() -> None:
    assert set(OTHER) == set(EngineFields.__struct_fields__)


@pytest.mark.parametrize("field", sorted(set(OTHER) - {"groups", "rows"}))
@pytest.mark.parametrize("shape", [{}, {"groups": (), "rows": ROWS}])
def test_another_value_of_any_field_is_another_namespace_and_is_named(
    field: str, shape: dict[str, object]
) -> None:
    ours, other = changed(**shape), changed(**shape, **{field: OTHER[field]})
    assert not ids(ours) & ids(other)
    (difference,) = differences(ours, other)
    mine = described(ours)[field]
    assert difference == f"{field}: {mine} here, {OTHER[field]} there"


def test_rows_have_one_namespace_of_their_own_and_what_differs_in_them_is_named() -> None:
    ours = changed(groups=(), rows=ROWS)
    (namespace,) = namespaces(ours)
    assert namespace.is_opaque
    assert namespace.parts_a_page == 1
    other = changed(groups=(), rows={**ROWS, "row_bytes": "8192"})
    assert not ids(ours) & ids(other)
    assert differences(ours, other) == ["row_bytes: 4096 here, 8192 there"]


@pytest.mark.parametrize(
    "group",
    [
        msgspec.structs.replace(SLIDING, layers=("layers.3", "layers.1")),
        msgspec.structs.replace(SLIDING, kv_heads=2),
        msgspec.structs.replace(SLIDING, key_dim=64),
        msgspec.structs.replace(SLIDING, value_dim=64),
        msgspec.structs.replace(SLIDING, window_tokens=128),
    ],
)
def test_another_group_is_another_namespace_and_is_named(group: EngineGroup) -> None:
    other = changed(groups=(FULL, group))
    assert namespaces(FIELDS)[0].id == namespaces(other)[0].id
    assert namespaces(FIELDS)[1].id != namespaces(other)[1].id
    (difference,) = differences(FIELDS, other)
    assert difference.startswith("groups[1].")


def test_equal_engines_share_and_differ_in_nothing() -> None:
    assert ids(FIELDS) == ids(changed())
    assert differences(FIELDS, changed()) == []


def test_a_group_that_the_other_lacks_is_named() -> None:
    other = changed(groups=(FULL,))
    assert not ids(FIELDS) & ids(other)
    assert "groups[1].kv_heads: 4 here, - there" in differences(FIELDS, other)


def test_groups_of_one_shape_do_not_share() -> None:
    assert len(ids(changed(groups=(FULL, FULL)))) == 2


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadValue, match=r"engine: got 'vllm 0\.32', want one of vllm 0\.30, v 1"):
        check_fields(FIELDS, ["vllm 0.30", "v 1"])


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_with_a_random_seed_are_refused(algorithm: str) -> None:
    seeded = changed(hash_algorithm=algorithm)
    check_fields(seeded, [FIELDS.engine])
    with pytest.raises(BadValue, match="PYTHONHASHSEED"):
        check_fields(changed(hash_algorithm=algorithm, hash_seed=UNSEEDED), [FIELDS.engine])


def test_pickled_hashes_are_warned_of() -> None:
    assert warnings(FIELDS) == []
    (text,) = warnings(changed(hash_algorithm="sha256"))
    assert "sha256_cbor" in text


@pytest.mark.parametrize(
    ("group", "ranks", "want"),
    [
        (FULL, 1, [(0, True)]),
        (FULL, 2, [(0, True), (1, True)]),
        (FULL, 4, [(0, True), (1, True), (2, True), (3, True)]),
        # Two ranks have the same head: the first of them writes it.
        (FULL, 8, [(r // 2, r % 2 == 0) for r in range(8)]),
        (LATENT, 4, [(0, True), (0, False), (0, False), (0, False)]),
    ],
)
def test_ranks_with_the_same_bytes_share_a_part(
    group: EngineGroup, ranks: int, want: list[tuple[int, bool]]
) -> None:
    (namespace,) = namespaces(changed(groups=(group,), tensor_parallel=ranks))
    assert [part_of(namespace, rank) for rank in range(ranks)] == want


def test_a_part_that_fits_no_chunk_is_refused() -> None:
    deep = msgspec.structs.replace(FULL, layers=tuple(map(str, range(80))), kv_heads=128)
    (namespace,) = namespaces(changed(groups=(deep,), block_tokens=128))
    with pytest.raises(BadValue, match="block_tokens"):
        part_of(namespace, 0)
