"""Calls about memory that the program names by address: from, into, several buffers, ranges."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from kvstore.connectors.mooncake.addresses import (
    cut,
    is_memory,
    joined,
    lengths_agree,
    place,
    scatter,
    size_of,
    slices_of,
)
from kvstore.connectors.mooncake.byte_calls import ByteCalls
from kvstore.connectors.mooncake.codes import Code
from kvstore.connectors.mooncake.objects import Value
from kvstore.connectors.mooncake.session import name_of, names_of
from kvstore.connectors.mooncake.values import DEFAULT_CONFIG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.mooncake.addresses import Slices
    from kvstore.connectors.mooncake.objects import Objects
    from kvstore.connectors.mooncake.values import ReplicateConfig

Fragments = list[list[list[int]]]
"""By buffer, by key, by fragment."""


class PointerCalls(ByteCalls):
    """Memory is the program's: it keeps it, as with Mooncake, until the call returns."""

    # Storing.

    def put_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = DEFAULT_CONFIG
    ) -> int:
        """Store one object."""
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """Store several; a code for each."""
        return self._put_from(keys, buffer_ptrs, sizes, config, replace=False)

    def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = DEFAULT_CONFIG
    ) -> int:
        """Store one in place of what is there."""
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """Store several in place of what is there."""
        return self._put_from(keys, buffer_ptrs, sizes, config, replace=True)

    def _put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig,
        *,
        replace: bool,
    ) -> list[int]:
        if not lengths_agree(keys, buffer_ptrs, sizes):
            return [Code.INVALID_PARAMS] * len(keys)
        places = [[each] for each in zip(buffer_ptrs, sizes, strict=True)]
        return self._store(_values(keys, places), config, replace=replace)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> int:
        """Store metadata and payload as one object, metadata first."""
        places = [(metadata_buffer_ptr, metadata_size), (buffer_ptr, size)]
        return self._store(_values([key], [places]), config)[0]

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """Store several, each of several stretches of memory, in order."""
        places = _paired(keys, all_buffer_ptrs, all_sizes)
        if places is None:
            return [Code.INVALID_PARAMS] * len(keys)
        return self._store(_values(keys, places), config)

    # Reading.

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read one object: its bytes, or a code."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Read several, each into memory that is large enough."""
        if not lengths_agree(keys, buffer_ptrs, sizes):
            return [Code.INVALID_PARAMS] * len(keys)
        return self._read_into(keys, [[each] for each in zip(buffer_ptrs, sizes, strict=True)])

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read several, each into several stretches of memory, in order."""
        del prefer_alloc_in_same_node
        places = _paired(keys, all_buffer_ptrs, all_sizes)
        if places is None:
            return [Code.INVALID_PARAMS] * len(keys)
        return self._read_into(keys, places)

    def _read_into(
        self, keys: Sequence[str], given: Sequence[Sequence[tuple[int, int]]]
    ) -> list[int]:
        names = names_of(keys)
        places = [_plain(each) for each in given]

        def read(objects: Objects) -> list[int]:
            finding = objects.find(names)
            number_of = {name: i for i, name in enumerate(finding.names)}
            results: list[int] = [Code.OBJECT_NOT_FOUND] * len(names)
            rounds: list[dict[int, int]] = []  # a key that comes twice is read twice
            for at, name in enumerate(names):
                i = number_of[name]
                size = finding.sizes[i]
                if size and not _is_room(places[at], size):
                    results[at] = Code.INVALID_PARAMS
                elif size:
                    turn = next((each for each in rounds if i not in each), None)
                    if turn is None:
                        turn = {}
                        rounds.append(turn)
                    turn[i] = at
            for turn in rounds:
                targets = {i: cut(places[at], 0, finding.sizes[i]) for i, at in turn.items()}
                for i, code in objects.read(finding, targets).items():
                    results[turn[i]] = code or finding.sizes[i]
            return results

        return self._carry_out(read, lambda code: [code] * len(names))

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> Fragments:
        """Read ranges of objects to offsets of buffers; bytes or a code for each fragment.

        Each object is read whole once, and verified, before its ranges are copied.
        """
        shape = [[list(sizes) for sizes in each] for each in all_sizes]
        columns = all_keys, all_dst_offsets, all_src_offsets, all_sizes
        if not lengths_agree(buffer_ptrs, *columns):
            return _filled(shape, Code.INVALID_PARAMS)
        distinct = list(dict.fromkeys(key for keys in all_keys for key in keys))
        read = dict(zip(distinct, self.batch_get_buffer(distinct), strict=True))
        results: Fragments = []
        for at, base in enumerate(buffer_ptrs):
            row = [column[at] for column in columns]
            if not lengths_agree(*row):
                results.append(_filled([shape[at]], Code.INVALID_PARAMS)[0])
                continue
            results.append(
                [
                    self._copy_ranges(base, read[key], to, source, sizes)
                    for key, to, source, sizes in zip(*row, strict=True)
                ]
            )
        return results

    def _copy_ranges(
        self,
        base: int,
        value: bytearray | None,
        to: Sequence[int],
        source: Sequence[int],
        sizes: Sequence[int],
    ) -> list[int]:
        if not lengths_agree(to, source, sizes):
            return [Code.INVALID_PARAMS] * len(sizes)
        if value is None:
            return [Code.OBJECT_NOT_FOUND] * len(sizes)
        whole, base = slices_of(value), index(base)
        results: list[int] = []
        columns = [map(index, each) for each in (to, source, sizes)]
        for offset, start, size in zip(*columns, strict=True):
            fits = start >= 0 and size > 0 and start + size <= len(value)
            if not fits or not self._regions.holds(base + offset, size):
                results.append(Code.INVALID_PARAMS)
                continue
            scatter(whole[0][0] + start, ((base + offset, size),))
            results.append(size)
        return results


def _values(keys: Sequence[str], places: Sequence[Sequence[tuple[int, int]]]) -> list[Value]:
    """Objects to be put; one that lies where no memory can be has no bytes, and is refused."""
    plain = map(_plain, places)
    return [
        Value(name_of(key), joined(slices) if all(is_memory(*each) for each in slices) else ())
        for key, slices in zip(keys, plain, strict=True)
    ]


def _plain(places: Sequence[tuple[int, int]]) -> Slices:
    return tuple([place(*each) for each in places])


def _paired(
    keys: Sequence[str], pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> list[list[tuple[int, int]]] | None:
    """Places of each key; None where lists do not belong together."""
    if not lengths_agree(keys, pointers, sizes):
        return None
    rows = list(zip(pointers, sizes, strict=True))
    if not all(lengths_agree(*row) for row in rows):
        return None
    return [list(zip(*row, strict=True)) for row in rows]


def _is_room(places: Slices, size: int) -> bool:
    return all(is_memory(*each) for each in places) and size_of(places) >= size


def _filled(shape: Fragments, code: Code) -> Fragments:
    return [[[code] * len(sizes) for sizes in each] for each in shape]
