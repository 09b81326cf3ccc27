"""What the blocking store and its asyncio face share: buffers, deadlines, checked requests.

Turns a caller's arguments into plans; whoever called runs them. Sends nothing itself.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client import checks
from kvstore.client.counters import ClientCounters
from kvstore.client.device_mover import DeviceMover
from kvstore.client.hedged_reads import Hedger, HedgingMover
from kvstore.client.locations import Query
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.performer import HostMover
from kvstore.client.pins import PinRequest, pin_steps, unpin_steps
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.replicas import replica_steps
from kvstore.client.staging import Staging
from kvstore.client.steps import ask
from kvstore.client.writes import PartSource, PutRequest, put_steps
from kvstore.errors import BadValue, BufferClosed, MalformedMessage, OutOfSpace
from kvstore.page import PageChain
from kvstore.require import require, require_owner, require_replicas, require_ttl
from kvstore.transfer.bounce import Bounces
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.device import Block
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.pins import ListPins, PinList

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvstore.client.locations import Locations
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.client.performer import Mover, Viewer
    from kvstore.client.steps import Steps
    from kvstore.client.writes import PutWishes
    from kvstore.clock import Clock
    from kvstore.hints import Hints
    from kvstore.namespace import Namespace
    from kvstore.transfer.choice import Choice
    from kvstore.wire.messages.common import SegmentRef
    from kvstore.wire.messages.pins import PinRow

REQUEST_ID_BYTES: Final = 16


def new_request_id() -> bytes:
    """Names one BeginPut, so that repeating it changes nothing."""
    return os.urandom(REQUEST_ID_BYTES)


class Calls:
    """The state of a store that is not a connection. Thread-safe; a fork needs no care."""

    def __init__(self, clock: Clock, timeout_s: float, *, hedge: bool = False) -> None:
        """`timeout_s` is for calls that name none."""
        self.clock = clock
        self.opened: dict[bytes, OpenedNamespace] = {}
        self.staging = Staging(self.buffer)
        self._timeout_s = checks.check_timeout(timeout_s)
        self._hedger = Hedger() if hedge else None
        self._buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._bounces: dict[str, Bounces] = {}
        """Host memory beside each device that pages were put from or read into."""

    def buffer(self, size_bytes: int) -> Buffer:
        """See KVStore.buffer."""
        if sum(not each.closed for each in self._buffers) >= limits.BUFFERS_PER_SESSION_MAX:
            raise OutOfSpace(f"{limits.BUFFERS_PER_SESSION_MAX} buffers are open: close some")
        buffer = Buffer(next(self._numbers), size_bytes)
        self._buffers.add(buffer)
        return buffer

    def memory(
        self, field: str, source: object, *, writable: bool
    ) -> AbstractContextManager[Memory | Block]:
        """The memory of a caller's buffer, kept from being closed meanwhile; or of a device."""
        if isinstance(source, Block):
            if writable and not source.is_writable:
                raise BadValue(field, "a block of another process", "one of this process")
            return nullcontext(source)
        if not isinstance(source, Buffer):
            return nullcontext(Memory.of(field, source, writable=writable))
        if source not in self._buffers:
            raise BufferClosed(f"{field}: {source!r} belongs to another store")
        return source.in_use()

    def mover(self, choice: Choice, memory: Memory | Block) -> Mover:
        """What moves pages between workers and this memory."""
        if isinstance(memory, Memory):
            if self._hedger is not None:
                return HedgingMover(choice, memory, self._hedger)
            return HostMover(choice, memory)
        device = memory.device
        bounces = self._bounces.get(device.identity)
        if bounces is None:  # without a lock, which a forked child could inherit held
            made = Bounces(device)
            bounces = self._bounces.setdefault(device.identity, made)
            if bounces is not made:
                made.close()
        return DeviceMover(choice, memory, bounces, self.staging.take)

    @property
    def counters(self) -> ClientCounters:
        """See KVStore.counters."""
        return ClientCounters() if self._hedger is None else self._hedger.counters

    def close(self) -> None:
        """End hedged reads that are under way, and close every buffer."""
        if self._hedger is not None:
            self._hedger.close()
        for bounces in self._bounces.values():
            bounces.close()
        for buffer in list(self._buffers):
            buffer.close()

    def left_s(self, timeout_s: float | None) -> float:
        """The time that a call which moves nothing may take."""
        return self._timeout_s if timeout_s is None else checks.check_timeout(timeout_s)

    def deadline_s(self, timeout_s: float | None, moved_bytes: int = 0) -> float:
        """When a call must end: as told, or after the usual time and that of its bytes."""
        allowance_s = moved_bytes / limits.PUT_BYTES_PER_S_MIN if timeout_s is None else 0.0
        return self.clock.now_s() + self.left_s(timeout_s) + allowance_s

    def query(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        timeout_s: float | None,
        parts: Sequence[int] = (),
        *,
        lease: bool = True,
        hints: Hints | None = None,
        lease_id: int = 0,
    ) -> Query:
        """A question about a chain's pages."""
        wanted = checks.check_query(opened, chain, parts, lease)
        checks.check_hints(hints)
        checks.check_lease_id(lease_id)
        deadline_s = self.deadline_s(timeout_s)
        return Query(opened, chain, deadline_s, wanted, lease, hints, lease_id)

    def put_request(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        offsets: Mapping[int, Sequence[int]],
        size_bytes: int | None,
        wishes: PutWishes,
    ) -> PutRequest:
        """A checked put, but for the source's bounds."""
        checks.check_put(opened, chain, wishes)
        require("offsets", offsets, Mapping, "lists of offsets by part")
        pages, page_bytes = len(chain), 0
        sources: list[PartSource] = []
        for part, places in offsets.items():
            size = checks.part_size(opened, part, size_bytes)
            sources.append(PartSource(part, size, checks.check_offsets(places, pages)))
            page_bytes += size
        deadline_s = self.deadline_s(wishes.timeout_s, pages * page_bytes)
        return PutRequest(
            opened, chain, tuple(sources), deadline_s, wishes.wait, wishes.ttl_s, wishes.hints,
            wishes.tier, wishes.replicas, wishes.strict, wishes.replicas_now,
        )  # fmt: skip

    def put_steps(self, request: PutRequest) -> Steps[list[PutOutcome]]:
        """The plan of a put."""
        return put_steps(request, self.clock, new_request_id)

    def replica_steps(
        self, request: PutRequest, outcomes: list[PutOutcome]
    ) -> Steps[list[PutOutcome]]:
        """The plan of waiting for what a put asked for."""
        return replica_steps(request, outcomes, self.clock)

    def pin_steps(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        owner: str,
        ttl_s: float,
        timeout_s: float | None,
        *,
        hard: bool,
    ) -> Steps[list[bool]]:
        """The plan of a pin."""
        checks.check_pages(opened, chain)
        checks.check_pin(owner, hard, ttl_s)
        deadline_s = self.deadline_s(timeout_s)
        return pin_steps(PinRequest(opened, chain, owner, hard, ttl_s, deadline_s), self.clock)

    def unpin_steps(
        self,
        opened: OpenedNamespace,
        chain: PageChain | None,
        owner: str,
        timeout_s: float | None,
    ) -> Steps[int]:
        """The plan of taking pins back."""
        checks.check_pages(opened, PageChain(b"") if chain is None else chain)
        require_owner(owner)
        return unpin_steps(opened, chain, owner, self.deadline_s(timeout_s), self.clock)

    def list_pins_steps(self, timeout_s: float | None) -> Steps[tuple[PinRow, ...]]:
        """The plan of looking at them."""
        reply = yield from ask(ListPins(), PinList, self.left_s(timeout_s))
        return reply.pins

    def read_request(
        self,
        locations: Locations,
        part: int,
        offsets: Sequence[int],
        timeout_s: float | None,
    ) -> ReadRequest:
        """A checked read, but for the destination's bounds."""
        places = checks.check_read(locations, part, offsets)
        moved = locations.part_bytes(part) * len(places)
        return ReadRequest(
            locations, part, places, self.deadline_s(timeout_s, moved),
            is_hedged=self._hedger is not None,
        )  # fmt: skip

    def view_request(
        self, locations: Locations, part: int, pages: int | None, timeout_s: float | None
    ) -> ReadRequest:
        """A checked request for views of the first `pages` pages: its places are their numbers."""
        places = checks.view_places(locations, pages)
        request = self.read_request(locations, part, places, timeout_s)
        return msgspec.structs.replace(request, needs_lease=True, is_hedged=False)

    def read_steps(self, request: ReadRequest, pages: Mover | Viewer) -> Steps[list[ReadOutcome]]:
        """The plan of a read, by the transports that `pages` has."""

        def rank(segment: SegmentRef) -> int | None:
            return pages.rank(segment, max(0.0, request.deadline_s - self.clock.now_s()))

        return read_steps(request, self.clock, rank, pages.order)

    def open_steps(
        self, namespace: Namespace, ttl_s: float | None, replicas: int = 0
    ) -> Steps[OpenedNamespace]:
        """Make a namespace known to the master, once a store; what is wished is told each time."""
        known = self.opened.get(namespace.id)
        require_replicas("replicas", replicas)
        if ttl_s is not None:
            require_ttl("ttl_s", ttl_s)
        elif known is not None and not replicas:
            return known
        question = OpenNamespace(namespace.content, namespace.layout, ttl_s, replicas)
        reply = yield from ask(question, NamespaceOpened, self._timeout_s)
        if reply.namespace != namespace.id:
            raise MalformedMessage("the master opened another namespace")
        opened = self.opened[namespace.id] = OpenedNamespace(namespace, reply.ordinal)
        return opened


def check_source(request: PutRequest, memory: Memory | Block) -> None:
    """Every page lies inside the source; BadValue naming offset and room."""
    for each in request.sources:
        memory.check_places("offsets", each.places, each.part_bytes)
