"""`KVStore`: the pool as an inference engine sees it. Blocking, thread-safe, survives fork.

What a process shares between calls is in kvstore.client.connected; what a call does is planned in
kvstore.client.writes, reads and locations.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.client import checks
from kvstore.client.calls import check_source
from kvstore.client.connected import Connected
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
    from collections.abc import Iterator, Mapping, Sequence

    from kvstore.client.locations import Found, Locations, Match
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.client.writes import PutRequest
    from kvstore.hints import Hints
    from kvstore.namespace import Content, Layout
    from kvstore.page import PageChain
    from kvstore.transfer.buffer import Buffer
    from kvstore.wire.messages.pins import PinRow


class KVStore(Connected):
    """The pool, for one process. Make it with `connect`; close it, or use it in a `with`.

    Deadlines: every call takes `timeout_s`; a call that moves pages has in addition the time that
    its bytes take at limits.PUT_BYTES_PER_S_MIN, unless told otherwise. Unavailable is raised when
    no master answers by then. A forked child may go on using the store in a session of its own;
    the parent's buffers are refused there.
    """

    # Namespaces and buffers.

    def open(
        self, content: Content, layout: Layout, *, ttl_s: float | None = None, replicas: int = 0
    ) -> OpenedNamespace:
        """Make a namespace known to the pool. BadValue names a field that is wrong.

        `ttl_s` is that of pages which are put without one, by anybody, from now on; infinity is
        for ever. None leaves it as it is, at first the master's. `replicas` is how many are wanted
        of each page for which no put asks for a number; 0 leaves that as it is.
        """
        return self._run(self._calls.open_steps(open_layout(content, layout), ttl_s, replicas))

    def open_opaque(
        self,
        name: str,
        *,
        keep_names: bool = False,
        ttl_s: float | None = None,
        replicas: int = 0,
    ) -> OpenedNamespace:
        """A namespace of named objects of any size, without prefix; see `put_objects`.

        With `keep_names` the pool keeps each object's name beside it, for `list_objects`.
        """
        namespace = opaque(self.tenant, name, keeps_names=keep_names)
        return self._run(self._calls.open_steps(namespace, ttl_s, replicas))

    def buffer(self, size_bytes: int) -> Buffer:
        """Memory that pages are put from and read into without another copy.

        OutOfSpace beyond limits.BUFFERS_PER_SESSION_MAX open ones.
        """
        return self._calls.buffer(size_bytes)

    # Storing.

    def put(  # noqa: PLR0913 -- each is a wish of its own
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
        """Store one part of every page of a chain; one outcome a page, in order.

        `source` is a Buffer of this store, any contiguous buffer (copied once more), or a block of
        a device (`kvstore.client.tensors.device_block` makes one of a tensor);
        `offsets` says where in it each page begins, in bytes. With `wait` the call waits within
        its deadline for room and for other puts of the same pages. When it returns, every lookup
        by anybody finds what is `Stored(visible=True)`. `hints` say what is known of the chain's
        future: the pool's policies listen to them and promise nothing. `tier` is where the pages
        had best lie ("hbm" is the memory of devices); without room there they go where all go.

        `replicas` is how many of each page are wanted, on hosts of their own; 0 for as many as the
        namespace wants. The put writes one; the pool makes the others from it, and more of them
        when hosts come, should there be fewer. With `replicas_now` the call waits for them, within
        its deadline, and outcomes tell how many there are. `strict` waits, too, and takes no fewer:
        where there are not enough hosts nothing is put, and a page that has fewer by the deadline
        counts as Refused, although what it has stays.
        """
        wishes = PutWishes(ttl_s, wait, timeout_s, hints, tier, replicas, strict, replicas_now)
        by_part = {checks.part_number(part): offsets}
        request = self._calls.put_request(opened, chain, by_part, None, wishes)
        return self._put(source, request)

    def put_parts(  # noqa: PLR0913 -- each is a wish of its own
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
        """Store several parts of every page: `offsets` has one list for each part."""
        wishes = PutWishes(ttl_s, wait, timeout_s, hints, tier, replicas, strict, replicas_now)
        return self._put(source, self._calls.put_request(opened, chain, offsets, None, wishes))

    def put_objects(  # noqa: PLR0913 -- each is a wish of its own
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
        """Store named objects of `size_bytes` each in an opaque namespace.

        Where it keeps names, `name_offsets` says where in the source each one lies, as
        kvstore.page.packed_name made it.
        """
        wishes = PutWishes(ttl_s, wait, timeout_s, hints, tier, replicas, strict, replicas_now)
        places = checks.object_offsets(opened, offsets, name_offsets)
        request = self._calls.put_request(opened, names, places, size_bytes, wishes)
        return self._put(source, request)

    def _put(self, source: object, request: PutRequest) -> list[PutOutcome]:
        outcomes = self._store(source, request)
        if request.awaits_replicas:
            return self._run(self._calls.replica_steps(request, outcomes))
        return outcomes

    def _store(self, source: object, request: PutRequest) -> list[PutOutcome]:
        with self._calls.memory("source", source, writable=False) as memory:
            check_source(request, memory)
            if not request.sources or not request.pages:
                return []
            if isinstance(memory, Block) or memory.buffer is not None:
                mover = self._calls.mover(self._choice, memory)
                return self._run(self._calls.put_steps(request), mover)
            outcomes: list[PutOutcome] = []
            for some in self._calls.staging.slices(request, memory):
                steps = self._calls.put_steps(some.fill())
                outcomes += self._run(steps, HostMover(self._choice, some.memory))
                if is_stopped(request, outcomes):
                    break
            return outcomes

    # Finding and reading.

    def probe(
        self, opened: OpenedNamespace, chain: PageChain, *, timeout_s: float | None = None
    ) -> list[bool]:
        """Whether each page is readable now. Takes no lease and keeps nothing alive."""
        query = self._calls.query(opened, chain, timeout_s)
        return self._run(probe_steps(query, self._calls.clock))

    def list_objects(
        self, opened: OpenedNamespace, *, timeout_s: float | None = None
    ) -> list[PageChain]:
        """Keys of all objects of an opaque namespace, also of those that cannot be read just now.

        In chains that fit one call. Where names are kept, part NAME_PART of each says its name.
        """
        deadline_s = self._calls.deadline_s(timeout_s)
        return self._run(object_steps(opened, deadline_s, self._calls.clock))

    def prefetch(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        tier: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Say that these pages will be read soon: those on disks are brought up if there is room.

        With `tier` "hbm" those in memory too, to a device of the worker that has them.
        Returns at once and promises nothing; pages that are not in the pool are passed over.
        """
        query = self._calls.query(opened, chain, timeout_s)
        self._run(prefetch_steps(query, self._calls.clock, checks.tier_name(tier)))

    def match_prefix(
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
        """The longest prefix of the chain in the pool, leased so that it can be read.

        `parts` narrows what is located to the parts that will be read; a page is found only when
        all its parts are there either way. `hints` as in `put`. With a `lease_id`, any number but
        0, `give_back_lease` can end these leases, and those of other lookups with it, early.
        """
        query = self._calls.query(
            opened, chain, timeout_s, parts, lease=lease, hints=hints, lease_id=lease_id
        )
        return self._run(match_steps(query, self._calls.clock))

    def lookup(
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
        """Every page of the chain that is in the pool, also beyond a gap; else as match_prefix."""
        query = self._calls.query(
            opened, chain, timeout_s, parts, lease=lease, hints=hints, lease_id=lease_id
        )
        return self._run(lookup_steps(query, self._calls.clock))

    def give_back_lease(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        lease_id: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Say that nothing is read any more under the leases that were taken as `lease_id`.

        Pages that nobody else has a lease on may make room at once instead of when it would have
        ended; without this call they all lapse by themselves.
        """
        query = self._calls.query(opened, chain, timeout_s, lease_id=lease_id)
        self._run(give_back_steps(query, self._calls.clock))

    def hint(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        hints: Hints,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Say what is known of the future of a chain that ends with these pages, without a use.

        Such as that its session has ended, or waits for a tool. Times count from this call on; the
        end of a session concerns only the pages that no other chain goes on from. Promises
        nothing; pages that are not in the pool are passed over, and a new master has not heard it.
        """
        checks.check_hints(hints)
        query = self._calls.query(opened, chain, timeout_s, lease=False, hints=hints)
        self._run(hint_steps(query, self._calls.clock))

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

        `into` is a Buffer, any writable buffer, or a block of a device as in `put`. A Hit's bytes
        were verified after the last of them had come. The place of a Miss holds nothing of the
        pool's.
        """
        request = self._calls.read_request(locations, part, offsets, timeout_s)
        with self._calls.memory("into", into, writable=True) as memory:
            memory.check_places("offsets", request.places, locations.part_bytes(part))
            mover = self._calls.mover(self._choice, memory)
            return self._run(self._calls.read_steps(request, mover), mover)

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

        Read-only and verified; their worker does not reuse their memory until the block ends.
        Misses where the leader could grant no lease. An array made of a view must be gone by
        then: else its page stays locked until it is, and a ResourceWarning says so.
        """
        request = self._calls.view_request(locations, part, pages, timeout_s)
        viewer = Viewer(self._choice)
        try:
            outcomes = self._run(self._calls.read_steps(request, viewer), viewer)
            yield [
                outcome if isinstance(outcome, Miss) else viewer.view(place)
                for place, outcome in enumerate(outcomes)
            ]
        finally:
            viewer.end_or_warn()

    # The rest.

    def pin(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        owner: str,
        ttl_s: float,
        hard: bool = False,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Keep pages in the pool for `ttl_s` seconds, or until `owner` takes that back.

        Tells for each whether it is pinned: those that are not readable now are not. A hard pin
        holds against eviction and expiry, and counts against the tenant's quota (OutOfSpace beyond
        it); a soft one makes pages go last under pressure. What is pinned again by its owner is
        pinned as told last. A removal ends pins; a restart of the master begins their time anew.
        """
        steps = self._calls.pin_steps(opened, chain, owner, ttl_s, timeout_s, hard=hard)
        return self._run(steps)

    def unpin(
        self,
        opened: OpenedNamespace,
        chain: PageChain | None = None,
        *,
        owner: str,
        timeout_s: float | None = None,
    ) -> int:
        """Take the owner's pins of these pages back, or all in this namespace: how many."""
        return self._run(self._calls.unpin_steps(opened, chain, owner, timeout_s))

    def pins(self, *, timeout_s: float | None = None) -> tuple[PinRow, ...]:
        """All pins of this store's tenant, oldest first."""
        return self._run(self._calls.list_pins_steps(timeout_s))

    def remove(
        self, opened: OpenedNamespace, chain: PageChain, *, timeout_s: float | None = None
    ) -> list[bool]:
        """Take pages out, everywhere and for good; tells for each whether it was there."""
        query = self._calls.query(opened, chain, timeout_s)
        return self._run(remove_steps(query, self._calls.clock))
