"""What simulated clients store: namespaces, chains that share prefixes, and the payload oracle.

A page's bytes are a function of its key, part and version, so that any reader can check any byte.
Only named objects have versions: they may be removed and put again with other bytes.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvstore.ids import KEY_BYTES
from kvstore.namespace import (
    Attention,
    CacheGroup,
    Content,
    Layout,
    Namespace,
    opaque,
    open_layout,
)
from kvstore.page import PageChain, name_key
from tests.fakes import payload

if TYPE_CHECKING:
    from random import Random

TENANT: Final = "simulation"
PAGE_TOKENS: Final = 8
_VERSION: Final = struct.Struct("<Q")
VERSION_BYTES: Final = _VERSION.size

SMALL: Final = 4096
WIDE: Final = 8192
REPEATS: Final = 4
"""Of the bytes in half of the pages, so that they shrink where they are compressed."""
NAMED_SIZES: Final = (1000, 4096, 9000)
"""Bytes of a named object, by the first byte of its key."""


def _chained(model: str, heads: int, head_dim: int, tensor_parallel: int) -> Namespace:
    group = CacheGroup(Attention.FULL, 2, heads, head_dim, head_dim)
    content = Content(TENANT, model, "r1", "", "bfloat16", (group,), "rope")
    layout = Layout(page_tokens=PAGE_TOKENS, tensor_parallel=tensor_parallel)
    return open_layout(content, layout)


# 2 layers x 8 tokens x heads x (key + value) x 2 bytes.
WHOLE: Final = _chained("whole", 1, 64, 1)
"""One part of 4 KiB a page."""
HALVES: Final = _chained("halves", 2, 128, 2)
"""Two parts of 8 KiB a page, each with a writer of its own."""
NAMED: Final = opaque(TENANT, "named")
"""Objects of three sizes."""
assert [part.size_bytes for part in WHOLE.parts] == [SMALL]
assert [part.size_bytes for part in HALVES.parts] == [WIDE, WIDE]


def part_bytes(namespace: Namespace, key: bytes, part: int) -> int:
    """Size of one part of a page."""
    if namespace.is_opaque:
        return NAMED_SIZES[key[0] % len(NAMED_SIZES)]
    return namespace.parts[part].size_bytes


@lru_cache(maxsize=20_000)
def _stream(key: bytes, part: int, size: int) -> bytes:
    if key[1] % 2:
        return payload(key, part, size)
    pattern = payload(key, part, -(-size // REPEATS))
    return (pattern * REPEATS)[:size]


def page_bytes(key: bytes, part: int, size: int, version: int = 0) -> bytes:
    """What lies, or ought to lie, in a page's extent."""
    if not version:
        return _stream(key, part, size)
    mark = _VERSION.pack(version)
    return mark + _stream(key + mark, part, size)[_VERSION.size :]


def version_of(data: bytes | memoryview) -> int:
    """The version that a named object's bytes claim to be."""
    return int(_VERSION.unpack_from(data)[0])


class Universe:
    """The chains and names that clients draw from: few enough that they meet."""

    def __init__(self, random: Random, depth: int, branches: int, names: int) -> None:
        """Chains of up to `depth` pages, `branches` of them, that part ways here and there."""
        self._by_namespace: list[tuple[Namespace, list[PageChain]]] = []
        for namespace in (WHOLE, HALVES):
            tokens = [self._tokens(random, depth)]
            while len(tokens) < branches:
                stem = random.choice(tokens)
                shared = random.randrange(depth) * PAGE_TOKENS
                tokens.append(stem[:shared] + self._tokens(random, depth)[shared:])
            chains = [PageChain.of_tokens(namespace.id, each, PAGE_TOKENS) for each in tokens]
            self._by_namespace.append((namespace, chains))
        self.names = [name_key(NAMED.id, b"name %d" % i) for i in range(names)]

    def _tokens(self, random: Random, depth: int) -> list[int]:
        return [random.randrange(1 << 16) for _ in range(depth * PAGE_TOKENS)]

    def chain(self, random: Random, namespace: Namespace) -> PageChain:
        """A whole chain, or the start of one; for names, some distinct ones in any order."""
        if namespace.is_opaque:
            return PageChain(b"".join(random.sample(self.names, random.randint(1, 4))))
        chains = next(chains for each, chains in self._by_namespace if each is namespace)
        chain = random.choice(chains)
        length = len(chain) if random.random() < 0.5 else random.randint(1, len(chain))
        return chain.slice(0, length)


def keys_of(packed: bytes) -> list[bytes]:
    """The single keys of a packed column."""
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
