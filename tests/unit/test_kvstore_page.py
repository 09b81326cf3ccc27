"""Page keys: the formula, injectivity, and chains cut anywhere."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES, NO_PARENT, ROOT_PARENT, NamespaceId, PageKey
from kvstore.namespace import NAME_PART_BYTES
from kvstore.page import (
    NAME_BYTES_MAX,
    TOKEN_MAX,
    PageChain,
    checksum_seed,
    checksum_seeds,
    engine_key,
    name_key,
    packed_name,
    page_key,
    parents_of,
    payload_checksum,
    unpacked_name,
)

NAMESPACE = NamespaceId(b"n" * 32)

keys = st.binary(min_size=32, max_size=32)
tokens = st.lists(st.integers(0, TOKEN_MAX), max_size=12)
small_chains = st.lists(st.integers(0, 3), max_size=40)


@given(keys, keys, tokens, st.binary(max_size=9))
def test_the_formula(namespace: bytes, parent: bytes, page: list[int], extra: bytes) -> None:
    body = b"".join(
        (
            b"kvh1.page",
            namespace,
            parent,
            struct.pack("<I", len(page)),
            *(struct.pack("<I", token) for token in page),
            struct.pack("<I", len(extra)),
            extra,
        )
    )
    got = page_key(NamespaceId(namespace), PageKey(parent), page, extra)
    assert got == hashlib.sha256(body).digest()


Pages = tuple[bytes, bytes, tuple[int, ...], bytes]
pages = st.tuples(
    st.sampled_from([b"n" * 32, b"m" * 32]),
    st.sampled_from([bytes(32), b"p" * 32]),
    st.lists(st.integers(0, 2), max_size=3).map(tuple),
    st.sampled_from([b"", bytes(4), b"\1\0\0\0", bytes(8)]),
)


@given(pages, pages)
def test_keys_are_equal_only_for_equal_pages(one: Pages, other: Pages) -> None:
    def key(page: Pages) -> bytes:
        return page_key(NamespaceId(page[0]), PageKey(page[1]), page[2], page[3])

    assert (key(one) == key(other)) == (one == other)


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_kinds_of_keys_never_meet(one: bytes, other: bytes) -> None:
    assert engine_key(NAMESPACE, one) != name_key(NAMESPACE, other)
    assert (name_key(NAMESPACE, one) == name_key(NAMESPACE, other)) == (one == other)
    assert (engine_key(NAMESPACE, one) == engine_key(NAMESPACE, other)) == (one == other)


@pytest.mark.parametrize("bad", [[-1], [TOKEN_MAX + 1], [1.5], ["a"], [None]])
def test_what_is_no_token_is_refused(bad: list[int]) -> None:
    with pytest.raises(BadValue, match="tokens"):
        page_key(NAMESPACE, ROOT_PARENT, bad)
    with pytest.raises(BadValue, match="tokens"):
        PageChain.of_tokens(NAMESPACE, bad, 1)


@given(small_chains, st.integers(1, 9), keys, st.binary(max_size=3))
def test_a_chain_is_its_pages_one_by_one(
    stream: list[int], page_tokens: int, parent: bytes, extra: bytes
) -> None:
    chain = PageChain.of_tokens(NAMESPACE, stream, page_tokens, PageKey(parent), extra)
    assert len(chain) == len(stream) // page_tokens
    last = PageKey(parent)
    for index, key in enumerate(chain):
        page = stream[index * page_tokens : (index + 1) * page_tokens]
        assert chain.parent_of(index) == last
        last = page_key(NAMESPACE, last, page, extra)
        assert key == last == chain.key(index)


@given(small_chains, small_chains, st.integers(1, 4))
def test_chains_share_keys_exactly_as_far_as_their_tokens_agree(
    one: list[int], other: list[int], page_tokens: int
) -> None:
    first = PageChain.of_tokens(NAMESPACE, one, page_tokens)
    second = PageChain.of_tokens(NAMESPACE, other, page_tokens)
    for index in range(min(len(first), len(second))):
        end = (index + 1) * page_tokens
        assert (first.key(index) == second.key(index)) == (one[:end] == other[:end])


@given(st.integers(0, 12), st.data())
def test_a_slice_is_the_chain_from_there(length: int, data: st.DataObject) -> None:
    chain = PageChain.of_tokens(NAMESPACE, range(length), 1)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    part = chain.slice(start, stop)
    assert list(part) == list(chain)[start:stop]
    assert part.parent == chain.parent_of(start)
    assert part == PageChain.of_tokens(NAMESPACE, range(start, stop), 1, part.parent)
    assert (part == chain) == (stop - start == length)


def test_chains_refuse_what_is_not_there() -> None:
    chain = PageChain.of_tokens(NAMESPACE, range(4), 2)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            chain.key(index)
    for bounds in ((-1, 1), (0, 3), (2, 1)):
        with pytest.raises(IndexError):
            chain.slice(*bounds)
    with pytest.raises(BadValue, match="keys"):
        PageChain(bytes(KEY_BYTES + 1))
    with pytest.raises(BadValue, match="parent"):
        PageChain(b"", PageKey(b"short"))
    with pytest.raises(TypeError):
        dict.fromkeys([chain])


def test_chains_show_themselves_briefly_and_compare_with_chains_only() -> None:
    chain = PageChain.of_tokens(NAMESPACE, range(4), 2)
    assert repr(chain) == f"PageChain(2 pages from {chain.packed[:8].hex()})"
    assert repr(PageChain(b"")) == "PageChain(0 pages from -)"
    assert chain != chain.packed


@given(st.binary(max_size=40), keys, st.integers(0, 1023))
def test_checksums_are_bound_to_key_and_part(payload: bytes, key: bytes, part: int) -> None:
    want = payload_checksum(payload, key, part)
    assert payload_checksum(memoryview(payload), key, part) == want
    assert payload_checksum(payload, key, part + 1) != want
    assert payload_checksum(payload + b"\0", key, part) != want
    assert checksum_seed(key, part) ^ part == int.from_bytes(key[:8], "little")


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=8), st.integers(0, 1023))
def test_the_seeds_of_a_column_are_those_of_its_keys(keys: list[bytes], part: int) -> None:
    assert checksum_seeds(b"".join(keys), part) == [checksum_seed(key, part) for key in keys]


@given(st.binary(max_size=NAME_BYTES_MAX))
def test_a_kept_name_is_read_as_it_was_packed(name: bytes) -> None:
    packed = packed_name(name)
    assert len(packed) == NAME_PART_BYTES
    assert unpacked_name(packed) == name


def test_a_name_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(BadValue, match="name: got 1023, want at most 1022"):
        packed_name(bytes(NAME_BYTES_MAX + 1))
    with pytest.raises(BadValue, match="name: got 65535, want at most 1022"):
        unpacked_name(b"\xff" * NAME_PART_BYTES)


def test_parents_are_the_pages_before_or_the_root_of_objects() -> None:
    first, second, above = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
    assert parents_of(above, first + second) == above + first
    assert parents_of(NO_PARENT, first + second) == ROOT_PARENT * 2
