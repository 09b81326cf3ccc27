"""A store of named objects without a pool: what the Mooncake drop-in needs of KVStore."""

from __future__ import annotations

import ctypes
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.client.locations import Found, Piece
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.outcomes import AlreadyThere, Hit, Miss, MissReason, Refused, Stored
from kvstore.connectors.mooncake import MooncakeDistributedStore, objects, session
from kvstore.ids import KEY_BYTES
from kvstore.namespace import NAME_PART, NAME_PART_BYTES, opaque
from kvstore.page import PageChain
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.reads import Located, LocatedCopy, LocatedRun
from tests.unit.client_scripts import segment, u64

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.errors import KVStoreError


class ObjectStore:
    """Keeps parts by key; may be told to refuse, to lose and to fail."""

    def __init__(self) -> None:
        """Start empty and healthy."""
        self.held: dict[bytes, dict[int, bytes]] = {}
        self.where: dict[bytes, int] = {}
        """Namespace of each key, by ordinal."""
        self.fail: KVStoreError | None = None
        self.refuse: dict[bytes, Refused] = {}
        """By key, once."""
        self.spoil: dict[bytes, MissReason] = {}
        self.puts_between: list[tuple[OpenedNamespace, bytes, bytes]] = []
        """What somebody else puts, one before each of our puts."""
        self.leased: dict[int, set[bytes]] = {}
        """Keys by number of the lease; those without a number are not kept."""
        self.pins: dict[tuple[bytes, str], tuple[float, bool]] = {}
        self.asked: Counter[str] = Counter()
        self.ttls: list[float | None] = []
        self.replicas: list[int] = []
        self._opened: dict[bytes, OpenedNamespace] = {}

    def _enter(self, call: str) -> None:
        self.asked[call] += 1
        if self.fail is not None:
            raise self.fail

    def open_opaque(
        self, name: str, *, keep_names: bool = False, ttl_s: float | None = None
    ) -> OpenedNamespace:
        """Make a namespace known."""
        self._enter("open_opaque")
        self.ttls.append(ttl_s)
        namespace = opaque("tests", name, keeps_names=keep_names)
        number = len(self._opened) + 1
        return self._opened.setdefault(namespace.id, OpenedNamespace(namespace, number))

    def buffer(self, size_bytes: int) -> Buffer:
        """Memory to move objects through."""
        return Buffer(1, size_bytes)

    def put_objects(
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: Buffer,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        name_offsets: Sequence[int] | None = None,
        replicas: int = 0,
    ) -> list[PutOutcome]:
        """Store objects of one size, with their names where those are kept."""
        self._enter("put_objects")
        assert len(set(names)) == len(names)
        assert (name_offsets is not None) == opened.namespace.keeps_names
        assert 0 < size_bytes <= limits.CHUNK_BYTES
        self.replicas.append(replicas)
        if self.puts_between:
            where, key, value = self.puts_between.pop(0)
            self.held[key], self.where[key] = {0: value, NAME_PART: b""}, where.ordinal
        outcomes: list[PutOutcome] = []
        for number, key in enumerate(names):
            if key in self.refuse:
                outcomes.append(self.refuse.pop(key))
                continue
            if key in self.held:
                outcomes.append(AlreadyThere())
                continue
            at = offsets[number]
            parts = {0: bytes(source.view[at : at + size_bytes])}
            if name_offsets is not None:
                at = name_offsets[number]
                parts[NAME_PART] = bytes(source.view[at : at + NAME_PART_BYTES])
            self.held[key], self.where[key] = parts, opened.ordinal
            outcomes.append(Stored())
        return outcomes

    def probe(self, opened: OpenedNamespace, chain: PageChain) -> list[bool]:
        """Tell which objects are there."""
        self._enter("probe")
        return [key in self.held for key in chain]

    def lookup(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        parts: Sequence[int] = (),
        lease: bool = True,
        lease_id: int = 0,
    ) -> Found:
        """Find objects; a run each."""
        self._enter("lookup")
        if lease and lease_id:
            self.leased[lease_id] = {key for key in chain if key in self.held}
        runs = []
        for number, key in enumerate(chain):
            if key in self.held:
                copies = tuple(
                    LocatedCopy(part, 0, len(data), u64([number]), u64([1]), u64([0]))
                    for part, data in self.held[key].items()
                    if part in (parts or (0, NAME_PART)) and data
                )
                runs.append(LocatedRun(number, 1, copies))
        located = Located(1, 10.0, (segment("near"),), tuple(runs))
        readable = bytes(key in self.held for key in chain)
        return Found(opened, chain, tuple(parts), (Piece.of(0, located, 0.0, lease),), readable)

    def give_back_lease(self, opened: OpenedNamespace, chain: PageChain, lease_id: int) -> None:
        """End what was leased of these objects under this number."""
        self._enter("give_back_lease")
        self.leased[lease_id].difference_update(chain)

    @property
    def objects_leased(self) -> int:
        """How many leases of an object there are that can be given back."""
        return sum(map(len, self.leased.values()))

    def read(
        self, found: Found, into: object, offsets: Sequence[int], *, part: int = 0
    ) -> list[ReadOutcome]:
        """Copy out what `found` still names."""
        self._enter("read")
        memory = into.memory if isinstance(into, Buffer) else Memory.of("into", into, writable=True)
        memory.check_places("offsets", offsets, found.part_bytes(part))
        runs = [run for piece in found.pieces for run in piece.located.runs]
        named = {page for run in runs for page in range(run.first, run.first + run.count)}
        outcomes: list[ReadOutcome] = []
        for number, (key, at) in enumerate(zip(found.chain, offsets, strict=True)):
            data = self.held.get(key, {}).get(part)
            if number not in named or not data or key in self.spoil:
                outcomes.append(Miss(self.spoil.get(key, MissReason.ABSENT)))
                continue
            memory.view[at : at + len(data)] = data
            outcomes.append(Hit())
        return outcomes

    def remove(self, opened: OpenedNamespace, chain: PageChain) -> list[bool]:
        """Take objects out."""
        self._enter("remove")
        assert len(set(chain)) == len(chain)
        return [self.held.pop(key, None) is not None for key in chain]

    def list_objects(self, opened: OpenedNamespace) -> list[PageChain]:
        """Two keys a chain, so that there are several."""
        self._enter("list_objects")
        keys = sorted(key for key in self.held if self.where[key] == opened.ordinal)
        packed = b"".join(keys)
        step = 2 * KEY_BYTES
        return [PageChain(packed[at : at + step]) for at in range(0, len(packed), step)]

    def pin(
        self, opened: OpenedNamespace, chain: PageChain, *, owner: str, ttl_s: float, hard: bool
    ) -> list[bool]:
        """Note pins."""
        self._enter("pin")
        self.pins |= {(key, owner): (ttl_s, hard) for key in chain if key in self.held}
        return [key in self.held for key in chain]

    def unpin(self, opened: OpenedNamespace, chain: PageChain, *, owner: str) -> int:
        """Take them back."""
        self._enter("unpin")
        return sum(self.pins.pop((key, owner), None) is not None for key in chain)

    def stat(self) -> None:
        """Answer, or fail."""
        self._enter("stat")

    def close(self) -> None:
        """Nothing to close."""
        self._enter("close")


SETUP: Final = ("host:1", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:7700")


def installed(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """What `setup` connects to from now on; little is staged at a time."""
    made = ObjectStore()
    monkeypatch.setattr(session, "_connect", lambda _: made)
    monkeypatch.setattr(objects, "STAGING_BYTES", 1 << 16)
    return made


@contextmanager
def set_up(fake: ObjectStore) -> Iterator[MooncakeDistributedStore]:
    """A drop-in store on `fake`."""
    made = MooncakeDistributedStore()
    assert made.setup(*SETUP) == 0
    yield made
    fake.fail = None
    made.close()


def region(data: bytes) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Memory that holds these bytes, and its address."""
    memory = ctypes.create_string_buffer(data, len(data))
    return memory, ctypes.addressof(memory)
