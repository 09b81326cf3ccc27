"""An etcd of the simulation: keys with revisions, leases in virtual time, conditional transactions.

One node stands for the whole cluster, whatever becomes of its members: stopping the node is the
loss of the majority, `change_leader` is what a new etcd leader does to leases, and `expire_leases`
what a stalled one does. Must not know what masters keep in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulation.rpc import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.channel import Channel
    from tests.simulation.world import World

ETCD: Final = "etcd"


@dataclass(frozen=True)
class Value:
    """What lies under a key."""

    value: bytes
    created: int
    """The revision in which the key came to be: another one is another life of the key."""
    written: int
    """The revision in which it was put last."""
    lease: int
    """The key goes when this lease ends; 0 for none."""


@dataclass(frozen=True)
class Grant:
    """Ask for a lease. Granted answers it."""

    ttl_s: float


@dataclass(frozen=True)
class Granted:
    """A lease that began when it was granted."""

    lease: int


@dataclass(frozen=True)
class KeepAlive:
    """Let a lease start anew. Kept answers it."""

    lease: int


@dataclass(frozen=True)
class Kept:
    """Whether the lease was still there."""

    is_there: bool


@dataclass(frozen=True)
class Revoke:
    """End a lease now; nobody waits for the answer."""

    lease: int


@dataclass(frozen=True)
class Transaction:
    """Do all of it in one revision, if every condition holds; else change nothing.

    Done answers it, or NoSpace where it would put something into an etcd that is full.
    """

    written: tuple[tuple[str, int], ...] = ()
    """Keys that must have been put last in these revisions; 0 for a key that must be absent."""
    deletes: tuple[str, ...] = ()
    puts: tuple[tuple[str, bytes], ...] = ()
    touches: tuple[str, ...] = ()
    """Keys that are put again as they are."""
    leased: tuple[tuple[str, bytes], ...] = ()
    """Put, too, but only for as long as the lease lasts, which must not have ended."""
    lease: int = 0
    epoch: int = 0
    """In which its sender leads, for checkers; 0 for an election."""


@dataclass(frozen=True)
class Done:
    """Whether the conditions held, in which revision, and what was compared as it is after it."""

    succeeded: bool
    revision: int
    found: dict[str, Value]


@dataclass(frozen=True)
class NoSpace:
    """Nothing can be put."""


@dataclass(frozen=True)
class Range:
    """Ask for every key of a prefix, as of one revision. Found answers it."""

    prefix: str


@dataclass(frozen=True)
class Found:
    """Keys in their order."""

    entries: dict[str, Value]


class SimEtcd:
    """The cluster. Everything that it answered outlives its crashes; leases start anew then."""

    def __init__(self, world: World) -> None:
        """Empty, and running."""
        self.world = world
        self.revision = 1
        self.entries: dict[str, Value] = {}
        self.is_full = False
        self.broken: list[tuple[bytes, float]] = []
        """What leased keys held whose lease has ended before its time, and when that was."""
        self.watch: Callable[[Transaction], None] = lambda _: None
        """Shown every transaction that changes something, before it does."""
        self._leases: dict[int, tuple[float, float]] = {}
        """(time to live, when it ends) by lease."""
        self._last_lease = 0

    # --- lives and faults ---------------------------------------------------------------------

    def start(self) -> None:
        """After a crash: whoever leads the members now knows no lease's age."""
        self.change_leader()

    def change_leader(self) -> None:
        """Every lease that has not ended starts anew."""
        for lease, (ttl_s, _) in list(self._leases.items()):
            self._prolong(lease, ttl_s)

    def expire_leases(self) -> None:
        """Every lease ends, however lately it was renewed."""
        leased = [each.value for each in self.entries.values() if each.lease]
        self.broken += [(value, self.world.now) for value in leased]
        for lease in list(self._leases):
            self._end(lease)

    def make_room(self) -> None:
        """Whatever filled it is gone."""
        self.is_full = False

    # --- connections ----------------------------------------------------------------------------

    def accept(self, channel: Channel, greeting: object) -> bool:
        """A master connects."""
        del greeting
        endpoint = Endpoint(self.world, ETCD, self._serve, lambda _: None)
        channel.attach(ETCD, endpoint.receive, endpoint.ended)
        endpoint.use(channel)
        return True

    def _serve(self, endpoint: Endpoint, number: int, message: object) -> None:
        endpoint.answer(number, self._answer(message))

    def _answer(self, message: object) -> object:
        match message:
            case Grant(ttl_s):
                return self._grant(ttl_s)
            case KeepAlive(lease):
                is_there = lease in self._leases
                if is_there:
                    self._prolong(lease, self._leases[lease][0])
                return Kept(is_there)
            case Revoke(lease):
                self._end(lease)
                return Kept(is_there=False)
            case Transaction():
                return self._transact(message)
            case Range(prefix):
                keys = sorted(key for key in self.entries if key.startswith(prefix))
                return Found({key: self.entries[key] for key in keys})
        raise AssertionError(message)

    # --- keys -------------------------------------------------------------------------------

    def _transact(self, message: Transaction) -> Done | NoSpace:
        if self.is_full and (message.puts or message.touches):
            return NoSpace()
        succeeded = all(self._written(key) == want for key, want in message.written)
        if message.leased:
            succeeded = succeeded and message.lease in self._leases
        if succeeded:
            self.watch(message)
            self.revision += 1
            for key in message.deletes:
                self.entries.pop(key, None)
            for key, value in message.puts:
                self._put(key, value)
            for key, value in message.leased:
                self._put(key, value, message.lease)
            for key in message.touches:
                if (there := self.entries.get(key)) is not None:
                    self._put(key, there.value, there.lease)
        found = {key: self.entries[key] for key, _ in message.written if key in self.entries}
        return Done(succeeded, self.revision, found)

    def _put(self, key: str, value: bytes, lease: int = 0) -> None:
        there, now = self.entries.get(key), self.revision
        created = now if there is None else there.created
        self.entries[key] = Value(value, created, now, lease)

    def _written(self, key: str) -> int:
        there = self.entries.get(key)
        return 0 if there is None else there.written

    # --- leases -----------------------------------------------------------------------------

    def _grant(self, ttl_s: float) -> Granted | NoSpace:
        if self.is_full:
            return NoSpace()
        self._last_lease += 1
        self._prolong(self._last_lease, ttl_s)
        return Granted(self._last_lease)

    def _prolong(self, lease: int, ttl_s: float) -> None:
        ends_s = self.world.now + ttl_s
        self._leases[lease] = (ttl_s, ends_s)
        self.world.after_on(ETCD, ttl_s, partial(self._may_end, lease, ends_s))

    def _may_end(self, lease: int, ends_s: float) -> None:
        if self._leases.get(lease, (0.0, 0.0))[1] == ends_s:
            self._end(lease)

    def _end(self, lease: int) -> None:
        if self._leases.pop(lease, None) is None:
            return
        for key in [key for key, each in self.entries.items() if each.lease == lease]:
            self.world.note(f"etcd drops {key}")
            self.revision += 1
            del self.entries[key]
