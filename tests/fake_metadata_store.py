"""The MetadataStore in memory: what a disk would hold, and faults on demand.

Passes the contract suite of tests/contract/test_kvstore_coordination_metadata_store.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.coordination.metadata_store import VALUE_BYTES_MAX
from kvstore.errors import BadValue, ConfigError, StaleEpoch
from kvstore.ids import Epoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.coordination.metadata_store import Entry
    from kvstore.errors import KVStoreError


class MetadataDisk:
    """What survives a master: share one between the stores of successive masters."""

    def __init__(self, cluster: str = "test") -> None:
        """Start empty, before the first epoch."""
        self.cluster = cluster
        self.epoch = Epoch(0)
        self.entries: dict[str, bytes] = {}
        self.refusals: list[KVStoreError] = []
        """Each is raised once, by the next writes, in order."""


class FakeMetadataStore:
    """One master's access to a MetadataDisk."""

    def __init__(self, disk: MetadataDisk, cluster: str = "test") -> None:
        """Point at the disk; nothing is opened yet."""
        self._disk = disk
        self._cluster = cluster
        self._epoch = Epoch(0)
        self._open = False

    async def open(self) -> Epoch:
        """As the port says."""
        assert self._epoch == 0, "a store is opened once"
        if self._disk.cluster != self._cluster:
            raise ConfigError(f"disk holds cluster {self._disk.cluster!r}, not {self._cluster!r}")
        self._disk.epoch = self._epoch = Epoch(self._disk.epoch + 1)
        self._open = True
        return self._epoch

    async def load(self, prefix: str) -> list[Entry]:
        """As the port says."""
        assert self._open, "open the store first"
        return sorted(each for each in self._disk.entries.items() if each[0].startswith(prefix))

    async def write(self, puts: Sequence[Entry], deletes: Sequence[str]) -> None:
        """As the port says; raises the next of the disk's refusals, if any are left."""
        assert self._open, "open the store first"
        for key, value in puts:
            if len(value) > VALUE_BYTES_MAX:
                raise BadValue(key, f"{len(value)} bytes", f"at most {VALUE_BYTES_MAX}")
        if self._disk.refusals:
            raise self._disk.refusals.pop(0)
        if self._disk.epoch != self._epoch:
            raise StaleEpoch(f"epoch {self._epoch} was followed by epoch {self._disk.epoch}")
        for key in deletes:
            self._disk.entries.pop(key, None)
        self._disk.entries.update(puts)

    async def close(self) -> None:
        """As the port says."""
        self._open = False
