"""Reed-Solomon shards: of k data shards and m parity shards, any k give all the others.

Shards are equally long and numbered: data 0 to k - 1, then parity. Data shards are bytes as they
came, so that whoever wants one reads it and needs nothing from here. Knows nothing of pages, and
finds no error: wrong bytes that go in come out as others, which the checksum of a part shows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from pyeclib.ec_iface import ECDriver

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.require import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

STRIP_BYTES: Final = 32 * 1024
"""Of each shard at once. The library holds the interpreter lock, for some 40 µs then; and what it
makes stays in the cache: shards of 1 MiB went 4 to 10 times as fast as in one piece."""
_BACKEND: Final = "isa_l_rs_cauchy"
"""Of the library's codes by vector instructions, one whose every k of k + m shards suffice. What
it computes lies in pools: another may only stand beside it, under another name."""


def encode(k: int, m: int, data: Sequence[memoryview], into: Sequence[memoryview]) -> None:
    """Fill the m views of `into` with the parity of the k views `data`; all are equally long.

    BadValue for other numbers of views, lengths that differ or are 0, views of other than
    bytes, and ones to fill that cannot be written. `into` may not overlap `data`.
    """
    _require_code(k, m)
    if len(data) != k:
        raise BadValue("data", f"{len(data)} shards", f"k = {k}")
    if len(into) != m:
        raise BadValue("into", f"{len(into)} shards", f"m = {m}")
    _require_writable(into)
    driver = _driver(k, m)
    for at, stop in _strips((*data, *into)):
        fragments = driver.encode(b"".join([shard[at:stop] for shard in data]))
        head_bytes = len(fragments[0]) - (stop - at)
        for parity, fragment in zip(into, fragments[k:], strict=True):
            parity[at:stop] = memoryview(fragment)[head_bytes:]


def decode(k: int, m: int, have: Mapping[int, memoryview], into: Mapping[int, memoryview]) -> None:
    """Fill the views of `into`, named by number, from any k or more other shards, `have`.

    All are equally long. BadValue for fewer than k, for numbers that are no shard's or are in
    both, for lengths that differ or are 0, for views of other than bytes, and for ones to fill
    that cannot be written.
    """
    _require_code(k, m)
    _require_numbers(k + m, have, into)
    if len(have) < k:
        raise BadValue("have", f"{len(have)} shards", f"k = {k} or more")
    _require_writable(into.values())
    driver = _driver(k, m)
    used = sorted(have)[:k]  # data first, which costs less than parity
    for at, stop in _strips((*have.values(), *into.values())):
        heads = _heads(k, m, stop - at)
        fragments = [heads[number] + have[number][at:stop] for number in used]
        for number, view in into.items():
            (found,) = driver.reconstruct(fragments, [number])
            view[at:stop] = memoryview(found)[len(heads[number]) :]


@lru_cache(maxsize=limits.SHARDS_MAX)
def _driver(k: int, m: int) -> ECDriver:
    return ECDriver(k=k, m=m, ec_type=_BACKEND)


@lru_cache(maxsize=limits.SHARDS_MAX)
def _heads(k: int, m: int, strip_bytes: int) -> list[bytes]:
    """What the library puts before each fragment: its number and length, nothing of its bytes."""
    fragments = _driver(k, m).encode(bytes(k * strip_bytes))
    return [fragment[: len(fragment) - strip_bytes] for fragment in fragments]


def _strips(shards: Sequence[memoryview]) -> list[tuple[int, int]]:
    """Where to cut shards; parity of a strip is parity of those bytes alone."""
    size = shards[0].nbytes
    for shard in shards:
        if shard.format != "B" or not shard.contiguous:
            raise BadValue("shard", shard, "a view of bytes that lie together")
        if shard.nbytes != size or not size:
            raise BadValue("shard", f"{shard.nbytes} bytes", f"{max(size, 1)}, as the others")
    return [(at, min(at + STRIP_BYTES, size)) for at in range(0, size, STRIP_BYTES)]


def _require_writable(into: Iterable[memoryview]) -> None:
    for view in into:
        if view.readonly:
            raise BadValue("into", view, "views that can be written")


def _require_code(k: int, m: int) -> None:
    for field, value in (("k", k), ("m", m)):
        want = f"1 to {limits.SHARDS_MAX}"
        require(field, value, int, want)
        if not 1 <= value <= limits.SHARDS_MAX:
            raise BadValue(field, value, want)
    if k + m > limits.SHARDS_MAX:
        raise BadValue("k + m", k + m, f"at most {limits.SHARDS_MAX}")


def _require_numbers(
    shards: int, have: Mapping[int, memoryview], into: Mapping[int, memoryview]
) -> None:
    for number in (*have, *into):
        if not 0 <= number < shards:
            raise BadValue("shard", number, f"0 to {shards - 1}")
    if both := have.keys() & into.keys():
        raise BadValue("into", sorted(both), "shards that `have` lacks")
