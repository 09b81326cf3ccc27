"""A process that serves requests: a client of the pool that other such processes send messages to.

What prefill, decode and gateway share: bringing pages, storing pages and tails, and one-way
messages in place of HTTP. Whoever waits for a message has a deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from kvstore.client.locations import Query, lookup_steps, match_steps
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.outcomes import AlreadyThere, Hit, Stored
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.tickets import HandOver, locate_parts, tail_key
from kvstore.client.writes import PartSource, PutRequest, put_steps
from kvstore.errors import DeadlineExceeded, OutOfSpace, Unavailable
from kvstore.namespace import tails
from kvstore.page import PageChain
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.tickets import LocateParts, TailRef
from tests.simulation.client_moves import Put
from tests.simulation.pages import PAGE_TOKENS, SMALL, TENANT, WHOLE, page_bytes
from tests.simulation.reader_moves import Read, rank_for
from tests.simulation.sim_client import OPEN_TIMEOUT_S, SimClient
from tests.simulation.workload import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.wire.messages.tickets import TicketClaimed
    from tests.simulation.pd_fleet import PdFleet
    from tests.simulation.simulation import Simulation
    from tests.simulation.tasks import Steps

TAILS: Final = tails(TENANT)
TOKEN_BYTES: Final = SMALL // PAGE_TOKENS
TAIL_TTL_S: Final = 5.0
"""Of a tail that nobody has pinned: whoever put it may have died before it told the master."""
MOVE_S: Final = 2.0
"""Deadline of bringing or storing pages."""


class PdNode(SimClient, ABC):
    """One process of the fleet, in all its lives."""

    def __init__(self, simulation: Simulation, name: str, fleet: PdFleet) -> None:
        """Not started."""
        workers, masters = simulation.workers, simulation.masters
        super().__init__(simulation.world, name, masters, workers, simulation.checks)
        self.fleet = fleet
        self.clock = VirtualClock(self)

    @abstractmethod
    def start(self) -> None:
        """Begin a life."""

    def post(self, target: str, action: Callable[[], None]) -> None:
        """A message that may get lost: `action` happens at the target."""
        world = self.world
        if world.is_cut(self.name, target) or world.chance(world.weather.loss):
            world.counts["tickets: messages lost"] += 1
        else:
            world.after_on(target, world.delay_s(), action)

    def open_namespaces(self) -> Steps[None]:
        """Make known what tickets are about."""
        for namespace in (WHOLE, TAILS):
            while namespace.id not in self.opened:
                ttl_s = TAIL_TTL_S if namespace is TAILS else None
                question = OpenNamespace(namespace.content, namespace.layout, ttl_s)
                try:
                    reply = yield from self.ask(question, OPEN_TIMEOUT_S)
                except DeadlineExceeded:
                    continue
                assert isinstance(reply, NamespaceOpened), reply
                self.checks.opened(namespace, reply)
                self.opened[namespace.id] = OpenedNamespace(namespace, reply.ordinal)

    def bring(self, chain: PageChain) -> Steps[int]:
        """Read the longest prefix that the pool has; how many pages came."""
        deadline_s = self.world.now + MOVE_S
        query = Query(self.namespace(WHOLE), chain, deadline_s)
        try:
            found = yield from self.run(match_steps(query, self.clock))
        except (Unavailable, OutOfSpace):
            return 0
        return (yield from self._read(ReadRequest(found, 0, _places(found.pages), deadline_s)))

    def bring_ahead(self, claimed: TicketClaimed, ticket: int, first: int, stop: int) -> Steps[int]:
        """Read these pages of a prompt that is being computed; how many came."""
        chain = PageChain(claimed.keys).slice(first, stop)
        question = LocateParts(ticket, claimed.token, 0, first, stop - first)
        plan = locate_parts(self.namespace(WHOLE), chain, question, self.clock, timeout_s=MOVE_S)
        found = yield from self.run(plan)
        deadline_s = self.world.now + MOVE_S
        return (yield from self._read(ReadRequest(found, 0, _places(len(chain)), deadline_s)))

    def keep(self, chain: PageChain) -> Steps[int]:
        """Store pages of a prompt; how many leading ones are in the pool then."""
        return (yield from self._store(self.namespace(WHOLE), chain, SMALL))

    def bring_tail(self, tail: TailRef) -> Steps[bool]:
        """Whether the tail came."""
        deadline_s = self.world.now + MOVE_S
        query = Query(self.namespace(TAILS), PageChain(tail.key), deadline_s)
        try:
            found = yield from self.run(lookup_steps(query, self.clock))
        except (Unavailable, OutOfSpace):
            return False
        if not found.part_bytes(0):
            return False
        return bool((yield from self._read(ReadRequest(found, 0, (0,), deadline_s))))

    def _read(self, request: ReadRequest) -> Steps[int]:
        """Leading pages that came; every byte of them is checked."""
        found, size = request.locations, request.locations.part_bytes(0)
        moves = Read(self, size * len(request.places))
        plan = read_steps(request, self.clock, rank_for(self, views=False))
        try:
            outcomes = yield from self.run(plan, moves)
        except (Unavailable, OutOfSpace):
            return 0
        hits = [isinstance(outcome, Hit) for outcome in outcomes]
        for page, (place, is_hit) in enumerate(zip(request.places, hits, strict=True)):
            data = bytes(moves.into[place : place + size])
            if is_hit:
                self.checks.delivered(found.chain.key(page), 0, data)
        return hits.index(False) if False in hits else len(hits)

    def hand_over(
        self, ticket: int, prompt: Sequence[int], generated: tuple[int, ...]
    ) -> Steps[HandOver]:
        """Store all that was computed: the last token was not."""
        computed = [*prompt, *generated[:-1]]
        chain = self.namespace(WHOLE).chain(computed)
        stored = yield from self._store(self.namespace(WHOLE), chain, SMALL)
        behind = len(computed) % PAGE_TOKENS
        if stored < len(chain) or not behind:
            return HandOver(chain.slice(0, stored), generated)
        counter = self.next_number() << 8 | len(self.name)
        key, size = tail_key(TAILS.id, ticket, counter), behind * TOKEN_BYTES
        own = self.namespace(TAILS)
        self.checks.history.remove_begins(key, self.world.now)  # which the ticket's end does
        is_there = yield from self._store(own, PageChain(key), size)
        tail = TailRef(TAILS.id, key, size) if is_there else TailRef()
        return HandOver(chain, generated, tail)

    def _store(self, opened: OpenedNamespace, chain: PageChain, size: int) -> Steps[int]:
        """Put pages; how many leading ones are in the pool then."""
        history, deadline_s = self.checks.history, self.world.now + MOVE_S
        for key in chain:
            history.put_begins(key, 0)
        moves = Put(self, b"".join(page_bytes(key, 0, size) for key in chain))
        source = PartSource(0, size, tuple(range(0, size * len(chain), size)))
        request = PutRequest(opened, chain, (source,), deadline_s)
        try:
            plan = put_steps(request, self.clock, self.new_request_id)
            outcomes = yield from self.run(plan, moves)
        except (Unavailable, OutOfSpace):
            outcomes = []
        moves.close()
        leading = 0
        for key, outcome in zip(chain, outcomes, strict=False):
            if isinstance(outcome, Stored) and outcome.visible:
                history.stored(key, self.world.now)
            elif not isinstance(outcome, AlreadyThere):
                break
            leading += 1
        return leading


def _places(pages: int) -> tuple[int, ...]:
    return tuple(range(0, SMALL * pages, SMALL))
