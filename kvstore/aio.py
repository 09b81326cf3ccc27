"""`AsyncKVStore`: the same pool for asyncio programs, by the same plans.

What a process shares between calls, and how steps are carried out beside an event loop, is in
kvstore.client.async_connected.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvstore.client import checks
from kvstore.client.async_connected import AsyncConnected, in_thread
from kvstore.client.calls import check_source
from kvstore.client.locations import (
    give_back_steps,
    hint_steps,
    lookup_steps,
    match_steps,
    object_steps,
    prefetch_steps,
    probe_steps,
    remove_steps,
)
from kvstore.client.outcomes import Miss
from kvstore.client.performer import HostMover, Viewer
from kvstore.client.staging import is_stopped
from kvstore.client.writes import PutWishes
from kvstore.namespace import opaque, open_layout
from kvstore.transfer.device import Block

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from kvstore.client.locations import Found, Locations, Match
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.client.writes import PutRequest
    from kvstore.hints import Hints
    from kvstore.namespace import Content, Layout
    from kvstore.page import PageChain
    from kvstore.transfer.buffer import Buffer
    from kvstore.wire.messages.pins import PinRow


class AsyncKVStore(AsyncConnected):
    """See KVStore: the same methods, to be awaited. Belongs to the loop that it was made in."""

    async def open(
        self, content: Content, layout: Layout, *, ttl_s: float | None = None, replicas: int = 0
    ) -> OpenedNamespace:
        """See KVStore.open."""
        return await self._run(
            self._calls.open_steps(open_layout(content, layout), ttl_s, replicas)
        )

    async def open_opaque(
        self,
        name: str,
        *,
        keep_names: bool = False,
        ttl_s: float | None = None,
        replicas: int = 0,
    ) -> OpenedNamespace:
        """See KVStore.open_opaque."""
        namespace = opaque(self.tenant, name, keeps_names=keep_names)
        return await self._run(self._calls.open_steps(namespace, ttl_s, replicas))

    def buffer(self, size_bytes: int) -> Buffer:
        """See KVStore.buffer; touching the memory takes about 0.3 ms a MiB."""
        return self._calls.buffer(size_bytes)

    async def put(  # noqa: PLR0913 -- each is a wish of its own
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        offsets: Sequence[int],
        *,
        part: int = 0,
        ttl_s: float | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
        hints: Hints | None = None,
        tier: str = "",
        replicas: int = 0,
        strict: bool = False,
        replicas_now: bool = False,
    ) -> list[PutOutcome]:
        """See KVStore.put."""
        wishes = PutWishes(ttl_s, wait, timeout_s, hints, tier, replicas, strict, replicas_now)
        by_part = {checks.part_number(part): offsets}
        request = self._calls.put_request(opened, chain, by_part, None, wishes)
        return await self._put(source, request)

    async def put_parts(  # noqa: PLR0913 -- each is a wish of its own
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        offsets: Mapping[int, Sequence[int]],
        *,
        ttl_s: float | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
        hints: Hints | None = None,
        tier: str = "",
        replicas: int = 0,
        strict: bool = False,
        replicas_now: bool = False,
    ) -> list[PutOutcome]:
        """See KVStore.put_parts."""
        wishes = PutWishes(ttl_s, wait, timeout_s, hints, tier, replicas, strict, replicas_now)
        request = self._calls.put_request(opened, chain, offsets, None, wishes)
        return await self._put(source, request)

    async def put_objects(  # noqa: PLR0913 -- each is a wish of its own
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: object,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        name_offsets: Sequence[int] | None = None,
        ttl_s: float | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
        hints: Hints | None = None,
        tier: str = "",
        replicas: int = 0,
        strict: bool = False,
        replicas_now: bool = False,
    ) -> list[PutOutcome]:
        """See KVStore.put_objects."""
        wishes = PutWishes(ttl_s, wait, timeout_s, hints, tier, replicas, strict, replicas_now)
        places = checks.object_offsets(opened, offsets, name_offsets)
        request = self._calls.put_request(opened, names, places, size_bytes, wishes)
        return await self._put(source, request)

    async def _put(self, source: object, request: PutRequest) -> list[PutOutcome]:
        outcomes = await self._store(source, request)
        if request.awaits_replicas:
            return await self._run(self._calls.replica_steps(request, outcomes))
        return outcomes

    async def _store(self, source: object, request: PutRequest) -> list[PutOutcome]:
        with self._calls.memory("source", source, writable=False) as memory:
            check_source(request, memory)
            if not request.sources or not request.pages:
                return []
            if isinstance(memory, Block) or memory.buffer is not None:
                mover = self._calls.mover(self._choice, memory)
                return await self._run(self._calls.put_steps(request), mover)
            outcomes: list[PutOutcome] = []
            for some in self._calls.staging.slices(request, memory):
                steps = self._calls.put_steps(await in_thread(some.fill))
                outcomes += await self._run(steps, HostMover(self._choice, some.memory))
                if is_stopped(request, outcomes):
                    break
            return outcomes

    async def probe(
        self, opened: OpenedNamespace, chain: PageChain, *, timeout_s: float | None = None
    ) -> list[bool]:
        """See KVStore.probe."""
        query = self._calls.query(opened, chain, timeout_s)
        return await self._run(probe_steps(query, self._calls.clock))

    async def list_objects(
        self, opened: OpenedNamespace, *, timeout_s: float | None = None
    ) -> list[PageChain]:
        """See KVStore.list_objects."""
        deadline_s = self._calls.deadline_s(timeout_s)
        return await self._run(object_steps(opened, deadline_s, self._calls.clock))

    async def prefetch(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        tier: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """See KVStore.prefetch."""
        query = self._calls.query(opened, chain, timeout_s)
        await self._run(prefetch_steps(query, self._calls.clock, checks.tier_name(tier)))

    async def match_prefix(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        lease: bool = True,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
        hints: Hints | None = None,
        lease_id: int = 0,
    ) -> Match:
        """See KVStore.match_prefix."""
        query = self._calls.query(
            opened, chain, timeout_s, parts, lease=lease, hints=hints, lease_id=lease_id
        )
        return await self._run(match_steps(query, self._calls.clock))

    async def lookup(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        lease: bool = True,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
        hints: Hints | None = None,
        lease_id: int = 0,
    ) -> Found:
        """See KVStore.lookup."""
        query = self._calls.query(
            opened, chain, timeout_s, parts, lease=lease, hints=hints, lease_id=lease_id
        )
        return await self._run(lookup_steps(query, self._calls.clock))

    async def give_back_lease(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        lease_id: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """See KVStore.give_back_lease."""
        query = self._calls.query(opened, chain, timeout_s, lease_id=lease_id)
        await self._run(give_back_steps(query, self._calls.clock))

    async def hint(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        hints: Hints,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """See KVStore.hint."""
        query = self._calls.query(opened, chain, timeout_s, lease=False, hints=hints)
        await self._run(hint_steps(query, self._calls.clock))

    async def read(
        self,
        locations: Locations,
        into: object,
        offsets: Sequence[int],
        *,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> list[ReadOutcome]:
        """See KVStore.read."""
        request = self._calls.read_request(locations, part, offsets, timeout_s)
        with self._calls.memory("into", into, writable=True) as memory:
            memory.check_places("offsets", request.places, locations.part_bytes(part))
            mover = self._calls.mover(self._choice, memory)
            await self._open_transports(locations)
            return await self._run(self._calls.read_steps(request, mover), mover)

    @asynccontextmanager
    async def views(
        self,
        locations: Locations,
        *,
        part: int = 0,
        pages: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[list[memoryview | Miss]]:
        """See KVStore.views."""
        request = self._calls.view_request(locations, part, pages, timeout_s)
        viewer = Viewer(self._choice)
        try:
            await self._open_transports(locations)
            outcomes = await self._run(self._calls.read_steps(request, viewer), viewer)
            yield [
                outcome if isinstance(outcome, Miss) else viewer.view(place)
                for place, outcome in enumerate(outcomes)
            ]
        finally:
            viewer.end_or_warn()

    async def pin(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        owner: str,
        ttl_s: float,
        hard: bool = False,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """See KVStore.pin."""
        steps = self._calls.pin_steps(opened, chain, owner, ttl_s, timeout_s, hard=hard)
        return await self._run(steps)

    async def unpin(
        self,
        opened: OpenedNamespace,
        chain: PageChain | None = None,
        *,
        owner: str,
        timeout_s: float | None = None,
    ) -> int:
        """See KVStore.unpin."""
        return await self._run(self._calls.unpin_steps(opened, chain, owner, timeout_s))

    async def pins(self, *, timeout_s: float | None = None) -> tuple[PinRow, ...]:
        """See KVStore.pins."""
        return await self._run(self._calls.list_pins_steps(timeout_s))

    async def remove(
        self, opened: OpenedNamespace, chain: PageChain, *, timeout_s: float | None = None
    ) -> list[bool]:
        """See KVStore.remove."""
        query = self._calls.query(opened, chain, timeout_s)
        return await self._run(remove_steps(query, self._calls.clock))
