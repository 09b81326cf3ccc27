"""Page keys: the hash chain that names a page by everything before it, and chains of them.

Formula: SHA-256(tag | namespace id | parent key | u32 n | n x u32 tokens | u32 len |
extra), little-endian. Never Python's hash(), never pickle. Golden vectors: tests/unit/golden.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import TYPE_CHECKING, Final

import xxhash

from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES, ROOT_PARENT, NamespaceId, PageKey
from kvstore.namespace import NAME_PART_BYTES
from kvstore.require import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE_TAG: Final = b"kvh1.page"
ENGINE_TAG: Final = b"kvh1.engine"
NAME_TAG: Final = b"kvh1.name"
TOKEN_MAX: Final = (1 << 32) - 1
_NAME_LENGTH: Final = struct.Struct("<H")
NAME_BYTES_MAX: Final = NAME_PART_BYTES - _NAME_LENGTH.size
"""Of a name that is kept."""


def page_key(
    namespace: NamespaceId, parent: PageKey, tokens: Sequence[int], extra: bytes = b""
) -> PageKey:
    """Key of the page that holds `tokens` after `parent`; `extra` is e.g. a picture's digest."""
    return _chained(namespace, parent, _token_bytes(tokens), extra)


def engine_key(namespace: NamespaceId, block_hash: bytes) -> PageKey:
    """Key for an engine that brings its own chained block hash."""
    require("block_hash", block_hash, bytes, "bytes")
    body = struct.pack("<I", len(block_hash)) + block_hash
    return PageKey(hashlib.sha256(ENGINE_TAG + namespace + body).digest())


def name_key(namespace: NamespaceId, name: bytes) -> PageKey:
    """Key of a named object in an opaque namespace."""
    require("name", name, bytes, "bytes")
    body = struct.pack("<I", len(name)) + name
    return PageKey(hashlib.sha256(NAME_TAG + namespace + body).digest())


def packed_name(name: bytes) -> bytes:
    """A name as it is kept beside its object: its length, itself, zeros. BadValue: too long."""
    require("name", name, bytes, "bytes")
    if len(name) > NAME_BYTES_MAX:
        raise BadValue("name", len(name), f"at most {NAME_BYTES_MAX} bytes")
    return (_NAME_LENGTH.pack(len(name)) + name).ljust(NAME_PART_BYTES, b"\0")


def unpacked_name(part: bytes | memoryview) -> bytes:
    """The name in such a part; BadValue when that is none."""
    (length,) = _NAME_LENGTH.unpack_from(part)
    name = bytes(part[_NAME_LENGTH.size : _NAME_LENGTH.size + length])
    if len(name) != length:
        raise BadValue("name", length, f"at most {NAME_BYTES_MAX} bytes")
    return name


def _token_bytes(tokens: Sequence[int]) -> bytes:
    want = f"integers from 0 to {TOKEN_MAX}"
    if isinstance(tokens, bytes | bytearray):  # an array would take them for packed integers
        raise BadValue("tokens", tokens, want)
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise BadValue("tokens", tokens, want) from error
    return packed.tobytes()


def _require_parent(parent: PageKey) -> None:
    require("parent", parent, bytes, f"{KEY_BYTES} bytes")
    if len(parent) != KEY_BYTES:
        raise BadValue("parent", len(parent), f"{KEY_BYTES} bytes")


def _chained(namespace: NamespaceId, parent: PageKey, tokens: bytes, extra: bytes) -> PageKey:
    body = struct.pack("<I", len(tokens) // 4) + tokens + struct.pack("<I", len(extra)) + extra
    return PageKey(hashlib.sha256(PAGE_TAG + namespace + parent + body).digest())


class PageChain:
    """Keys of consecutive pages, packed; each page is the parent of the next.

    `packed` holds 32 bytes a page. Immutable; slices keep the right parent.
    """

    __slots__ = ("packed", "parent")

    def __init__(self, packed: bytes, parent: PageKey = ROOT_PARENT) -> None:
        """Raises BadValue when `packed` is not whole keys or the parent is not one key."""
        require("keys", packed, bytes, f"a multiple of {KEY_BYTES} bytes")
        if len(packed) % KEY_BYTES:
            raise BadValue("keys", len(packed), f"a multiple of {KEY_BYTES} bytes")
        _require_parent(parent)
        self.packed = packed
        self.parent = parent

    @classmethod
    def of_tokens(
        cls,
        namespace: NamespaceId,
        tokens: Sequence[int],
        page_tokens: int,
        parent: PageKey = ROOT_PARENT,
        extra: bytes = b"",
    ) -> PageChain:
        """Keys of the *full* pages of `tokens`; a partial last page has no key."""
        require("extra", extra, bytes, "bytes")
        _require_parent(parent)
        packed = _token_bytes(tokens)
        step = page_tokens * 4
        keys: list[PageKey] = []
        last = parent
        for start in range(0, len(packed) - step + 1, step):
            last = _chained(namespace, last, packed[start : start + step], extra)
            keys.append(last)
        return cls(b"".join(keys), parent)

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    def key(self, index: int) -> PageKey:
        """The key of page `index`, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return PageKey(self.packed[index * KEY_BYTES : (index + 1) * KEY_BYTES])

    def __iter__(self) -> Iterator[PageKey]:
        packed = self.packed
        return (PageKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))

    def parent_of(self, index: int) -> PageKey:
        """The parent of page `index`."""
        return self.key(index - 1) if index else self.parent

    def slice(self, start: int, stop: int) -> PageChain:
        """Pages [start, stop) as a chain of their own."""
        pages = len(self)
        if start == 0 and stop == pages:
            return self
        if not 0 <= start <= stop <= pages:
            raise IndexError((start, stop))
        return PageChain(self.packed[start * KEY_BYTES : stop * KEY_BYTES], self.parent_of(start))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PageChain):
            return NotImplemented
        return self.packed == other.packed and self.parent == other.parent

    __hash__ = None  # type: ignore[assignment]  # a chain is not a key; nothing hashes it

    def __repr__(self) -> str:
        first = self.packed[:8].hex() or "-"
        return f"PageChain({len(self)} pages from {first})"


def parents_of(parent: bytes, keys: bytes) -> bytes:
    """The parent of each page of a packed column: the page before it, or the root of named objects.

    `parent` is that of the first page; NO_PARENT says that they are named objects.
    """
    return parent + keys[:-KEY_BYTES] if parent else bytes(len(keys))


def checksum_seed(key: bytes, part: int) -> int:
    """Seed of a part's checksum: first 8 key bytes, little-endian, XOR part index."""
    return int.from_bytes(key[:8], "little") ^ part


def checksum_seeds(keys: bytes, part: int) -> list[int]:
    """`checksum_seed` of every key of a packed column."""
    firsts = array("Q", keys)[:: KEY_BYTES // 8]  # hosts are little-endian, see transport.column
    return [first ^ part for first in firsts]


seeded_checksum: Final = xxhash.xxh3_64_intdigest
"""seeded_checksum(payload, seed): `payload_checksum` where the seed is known already."""
growing_checksum: Final = xxhash.xxh3_64
"""growing_checksum(seed=seed): the same of a payload that comes in pieces, by `update`."""


def payload_checksum(payload: bytes | memoryview, key: bytes, part: int) -> int:
    """XXH3-64 of the payload, bound to key and part; the same for all replicas and tiers."""
    return seeded_checksum(payload, checksum_seed(key, part))
