"""A store without a pool: pages in a dict, behind the calls that prefixes need (PageStore)."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from kvstore.client.locations import Found, Match
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.outcomes import (
    AlreadyThere,
    Hit,
    Miss,
    MissReason,
    Refused,
    RefusedReason,
    Stored,
)
from kvstore.ids import ROOT_PARENT
from kvstore.namespace import opaque, open_layout
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.client.locations import Locations
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.errors import KVStoreError
    from kvstore.hints import Hints
    from kvstore.namespace import Content, Layout
    from kvstore.page import PageChain


class FakeStore:
    """Keeps what is put; may be told to lose, refuse and fail."""

    def __init__(self) -> None:
        """Start empty and healthy."""
        self.tenant = "default"
        self.held: dict[tuple[bytes, int], bytes] = {}
        self.puts: Counter[bytes] = Counter()
        """How often each page was stored (not: found there)."""
        self.buffers: list[Buffer] = []
        self.fail: dict[str, KVStoreError] = {}
        """By name of a call: raise this instead."""
        self.refuse: dict[bytes, RefusedReason] = {}
        """By page key: refuse it, once."""
        self.spoil: dict[bytes, MissReason] = {}
        """By page key: reads of it miss, although it is found."""
        self.evict_after_probe: list[bytes] = []
        self.objects: list[bytes] = []
        """Keys of named objects, in the order of their puts."""
        self.objects_max = 1 << 30
        """No room for more of them."""
        self.heard: list[tuple[PageChain, bool, Hints | None]] = []
        """Chain, lease and hints of each match, put and hint."""
        self._lock = threading.RLock()

    def _enter(self, call: str) -> None:
        if call in self.fail:
            raise self.fail[call]

    def open(self, content: Content, layout: Layout) -> OpenedNamespace:
        """Make a namespace known."""
        self._enter("open")
        return OpenedNamespace(open_layout(content, layout), 1)

    def open_opaque(self, name: str) -> OpenedNamespace:
        """Make a namespace of named objects known."""
        self._enter("open_opaque")
        return OpenedNamespace(opaque(self.tenant, name), 2)

    def buffer(self, size_bytes: int) -> Buffer:
        """Memory to move pages through."""
        self._enter("buffer")
        self.buffers.append(Buffer(len(self.buffers) + 1, size_bytes))
        return self.buffers[-1]

    def probe(self, opened: OpenedNamespace, chain: PageChain) -> list[bool]:
        """Tell which pages are there."""
        self._enter("probe")
        with self._lock:
            known = [self._is_whole(opened, key) for key in chain]
            for key in self.evict_after_probe:
                self.lose(key)
        return known

    def lose(self, key: bytes) -> None:
        """Evict a page."""
        for held in [held for held in self.held if held[0] == key]:
            del self.held[held]

    def _is_whole(self, opened: OpenedNamespace, key: bytes) -> bool:
        parts = range(1) if opened.namespace.is_opaque else range(len(opened.namespace.parts))
        return all((key, part) in self.held for part in parts)

    def match_prefix(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        lease: bool = True,
        hints: Hints | None = None,
    ) -> Match:
        """Find the longest prefix."""
        self._enter("match_prefix")
        self.heard.append((chain, lease, hints))
        with self._lock:
            readable = bytes(self._is_whole(opened, key) for key in chain)
        return Match(opened, chain, (), (), readable)

    def hint(self, opened: OpenedNamespace, chain: PageChain, hints: Hints) -> None:
        """Hear it."""
        self._enter("hint")
        self.heard.append((chain, False, hints))

    def lookup(self, opened: OpenedNamespace, chain: PageChain) -> Found:
        """Find pages, also beyond a gap."""
        self._enter("lookup")
        with self._lock:
            readable = bytes(self._is_whole(opened, key) for key in chain)
        return Found(opened, chain, (), (), readable)

    def read(
        self, locations: Locations, into: object, offsets: Sequence[int], *, part: int = 0
    ) -> list[ReadOutcome]:
        """Copy pages out."""
        self._enter("read")
        assert len(offsets) <= locations.pages
        memory = into.memory if isinstance(into, Buffer) else Memory.of("into", into, writable=True)
        outcomes: list[ReadOutcome] = []
        with self._lock:
            for key, offset in zip(locations.chain, offsets, strict=False):
                data = self.held.get((key, part))
                if data is None or key in self.spoil:
                    outcomes.append(Miss(self.spoil.get(key, MissReason.STALE)))
                    continue
                memory.view[offset : offset + len(data)] = data
                outcomes.append(Hit())
        return outcomes

    def put_parts(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        offsets: Mapping[int, Sequence[int]],
        *,
        hints: Hints | None = None,
    ) -> list[PutOutcome]:
        """Store pages; the ones after a refused one have no parent."""
        self._enter("put_parts")
        self.heard.append((chain, False, hints))
        memory = (
            source.memory
            if isinstance(source, Buffer)
            else Memory.of("source", source, writable=False)
        )
        outcomes: list[PutOutcome] = []
        with self._lock:
            for i, key in enumerate(chain):
                places = {part: each[i] for part, each in offsets.items()}
                parent = chain.parent_of(i)
                if parent != ROOT_PARENT and not any(held[0] == parent for held in self.held):
                    outcomes.append(Refused(RefusedReason.PARENT_MISSING))
                elif key in self.refuse:
                    outcomes.append(Refused(self.refuse.pop(key)))
                else:
                    outcomes.append(self._put_page(opened, key, memory, places))
        return outcomes

    def put_objects(
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: object,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        hints: Hints | None = None,
    ) -> list[PutOutcome]:
        """Store named objects; what is there stays."""
        self._enter("put_objects")
        assert isinstance(source, Buffer)
        assert opened.namespace.is_opaque
        self.heard.append((names, False, hints))
        outcomes: list[PutOutcome] = []
        with self._lock:
            for key, place in zip(names, offsets, strict=True):
                if key in self.refuse:
                    outcomes.append(Refused(self.refuse.pop(key)))
                elif (key, 0) in self.held:
                    outcomes.append(AlreadyThere())
                elif len(self.objects) == self.objects_max:
                    outcomes.append(Refused(RefusedReason.OUT_OF_SPACE))
                else:
                    source.memory.check_places("offsets", (place,), size_bytes)
                    self.held[key, 0] = bytes(source.view[place : place + size_bytes])
                    self.objects.append(key)
                    self.puts[key] += 1
                    outcomes.append(Stored())
        return outcomes

    def _put_page(
        self, opened: OpenedNamespace, key: bytes, memory: Memory, places: Mapping[int, int]
    ) -> PutOutcome:
        if self._is_whole(opened, key):
            return AlreadyThere()
        for part, place in places.items():
            size = opened.namespace.parts[part].size_bytes
            memory.check_places("offsets", (place,), size)
            self.held[key, part] = bytes(memory.view[place : place + size])
        self.puts[key] += 1
        return Stored(self._is_whole(opened, key))
