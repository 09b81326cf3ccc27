"""Hashes of an engine's blocks without the engine; the vectors are vLLM's own."""

from __future__ import annotations

import pytest

from kvstore.block_hashes import SHA256_CBOR, VLLM_SEED, Hashing, block_hashes, chain_of
from kvstore.errors import BadValue
from kvstore.page import PageChain, engine_key
from tests.unit.client_scripts import opened

FULL = [
    "ee42a642317300c631ca8d373a4367929ea28ebd745c2be74cd7b60e470f8ee9",
    "a880294471e2ed8e082db6f4c8c18ff0dbfbb0540e296516336eaf7528da7f59",
]
WIDE = [
    "d7d6ac03ff7fccb18d6cfb4700e0614073c32b0f652d8c111d4b1168f881fa58",
    "6ddc510585934dfc57ac4897314de28929b7883b094e4c590ed71e1e2e529f42",
]


def hexes(tokens: list[int], block_tokens: int, seed: str) -> list[str]:
    return [each.hex() for each in block_hashes(tokens, block_tokens, seed)]


def test_they_are_those_of_vllm() -> None:
    assert hexes(list(range(20, 300, 4)), 32, VLLM_SEED) == FULL
    # Tokens of every width that the encoding has, and the seed of an environment.
    assert hexes([0, 23, 24, 255, 256, 65535, 65536, 4294967295], 4, "7") == WIDE


def test_a_block_that_is_not_full_has_none() -> None:
    assert hexes(list(range(20, 272, 4)), 32, VLLM_SEED) == FULL[:1]
    assert hexes([1, 2, 3], 4, VLLM_SEED) == []


def test_pages_are_named_by_them_or_by_their_own_keys() -> None:
    namespace = opened().namespace
    step = namespace.layout.page_tokens
    tokens = list(range(2 * step + 1))
    hashes = block_hashes(tokens, step, "s")
    named = chain_of(namespace, tokens, Hashing(SHA256_CBOR, "s"))
    assert list(named) == [engine_key(namespace.id, each) for each in hashes]
    own = chain_of(namespace, tokens, Hashing())
    assert own.packed == PageChain.of_tokens(namespace.id, tokens, step).packed != named.packed


def test_what_cannot_be_derived_is_refused() -> None:
    with pytest.raises(BadValue, match=r"hash_algorithm.*sha256_cbor"):
        chain_of(opened().namespace, [1], Hashing("sha256", VLLM_SEED))
