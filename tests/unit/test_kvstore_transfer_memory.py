"""Memory of callers: what is taken, what is refused, and what is checked before any copy."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from kvstore.transfer.memory import Memory, address_of, copy_bytes


@pytest.mark.parametrize(
    "source",
    [b"12345678", bytearray(8), memoryview(b"12345678"), array("Q", [1]), np.zeros((2, 2), "u2")],
)
def test_any_contiguous_buffer_is_taken(source: bytes) -> None:
    memory = Memory.of("source", source, writable=False)
    assert memory.size_bytes == 8
    into = bytearray(8)
    copy_bytes(address_of(memoryview(into)), memory.address, 8)
    assert bytes(into) == memoryview(source).cast("B")


@pytest.mark.parametrize("source", [1, "text", None, [1, 2], np.zeros((4, 4))[:, ::2]])
def test_anything_else_is_refused_by_name(source: object) -> None:
    with pytest.raises(BadValue, match="source: "):
        Memory.of("source", source, writable=False)


@pytest.mark.parametrize("into", [b"123", memoryview(b"123")])
def test_a_destination_must_be_writable(into: bytes) -> None:
    with pytest.raises(BadValue, match=r"into: .*writable"):
        Memory.of("into", into, writable=True)


@given(
    size=st.integers(0, 100),
    places=st.lists(st.integers(-5, 110), max_size=5),
    length=st.integers(1, 120),
)
def test_places_are_inside_or_refused(size: int, places: list[int], length: int) -> None:
    memory = Memory.of("into", bytearray(size), writable=True)
    inside = all(place >= 0 and place + length <= size for place in places)
    if inside:
        memory.check_places("offsets", places, length)
        return
    with pytest.raises(BadValue, match=r"offsets: got -?[0-9]+, want 0 to"):
        memory.check_places("offsets", places, length)


def test_wiping_zeroes_those_places_and_nothing_else() -> None:
    into = bytearray(b"\xff" * 10)
    Memory.of("into", into, writable=True).wipe((1, 7), 2)
    assert into == b"\xff\0\0\xff\xff\xff\xff\0\0\xff"
