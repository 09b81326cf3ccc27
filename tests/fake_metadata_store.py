"""The MetadataStore in memory: what a disk would hold, leases, and faults on demand.

Passes the contract suite of tests/contract/test_kvstore_coordination_metadata_store.py. By itself
it is like the embedded store: a campaign wins, a term ends only with the next. With a lease and a
clock it is like etcd: who leads is known, and a term ends unless it is renewed.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.coordination.metadata_store import Leader, Term, require_writable
from kvstore.errors import ConfigError, OutOfSpace, StaleEpoch, Unavailable
from kvstore.ids import Epoch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvstore.coordination.metadata_store import Candidate, Entry
    from kvstore.errors import KVStoreError

PAGE_ENTRIES: Final = 16


class MetadataDisk:
    """What survives a master: share one between the stores of masters, one after another or not."""

    def __init__(
        self,
        cluster: str = "test",
        *,
        lease_s: float = inf,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Start empty, before the first epoch. A finite `lease_s` is measured on `now`."""
        self.cluster = cluster
        self.epoch = Epoch(0)
        self.entries: dict[str, bytes] = {}
        self.lease_s = lease_s
        self.refusals: list[KVStoreError] = []
        """Each is raised once, by the next writes, in order."""
        self.is_full = False
        """Every write is refused, and with leases every election, too."""
        self._now = now
        self._leader: Leader | None = None
        self._ends_at_s = -inf

    @property
    def leader(self) -> Leader | None:
        """Whose lease has not ended."""
        return self._leader if self._now() < self._ends_at_s else None

    def expire_lease(self) -> None:
        """End the leader's lease now, however lately it was renewed."""
        self._leader = None

    def elect(self, candidate: Candidate) -> Leader:
        """Raise the epoch in favour of this one."""
        self.epoch = Epoch(max(self.epoch, candidate.above) + 1)
        self._leader = Leader(self.epoch, candidate.name, candidate.where)
        self.prolong()
        return self._leader

    def prolong(self) -> None:
        """Let the lease of the leader start anew."""
        self._ends_at_s = self._now() + self.lease_s


class FakeMetadataStore:
    """One master's access to a MetadataDisk."""

    def __init__(self, disk: MetadataDisk, cluster: str = "test") -> None:
        """Point at the disk; nothing is opened yet."""
        self._disk = disk
        self._cluster = cluster
        self._epoch = Epoch(0)
        self._open = False
        self.is_cut_off = False
        """Every call fails with Unavailable."""
        self.reaches = asyncio.Event()
        """While it is cleared every call hangs; what hung reaches the disk later."""
        self.reaches.set()

    async def open(self) -> None:
        """As the port says."""
        assert not self._open, "a store is opened once"
        await self._reach()
        if self._disk.cluster != self._cluster:
            raise ConfigError(f"disk holds cluster {self._disk.cluster!r}, not {self._cluster!r}")
        self._open = True

    async def campaign(self, candidate: Candidate) -> Term | Leader:
        """As the port says."""
        await self._reach_opened()
        if self._disk.lease_s < inf and (leader := self._disk.leader) is not None:
            return leader
        if self._disk.lease_s < inf and self._disk.is_full:
            raise Unavailable("the disk is full")
        self._epoch = self._disk.elect(candidate).epoch
        return Term(self._epoch, self._disk.lease_s)

    async def renew(self) -> None:
        """As the port says."""
        await self._reach_opened()
        self._require_term()
        self._disk.prolong()

    async def load(self, prefix: str) -> AsyncIterator[list[Entry]]:
        """As the port says."""
        await self._reach_opened()
        found = sorted(each for each in self._disk.entries.items() if each[0].startswith(prefix))
        for start in range(0, len(found), PAGE_ENTRIES):
            await self._reach()
            yield found[start : start + PAGE_ENTRIES]

    async def write(self, puts: Sequence[Entry], deletes: Sequence[str]) -> None:
        """As the port says; raises the next of the disk's refusals, if any are left."""
        require_writable(puts, deletes)
        await self._reach_opened()
        if self._disk.refusals:
            raise self._disk.refusals.pop(0)
        if self._disk.is_full:
            raise OutOfSpace("the disk is full")
        self._require_term()
        for key in deletes:
            self._disk.entries.pop(key, None)
        self._disk.entries.update(puts)

    async def resign(self) -> None:
        """As the port says."""
        leads, self._epoch = self._epoch, Epoch(0)
        leader = self._disk.leader
        if not self.is_cut_off and leader is not None and leader.epoch == leads:
            self._disk.expire_lease()

    async def close(self) -> None:
        """As the port says."""
        self._open = False

    async def _reach(self) -> None:
        if self.is_cut_off:
            raise Unavailable("the disk cannot be reached")
        await self.reaches.wait()

    async def _reach_opened(self) -> None:
        assert self._open, "open the store first"
        await self._reach()

    def _require_term(self) -> None:
        leader = self._disk.leader
        if self._epoch == 0:
            raise StaleEpoch("this master is in no term")
        if self._disk.epoch != self._epoch:  # I10
            raise StaleEpoch(f"epoch {self._epoch} was followed by epoch {self._disk.epoch}")
        if leader is None:
            raise StaleEpoch(f"the lease of epoch {self._epoch} has ended")
