"""A master process of the simulation: the real leadership machine, and one term after another.

Listens for its whole life. While it does not lead it greets whoever comes, and tells them where
the leader is.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.coordination.metadata_store import Candidate, Leader, Term
from kvstore.errors import KVStoreError, NotLeader, StaleEpoch
from kvstore.rpc.failure import failure_of
from kvstore.wire.messages.base import Message
from master.events import Tick
from master.leadership import (
    BeginTerm,
    Campaign,
    CampaignEnded,
    Deposed,
    EndTerm,
    EpochSeen,
    GiveUp,
    Leadership,
    LeadershipAction,
    LeadershipEvent,
    Load,
    Loaded,
    Prolong,
    Renew,
    Renewal,
    RenewEnded,
    Resign,
    StandingTick,
    StopAsked,
)
from tests.simulation.rpc import Endpoint
from tests.simulation.sim_link import address_of
from tests.simulation.sim_term import SimTerm
from tests.simulation.worker_links import Greeting

if TYPE_CHECKING:
    from kvstore.coordination.metadata_store import Entry
    from kvstore.ids import Epoch
    from master.state import MasterState
    from master.tunables import Tunables
    from tests.simulation.channel import Channel
    from tests.simulation.checks import Checks
    from tests.simulation.sim_metadata import SimStore
    from tests.simulation.world import World

LOAD_RETRY_S: Final = 0.1


class SimMaster:
    """One master process, in all its lives."""

    def __init__(
        self, world: World, name: str, store: SimStore, tunables: Tunables, checks: Checks
    ) -> None:
        """Not started."""
        self.world = world
        self.name = name
        self.store = store
        self.tunables = tunables
        self.checks = checks
        self.term: SimTerm | None = None
        self._leadership = Leadership()
        self._restored: list[Entry] = []
        self._peers: list[Endpoint] = []
        self._alarm_at_s = math.inf

    @property
    def core(self) -> MasterState | None:
        """Its core while it is in a term, even if that is over without its knowledge."""
        return None if self.term is None else self.term.core

    @property
    def epoch(self) -> Epoch:
        """Of its term, else the highest that it knows of."""
        return self._leadership.epoch

    # --- lives ------------------------------------------------------------------------------

    def start(self) -> None:
        """Stand by, and try to lead."""
        self._leadership = Leadership()
        self._alarm_at_s = math.inf
        self._feed(StandingTick())

    def crash(self) -> None:
        """kill -9."""
        self.world.crash(self.name)
        if self.term is not None:
            self.term.is_over = True
        self.term = None
        self.store.forget()
        self._peers.clear()

    def stop(self) -> None:
        """Give up leading; whoever it is connected to has to look elsewhere."""
        self._feed(StopAsked())

    # --- standing -----------------------------------------------------------------------------

    def deposed(self, epoch: Epoch) -> None:
        """The store has said that this term is over."""
        self._feed(Deposed(epoch))

    def outrun(self, epoch: Epoch, seen: Epoch) -> None:
        """A worker has seen a higher epoch than this term's."""
        self._feed(EpochSeen(epoch, seen))

    def _feed(self, event: LeadershipEvent) -> None:
        for action in self._leadership.handle(event, self.world.now):
            self._carry_out(action)
        self._set_alarm()

    def _set_alarm(self) -> None:
        at_s = self._leadership.wakeup_s
        if at_s < self._alarm_at_s:
            self._alarm_at_s = at_s
            delay_s = max(0.0, at_s - self.world.now)
            self.world.after_on(self.name, delay_s, partial(self._ring, at_s))

    def _ring(self, at_s: float) -> None:
        if at_s == self._alarm_at_s:
            self._alarm_at_s = math.inf
            self._feed(StandingTick())

    def _carry_out(self, action: LeadershipAction) -> None:
        match action:
            case Campaign(timeout_s):
                candidate = Candidate(self.name, (address_of(self.name),), self.epoch)
                self.store.campaign(candidate, timeout_s, partial(self._answered, self.world.now))
            case Renew(epoch, timeout_s):
                ended = partial(self._renewed, epoch, self.world.now)
                self.store.renew(timeout_s, ended)
            case Load(epoch):
                self._load(epoch)
            case BeginTerm(epoch, until_s):
                self._begin(epoch, until_s)
            case Prolong(until_s):
                assert self.term is not None
                self.term.prolong(until_s)
            case EndTerm(epoch):
                self._end(epoch)
            case Resign():
                self.store.resign()
            case GiveUp():
                raise AssertionError("nobody else writes to this disk")

    def _answered(self, sent_s: float, answer: Term | Leader | KVStoreError) -> None:
        known = None if isinstance(answer, KVStoreError) else answer
        self._feed(CampaignEnded(sent_s, known))

    def _renewed(self, epoch: Epoch, sent_s: float, error: KVStoreError | None) -> None:
        renewal = Renewal.HELD
        if error is not None:
            renewal = Renewal.OVER if isinstance(error, StaleEpoch) else Renewal.UNKNOWN
        self._feed(RenewEnded(epoch, sent_s, renewal))

    def _load(self, epoch: Epoch) -> None:
        if self._leadership.epoch == epoch:
            self.store.load(partial(self._loaded, epoch))

    def _loaded(self, epoch: Epoch, entries: list[Entry] | KVStoreError) -> None:
        if isinstance(entries, KVStoreError):
            self.world.after_on(self.name, LOAD_RETRY_S, partial(self._load, epoch))
        else:
            self._restored = entries
            self._feed(Loaded(epoch))

    def _begin(self, epoch: Epoch, until_s: float) -> None:
        self.world.note(f"{self.name} leads in epoch {epoch}")
        restored, self._restored = self._restored, []
        self.term = SimTerm(self, epoch, restored, until_s)
        self.checks.begins_term(self)
        self._turn_out()
        self.term.feed(Tick())

    def _end(self, epoch: Epoch) -> None:
        self.world.note(f"{self.name} ends epoch {epoch}")
        term, self.term = self.term, None
        if term is not None:
            term.end()
        self._turn_out()

    def _turn_out(self) -> None:
        """Whoever met a standby, or a leader that is one no more, comes again."""
        peers, self._peers = self._peers, []
        for endpoint in peers:
            endpoint.close()

    # --- connections --------------------------------------------------------------------------

    def accept(self, channel: Channel, greeting: object) -> bool:
        """A peer has passed the handshake."""
        assert isinstance(greeting, Greeting), greeting
        endpoint = Endpoint(self.world, self.name, self._serve, self._closed)
        channel.attach(self.name, endpoint.receive, endpoint.ended)
        endpoint.use(channel)
        channel.welcome = self.epoch
        self._peers.append(endpoint)
        if self.term is not None:
            self.term.opened(endpoint, greeting)
        return True

    def _closed(self, endpoint: Endpoint) -> None:
        if endpoint in self._peers:
            self._peers.remove(endpoint)
        if self.term is not None:
            self.term.closed(endpoint)

    def _serve(self, endpoint: Endpoint, number: int, message: object) -> None:
        assert isinstance(message, Message), message
        if self.term is not None:
            self.term.serve(endpoint, number, message)
        else:
            leader = self._leadership.leader
            # It may be an earlier life of this master that is still in the books.
            where = () if leader is None or leader.name == self.name else leader.where
            endpoint.answer(number, failure_of(NotLeader(where)))
