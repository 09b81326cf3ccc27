"""A store without a pool behind the calls of engines' connectors (EngineStore). Not a test."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.client.locations import Found
from kvstore.client.outcomes import Miss, MissReason
from kvstore.page import PageChain
from tests.fake_store import FakeStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvstore.client.locations import Locations, Match
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.hints import Hints


class AtOnce:
    """In place of a OneThread: jobs run where they are given."""

    def __init__(self, name: str) -> None:
        """Start nothing."""
        del name

    def run(self, job: Callable[[], None]) -> bool:
        """Run it."""
        job()
        return True

    def close(self, timeout_s: float) -> bool:
        """Nothing goes on."""
        del timeout_s
        return True


class EngineFakeStore(FakeStore):
    """Keeps what is put; may be told to lose, refuse and fail."""

    def __init__(self) -> None:
        """Start empty and healthy."""
        super().__init__()
        self.closed = False
        self.can_map = True
        """Whether pages can be viewed where they lie."""
        self.leased: dict[tuple[bytes, int], set[bytes]] = defaultdict(set)
        """Keys by namespace and number of the lease; those without a number are not kept."""

    def match_prefix(  # type: ignore[override]  # engines say other things than prefixes do
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
        lease_id: int = 0,
    ) -> Match:
        """Find the longest prefix."""
        del parts, timeout_s
        found = super().match_prefix(opened, chain)
        self._lease(found, lease_id)
        return found

    def lookup(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
        lease_id: int = 0,
    ) -> Found:
        """Find every page that is there."""
        del parts, timeout_s
        self._enter("lookup")
        readable = bytes(self._is_whole(opened, key) for key in chain)
        found = Found(opened, chain, (), (), readable)
        self._lease(found, lease_id)
        return found

    def _lease(self, found: Locations, lease_id: int) -> None:
        there = itertools.compress(found.chain, found.readable[: found.pages])
        if lease_id:
            self.leased[found.opened.namespace.id, lease_id].update(there)

    def give_back_lease(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        lease_id: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """End what was leased of these pages under this number."""
        del timeout_s
        self._enter("give_back_lease")
        self.leased[opened.namespace.id, lease_id].difference_update(chain)

    @property
    def pages_leased(self) -> int:
        """How many leases of a page there are that can be given back."""
        return sum(map(len, self.leased.values()))

    def read(
        self,
        locations: Locations,
        into: object,
        offsets: Sequence[int],
        *,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> list[ReadOutcome]:
        """Copy pages out."""
        del timeout_s
        return super().read(locations, into, offsets, part=part)

    @contextmanager
    def views(
        self, locations: Locations, *, part: int = 0, timeout_s: float | None = None
    ) -> Iterator[list[memoryview | Miss]]:
        """Pages where they lie, while `can_map`; read-only, and no longer there afterwards."""
        del timeout_s
        self._enter("views")
        pages: list[memoryview | Miss] = []
        for key in itertools.islice(locations.chain, locations.pages):
            data = self.held.get((key, part))
            if data is None or key in self.spoil or not self.can_map:
                pages.append(Miss(self.spoil.get(key, MissReason.STALE)))
            else:
                pages.append(memoryview(bytes(data)))
        yield pages
        for page in pages:
            if isinstance(page, memoryview):
                page.release()

    def put_parts(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        offsets: Mapping[int, Sequence[int]],
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> list[PutOutcome]:
        """Store pages."""
        del wait, timeout_s
        return super().put_parts(opened, chain, source, offsets, hints=hints)

    def hint(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        hints: Hints,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Hear it."""
        del timeout_s
        super().hint(opened, chain, hints)

    def put_objects(  # type: ignore[override]  # as above
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: object,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Store rows."""
        del wait, timeout_s
        return super().put_objects(opened, names, source, offsets, size_bytes)

    def list_objects(self, opened: OpenedNamespace) -> list[PageChain]:
        """Keys of all rows, whatever their namespace."""
        self._enter("list_objects")
        del opened
        return [PageChain(key) for key, _ in self.held]

    def remove(self, opened: OpenedNamespace, chain: PageChain) -> list[bool]:
        """Take rows out."""
        was_there = [self._is_whole(opened, key) for key in chain]
        for key in chain:
            self.lose(key)
        return was_there

    def close(self) -> None:
        """Close every buffer, as a store does."""
        self.closed = True
        for buffer in self.buffers:
            buffer.close()
