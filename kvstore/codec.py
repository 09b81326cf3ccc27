"""How a part lies at rest: as it is, or compressed by lz4 or zstd, also over byte planes.

Byte planes are the bytes at even and at odd places of a part, one plane after the other: of 16-bit
floats, the plane with sign and exponent compresses and the other is noise. Codecs know nothing of
pages: whether decoded bytes are the right ones, the checksum of the part decides.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import lz4.block
import zstandard

from kvstore.errors import CorruptPage

ZSTD_LEVEL: Final = 1
"""Higher levels gain nothing on KV: level 3 gave 0.71 of the size over planes, level 1 0.70."""
ZSTD_WINDOW_BYTES_MAX: Final = 1 << 20
"""Memory that a frame may ask for; our own ask for half of it."""
PLANE_STEP_BYTES: Final = 256 * 1024
"""Split at once: byte-wise slices hold the interpreter lock. Even, so that planes line up."""


class Codec(IntEnum):
    """`Record.codec`; the numbers never change."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2
    LZ4_PLANES = 3
    ZSTD_PLANES = 4


COMPRESSING: Final = tuple(codec for codec in Codec if codec is not Codec.NONE)
_OVER_PLANES: Final = (Codec.LZ4_PLANES, Codec.ZSTD_PLANES)
_BY_LZ4: Final = (Codec.LZ4, Codec.LZ4_PLANES)
_EVEN_BYTES: Final = struct.Struct("<I")
"""Before the planes' stored forms: the length of the first. Each is compressed alone, because zstd
would code both by one table: noise in parts of 64 KiB then gave 0.77 of the size, not 0.69."""


def encode(codec: Codec, payload: memoryview) -> bytes | None:
    """The stored form of a part; None when it is no shorter, or for NONE: then store it as it is.

    The interpreter lock is free while lz4 and zstd work.
    """
    if codec is Codec.NONE:
        return None
    if codec in _OVER_PLANES:
        even, odd = (_compress(codec, plane) for plane in _split(payload))
        stored = _EVEN_BYTES.pack(len(even)) + even + odd
    else:
        stored = _compress(codec, payload)
    return stored if len(stored) < len(payload) else None


def decode(codec: int, stored: memoryview, into: memoryview) -> None:
    """Fill `into`, which is as long as the part, from its stored form.

    Trusts nothing: CorruptPage for an unknown codec and for whatever does not give exactly so many
    bytes. Never makes more than twice the part's length. `into` may be partly written then.
    """
    try:
        known = Codec(codec)
    except ValueError as error:
        raise CorruptPage(f"codec: got {codec}, want 0 to {max(Codec)}") from error
    if known is Codec.NONE:
        _require_length(len(stored), len(into))
        into[:] = stored
    elif known in _OVER_PLANES:
        _decode_planes(known, stored, into)
    else:
        _decompress(known, stored, into)


def _decode_planes(codec: Codec, stored: memoryview, into: memoryview) -> None:
    if len(stored) < _EVEN_BYTES.size:
        raise CorruptPage(f"{codec.name}: got {len(stored)} bytes, want {_EVEN_BYTES.size} or more")
    stop = _EVEN_BYTES.size + _EVEN_BYTES.unpack_from(stored)[0]
    planes = memoryview(bytearray(len(into)))
    half = (len(into) + 1) // 2
    _decompress(codec, stored[_EVEN_BYTES.size : stop], planes[:half])
    _decompress(codec, stored[stop:], planes[half:])
    _merge(planes, into)


def _compress(codec: Codec, plain: bytes | memoryview) -> bytes:
    if codec in _BY_LZ4:
        made: bytes = lz4.block.compress(plain, store_size=False)
        return made
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plain)


def _decompress(codec: Codec, stored: memoryview, into: memoryview) -> None:
    if codec in _BY_LZ4:
        try:
            plain: bytes = lz4.block.decompress(stored, uncompressed_size=len(into))
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CorruptPage(f"{codec.name}: {error}") from error
        _require_length(len(plain), len(into))
        into[:] = plain
        return
    # A stream into the given memory: the length that a frame claims is never made.
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
    try:
        with decompressor.stream_reader(stored) as reader:
            filled = reader.readinto(into)
            beyond = len(reader.read(1))
    except zstandard.ZstdError as error:
        raise CorruptPage(f"{codec.name}: {error}") from error
    _require_length(filled + beyond, len(into))


def _require_length(got: int, want: int) -> None:
    if got != want:
        raise CorruptPage(f"stored part: gives {got} bytes, want {want}")


def _split(payload: memoryview) -> tuple[bytes, bytes]:
    """The bytes at even places, and those at odd places."""
    even, odd = [], []
    for at in range(0, len(payload), PLANE_STEP_BYTES):
        piece = bytes(payload[at : at + PLANE_STEP_BYTES])
        even.append(piece[0::2])
        odd.append(piece[1::2])
    return b"".join(even), b"".join(odd)


def _merge(planes: memoryview, into: memoryview) -> None:
    """Undo `_split`, of planes that lie one after the other."""
    half = (len(into) + 1) // 2
    for at in range(0, len(into), PLANE_STEP_BYTES):
        stop = min(at + PLANE_STEP_BYTES, len(into))
        piece = bytearray(stop - at)
        piece[0::2] = planes[at // 2 : (stop + 1) // 2]
        piece[1::2] = planes[half + at // 2 : half + stop // 2]
        into[at:stop] = piece
