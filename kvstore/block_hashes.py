"""What an engine calls its blocks, derived from tokens alone: for who has no such engine at hand.

A gateway in front of engines that bring block hashes of their own names the pages of a prompt with
them before anything is computed. Pure. vLLM's form: each block's hash is that of the hash before
it, the block's tokens and nothing else; that of the first follows a hash of the seed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.page import PageChain, engine_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.namespace import Namespace

OWN: Final = ""
"""No engine's: pages have keys of their own."""
SHA256_CBOR: Final = "sha256_cbor"
VLLM_SEED: Final = "vllm-none-hash"
"""Of vLLM where PYTHONHASHSEED does not say otherwise."""

_UNSIGNED, _BYTES, _TEXT, _ARRAY = 0x00, 0x40, 0x60, 0x80
_NOTHING: Final = b"\xf6"
_DIRECT: Final = 24
"""Smaller numbers are in the first byte itself; this and the next say how many bytes follow."""


class Hashing(msgspec.Struct, frozen=True):
    """Where the names of a fleet's pages come from."""

    algorithm: str = OWN
    seed: str = ""


def check_hashing(hashing: Hashing) -> None:
    """Refuse, by BadValue, what cannot be derived: other hashes go by an interpreter's pickles."""
    if hashing.algorithm not in (OWN, SHA256_CBOR):
        raise BadValue("hash_algorithm", hashing.algorithm, SHA256_CBOR)


OWN_HASHING: Final = Hashing()


def chain_of(
    namespace: Namespace, tokens: Sequence[int], hashing: Hashing, extra: bytes = b""
) -> PageChain:
    """The full pages of these tokens; an engine's have no adapter, no picture and no salt.

    `extra` is for pages with keys of their own, as in `kvstore.page.page_key`.
    """
    check_hashing(hashing)
    step = namespace.layout.page_tokens
    if hashing.algorithm == OWN:
        return PageChain.of_tokens(namespace.id, tokens, step, extra=extra)
    hashes = block_hashes(tokens, step, hashing.seed)
    return PageChain(b"".join([engine_key(namespace.id, each) for each in hashes]))


def block_hashes(tokens: Sequence[int], block_tokens: int, seed: str) -> list[bytes]:
    """vLLM's `sha256_cbor` hash of each full block."""
    text = seed.encode()
    last = _sha256(_head(_TEXT, len(text)) + text)
    found: list[bytes] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = b"".join([_head(_UNSIGNED, each) for each in tokens[start : start + block_tokens]])
        parent = _head(_BYTES, len(last)) + last
        last = _sha256(_head(_ARRAY, 3) + parent + _head(_ARRAY, block_tokens) + block + _NOTHING)
        found.append(last)
    return found


def _head(kind: int, number: int) -> bytes:
    """The first bytes of a CBOR item, as short as they can be."""
    if number < _DIRECT:
        return bytes([kind | number])
    power = next(p for p in range(4) if number < 1 << (8 << p))
    return bytes([kind | (_DIRECT + power)]) + number.to_bytes(1 << power, "big")


def _sha256(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
