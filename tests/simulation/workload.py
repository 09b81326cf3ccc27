"""What simulated clients do: random puts, reads, views, probes and removes, and what must be true
of the results. One generator a call, and one that makes calls for as long as it is told to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvstore.client.locations import (
    Locations,
    Query,
    lookup_steps,
    match_steps,
    prefetch_steps,
    probe_steps,
    remove_steps,
)
from kvstore.client.outcomes import AlreadyThere, Hit, Refused, Stored
from kvstore.client.pins import PinRequest, pin_steps, unpin_steps
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.steps import ask
from kvstore.client.writes import PartSource, PutRequest, put_steps
from kvstore.errors import KVStoreError, OutOfSpace, Unavailable
from kvstore.page import PageChain
from kvstore.wire.messages.reads import GetStatus, Status
from tests.simulation.client_moves import Put
from tests.simulation.pages import HALVES, NAMED, WHOLE, Universe, page_bytes, part_bytes
from tests.simulation.reader_moves import Read, View, rank_for

if TYPE_CHECKING:
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.namespace import Namespace
    from tests.simulation.sim_client import SimClient
    from tests.simulation.tasks import Steps

T = TypeVar("T")
GRACE_S: Final = 0.1
"""I20: a call ends by its deadline and this."""
VIEW_LOOKS: Final = 3


class Caller:
    """Makes the calls of one client."""

    def __init__(self, client: SimClient, universe: Universe) -> None:
        """Choose from this universe."""
        self.client = client
        self.universe = universe
        self.world = client.world
        self.random = client.random
        self.checks = client.checks
        self.is_stopped = False

    def work(self) -> Steps[None]:
        """Make calls until stopped."""
        yield from self.client.open_namespaces()
        options = self.checks.options
        while not self.is_stopped:
            yield self.random.uniform(0.0, options.pause_s)
            yield from self.one_call()

    def one_call(self) -> Steps[None]:
        """A call of some kind, with some deadline, on some chain."""
        namespace = self.random.choice((WHOLE, WHOLE, HALVES, NAMED))
        chain = self.universe.chain(self.random, namespace)
        timeout_s = self.random.choice((0.3, 2.0, 6.0, 10.0))
        toss = self.random.random()
        options = self.checks.options
        if toss < options.removes:
            yield from self.remove(namespace, chain, timeout_s)
        elif toss < options.removes + options.views:
            yield from self.view(namespace, chain, timeout_s)
        elif self.random.random() < options.pins:
            yield from self.pin(namespace, chain, timeout_s)
        elif toss < options.removes + options.views + 0.4:
            yield from self.put(namespace, chain, timeout_s)
        elif toss < options.removes + options.views + 0.44:
            yield from self.probe(namespace, chain, timeout_s)
        elif options.disks and toss < options.removes + options.views + 0.445:
            yield from self.prefetch(namespace, chain, timeout_s)
        elif toss < options.removes + options.views + 0.45:
            yield from self.stat(timeout_s)
        else:
            yield from self.read(namespace, chain, timeout_s)

    def _bounded(self, what: str, deadline_s: float, call: Steps[T]) -> Steps[T | None]:
        """A call, with its end checked against its deadline; None when it was not carried out."""
        world, name = self.world, self.client.name
        status = world.nodes[name]
        stopped_s = status.stopped_s
        world.counts[what] += 1
        result: T | None = None
        try:
            result = yield from call
        except (Unavailable, OutOfSpace) as error:
            world.note(f"{name} {what}: {error.code}")
            world.counts[f"failed {what}"] += 1
        except KVStoreError as error:
            self.checks.fail("I20", f"{what} of {name} raised {error!r}")
        late_s = world.now - deadline_s - (status.stopped_s - stopped_s)
        if late_s > GRACE_S:
            self.checks.fail("I20", f"{what} of {name} ended {late_s:.3f} s after its deadline")
        return result

    # --- puts -------------------------------------------------------------------------------

    def put(self, namespace: Namespace, chain: PageChain, timeout_s: float) -> Steps[None]:
        """Store the pages of a chain, one part of each or all."""
        client, now = self.client, self.world.now
        version = 0
        if namespace.is_opaque:
            version = (client.next_number() << 8) | (hash_of(client.name) & 0xFF) | 1 << 40
            chain = self._of_one_size(chain)
        parts = self._parts(namespace)
        if len(parts) > 1 and self.random.random() < 0.6:
            parts = [self.random.choice(parts)]
        sources, data = self._sources(namespace, chain, parts, version)
        ttl_s = self.random.choice((None, None, 1.0, 5.0))
        request = PutRequest(
            client.namespace(namespace), chain, sources, now + timeout_s,
            wait=self.random.random() < 0.8, ttl_s=ttl_s,
        )  # fmt: skip
        for key in chain:
            self.checks.history.put_begins(key, version)
        moves = Put(client, data)
        plan = put_steps(request, VirtualClock(client), client.new_request_id)
        outcomes = yield from self._bounded("put", now + timeout_s, client.run(plan, moves))
        moves.close()
        if outcomes is not None:
            self._note_put(chain, outcomes)

    def _of_one_size(self, chain: PageChain) -> PageChain:
        size = part_bytes(NAMED, chain.key(0), 0)
        return PageChain(b"".join(key for key in chain if part_bytes(NAMED, key, 0) == size))

    def _sources(
        self, namespace: Namespace, chain: PageChain, parts: list[int], version: int
    ) -> tuple[tuple[PartSource, ...], bytes]:
        data = bytearray()
        sources: list[PartSource] = []
        for part in parts:
            places: list[int] = []
            size = part_bytes(namespace, chain.key(0), part)
            for key in chain:
                places.append(len(data))
                data += page_bytes(key, part, size, version)
            sources.append(PartSource(part, size, tuple(places)))
        return tuple(sources), bytes(data)

    def _note_put(self, chain: PageChain, outcomes: list[PutOutcome]) -> None:
        if len(outcomes) != len(chain):
            self.checks.fail("I21", f"{len(outcomes)} outcomes for {len(chain)} pages")
        for key, outcome in zip(chain, outcomes, strict=True):
            match outcome:
                case Stored(visible):
                    self.world.counts["pages stored"] += 1
                    if visible:
                        self.checks.history.stored(key, self.world.now)
                case AlreadyThere():
                    self.world.counts["pages already there"] += 1
                case Refused(reason):
                    self.world.counts[f"refused: {reason.value}"] += 1

    # --- reads ------------------------------------------------------------------------------

    def _found(
        self, namespace: Namespace, chain: PageChain, deadline_s: float
    ) -> Steps[Locations | None]:
        lease = self.random.random() < 0.9
        query = Query(self.client.namespace(namespace), chain, deadline_s, lease=lease)
        use_match = not namespace.is_opaque and self.random.random() < 0.7
        plan = match_steps if use_match else lookup_steps
        found = yield from self._bounded(
            "match" if use_match else "lookup",
            deadline_s,
            self.client.run(plan(query, VirtualClock(self.client))),
        )
        if found is not None and self.random.random() < 0.2:
            yield self.random.uniform(0.0, 2.0)  # the lease grows old before it is used
        return found

    def _requests(
        self, namespace: Namespace, found: Locations, deadline_s: float
    ) -> list[ReadRequest]:
        """Reads of each part of the located pages; all of equal size in one read."""
        pages = len(found.readable) if namespace.is_opaque else sum(found.readable)
        count = min(pages, len(found.chain))
        requests: list[ReadRequest] = []
        for part in self._parts(namespace):
            size = found.part_bytes(part)
            if count and size:
                places = tuple(page * size for page in range(count))
                requests.append(ReadRequest(found, part, places, deadline_s))
        return requests

    def read(self, namespace: Namespace, chain: PageChain, timeout_s: float) -> Steps[None]:
        """Find pages and copy them out."""
        if namespace.is_opaque:
            chain = self._of_one_size(chain)
        deadline_s = self.world.now + timeout_s
        found = yield from self._found(namespace, chain, deadline_s)
        if found is None:
            return
        for part in self._parts(namespace):
            for request in self._requests(namespace, found, self.world.now + timeout_s):
                if request.part == part:
                    yield from self._read_part(found, request)

    def _parts(self, namespace: Namespace) -> list[int]:
        return [0] if namespace.is_opaque else [part.index for part in namespace.parts]

    def _read_part(self, found: Locations, request: ReadRequest) -> Steps[None]:
        size = found.part_bytes(request.part)
        moves = Read(self.client, size * len(request.places))
        plan = read_steps(request, VirtualClock(self.client), rank_for(self.client, views=False))
        outcomes = yield from self._bounded(
            "read", request.deadline_s, self.client.run(plan, moves)
        )
        if outcomes is None:
            return
        if len(outcomes) != len(request.places):
            self.checks.fail("I21", f"{len(outcomes)} outcomes for {len(request.places)} pages")
        for page, (place, outcome) in enumerate(zip(request.places, outcomes, strict=True)):
            key, data = found.chain.key(page), bytes(moves.into[place : place + size])
            if isinstance(outcome, Hit):
                self.checks.delivered(key, request.part, data)
                if found.pieces[0].deadline_s is not None:
                    self.checks.taken(key, moves.taken_s[place])
            else:
                self.world.counts[f"miss: {outcome.reason.value}"] += 1
                self.checks.withheld(key, data)

    def view(self, namespace: Namespace, chain: PageChain, timeout_s: float) -> Steps[None]:
        """Find pages, look at them where they lie, for a while."""
        if namespace.is_opaque:
            chain = self._of_one_size(chain)
        deadline_s = self.world.now + timeout_s
        found = yield from self._found(namespace, chain, deadline_s)
        deadline_s = self.world.now + timeout_s
        requests = [] if found is None else self._requests(namespace, found, deadline_s)
        if found is None or not requests:
            return
        request = msgspec.structs.replace(requests[0], needs_lease=True)
        moves = View(self.client)
        plan = read_steps(request, VirtualClock(self.client), rank_for(self.client, views=True))
        outcomes = yield from self._bounded("view", deadline_s, self.client.run(plan, moves))
        for _ in range(VIEW_LOOKS if outcomes is not None else 0):
            self._look(found, request, outcomes or [], moves)
            yield self.random.uniform(0.0, 1.5)
        moves.end()

    def _look(
        self, found: Locations, request: ReadRequest, outcomes: list[ReadOutcome], moves: View
    ) -> None:
        for page, (place, outcome) in enumerate(zip(request.places, outcomes, strict=True)):
            if not isinstance(outcome, Hit):
                continue
            memory, offset, size = moves.held[place]
            if offset not in memory.damaged:
                data = memory.payload[offset : offset + size]
                self.checks.delivered(found.chain.key(page), request.part, data)

    def round_trip(self, namespace: Namespace) -> Steps[None]:
        """Put a page or two and read them, which works when nothing is wrong.

        Tried again for as long as the caller has patience: a page that a fault has damaged is a
        miss until some reader has reported it.
        """
        yield from self.client.open_namespaces()
        chain = self.universe.chain(self.random, namespace)
        chain = chain.slice(0, min(2, len(chain)))
        is_whole = False
        while not is_whole:
            yield 0.2
            try:
                is_whole = yield from self._round_trip(namespace, chain)
            except Unavailable as error:
                self.world.note(f"{self.client.name} round trip: {error!r}")

    def _round_trip(self, namespace: Namespace, chain: PageChain) -> Steps[bool]:
        parts = [part.index for part in namespace.parts]
        sources, data = self._sources(namespace, chain, parts, 0)
        clock, deadline_s = VirtualClock(self.client), self.world.now + 8.0
        until_s = self.world.now + 4.0
        request = PutRequest(self.client.namespace(namespace), chain, sources, until_s)
        plan = put_steps(request, clock, self.client.new_request_id)
        outcomes = yield from self.client.run(plan, Put(self.client, data))
        query = Query(self.client.namespace(namespace), chain, deadline_s)
        found = yield from self.client.run(match_steps(query, clock))
        is_whole = sum(found.readable) == len(chain)
        is_stored = not any(isinstance(outcome, Refused) for outcome in outcomes)
        self.world.note(f"{self.client.name} round trip: {outcomes}, {found.readable!r}")
        for read in self._requests(namespace, found, deadline_s):
            moves = Read(self.client, found.part_bytes(read.part) * len(read.places))
            rank = rank_for(self.client, views=False)
            hits = yield from self.client.run(read_steps(read, clock, rank), moves)
            is_whole = is_whole and all(isinstance(hit, Hit) for hit in hits)
        return is_stored and is_whole

    # --- the rest ---------------------------------------------------------------------------

    def probe(self, namespace: Namespace, chain: PageChain, timeout_s: float) -> Steps[None]:
        """Ask which pages are there."""
        deadline_s = self.world.now + timeout_s
        query = Query(self.client.namespace(namespace), chain, deadline_s)
        plan = probe_steps(query, VirtualClock(self.client))
        yield from self._bounded("probe", deadline_s, self.client.run(plan))

    def pin(self, namespace: Namespace, chain: PageChain, timeout_s: float) -> Steps[None]:
        """Have pages stay for a while, or let them go again."""
        deadline_s = self.world.now + timeout_s
        opened, owner = self.client.namespace(namespace), self.client.name
        clock = VirtualClock(self.client)
        if self.random.random() < 0.3:
            unpin = unpin_steps(opened, chain, owner, deadline_s, clock)
            yield from self._bounded("unpin", deadline_s, self.client.run(unpin))
            return
        is_hard, ttl_s = self.random.random() < 0.7, self.random.choice((2.0, 5.0, 10.0))
        request = PinRequest(opened, chain, owner, is_hard, ttl_s, deadline_s)
        plan = pin_steps(request, clock)
        yield from self._bounded("pin", deadline_s, self.client.run(plan))

    def prefetch(self, namespace: Namespace, chain: PageChain, timeout_s: float) -> Steps[None]:
        """Say what will be read soon."""
        deadline_s = self.world.now + timeout_s
        query = Query(self.client.namespace(namespace), chain, deadline_s)
        plan = prefetch_steps(query, VirtualClock(self.client))
        yield from self._bounded("prefetch", deadline_s, self.client.run(plan))

    def stat(self, timeout_s: float) -> Steps[None]:
        """Ask how the pool is."""
        deadline_s = self.world.now + timeout_s
        call = self.client.run(ask(GetStatus(), Status, timeout_s))
        yield from self._bounded("stat", deadline_s, call)

    def remove(self, namespace: Namespace, chain: PageChain, timeout_s: float) -> Steps[None]:
        """Take some pages out, from somewhere in the chain."""
        start = self.random.randrange(len(chain))
        chain = chain.slice(start, min(len(chain), start + self.random.randint(1, 3)))
        began_s = self.world.now
        for key in chain:
            self.checks.history.remove_begins(key, began_s)
        query = Query(self.client.namespace(namespace), chain, began_s + timeout_s)
        plan = remove_steps(query, VirtualClock(self.client))
        flags = yield from self._bounded("remove", began_s + timeout_s, self.client.run(plan))
        if flags is not None:
            for key in chain:
                self.checks.history.removed(key, began_s)
            self.world.counts["pages removed"] += sum(flags)


class VirtualClock:
    """A process's clock: it goes on while the process is stopped."""

    def __init__(self, client: SimClient) -> None:
        self._client = client

    def now_s(self) -> float:
        """Virtual time."""
        return self._client.world.now


def hash_of(name: str) -> int:
    """A small number of a name, the same in every process."""
    return sum(name.encode())
