"""Objects that are larger than a chunk: pieces, and the manifest that takes the object's place.

Pure. An object's value is its manifest where it is of that length and begins with the mark; a
program's own value that looks like one is stored by a manifest, too, so that none is mistaken.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from kvstore import limits

MARK: Final = b"kvharbor pieces\n"
VERSION_BYTES: Final = 16
_MANIFEST: Final = struct.Struct(f"<{len(MARK)}s{VERSION_BYTES}sQ")
MANIFEST_BYTES: Final = _MANIFEST.size
PIECE_BYTES: Final = limits.CHUNK_BYTES
_NUMBER: Final = struct.Struct("<I")


class Manifest(msgspec.Struct, frozen=True):
    """What an object of several pieces is made of."""

    version: bytes
    """Of this value alone, so that pieces of two values never meet."""
    size_bytes: int

    def pack(self) -> bytes:
        """What is stored under the object's name."""
        return _MANIFEST.pack(MARK, self.version, self.size_bytes)

    def names(self) -> list[bytes]:
        """Of the pieces, in order."""
        pieces = -(-self.size_bytes // PIECE_BYTES)
        return [self.version + _NUMBER.pack(number) for number in range(pieces)]

    def piece(self, number: int) -> tuple[int, int]:
        """Start and length of a piece within the object."""
        start = number * PIECE_BYTES
        return start, min(PIECE_BYTES, self.size_bytes - start)


def needs_manifest(size_bytes: int, head: bytes) -> bool:
    """Whether a value that begins like this cannot lie under its own name."""
    return size_bytes > PIECE_BYTES or (size_bytes == MANIFEST_BYTES and head.startswith(MARK))


def unpack(value: bytes) -> Manifest | None:
    """The manifest that is stored there; None where it is a value of its own."""
    if len(value) != MANIFEST_BYTES or not value.startswith(MARK):
        return None
    _, version, size_bytes = _MANIFEST.unpack(value)
    return Manifest(version, size_bytes)
