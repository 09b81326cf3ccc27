"""Named objects in the pool as a cache may use them: never an exception, trouble is a miss.

Owns the way to the pool. Objects are those of the Mooncake drop-in (any size, pieces where they are
larger than a chunk); bytes go straight to where LMCache wants them, which looks there only once it
was told that they have come: a read that is refused has wiped them (V4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.leases import Leases
from kvstore.connectors.mooncake.addresses import cut, size_of, slices_of
from kvstore.connectors.mooncake.codes import Code
from kvstore.connectors.mooncake.objects import Objects, Value
from kvstore.connectors.mooncake.puts import store_values
from kvstore.connectors.mooncake.values import ReplicateConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client.store import KVStore
    from kvstore.clock import Clock
    from kvstore.connectors.mooncake.addresses import Slices

USUAL: Final = ReplicateConfig()


class Item(NamedTuple):
    """An object and where its bytes are, or shall be: a contiguous buffer."""

    name: bytes
    memory: object
    may_be_shorter: bool = False
    """Whether an object that leaves some of the memory as it is may be loaded to its beginning."""


class PooledObjects:
    """The objects of one namespace. Thread-safe; calls may take as long as the pool lets them."""

    def __init__(self, make: Callable[[], KVStore], namespace: str, clock: Clock) -> None:
        """Ask nothing yet; `make` connects when first needed, and again after a loss."""
        self._make = make
        self._namespace = namespace
        self._objects: Objects | None = None
        self.pool = EnginePool(self._connect, (), clock)
        self.leases = Leases(self.pool, clock, lambda _, *told: self._ask().give_back(*told))
        """Of what was found with a number."""

    def _connect(self) -> KVStore:
        store = self._make()
        try:
            self._objects = Objects(store, self._namespace)
        except BaseException:
            store.close()
            raise
        return store

    def _ask(self) -> Objects:
        assert self._objects is not None, "called by the pool's own calls alone"
        return self._objects

    def store(self, items: Sequence[Item]) -> list[bool]:
        """Whether each is in the pool now; what was there before stays."""

        def put(_: object) -> list[bool]:
            values = [Value(each.name, slices_of(each.memory), each.memory) for each in items]
            codes = store_values(self._ask(), values, USUAL, replace=False)
            return [code == Code.OK for code in codes]

        return self.pool.call("storing objects", put, [False] * len(items))

    def sizes(self, names: Sequence[bytes], *, lease_id: int = 0) -> list[int] | None:
        """Bytes of each, 0 where it is not there; None where nobody could be asked.

        With a number of `leases` nobody takes away what was found for some seconds.
        """

        def find(_: object) -> list[int]:
            finding = self._ask().find(names, lease=lease_id > 0, lease_id=lease_id)
            sizes = dict(zip(finding.names, finding.sizes, strict=True))
            return [sizes[name] for name in names]

        return self.pool.call("looking objects up", find, None)

    def load(self, items: Sequence[Item]) -> list[bool]:
        """Whether each has come: all of it, verified. Names are distinct."""

        names = [item.name for item in items]

        def read(_: object) -> list[bool]:
            targets: dict[int, Slices] = {}
            with self.leases.reading(names) as lease_id:
                finding = self._ask().find(names, lease_id=lease_id)
                for number, (item, size) in enumerate(zip(items, finding.sizes, strict=True)):
                    room = slices_of(item.memory)
                    if size == size_of(room) or (item.may_be_shorter and size < size_of(room)):
                        targets[number] = cut(room, 0, size)
                codes = self._ask().read(finding, {i: to for i, to in targets.items() if to})
            return [codes.get(number) == Code.OK for number in range(len(items))]

        return self.pool.call("loading objects", read, [False] * len(items))

    def remove(self, names: Sequence[bytes]) -> bool:
        """Take objects out; whether the pool has done so."""

        def take(_: object) -> bool:
            self._ask().remove(names)
            return True

        return self.pool.call("removing objects", take, False)

    def names(self) -> list[bytes]:
        """Of all objects, in order; none in trouble."""

        def every(_: object) -> list[bytes]:
            return sorted(
                name for _, some in self._ask().listed() for name in some if name is not None
            )

        return self.pool.call("listing objects", every, [])

    def close(self) -> None:
        """End the connection; later calls are misses. Safe to repeat."""
        self.leases.close()
        self.pool.close()
