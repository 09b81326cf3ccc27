"""Packed columns against lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.ids import KEY_BYTES
from master import packed
from tests.unit.master_rig import chain

POOL = packed.split_keys(chain(1, 6))
key_lists = st.lists(st.sampled_from(POOL), min_size=1, max_size=20)


@given(key_lists, key_lists, st.data())
def test_common_bytes_is_the_longest_common_stretch(
    held: list[bytes], asked: list[bytes], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(held) - 1))
    offset = data.draw(st.integers(0, len(asked) - 1))
    asked[offset] = held[at]
    want = 0
    for mine, theirs in zip(held[at:], asked[offset:], strict=False):
        if mine != theirs:
            break
        want += 1
    got = packed.common_bytes(b"".join(held), at * KEY_BYTES, b"".join(asked), offset * KEY_BYTES)
    assert got == want * KEY_BYTES


@given(st.lists(st.sampled_from(POOL), max_size=8), st.sampled_from(POOL))
def test_index_of_finds_whole_keys_only(keys: list[bytes], key: bytes) -> None:
    want = keys.index(key) if key in keys else packed.NOT_THERE
    assert packed.index_of(b"".join(keys), key) == want


def test_index_of_is_not_fooled_by_unaligned_bytes() -> None:
    key = bytes(range(32))
    keys = bytes(16) + key + bytes(16) + key
    assert packed.index_of(keys, key) == 2
    assert packed.index_of(keys[:64], key) == packed.NOT_THERE


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_words_and_back(values: list[int]) -> None:
    assert list(packed.words(packed.pack_words(values))) == values
    assert b"".join(map(packed.word, values)) == packed.pack_words(values)
