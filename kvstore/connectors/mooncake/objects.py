"""Named objects of any size in the pool: put, find, read, list and remove them by their names.

Objects of a chunk or less are one page each; larger ones are pieces in a namespace beside, and a
manifest (kvstore.connectors.mooncake.large). Everything is copied through buffers of the store's
own on its way in, and read to where it shall lie wherever that is one stretch. Thread-safe.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.client.outcomes import Refused
from kvstore.client.staging import STAGING_BYTES, SpareBuffers
from kvstore.clock import SystemClock
from kvstore.connectors.mooncake.addresses import (
    FIRST_ADDRESS,
    Slices,
    address_space,
    cut,
    gather,
    joined,
    scatter,
    size_of,
)
from kvstore.connectors.mooncake.codes import Code, code_of_put, code_of_read
from kvstore.connectors.mooncake.large import MANIFEST_BYTES, Manifest, unpack
from kvstore.connectors.mooncake.located import only, sizes_of
from kvstore.connectors.mooncake.refusals import Refusals
from kvstore.namespace import NAME_PART, NAME_PART_BYTES
from kvstore.page import PageChain, name_key, packed_name, unpacked_name
from kvstore.transfer.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvstore.client.locations import Found
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome
    from kvstore.client.store import KVStore

SPACE: Final = address_space()
KEYS_KEPT: Final = 1 << 16
"""Names whose keys are remembered: hashing one takes as long as the master's finding it. They take
18 MB where names have 40 bytes, 81 MB where they have 1 000."""


class Value(NamedTuple):
    """An object to be put."""

    name: bytes
    slices: Slices
    memory: object = None
    """Keeps it where it is; None: whoever made the value does."""


class Finding(NamedTuple):
    """What was found of some names, each once."""

    names: list[bytes]
    found: Found
    manifests: dict[int, Manifest]
    """Of those that have pieces, by place in `names`."""
    sizes: list[int]
    """Bytes of each whole object; 0: it is not there."""


class Objects:
    """The objects of one name of a tenant."""

    def __init__(self, store: KVStore, name: str) -> None:
        """Open the namespaces. Objects have no time to live, as in Mooncake: room decides."""
        self.store = store
        self._heads = store.open_opaque(name, keep_names=True, ttl_s=inf)
        self._pieces = store.open_opaque(f"{name}/pieces", ttl_s=inf)
        self._spare = SpareBuffers(store.buffer)
        self._refusals = Refusals(SystemClock())
        self._key = lru_cache(KEYS_KEPT)(partial(name_key, self._heads.namespace.id))

    def chain(self, names: Iterable[bytes]) -> PageChain:
        """Keys of objects. Engines name the same ones again and again: to ask, to put, to read."""
        return PageChain(b"".join(map(self._key, names)))

    # Storing.

    def put(self, values: Sequence[Value], replicas: int = 0) -> list[PutOutcome]:
        """Store objects of at most PIECE_BYTES each, under distinct names; outcomes in order."""
        return self._put(self._heads, values, replicas)

    def put_pieces(self, manifest: Manifest, slices: Slices, replicas: int) -> Code:
        """Store the pieces of an object; where not all can be, none stay."""
        pieces = [
            Value(name, cut(slices, *manifest.piece(number)))
            for number, name in enumerate(manifest.names())
        ]
        for outcome in self._put(self._pieces, pieces, replicas):
            if code := code_of_put(outcome):
                self.drop_pieces([manifest])
                return code
        return Code.OK

    def drop_pieces(self, manifests: Iterable[Manifest]) -> None:
        """Take the pieces of objects out."""
        names = [name for each in manifests for name in each.names()]
        if names:
            self.store.remove(self._pieces, self._pieces.names(names))

    def _put(
        self, opened: OpenedNamespace, values: Sequence[Value], replicas: int
    ) -> list[PutOutcome]:
        """Values of one size are put together, as many as are staged at a time."""
        outcomes: dict[bytes, PutOutcome] = {}
        by_size: dict[int, list[Value]] = {}
        for value in values:
            by_size.setdefault(size_of(value.slices), []).append(value)
        for size, alike in by_size.items():
            step = max(1, STAGING_BYTES // (size + NAME_PART_BYTES))
            for first in range(0, len(alike), step):
                some = alike[first : first + step]
                done = self._put_alike(opened, some, size, replicas)
                outcomes |= zip([value.name for value in some], done, strict=True)
                for value, outcome in zip(some, done, strict=True):
                    if isinstance(outcome, Refused):
                        self._refusals.add(value.name, size, outcome.reason)
        return [outcomes[value.name] for value in values]

    def _put_alike(
        self, opened: OpenedNamespace, values: Sequence[Value], size: int, replicas: int
    ) -> list[PutOutcome]:
        count, keeps_names = len(values), opened.namespace.keeps_names
        named = [value.name for value in values]
        names_at = count * size
        name_places = range(names_at, names_at + count * NAME_PART_BYTES, NAME_PART_BYTES)
        with self._spare.take(max(STAGING_BYTES, names_at + count * NAME_PART_BYTES)) as buffer:
            for number, value in enumerate(values):
                gather(value.slices, buffer.address + number * size)
                if keeps_names:
                    at = name_places[number]
                    buffer.view[at : at + NAME_PART_BYTES] = packed_name(value.name)
            return self.store.put_objects(
                opened,
                self.chain(named) if keeps_names else opened.names(named),
                buffer,
                range(0, names_at, size),
                size,
                name_offsets=name_places if keeps_names else None,
                replicas=replicas,
            )

    # Finding and reading.

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each can be read now."""
        return self.store.probe(self._heads, self.chain(names))

    def whole(self, names: Sequence[bytes]) -> set[bytes]:
        """Those that are there, with all their pieces."""
        finding = self.find(names, lease=False)
        found = {name for name, size in zip(finding.names, finding.sizes, strict=True) if size}
        for i, manifest in finding.manifests.items():
            pieces = self._pieces.names(manifest.names())
            if not all(self.store.probe(self._pieces, pieces)):
                found.discard(finding.names[i])
        return found

    def find(self, names: Iterable[bytes], *, lease: bool = True, lease_id: int = 0) -> Finding:
        """Where objects are, and how large; `lease_id` as of `give_back`."""
        distinct = list(dict.fromkeys(names))
        found = self.store.lookup(
            self._heads, self.chain(distinct), parts=(0,), lease=lease, lease_id=lease_id
        )
        sizes = sizes_of(found)
        manifests: dict[int, Manifest] = {}
        short = [i for i, size in enumerate(sizes) if size == MANIFEST_BYTES]
        if short:
            head = bytearray(len(short) * MANIFEST_BYTES)
            into = Memory.of("head", head, writable=True).address
            targets = {
                i: ((into + n * MANIFEST_BYTES, MANIFEST_BYTES),) for n, i in enumerate(short)
            }
            codes = self._read(found, targets)
            for n, i in enumerate(short):
                manifest = unpack(bytes(head[n * MANIFEST_BYTES : (n + 1) * MANIFEST_BYTES]))
                if codes[i]:
                    sizes[i] = 0
                elif manifest is not None:
                    manifests[i], sizes[i] = manifest, manifest.size_bytes
        return Finding(distinct, found, manifests, sizes)

    def give_back(self, names: Sequence[bytes], lease_id: int) -> None:
        """Nothing is read any more of objects that were found as `lease_id`, any number but 0.

        Of objects in pieces the pieces' own leases lapse: they are taken when they are read.
        """
        self.store.give_back_lease(self._heads, self.chain(names), lease_id)

    def read(self, finding: Finding, targets: Mapping[int, Slices]) -> dict[int, Code]:
        """Copy found objects, by their places in the finding, to memory of exactly their size."""
        plain = {i: slices for i, slices in targets.items() if i not in finding.manifests}
        codes = self._read(finding.found, plain)
        for i in targets.keys() - plain.keys():
            codes[i] = self._read_pieces(finding.manifests[i], targets[i])
        return codes

    def _read_pieces(self, manifest: Manifest, slices: Slices) -> Code:
        names = manifest.names()
        found = self.store.lookup(self._pieces, self._pieces.names(names))
        pieces = [manifest.piece(number) for number in range(len(names))]
        if sizes_of(found) != [size for _, size in pieces]:
            return Code.OBJECT_NOT_FOUND
        codes = self._read(found, {i: cut(slices, *piece) for i, piece in enumerate(pieces)})
        return min(codes.values())

    def _read(self, found: Found, targets: Mapping[int, Slices]) -> dict[int, Code]:
        """Objects of one page each: straight to their place where it is one, else by a buffer."""
        whole = {i: joined(slices) for i, slices in targets.items()}
        codes: dict[int, Code] = {}
        direct = {
            i: slices[0][0] - FIRST_ADDRESS for i, slices in whole.items() if len(slices) == 1
        }
        if direct:
            codes |= self._read_to(found, SPACE, direct)
        staged: dict[int, Slices] = {}
        room = STAGING_BYTES
        for i, slices in whole.items():
            if i in direct:
                continue
            if staged and size_of(slices) > room:
                codes |= self._read_staged(found, staged)
                staged, room = {}, STAGING_BYTES
            staged[i] = slices
            room -= size_of(slices)
        if staged:
            codes |= self._read_staged(found, staged)
        return codes

    def _read_staged(self, found: Found, targets: Mapping[int, Slices]) -> dict[int, Code]:
        places: dict[int, int] = {}
        end = 0
        for i, slices in targets.items():
            places[i], end = end, end + size_of(slices)
        largest = found.part_bytes(0)  # a read wants room for it at every place
        with self._spare.take(max(STAGING_BYTES, end) + largest) as buffer:
            codes = self._read_to(found, buffer, places)
            for i, code in codes.items():
                if code == Code.OK:
                    scatter(buffer.address + places[i], targets[i])
        return codes

    def _read_to(self, found: Found, into: object, places: Mapping[int, int]) -> dict[int, Code]:
        offsets = [places.get(i, 0) for i in range(len(found.chain))]
        outcomes = self.store.read(only(found, places), into, offsets)
        return {i: code_of_read(outcomes[i]) for i in places}

    # Listing, removing, pinning.

    def listed(self) -> Iterator[tuple[PageChain, list[bytes | None]]]:
        """All objects, a batch at a time, with their names; None where that cannot be read now."""
        for chain in self.store.list_objects(self._heads):
            found = self.store.lookup(self._heads, chain, parts=(NAME_PART,), lease=False)
            count = len(chain)
            with self._spare.take(max(STAGING_BYTES, count * NAME_PART_BYTES)) as buffer:
                offsets = range(0, count * NAME_PART_BYTES, NAME_PART_BYTES)
                outcomes = self.store.read(found, buffer, offsets, part=NAME_PART)
                names = [
                    None if code_of_read(outcome) else unpacked_name(buffer.view[at:])
                    for at, outcome in zip(offsets, outcomes, strict=True)
                ]
            yield chain, names

    def remove(self, names: Sequence[bytes]) -> list[bool]:
        """Take objects out, with their pieces; whether each was there, when it is named first."""
        finding = self.find(names, lease=False)
        gone = self.store.remove(self._heads, finding.found.chain)
        self.drop_pieces(finding.manifests.values())
        was_there = dict(zip(finding.names, gone, strict=True))
        return [was_there.pop(name, False) for name in names]

    def clear(self) -> int:
        """Take all objects out; how many there were."""
        heads = self.store.list_objects(self._heads)
        pieces = self.store.list_objects(self._pieces)
        removed = sum([sum(self.store.remove(self._heads, chain)) for chain in heads])
        for chain in pieces:
            self.store.remove(self._pieces, chain)
        return removed

    def pin(self, names: Sequence[bytes], owner: str, ttl_s: float, *, hard: bool) -> None:
        """Keep objects, with their pieces."""
        self.store.pin(self._heads, self.chain(names), owner=owner, ttl_s=ttl_s, hard=hard)
        pieces = self._piece_names(names)
        if pieces:
            chain = self._pieces.names(pieces)
            self.store.pin(self._pieces, chain, owner=owner, ttl_s=ttl_s, hard=hard)

    def unpin(self, names: Sequence[bytes], owner: str) -> None:
        """Take pins back."""
        self.store.unpin(self._heads, self.chain(names), owner=owner)
        pieces = self._piece_names(names)
        if pieces:
            self.store.unpin(self._pieces, self._pieces.names(pieces), owner=owner)

    def _piece_names(self, names: Sequence[bytes]) -> list[bytes]:
        manifests = self.find(names, lease=False).manifests.values()
        return [name for manifest in manifests for name in manifest.names()]

    def close(self) -> None:
        """Let buffers go; the store is its maker's."""
        self._spare.close()
