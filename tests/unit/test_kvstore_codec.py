"""Codecs: what goes in comes out, and nothing that was damaged passes for a part."""

from __future__ import annotations

import contextlib
import random
import struct

import lz4.block
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec import COMPRESSING, PLANE_STEP_BYTES, Codec, decode, encode
from kvstore.errors import CorruptPage
from kvstore.page import payload_checksum

KEY = bytes(range(32))


def bf16_noise(values: int, seed: int = 1) -> bytes:
    """Normal noise as 16-bit floats: the upper half of each float32."""
    draw = random.Random(seed)
    floats = struct.pack(f"<{values}f", *(draw.gauss(0, 1) for _ in range(values)))
    return b"".join(floats[at + 2 : at + 4] for at in range(0, len(floats), 4))


def decoded(codec: int, stored: bytes, size: int) -> bytes:
    into = bytearray(size)
    decode(codec, memoryview(stored), memoryview(into))
    return bytes(into)


def stored_form(codec: Codec, payload: bytes) -> bytes:
    """What `encode` gives for bytes that this codec can shorten."""
    stored = encode(codec, memoryview(payload))
    assert stored is not None
    return stored


COMPRESSIBLE = st.builds(
    lambda piece, times, rest: piece * times + rest,
    st.binary(min_size=1, max_size=40),
    st.integers(20, 60),
    st.binary(max_size=20),
)


def test_numbers_never_change() -> None:
    assert {codec.name: codec.value for codec in Codec} == {
        "NONE": 0, "LZ4": 1, "ZSTD": 2, "LZ4_PLANES": 3, "ZSTD_PLANES": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "stored"),
    [
        (Codec.LZ4, "2f616202004d50616278797a"),
        (Codec.ZSTD, "28b52ffd20675d000028616278797a0100dfe4b0"),
        (Codec.LZ4_PLANES, "0b0000001f6101001b50616161787a1f6201001a506262626279"),
        (
            Codec.ZSTD_PLANES,
            "1300000028b52ffd2034550000206161787a010045000b28b52ffd20334d000018626279010045000b",
        ),
    ],
)
def test_what_an_earlier_release_has_stored_is_read(codec: Codec, stored: str) -> None:
    assert decoded(codec, bytes.fromhex(stored), 103) == b"ab" * 50 + b"xyz"


@pytest.mark.parametrize("codec", COMPRESSING)
@given(payload=st.one_of(st.binary(max_size=300), COMPRESSIBLE))
def test_what_goes_in_comes_out(codec: Codec, payload: bytes) -> None:
    stored = encode(codec, memoryview(payload))
    if stored is not None:
        assert len(stored) < len(payload)
        assert decoded(codec, stored, len(payload)) == payload


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("over", [-1, 0, 1, 2, 3])
def test_lengths_around_the_step_of_the_planes(codec: Codec, over: int) -> None:
    size = 2 * PLANE_STEP_BYTES + over
    payload = (bytes(range(256)) * (size // 256 + 1))[:size]
    assert decoded(codec, stored_form(codec, payload), size) == payload


def test_planes_make_noise_of_16_bit_floats_shorter() -> None:
    noise = bf16_noise(64 * 1024)
    assert encode(Codec.LZ4, memoryview(noise)) is None
    plain, planes = (len(stored_form(c, noise)) for c in (Codec.ZSTD, Codec.ZSTD_PLANES))
    assert planes / len(noise) < 0.72 < 0.75 < plain / len(noise)
    assert len(stored_form(Codec.LZ4_PLANES, noise)) / len(noise) < 0.87


@pytest.mark.parametrize("codec", Codec)
def test_what_saves_nothing_is_not_encoded(codec: Codec) -> None:
    assert encode(codec, memoryview(random.Random(3).randbytes(10_000))) is None


def test_as_it_is_means_exactly_as_long() -> None:
    assert decoded(Codec.NONE, b"abc", 3) == b"abc"
    for size in (2, 4):
        with pytest.raises(CorruptPage, match=f"gives 3 bytes, want {size}"):
            decoded(Codec.NONE, b"abc", size)


@pytest.mark.parametrize("codec", [5, 77, 255])
def test_an_unknown_codec_is_a_corrupt_page(codec: int) -> None:
    with pytest.raises(CorruptPage, match=f"codec: got {codec}, want 0 to 4"):
        decoded(codec, b"abc", 3)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_every_truncation_is_a_corrupt_page(codec: Codec) -> None:
    payload = bf16_noise(100) + bytes(200)
    stored = stored_form(codec, payload)
    for length in range(len(stored)):
        with pytest.raises(CorruptPage):
            decoded(codec, stored[:length], len(payload))


@pytest.mark.parametrize("codec", COMPRESSING)
def test_every_flipped_bit_is_noticed_here_or_by_the_checksum(codec: Codec) -> None:
    payload = bf16_noise(100) + bytes(200)
    checksum = payload_checksum(payload, KEY, 0)
    stored = stored_form(codec, payload)
    for bit in range(len(stored) * 8):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = decoded(codec, bytes(flipped), len(payload))
        except CorruptPage:
            continue
        # A bit that nobody reads, such as one of a frame's reserved ones, changes nothing.
        assert found == payload or payload_checksum(found, KEY, 0) != checksum


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("size", [0, 1, 399, 401, 100_000])
def test_a_part_of_another_length_is_a_corrupt_page(codec: Codec, size: int) -> None:
    stored = stored_form(codec, bytes(400))
    with pytest.raises(CorruptPage):
        decoded(codec, stored, size)


@pytest.mark.parametrize("codec", COMPRESSING)
@given(stored=st.binary(max_size=200), size=st.integers(0, 500))
def test_random_bytes_never_do_worse_than_a_corrupt_page(
    codec: Codec, stored: bytes, size: int
) -> None:
    into = bytearray(size)
    with contextlib.suppress(CorruptPage):
        decode(codec, memoryview(stored), memoryview(into))
    assert len(into) == size


def test_a_frame_that_would_unfold_to_64_mib_is_never_unfolded() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    assert len(bomb) < 16_384
    with pytest.raises(CorruptPage, match="gives 4097 bytes, want 4096"):
        decoded(Codec.ZSTD, bomb, 4096)
    with pytest.raises(CorruptPage, match="gives 2049 bytes, want 2048"):
        decoded(Codec.ZSTD_PLANES, len(bomb).to_bytes(4, "little") + bomb, 4096)
    with pytest.raises(CorruptPage, match="insufficient space"):
        decoded(Codec.LZ4, lz4.block.compress(bytes(64 << 20), store_size=False), 4096)


def test_a_frame_that_asks_for_a_large_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(bytes(5000)) + compressor.flush()
    with pytest.raises(CorruptPage, match="ZSTD"):
        decoded(Codec.ZSTD, frame, 5000)
