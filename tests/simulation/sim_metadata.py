"""Where simulated masters keep what is durable: the MetadataStore port, with calls that end later.

A `SimDisk` is the embedded store: a campaign wins at once, a term ends only with the next. An
`EtcdClient` does over a bad network what the adapter of etcd does. A call's `done` gets what the
port returns or raises; it is called once, unless the process dies first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from kvstore.coordination.metadata_store import Leader, Term
from kvstore.errors import KVStoreError, OutOfSpace, StaleEpoch, Unavailable
from kvstore.ids import Epoch
from kvstore.limits import LEADER_LEASE_S
from tests.simulation.channel import HANDSHAKE_TIMEOUT_S, Channel, Dial, dial
from tests.simulation.rpc import Endpoint
from tests.simulation.sim_etcd import (
    ETCD,
    Done,
    Found,
    Grant,
    Granted,
    KeepAlive,
    Kept,
    NoSpace,
    Range,
    Revoke,
    Transaction,
)
from tests.simulation.tasks import Signal, Steps, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.coordination.metadata_store import Candidate, Entry
    from tests.simulation.sim_etcd import SimEtcd
    from tests.simulation.world import World

T = TypeVar("T")
Answered = Callable[[T | KVStoreError], None]
WRITE_TIMEOUT_S: Final = 1.0
LOAD_TIMEOUT_S: Final = 2.0
EPOCH, LEADER, ROWS = "epoch", "leader", "rows/"


class SimStore(Protocol):
    """One master's access to durable metadata; MetadataStore says what each call means."""

    def campaign(
        self, candidate: Candidate, timeout_s: float, done: Answered[Term | Leader]
    ) -> None:
        """One try to lead."""

    def renew(self, timeout_s: float, done: Answered[None]) -> None:
        """Let the lease start anew."""

    def load(self, done: Answered[list[Entry]]) -> None:
        """Everything."""

    def write(self, puts: Sequence[Entry], deletes: Sequence[str], done: Answered[None]) -> None:
        """All or nothing. One write at a time."""

    def resign(self) -> None:
        """End the term."""

    def forget(self) -> None:
        """The process is gone: its next life begins with nothing."""


class SimDisk:
    """The embedded store of one master, which outlives it."""

    def __init__(self, world: World, name: str, write_delay_max_s: float) -> None:
        """Empty, before the first epoch."""
        self.entries: dict[str, bytes] = {}
        self.epoch = Epoch(0)
        self._world = world
        self._name = name
        self._write_delay_max_s = write_delay_max_s

    def campaign(
        self, candidate: Candidate, timeout_s: float, done: Answered[Term | Leader]
    ) -> None:
        """Win at once."""
        del timeout_s
        self.epoch = Epoch(max(self.epoch, candidate.above) + 1)
        done(Term(self.epoch, inf))

    def renew(self, timeout_s: float, done: Answered[None]) -> None:
        """A term that does not end by time."""
        del timeout_s
        done(None)

    def load(self, done: Answered[list[Entry]]) -> None:
        """All of it at once."""
        done(sorted(self.entries.items()))

    def write(self, puts: Sequence[Entry], deletes: Sequence[str], done: Answered[None]) -> None:
        """Durable after a while; lost if its master dies before."""

        def written() -> None:
            for key in deletes:
                self.entries.pop(key, None)
            self.entries.update(puts)
            done(None)

        delay_s = self._world.random.uniform(0.0005, self._write_delay_max_s)
        self._world.after_on(self._name, delay_s, written)

    def resign(self) -> None:
        """Nobody else would lead."""

    def forget(self) -> None:
        """All that is known is on the disk."""


class EtcdClient:
    """One master's connection to etcd, and the term that it is in."""

    def __init__(self, world: World, name: str, etcd: SimEtcd) -> None:
        """Not connected, in no term."""
        self._world = world
        self._name = name
        self._etcd = etcd
        self.forget()

    def forget(self) -> None:
        """The process is gone: its next life begins with nothing."""
        self._link: Endpoint | None = None
        self._leave_term()

    def _leave_term(self) -> None:
        self._epoch = Epoch(0)
        self._lease = 0
        self._created = 0
        """The revision in which the leader's key came to be, which is ours while it is this."""
        self._written = 0
        """The revision of the last write that is known to be in."""

    def _run(self, begin: Callable[[], Steps[T]], done: Callable[[T], None]) -> None:
        """Run a call in a thread of its own, which is made first, so that it is collected first."""

        def run() -> Steps[None]:
            done((yield from begin()))

        spawn(self._world, self._name, run())

    # --- terms ------------------------------------------------------------------------------

    def campaign(
        self, candidate: Candidate, timeout_s: float, done: Answered[Term | Leader]
    ) -> None:
        """Look who leads; if nobody does, put the leader's key, under a lease of its own."""
        self._leave_term()
        self._run(partial(self._campaign, candidate, self._world.now + timeout_s), done)

    def _campaign(
        self, candidate: Candidate, deadline_s: float
    ) -> Steps[Term | Leader | KVStoreError]:
        known = yield from self._ask(Range(""), deadline_s)
        if not isinstance(known, Found):
            return Unavailable("etcd does not say who leads")
        if LEADER in known.entries:
            return leader_in(known.entries[LEADER].value)
        lease = yield from self._ask(Grant(LEADER_LEASE_S), deadline_s)
        if not isinstance(lease, Granted):
            return Unavailable("etcd grants no lease")
        last = known.entries.get(EPOCH)
        epoch = Epoch(max(0 if last is None else int(last.value), candidate.above) + 1)
        leader = Leader(epoch, candidate.name, candidate.where)
        election = Transaction(
            written=((LEADER, 0), (EPOCH, 0 if last is None else last.written)),
            puts=((EPOCH, b"%d" % epoch),),
            leased=((LEADER, msgspec.msgpack.encode(leader)),),
            lease=lease.lease,
        )
        won = yield from self._ask(election, deadline_s)
        if isinstance(won, Done) and won.succeeded:
            self._epoch, self._lease = epoch, lease.lease
            self._created = self._written = won.revision
            return Term(epoch, LEADER_LEASE_S)
        return Unavailable("etcd does not say who has won, or another was faster")

    def renew(self, timeout_s: float, done: Answered[None]) -> None:
        """Keep the lease alive."""
        self._run(partial(self._renew, self._world.now + timeout_s), done)

    def _renew(self, deadline_s: float) -> Steps[KVStoreError | None]:
        kept = yield from self._ask(KeepAlive(self._lease), deadline_s)
        if not isinstance(kept, Kept):
            return Unavailable("etcd does not say whether the lease is kept")
        return None if kept.is_there else StaleEpoch("the lease has ended")

    def resign(self) -> None:
        """Revoke the lease; nobody waits for that."""
        revoke, deadline_s = Revoke(self._lease), self._world.now + WRITE_TIMEOUT_S
        self._leave_term()
        self._run(partial(self._ask, revoke, deadline_s), lambda _: None)

    # --- what is durable ----------------------------------------------------------------------

    def load(self, done: Answered[list[Entry]]) -> None:
        """Every row, as of one revision."""
        self._run(self._load, done)

    def _load(self) -> Steps[list[Entry] | KVStoreError]:
        found = yield from self._ask(Range(ROWS), self._world.now + LOAD_TIMEOUT_S)
        if not isinstance(found, Found):
            return Unavailable("etcd does not answer")
        return [(key.removeprefix(ROWS), each.value) for key, each in found.entries.items()]

    def write(self, puts: Sequence[Entry], deletes: Sequence[str], done: Answered[None]) -> None:
        """In one transaction, which takes no effect after a later one: as the adapter of etcd."""
        rows = tuple((ROWS + key, value) for key, value in puts)
        self._run(partial(self._write, rows, tuple(ROWS + key for key in deletes)), done)

    def _write(
        self, rows: tuple[Entry, ...], deletes: tuple[str, ...]
    ) -> Steps[KVStoreError | None]:
        epoch, created, deadline_s = self._epoch, self._created, self._world.now + WRITE_TIMEOUT_S
        while True:
            message = Transaction(
                written=self.last_write(), deletes=deletes, puts=rows, touches=(LEADER,),
                epoch=epoch,
            )  # fmt: skip
            reply = yield from self._ask(message, deadline_s)
            if isinstance(reply, NoSpace):
                return OutOfSpace("etcd is full")
            if not isinstance(reply, Done):
                return Unavailable("etcd does not answer")
            leader = reply.found.get(LEADER)
            if leader is not None and leader.created == created == self._created:
                # What was not answered may have been done: then this try has changed nothing.
                self._written = leader.written
            elif not reply.succeeded:
                return StaleEpoch(f"epoch {epoch} is over")
            if reply.succeeded:
                return None

    def last_write(self) -> tuple[tuple[str, int], ...]:
        """I10: the condition of every write, that nothing was written since our last one."""
        return ((LEADER, self._written),)

    # --- the connection ----------------------------------------------------------------------

    def _ask(self, message: object, deadline_s: float) -> Steps[object | None]:
        """The answer; None when there is none in time: then the connection goes, too."""
        link = yield from self._connected(deadline_s)
        left_s = deadline_s - self._world.now
        if link is None or left_s <= 0:
            return None
        answered: Signal[object | None] = Signal()
        link.call(message, left_s, answered.fire)
        yield answered
        if answered.value is None and self._link is link:
            self._link = None
            link.close()
        return answered.value

    def _connected(self, deadline_s: float) -> Steps[Endpoint | None]:
        if self._link is not None and self._link.is_open:
            return self._link
        link = Endpoint(self._world, self._name, _unasked, lambda _: None)
        connected: Signal[Channel | None] = Signal()
        timeout_s = min(HANDSHAKE_TIMEOUT_S, deadline_s - self._world.now)
        call = Dial(
            self._name, ETCD, None, link.receive, link.ended, connected.fire, timeout_s,
            is_stream=True,
        )  # fmt: skip
        dial(self._world, call, self._etcd.accept)
        yield connected
        if connected.value is None:
            return None
        link.use(connected.value)
        if self._link is not None and self._link.is_open:
            link.close()  # another call was faster
        else:
            self._link = link
        return self._link


def leader_in(value: bytes) -> Leader:
    """What the leader's key says."""
    return msgspec.msgpack.decode(value, type=Leader)


def leads(etcd: SimEtcd) -> Leader | None:
    """Whose lease has not ended, in truth."""
    value = etcd.entries.get(LEADER)
    return None if value is None else leader_in(value.value)


def _unasked(endpoint: Endpoint, number: int, message: object) -> None:
    raise AssertionError(f"{message!r} to {endpoint.node}, which serves nothing ({number})")
