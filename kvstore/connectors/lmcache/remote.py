"""The classes that LMCache inside an engine loads as its remote storage: its calls, in its types.

    remote_storage_plugins: ["kvharbor"]
    extra_config:
      remote_storage_plugin.kvharbor.module_path: kvstore.connectors.lmcache.remote
      remote_storage_plugin.kvharbor.class_name: KvharborRemoteAdapter
      kvharbor: {"masters": "127.0.0.1:7700"}

For the minor versions of LMCache in `settings.ENGINES`. Imported by LMCache alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from lmcache import __version__
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.clock import SystemClock
from kvstore.connectors.lmcache.aside import aside
from kvstore.connectors.lmcache.naming import layout_of, remote_key, remote_name
from kvstore.connectors.lmcache.pooled import Item, PooledObjects
from kvstore.connectors.lmcache.settings import engine_of, settings_of
from kvstore.connectors.pool_settings import connect
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.lmcache.foreign import Lmcache

WHERE: Final = "extra_config.kvharbor"
NAME: Final = "lmcache-remote"
URL: Final = "plugin://kvharbor"
DOWN: Final = 1
"""What a ping says of a pool that does not answer."""


class KvharborRemoteAdapter(ConnectorAdapter):  # type: ignore[misc]  # not there to be checked
    """Makes the connector, with what LMCache knows of the model."""

    def __init__(self) -> None:
        """Answer to the name that the plug-in has in the configuration."""
        super().__init__(URL)

    def create_connector(self, context: Lmcache) -> KvharborRemoteConnector:
        """A connector that needs no pool yet. BadValue names a setting that is wrong."""
        return KvharborRemoteConnector(context.config, context.metadata, context.local_cpu_backend)


class KvharborRemoteConnector(RemoteConnector):  # type: ignore[misc]  # likewise
    """LMCache's chunks in a kvharbor pool. Trouble with the pool is a miss, never an exception."""

    def __init__(self, config: Lmcache, metadata: Lmcache, memory: Lmcache) -> None:
        """`memory` is where LMCache has its chunks; nothing is asked before the first call."""
        if config.use_layerwise:
            raise BadValue("use_layerwise", True, "False: chunks are stored whole")
        super().__init__(config, metadata)
        settings = settings_of((config.extra_config or {}).get("kvharbor", {}), WHERE)
        hashes = f"{config.pre_caching_hash_algorithm} {os.environ.get('PYTHONHASHSEED', '')}"
        self._memory = memory
        self._layout = f"{layout_of(self.meta_shapes, self.meta_dtypes)} {self.meta_fmt.name}"
        self._objects = PooledObjects(
            lambda: connect(settings, NAME),
            f"{NAME} {engine_of(__version__)} {hashes} {settings.revision}",
            SystemClock(),
        )

    # What is there.

    def exists_sync(self, key: Lmcache) -> bool:
        """Whether it is in the pool."""
        return self.batched_contains([key]) == 1

    async def exists(self, key: Lmcache) -> bool:
        """Whether it is in the pool."""
        return await aside(lambda: self.exists_sync(key))

    def support_batched_contains(self) -> bool:
        """Yes: one question for all."""
        return True

    def batched_contains(self, keys: Sequence[Lmcache]) -> int:
        """How many of them are there before the first that is not; leased until they are got."""
        leases = self._objects.leases
        number = leases.number()
        names, sizes = self._names(keys), self._sizes(keys, number)
        there = [name for name, size in zip(names, sizes, strict=True) if size]
        leases.took(number, there, there)
        return sizes.index(0) if 0 in sizes else len(sizes)

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Lmcache], pin: bool = False
    ) -> int:
        """As batched_contains."""
        del lookup_id, pin  # every lookup leases
        return await aside(lambda: self.batched_contains(keys))

    def _sizes(self, keys: Sequence[Lmcache], lease_id: int = 0) -> list[int]:
        return self._objects.sizes(self._names(keys), lease_id=lease_id) or [0] * len(keys)

    def _names(self, keys: Sequence[Lmcache]) -> list[bytes]:
        return [self._name(key) for key in keys]

    def _name(self, key: Lmcache) -> bytes:
        return remote_name(key.to_string(), dict(key.tags or ()), self._layout)

    # Getting. Chunks that are not full are smaller, and shaped by what has come.

    async def get(self, key: Lmcache) -> Lmcache:
        """A new object of LMCache's with the chunk; None where it did not come."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Yes: one read for all."""
        return True

    async def batched_get(self, keys: Sequence[Lmcache]) -> list[Lmcache]:
        """For each, as `get`. LMCache gives up after a while what it waits for."""
        return await aside(lambda: self._get(keys), _let_go)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[Lmcache]
    ) -> list[Lmcache]:
        """Those before the first that did not come; what came behind it is given back."""
        del lookup_id
        came = await self.batched_get(keys)
        first = came.index(None) if None in came else len(came)
        _let_go(came[first:])
        return came[:first]

    def _get(self, keys: Sequence[Lmcache]) -> list[Lmcache]:
        made = [self._room(size) for size in self._sizes(keys)]
        wanted = [
            (number, Item(self._name(keys[number]), each.byte_array))
            for number, each in enumerate(made)
            if each is not None
        ]
        came = self._objects.load([item for _, item in wanted]) if wanted else []
        self._objects.leases.let_go(self._names(keys))
        for (number, _), has_come in zip(wanted, came, strict=True):
            if not has_come:
                made[number].ref_count_down()
                made[number] = None
        return made

    def _room(self, size: int) -> Lmcache:
        """An object of that size; None without room, or where no chunk has such a size."""
        if not 0 < size <= self.full_chunk_size_bytes or size % self.single_token_size:
            return None
        room = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        return None if room is None else self.reshape_partial_chunk(room, size)

    # Putting. LMCache's wrapper around this takes back its reference when a put has returned.

    async def put(self, key: Lmcache, memory_obj: Lmcache) -> None:
        """Store a chunk; trouble is logged, and the chunk not stored."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Yes: one put for all."""
        return True

    async def batched_put(self, keys: Sequence[Lmcache], memory_objs: Sequence[Lmcache]) -> None:
        """As `put`, for each."""
        items = [
            Item(self._name(key), each.byte_array)
            for key, each in zip(keys, memory_objs, strict=True)
        ]
        for each in memory_objs:  # a thread that nobody waits for any more still reads them
            each.ref_count_up()
        await aside(lambda: self._put(items, memory_objs))

    def _put(self, items: Sequence[Item], memory_objs: Sequence[Lmcache]) -> None:
        try:
            self._objects.store(items)
        finally:
            _let_go(memory_objs)

    # The rest.

    async def list(self) -> list[str]:
        """LMCache's texts of all keys in the pool, of all its engines."""
        return [remote_key(name) for name in await aside(self._objects.names)]

    def remove_sync(self, key: Lmcache) -> bool:
        """Take a chunk out; whether the pool has done so."""
        return self._objects.remove([self._name(key)])

    def support_ping(self) -> bool:
        """Yes: it asks nothing, and tells whether the pool answered last."""
        return True

    async def ping(self) -> int:
        """0 while the pool is worth asking."""
        return 0 if self._objects.pool.is_worth_asking else DOWN

    async def close(self) -> None:
        """End the connection."""
        await aside(self._objects.close)


def _let_go(objects: Sequence[Lmcache | None]) -> None:
    for each in objects:
        if each is not None:
            each.ref_count_down()
