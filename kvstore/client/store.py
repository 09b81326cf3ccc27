"""`KVStore`: the pool as an inference engine sees it. Blocking, thread-safe, survives fork.

Owns what a process shares between calls: the link to the masters, the transports, the buffers.
What a call does is planned in kvstore.client.writes, reads and locations.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self, TypeVar

from kvstore import limits
from kvstore.client import checks
from kvstore.client.locations import Query, lookup_steps, match_steps, probe_steps, remove_steps
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.outcomes import Miss
from kvstore.client.performer import Blocking, Mover, Viewer
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.staging import Staging
from kvstore.client.steps import ask, drive
from kvstore.client.writes import PartSource, PutRequest, put_steps
from kvstore.clock import SystemClock
from kvstore.errors import BufferClosed, MalformedMessage, OutOfSpace
from kvstore.namespace import opaque, open_layout
from kvstore.rpc.identity import Identity, Role
from kvstore.rpc.link import MasterLink
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.choice import Choice
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.reads import GetStatus, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from kvstore.client.locations import Found, Locations, Match
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.client.steps import Steps
    from kvstore.clock import Clock
    from kvstore.namespace import Content, Layout, Namespace
    from kvstore.page import PageChain
    from kvstore.wire.messages.common import SegmentRef

DEFAULT_MASTERS: Final = f"127.0.0.1:{limits.MASTER_PORT}"
DEFAULT_TRANSPORTS: Final = ("shm", "tcp")
REQUEST_ID_BYTES: Final = 16

T = TypeVar("T")


def _new_request_id() -> bytes:
    return os.urandom(REQUEST_ID_BYTES)


class KVStore:
    """The pool, for one process. Make it with `connect`; close it, or use it in a `with`.

    Deadlines: every call takes `timeout_s`; a call that moves pages has in addition the time that
    its bytes take at limits.PUT_BYTES_PER_S_MIN, unless told otherwise. Unavailable is raised when
    no master answers by then. A forked child may go on using the store in a session of its own;
    the parent's buffers are refused there.
    """

    def __init__(
        self,
        link: MasterLink,
        choice: Choice,
        clock: Clock,
        *,
        tenant: str = "default",
        timeout_s: float = limits.CALL_TIMEOUT_S,
    ) -> None:
        """Own `link` and `choice`. `connect` is the usual way."""
        self.tenant: Final = tenant
        self._link = link
        self._choice = choice
        self._clock = clock
        self._timeout_s = checks.check_timeout(timeout_s)
        self._opened: dict[bytes, OpenedNamespace] = {}
        self._buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._staging = Staging(self.buffer)

    @classmethod
    def connect(
        cls,
        masters: str | Sequence[str] = DEFAULT_MASTERS,
        *,
        tenant: str = "default",
        secret: bytes | None = None,
        name: str = "",
        transports: Sequence[str] = DEFAULT_TRANSPORTS,
        timeout_s: float = limits.CALL_TIMEOUT_S,
    ) -> Self:
        """Reach a master of the pool.

        `transports` are those that may be used; ConfigError when this process cannot use one.
        Unavailable when no master answers, AccessDenied when it refuses the secret.
        """
        addresses = [masters] if isinstance(masters, str) else list(masters)
        clock = SystemClock()
        link = MasterLink(addresses, Identity(Role.ENGINE, tenant, name, secret), clock)
        try:
            choice = Choice(transports, lambda: link.identity, clock)
            store = cls(link, choice, clock, tenant=tenant, timeout_s=timeout_s)
            store.stat()
        except BaseException:
            link.close()
            raise
        return store

    # Namespaces and buffers.

    def open(self, content: Content, layout: Layout) -> OpenedNamespace:
        """Make a namespace known to the pool. BadValue names a field that is wrong."""
        return self._open(open_layout(content, layout))

    def open_opaque(self, name: str) -> OpenedNamespace:
        """A namespace of named objects of any size, without prefix; see `put_objects`."""
        return self._open(opaque(self.tenant, name))

    def _open(self, namespace: Namespace) -> OpenedNamespace:
        known = self._opened.get(namespace.id)
        if known is not None:
            return known
        question = OpenNamespace(namespace.content, namespace.layout)
        reply = self._run(ask(question, NamespaceOpened, self._timeout_s))
        if reply.namespace != namespace.id:
            raise MalformedMessage("the master opened another namespace")
        opened = OpenedNamespace(namespace, reply.ordinal)
        self._opened[namespace.id] = opened
        return opened

    def buffer(self, size_bytes: int) -> Buffer:
        """Memory that pages are put from and read into without another copy.

        OutOfSpace beyond limits.BUFFERS_PER_SESSION_MAX open ones.
        """
        if sum(not each.closed for each in self._buffers) >= limits.BUFFERS_PER_SESSION_MAX:
            raise OutOfSpace(f"{limits.BUFFERS_PER_SESSION_MAX} buffers are open: close some")
        buffer = Buffer(next(self._numbers), size_bytes)
        self._buffers.add(buffer)
        return buffer

    # Storing.

    def put(
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
    ) -> list[PutOutcome]:
        """Store one part of every page of a chain; one outcome a page, in order.

        `source` is a Buffer of this store, or any contiguous buffer (copied once more);
        `offsets` says where in it each page begins, in bytes. With `wait` the call waits within
        its deadline for room and for other puts of the same pages. When it returns, every lookup
        by anybody finds what is `Stored(visible=True)`.
        """
        sources = {part: offsets}
        return self.put_parts(
            opened, chain, source, sources, ttl_s=ttl_s, wait=wait, timeout_s=timeout_s
        )

    def put_parts(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        offsets: Mapping[int, Sequence[int]],
        *,
        ttl_s: float | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Store several parts of every page: `offsets` has one list for each part."""
        sources = tuple(
            PartSource(
                part, checks.part_size(opened, part, None), checks.check_offsets(places, len(chain))
            )
            for part, places in offsets.items()
        )
        return self._put(opened, chain, source, sources, (ttl_s, wait, timeout_s))

    def put_objects(
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: object,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        ttl_s: float | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Store named objects of `size_bytes` each in an opaque namespace."""
        size = checks.part_size(opened, 0, size_bytes)
        sources = (PartSource(0, size, checks.check_offsets(offsets, len(names))),)
        return self._put(opened, names, source, sources, (ttl_s, wait, timeout_s))

    def _put(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        sources: tuple[PartSource, ...],
        wishes: tuple[float | None, bool, float | None],
    ) -> list[PutOutcome]:
        ttl_s, wait, timeout_s = wishes
        checks.check_put(chain, ttl_s)
        moved = sum(each.part_bytes for each in sources) * len(chain)
        deadline_s = self._deadline_s(timeout_s, moved)
        request = PutRequest(opened, chain, sources, deadline_s, wait, ttl_s)
        with self._memory("source", source, writable=False) as memory:
            for each in sources:
                memory.check_places("offsets", each.places, each.part_bytes)
            if not sources or not chain:
                return []
            if memory.buffer is None:
                return self._staging.put(request, memory, self._put_from)
            return self._put_from(request, memory)

    def _put_from(self, request: PutRequest, memory: Memory) -> list[PutOutcome]:
        steps = put_steps(request, self._clock, _new_request_id)
        return self._run(steps, Mover(self._choice, memory))

    # Finding and reading.

    def probe(
        self, opened: OpenedNamespace, chain: PageChain, *, timeout_s: float | None = None
    ) -> list[bool]:
        """Whether each page is readable now. Takes no lease and keeps nothing alive."""
        query = Query(opened, chain, self._deadline_s(timeout_s))
        return self._run(probe_steps(query, self._clock))

    def match_prefix(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        lease: bool = True,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Match:
        """The longest prefix of the chain in the pool, leased so that it can be read.

        `parts` narrows what is located to the parts that will be read; a page is found only when
        all its parts are there either way.
        """
        query = Query(opened, chain, self._deadline_s(timeout_s), tuple(parts), lease)
        return self._run(match_steps(query, self._clock))

    def lookup(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        lease: bool = True,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Found:
        """Every page of the chain that is in the pool, also beyond a gap; else as match_prefix."""
        query = Query(opened, chain, self._deadline_s(timeout_s), tuple(parts), lease)
        return self._run(lookup_steps(query, self._clock))

    def read(
        self,
        locations: Locations,
        into: object,
        offsets: Sequence[int],
        *,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> list[ReadOutcome]:
        """Copy the first len(offsets) located pages to those places; one outcome a page, in order.

        A Hit's bytes were verified after the last of them had come. The place of a Miss holds
        nothing of the pool's.
        """
        places = checks.check_read(locations, part, offsets)
        size = locations.part_bytes(part)
        with self._memory("into", into, writable=True) as memory:
            memory.check_places("offsets", places, size)
            deadline_s = self._deadline_s(timeout_s, size * len(places))
            request = ReadRequest(locations, part, places, deadline_s)
            return self._read(request, Mover(self._choice, memory))

    @contextmanager
    def views(
        self,
        locations: Locations,
        *,
        part: int = 0,
        pages: int | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[list[memoryview | Miss]]:
        """The first `pages` located pages where they lie, without copying (shm only).

        Read-only and verified; their worker does not reuse their memory until the block ends. An
        array made of a view must be gone by then: else its page stays locked until it is, and a
        ResourceWarning says so.
        """
        count = locations.pages if pages is None else pages
        places = checks.check_read(locations, part, range(count))
        deadline_s = self._deadline_s(timeout_s, locations.part_bytes(part) * count)
        request = ReadRequest(locations, part, places, deadline_s)
        viewer = Viewer(self._choice)
        try:
            yield [
                outcome if isinstance(outcome, Miss) else viewer.view(place)
                for place, outcome in enumerate(self._read(request, viewer))
            ]
        finally:
            leaked = viewer.end()
            if leaked:
                text = f"{leaked} pages are still in use after their `with` and stay locked"
                warnings.warn(text, ResourceWarning, stacklevel=3)

    def _read(self, request: ReadRequest, pages: Mover | Viewer) -> list[ReadOutcome]:
        def rank(segment: SegmentRef) -> int | None:
            return pages.rank(segment, max(0.0, request.deadline_s - self._clock.now_s()))

        return self._run(read_steps(request, self._clock, rank), pages)

    # The rest.

    def remove(
        self, opened: OpenedNamespace, chain: PageChain, *, timeout_s: float | None = None
    ) -> list[bool]:
        """Take pages out, everywhere and for good; tells for each whether it was there."""
        query = Query(opened, chain, self._deadline_s(timeout_s))
        return self._run(remove_steps(query, self._clock))

    def stat(self, *, timeout_s: float | None = None) -> Status:
        """The pool at this moment: workers, bytes by state, counters."""
        return self._run(
            ask(GetStatus(), Status, self._timeout_s if timeout_s is None else timeout_s)
        )

    def close(self) -> None:
        """Close buffers, transports and the link to the masters. Safe to repeat."""
        for buffer in list(self._buffers):
            buffer.close()
        self._choice.close()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _memory(self, field: str, source: object, *, writable: bool) -> Iterator[Memory]:
        """The memory of a caller's buffer, kept from being closed meanwhile."""
        if not isinstance(source, Buffer):
            yield Memory.of(field, source, writable=writable)
            return
        if source not in self._buffers:
            raise BufferClosed(f"{field}: {source!r} belongs to another store")
        with source.in_use() as memory:
            yield memory

    def _run(self, steps: Steps[T], pages: Mover | Viewer | None = None) -> T:
        performer = Blocking(self._link.call, pages or Viewer(self._choice), time.sleep)
        return drive(steps, performer)

    def _deadline_s(self, timeout_s: float | None, moved_bytes: int = 0) -> float:
        """When a call must end: as told, or the usual time and that of its bytes."""
        if timeout_s is None:
            timeout_s = self._timeout_s + moved_bytes / limits.PUT_BYTES_PER_S_MIN
        else:
            checks.check_timeout(timeout_s)
        return self._clock.now_s() + timeout_s
