"""Bytes of KV: the published examples to the byte, and every kind of attention and format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from kvstore.namespace import Attention, CacheGroup
from kvstore.planner import models
from kvstore.planner.kv_bytes import (
    DTYPE_BITS,
    arithmetic,
    kv_format,
    request_bytes,
    token_bytes,
)
from tests.unit.plans import SEVEN_B

FP16 = kv_format("float16")
GEMMA = models.model("gemma-2-9b").groups


def test_a_token_of_the_7b_example_has_half_a_megabyte() -> None:
    assert token_bytes(SEVEN_B.groups, FP16) == 2 * 32 * 32 * 128 * 2 == 524_288
    assert arithmetic(SEVEN_B.groups, FP16) == "2 × 32 layers × 32 heads × 128 × 2 B"


@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 524_288), (512, 256 << 20), (2048, 1_073_741_824)]
)
def test_a_request_of_the_7b_example_has_so_many_bytes(tokens: int, size: int) -> None:
    assert SEVEN_B.bytes_of(tokens) == size


def test_by_the_hidden_size_it_is_the_same_where_every_head_keeps_its_own() -> None:
    assert SEVEN_B.bytes_of(2048) == 2 * 32 * 4096 * 2048 * 2


def test_a_concurrency_of_32_moves_34_gigabytes() -> None:
    assert 32 * SEVEN_B.bytes_of(2048) == pytest.approx(34.4e9, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2),  # grouped heads: a quarter of their number
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2),
        ("deepseek-v3", 61 * (512 + 64) * 2),  # one latent vector a token and layer
        ("smollm2-135m", 2 * 30 * 3 * 64 * 2),
    ],
)
def test_published_models_have_so_many_bytes_a_token(name: str, size: int) -> None:
    assert token_bytes(models.model(name).groups, kv_format("bfloat16")) == size


def test_a_latent_vector_has_no_value_beside_it() -> None:
    latent = (CacheGroup(Attention.LATENT, 61, 1, 576, 0),)
    assert arithmetic(latent, FP16) == "61 layers × 576 × 2 B"


def test_one_head_for_all_is_as_many_times_less_as_there_are_heads() -> None:
    one = (CacheGroup(Attention.FULL, 32, 1, 128, 128),)
    assert 32 * token_bytes(one, FP16) == token_bytes(SEVEN_B.groups, FP16)


def test_a_window_bounds_its_layers_and_no_others() -> None:
    each = 21 * 8 * 2 * 256 * 2
    assert request_bytes(GEMMA, FP16, 4096) == 2 * 4096 * each
    assert request_bytes(GEMMA, FP16, 8192) == (8192 + 4096) * each
    assert "(last 4096 tokens)" in arithmetic(GEMMA, FP16)


@pytest.mark.parametrize(
    ("dtype", "scales", "vector"),
    [
        ("float16", None, 256),
        ("float8_e4m3", None, 128),
        ("int8", None, 128 + 2),
        ("int8", 0, 128),
        ("int8", 4, 128 + 4),
        ("int4", None, 64 + 4),
        ("int4", 0, 64),
    ],
)
def test_quantised_vectors_carry_their_scales(dtype: str, scales: int | None, vector: int) -> None:
    assert token_bytes(SEVEN_B.groups, kv_format(dtype, scales)) == 2 * 32 * 32 * vector


def test_scales_are_in_the_arithmetic() -> None:
    text = arithmetic(SEVEN_B.groups, kv_format("int8"))
    assert text == "2 × 32 layers × 32 heads × (128 × 1 B + 2 B)"


def test_half_a_byte_too_many_is_a_byte() -> None:
    odd = (CacheGroup(Attention.FULL, 1, 1, 3, 3),)
    assert token_bytes(odd, kv_format("int4", 0)) == 2 * 2


@given(st.sampled_from(sorted(DTYPE_BITS)), st.floats(1, 1e6), st.floats(1, 1e6))
def test_more_tokens_never_have_fewer_bytes(dtype: str, one: float, other: float) -> None:
    form, (few, many) = kv_format(dtype), sorted((one, other))
    for known in models.MODELS.values():
        assert request_bytes(known.groups, form, few) <= request_bytes(known.groups, form, many)


@pytest.mark.parametrize(
    ("dtype", "scales", "field"),
    [("fp12", None, "dtype"), ("int8", -1, "scale_bytes"), ("int8", True, "scale_bytes")],
)
def test_other_formats_are_refused(dtype: str, scales: int | None, field: str) -> None:
    with pytest.raises(BadValue, match=rf"^{field}: got .*, want "):
        kv_format(dtype, scales)


def test_an_unknown_model_is_told_who_is_known() -> None:
    with pytest.raises(
        BadValue, match=r"^model: got 'gpt-5', want one of smollm2-135m, .*--config"
    ):
        models.model("gpt-5")
