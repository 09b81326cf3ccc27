"""Erasure coding: any k shards give the others, fewer give none, and its bytes never change."""

from __future__ import annotations

import random
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.erasure import STRIP_BYTES, decode, encode
from kvstore.errors import BadValue
from kvstore.limits import SHARDS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

SAMPLES = 40


def stripe(k: int, m: int, nbytes: int, seed: int = 1) -> list[memoryview]:
    """Data made from the seed, and its parity."""
    draw = random.Random(seed)
    data = [memoryview(draw.randbytes(nbytes)) for _ in range(k)]
    parity = empty(m, nbytes)
    encode(k, m, data, parity)
    return [*data, *parity]


def empty(shards: int, nbytes: int) -> list[memoryview]:
    return [memoryview(bytearray(nbytes)) for _ in range(shards)]


def rebuilt(k: int, m: int, shards: list[memoryview], lost: Iterable[int]) -> list[memoryview]:
    """All shards, those that were lost decoded from the rest."""
    gone = tuple(lost)
    have = {number: view for number, view in enumerate(shards) if number not in gone}
    into = dict(zip(gone, empty(len(gone), shards[0].nbytes), strict=True))
    decode(k, m, have, into)
    return [(have | into)[number] for number in range(k + m)]


def losses(k: int, m: int) -> list[tuple[int, ...]]:
    """Every set of 1 to m lost shards."""
    return [lost for count in range(1, m + 1) for lost in combinations(range(k + m), count)]


@pytest.mark.parametrize(("k", "m"), [(4, 2), (2, 1), (1, 1), (1, 2)])
def test_whatever_up_to_m_shards_are_lost_comes_back(k: int, m: int) -> None:
    shards = stripe(k, m, 1000)
    for lost in losses(k, m):
        assert rebuilt(k, m, shards, lost) == shards, lost


def test_what_is_lost_of_a_wide_stripe_comes_back() -> None:
    seed = 11
    print("seed", seed)
    shards = stripe(8, 3, 4096, seed)
    for lost in random.Random(seed).sample(losses(8, 3), SAMPLES):
        assert rebuilt(8, 3, shards, lost) == shards, lost


def test_one_loss_too_many_is_an_error() -> None:
    shards = stripe(4, 2, 100)
    for lost in combinations(range(6), 3):
        with pytest.raises(BadValue, match="have: got '3 shards', want k = 4 or more"):
            rebuilt(4, 2, shards, lost)


@pytest.mark.parametrize(
    "nbytes", [1, 15, 17, STRIP_BYTES - 1, STRIP_BYTES, STRIP_BYTES + 1, 3 * STRIP_BYTES + 5]
)
def test_any_length_will_do(nbytes: int) -> None:
    shards = stripe(3, 2, nbytes)
    assert rebuilt(3, 2, shards, (0, 2)) == shards
    assert rebuilt(3, 2, shards, (1, 4)) == shards


@given(
    code=st.tuples(st.integers(1, 12), st.integers(1, 6)),
    nbytes=st.integers(1, 3000),
    seed=st.integers(0, 2**32),
)
def test_any_k_shards_give_the_others(code: tuple[int, int], nbytes: int, seed: int) -> None:
    print("code", code, "nbytes", nbytes, "seed", seed)
    k, m = code
    shards = stripe(k, m, nbytes, seed)
    lost = random.Random(seed).sample(range(k + m), m)
    assert rebuilt(k, m, shards, lost) == shards


def test_the_largest_stripe_works() -> None:
    shards = stripe(SHARDS_MAX - 4, 4, 64)
    assert rebuilt(SHARDS_MAX - 4, 4, shards, (0, 9, 27, 31)) == shards


def test_one_code_of_one_shard_is_a_copy() -> None:
    data, parity = stripe(1, 1, 77)
    assert parity == data


def test_parity_that_lies_in_pools_is_never_computed_otherwise() -> None:
    """It was written by other versions: other bytes would make all of it worthless."""
    sums = [xxhash.xxh3_64_hexdigest(shard) for shard in stripe(4, 2, STRIP_BYTES + 100)[4:]]
    assert sums == ["05c5201becdd404e", "a28171468fa82e0e"]


def test_a_wrong_shard_shows_in_what_is_decoded() -> None:
    """Shards carry no checksum of their own, so nothing else would say so."""
    shards = stripe(4, 2, 100)
    shards[3] = memoryview(bytes(100))
    assert rebuilt(4, 2, shards, (0,))[0] != stripe(4, 2, 100)[0]


VIEW = memoryview(bytearray(8))

BAD_ENCODES = {
    "no data shard": (0, 1, [], [VIEW], "k: got 0, want 1 to 32"),
    "no parity shard": (1, 0, [VIEW], [], "m: got 0, want 1 to 32"),
    "a truth value": (True, 1, [VIEW], [VIEW], "k: got True, want 1 to 32"),
    "too wide": (30, 3, [VIEW] * 30, [VIEW] * 3, r"k \+ m: got 33, want at most 32"),
    "data missing": (2, 1, [VIEW], [VIEW], "data: got '1 shards', want k = 2"),
    "too much parity": (1, 1, [VIEW], [VIEW] * 2, "into: got '2 shards', want m = 1"),
    "unequal data": (2, 1, [VIEW, VIEW[1:]], [VIEW], "shard: got '7 bytes', want 8"),
    "short parity": (1, 1, [VIEW], [VIEW[:4]], "shard: got '4 bytes', want 8"),
    "empty": (1, 1, [VIEW[:0]], [VIEW[:0]], "shard: got '0 bytes', want 1"),
    "no bytes": (1, 1, [VIEW.cast("Q")], [VIEW], "shard: .* want a view of bytes"),
    "read-only parity": (1, 1, [VIEW], [VIEW.toreadonly()], "into: .* want views that can be"),
    "with gaps": (1, 1, [VIEW[::2]], [VIEW[:4]], "shard: .* want a view of bytes"),
}


@pytest.mark.parametrize("case", BAD_ENCODES)
def test_what_cannot_be_encoded_is_named(case: str) -> None:
    k, m, data, into, message = BAD_ENCODES[case]
    with pytest.raises(BadValue, match=message):
        encode(k, m, data, into)


BAD_DECODES = {
    "no such shard": ({0: VIEW, 3: VIEW}, {1: VIEW}, "shard: got 3, want 0 to 2"),
    "below the first": ({0: VIEW, 1: VIEW}, {-1: VIEW}, "shard: got -1, want 0 to 2"),
    "both there and lost": ({0: VIEW, 1: VIEW}, {1: VIEW}, r"into: got \[1\], want shards"),
    "unequal": ({0: VIEW, 1: VIEW[1:]}, {2: VIEW}, "shard: got '7 bytes', want 8"),
    "read-only place": (
        {0: VIEW, 1: VIEW},
        {2: VIEW.toreadonly()},
        "into: .* want views that can be",
    ),
    "lost one unequal": ({0: VIEW, 1: VIEW}, {2: VIEW[1:]}, "shard: got '7 bytes', want 8"),
}


@pytest.mark.parametrize("case", BAD_DECODES)
def test_what_cannot_be_decoded_is_named(case: str) -> None:
    have, into, message = BAD_DECODES[case]
    with pytest.raises(BadValue, match=message):
        decode(2, 1, have, into)
