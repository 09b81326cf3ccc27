"""What LMCache's objects are called in the pool: everything that decides on their bytes.

Pure, and knows LMCache's objects by their attributes only. The shape and dtype are in the name, so
that an object of another layout is not there at all.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvstore.errors import BadValue
from kvstore.namespace import encode_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BYTES: Final = "bytes"
"""Layout of what is plain bytes to LMCache, too: what a serde made, in which no shape is left."""
PLAIN: Final = "uint8"
"""Of a serde's bytes, in one row; and of the KV of caches whose types torch has no name for."""
REMOTE_TAG: Final = b"kvh1.lmcache.remote"
FIELDS: Final = 6


class ObjectKey(Protocol):
    """LMCache's key of an object of its server."""

    @property
    def chunk_hash(self) -> bytes:
        """Of the chunk's tokens and all before them."""
        ...

    @property
    def model_name(self) -> str:
        """Without @."""
        ...

    @property
    def kv_rank(self) -> int:
        """World size and rank."""
        ...

    @property
    def object_group_id(self) -> int:
        """Which group of layers."""
        ...

    @property
    def cache_salt(self) -> str:
        """Whose it is; without @."""
        ...


class NamedObject(NamedTuple):
    """The fields of a name."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str
    layout: str


def layout_of(shapes: Sequence[Sequence[int]], dtypes: Iterable[object]) -> str:
    """An object's shapes and dtypes as text; no shapes at all, or rows of bytes, are BYTES."""
    kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if set(kinds) <= {PLAIN} and all(len(shape) <= 1 for shape in shapes):
        return BYTES
    sizes = ["x".join(map(str, shape)) for shape in shapes]
    return "+".join(f"{kind}:{size}" for kind, size in zip(kinds, sizes, strict=True))


def name_of(key: ObjectKey, layout: str) -> bytes:
    """The name of an object of that layout."""
    return "@".join(
        (
            key.model_name,
            f"{key.kv_rank:x}",
            f"{key.object_group_id:x}",
            key.chunk_hash.hex(),
            key.cache_salt,
            layout,
        )
    ).encode()


def named_object(name: bytes) -> NamedObject:
    """The fields of a name that `name_of` gave; BadValue for another."""
    fields = name.decode(errors="replace").split("@")
    if len(fields) != FIELDS:
        raise BadValue("name", name, f"{FIELDS} fields with @ between")
    model, rank, group, chunk, salt, layout = fields
    try:
        return NamedObject(bytes.fromhex(chunk), model, int(rank, 16), int(group, 16), salt, layout)
    except ValueError as error:
        raise BadValue("name", name, "hexadecimal rank, group and hash") from error


def remote_name(text: str, tags: Mapping[str, object], layout: str) -> bytes:
    """The name of an object of an engine's own cache: a digest, and LMCache's text for the key.

    That text alone would not do: tags may have in them what stands between tags.
    """
    pairs = [(name, repr(value)) for name, value in tags.items()]
    fields = encode_fields(REMOTE_TAG, [("key", text), ("layout", layout), *pairs])
    return f"{hashlib.sha256(fields).hexdigest()} {text}".encode()


def remote_key(name: bytes) -> str:
    """LMCache's text for the key in such a name."""
    return name.decode(errors="replace").partition(" ")[2]
