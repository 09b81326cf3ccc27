"""A master with a fleet: a gateway, prefill and decode workers, all of one tenant, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvstore.ids import NO_PARENT, ROOT_PARENT
from kvstore.namespace import tails
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig, chain

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.tickets import Ticket

    T = TypeVar("T", bound=Message)
PAGE_TOKENS = 128
"""Of `small_layout`; each page has 4 KiB."""


class Fleet:
    """One pool worker `w1`, a namespace, and inference workers that join as they are named."""

    def __init__(self, tunables: Tunables | None = None, chunks: int = 16, parts: int = 1) -> None:
        self.rig = Rig(tunables or Tunables(cluster="test", replicas=1, colocation="never"))
        self.rig.add_worker(chunks=chunks)
        self.space = self.rig.open_namespace(parts=parts)
        self.tails = self._open_tails()
        self.joined: dict[str, wire.JoinFleet] = {}
        self.lives: dict[str, int] = {}
        self.opened = 0

    def _open_tails(self) -> OpenedNamespace:
        own = tails("tenant")
        reply = self.ask(OpenNamespace(own.content, own.layout), NamespaceOpened)
        return OpenedNamespace(self.rig, own, reply.ordinal)

    def ask(self, message: Message, kind: type[T]) -> T:
        """The answer, which has to be of that kind."""
        reply = self.rig.ask(self.rig.engine, message)
        assert isinstance(reply, kind), reply
        return reply

    def join(
        self,
        name: str,
        role: str = "decode",
        capacity: int = 10_000,
        batch: int = 8,
        adapters: tuple[str, ...] = (),
        host: str = "",
        *,
        switches: bool = False,
    ) -> None:
        """A worker joins and beats once."""
        capacity = 0 if role == "prefill" else capacity
        place = f"{name}:1", host or f"host-{name}", "", ""
        held = capacity, batch, adapters, switches
        wish = wire.JoinFleet(self.space.id, name, role, *place, *held)
        self.joined[name] = wish
        self.lives[name] = self.ask(wish, wire.FleetJoined).life
        self.beat(name)

    def beat_message(
        self,
        name: str,
        *running: tuple[int, int, int],
        queued: int = 0,
        link: float = 0.0,
        rtt: float = 0.0,
        draining: bool = False,
    ) -> wire.FleetBeat:
        """What a worker says."""
        rows = tuple(wire.Running(*each) for each in running)
        life = self.lives[name]
        return wire.FleetBeat(
            self.space.id, name, life, queued, 1000.0, 0.02, link, rtt, rows, draining
        )

    def beat(
        self, name: str, *running: tuple[int, int, int], draining: bool = False
    ) -> tuple[int, ...]:
        """A worker beats; what it is to stop."""
        message = self.beat_message(name, *running, draining=draining)
        return self.ask(message, wire.FleetNoted).fenced

    def pair(self) -> None:
        """Prefill p1, decode d1."""
        self.join("p1", "prefill")
        self.join("d1")

    def wish(
        self,
        seed: int = 1,
        pages: int = 2,
        new_tokens: int = 100,
        *,
        behind: int = 10,
        request: str = "",
        deadline_s: float = 60.0,
        first_token_s: float = 5.0,
        adapter: str = "",
    ) -> wire.OpenTicket:
        """A request with so many full pages, and tokens behind them."""
        tokens = pages * PAGE_TOKENS + behind
        times = first_token_s, deadline_s
        self.opened += 1
        name = request or f"request {self.opened}"
        keys = chain(seed, pages)
        return wire.OpenTicket(self.space.id, name, keys, tokens, new_tokens, *times, adapter)

    def open(self, wish: wire.OpenTicket | None = None) -> wire.TicketOpened:
        """Admitted."""
        return self.ask(wish or self.wish(), wire.TicketOpened)

    def throttled(self, wish: wire.OpenTicket | None = None) -> wire.Throttled:
        """Refused for now."""
        return self.ask(wish or self.wish(), wire.Throttled)

    def ticket(self, number: int) -> Ticket:
        """As the master has it."""
        found = self.rig.master.core.tickets.find(number)
        assert found is not None, number
        return found

    def begin(self, opened: wire.TicketOpened, tokens_left: int = 0) -> None:
        """The prefill worker named begins."""
        life = self.lives[opened.prefill]
        self.ask(wire.BeginPrefill(opened.ticket, opened.prefill, life, tokens_left), Done)

    def route_ahead(
        self, wish: wire.OpenTicket | None = None, decode: str = "d1"
    ) -> tuple[wire.TicketOpened, wire.TicketRouted]:
        """Its prompt is being computed, and takes less time than `decode`'s link for its KV."""
        self.ask(self.beat_message(decode, link=5e3), wire.FleetNoted)
        opened = self.open(wish)
        self.begin(opened, self.ticket(opened.ticket).wish.prompt_tokens)
        routed = self.route(opened.ticket)
        assert routed.is_ahead
        return opened, routed

    def claim_ahead(
        self, wish: wire.OpenTicket | None = None
    ) -> tuple[wire.TicketOpened, wire.TicketClaimed]:
        """And that one has claimed it."""
        opened, routed = self.route_ahead(wish)
        return opened, self.claim(opened.ticket, routed)

    def stage_message(
        self, opened: wire.TicketOpened, tail: bytes = b"", tokens: tuple[int, ...] = (7,)
    ) -> wire.StageTicket:
        """What the prefill worker says when it is done."""
        life, keys = self.lives[opened.prefill], self.ticket(opened.ticket).wish.keys
        named = wire.TailRef(self.tails.id, tail, 4096) if tail else wire.TailRef()
        return wire.StageTicket(opened.ticket, opened.prefill, life, keys, named, tokens)

    def put_tail(self, seed: int = 99) -> bytes:
        """An object as a prefill worker leaves it; its key."""
        key, rig = chain(seed, 1), self.rig
        chains = (PutChain(NO_PARENT, key),)
        request = b"tail %11d" % seed
        plans = self.ask(
            BeginPut(request, self.tails.id, chains, (0,), (4096,), 5.0, False, 60.0), PutPlans
        )
        for span in plans.spans:
            segment = rig.segment(plans.segments[span.segment].segment)
            report = segment.write(self.tails.ordinal, span, key, ROOT_PARENT, 4096, token_count=1)
            assert report is not None
            outcomes = self.tails.report([report])
            assert not any(map(any, outcomes)), outcomes
        assert self.tails.probe(key) == b"\1"
        return key

    def stage(self, wish: wire.OpenTicket | None = None, tail: bytes = b"") -> wire.TicketOpened:
        """Opened, computed, staged."""
        opened = self.open(wish)
        self.begin(opened)
        self.ask(self.stage_message(opened, tail), Done)
        return opened

    def route(self, ticket: int, above: int = 0) -> wire.TicketRouted:
        """The route above that one, once there is one."""
        reply = self.rig.ask(self.rig.engine, wire.AwaitRoute(ticket, above, 5.0))
        reply = self.rig.settled(self.rig.engine, reply)
        assert isinstance(reply, wire.TicketRouted), reply
        return reply

    def claim(self, ticket: int, route: wire.TicketRouted) -> wire.TicketClaimed:
        """The decode worker of that route takes it."""
        name = route.decode
        life, is_ahead = self.lives[name], route.is_ahead
        message = wire.ClaimTicket(ticket, route.route, name, life, is_ahead)
        return self.ask(message, wire.TicketClaimed)

    def install(self, wish: wire.OpenTicket | None = None) -> tuple[int, wire.TicketClaimed, str]:
        """All the way until a decode worker generates: ticket, claim, worker."""
        opened = self.stage(wish)
        route = self.route(opened.ticket)
        claimed = self.claim(opened.ticket, route)
        self.ask(wire.TicketInstalled(opened.ticket, claimed.token), Done)
        return opened.ticket, claimed, route.decode

    def assert_nothing_held(self) -> None:
        """Nobody has anything of any ticket (I39)."""
        core = self.rig.master.core
        book = core.tickets
        assert not len(book)
        assert book.staged_bytes == 0
        assert not book.source_bytes
        assert core.pins.tickets.pages == 0
        for fleet in book.fleets:
            assert (fleet.credit_tokens, fleet.tickets, fleet.waiting) == (0, 0, {})
            assert (fleet.waiting_tokens, fleet.roomless) == (0, {})
            for worker in fleet.workers.values():
                held = worker.used_tokens, worker.link_bytes, worker.tickets, worker.prefixes
                assert held == (0, 0, {}, {})
                assert (worker.kept, worker.kept_tokens) == ({}, 0)
