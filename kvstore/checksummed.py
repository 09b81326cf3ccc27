"""Bytes with their checksum at the end, for values that come back from a store of somebody else."""

from __future__ import annotations

from typing import Final

import xxhash

from kvstore.errors import CorruptPage

CHECKSUM_BYTES: Final = 8


def checksummed(body: bytes) -> bytes:
    """`body`, and XXH3-64 over it, little-endian."""
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(CHECKSUM_BYTES, "little")


def checked(value: bytes) -> memoryview:
    """The body of what `checksummed` made; CorruptPage when it is anything else."""
    body = memoryview(value)[:-CHECKSUM_BYTES]
    if value[-CHECKSUM_BYTES:] != xxhash.xxh3_64_intdigest(body).to_bytes(CHECKSUM_BYTES, "little"):
        raise CorruptPage(f"value of {len(value)} bytes: checksum differs")
    return body
