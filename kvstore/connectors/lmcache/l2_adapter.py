"""The class that LMCache's server loads as its second level: its calls, in its types.

    lmcache server ... --l2-adapter '{"type": "plugin",
      "module_path": "kvstore.connectors.lmcache.l2_adapter",
      "class_name": "KvharborL2Adapter", "adapter_params": {"masters": "127.0.0.1:7700"}}'

For the minor versions of LMCache in `settings.ENGINES`. Imported by LMCache alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lmcache import __version__
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvstore.clock import SystemClock
from kvstore.connectors.lmcache.l2_objects import L2Objects
from kvstore.connectors.lmcache.lane import Lane
from kvstore.connectors.lmcache.pooled import PooledObjects
from kvstore.connectors.lmcache.settings import engine_of, settings_of
from kvstore.connectors.pool_settings import connect

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.connectors.lmcache.l2_objects import Described, MemoryObject
    from kvstore.connectors.lmcache.naming import ObjectKey

WHERE: Final = "adapter_params"
NAME: Final = "lmcache"
END_S: Final = 5.0
"""A task that is under way when the server ends may take so long."""


class KvharborL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not there to check
    """LMCache's second level in a kvharbor pool, which many servers may share."""

    def __init__(self, adapter_params: Mapping[str, object], l1_memory_desc: object = None) -> None:
        """Start without a pool, if it is not there yet. BadValue names a setting that is wrong."""
        del l1_memory_desc  # bytes are copied by this process: nobody else needs its memory
        settings = self._settings = settings_of(adapter_params, WHERE)
        super().__init__(max_capacity_bytes=settings.capacity_bytes)
        pooled = PooledObjects(
            lambda: connect(settings, NAME),
            f"{NAME} {engine_of(__version__)} {settings.revision}",
            SystemClock(),
        )
        self._objects = L2Objects(
            pooled,
            lambda news: self._notify_keys_stored(list(news.keys), list(news.sizes)),
            lambda news: self._notify_keys_accessed(list(news.keys)),
            lambda news: self._notify_keys_deleted(list(news.keys), list(news.sizes)),
        )
        self._stores: Lane[L2StoreResult] = Lane("kvharbor-store")
        self._lookups: Lane[Bitmap] = Lane("kvharbor-lookup")
        self._loads: Lane[Bitmap] = Lane("kvharbor-load")

    # Descriptors: three different ones, or LMCache confuses what has ended.

    def get_store_event_fd(self) -> int:
        """Written when a store has ended."""
        return self._stores.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        """Written when a lookup has ended."""
        return self._lookups.descriptor

    def get_load_event_fd(self) -> int:
        """Written when a load has ended."""
        return self._loads.descriptor

    # Tasks.

    def submit_store_task(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObject]) -> int:
        """Have objects stored; the task's number."""

        def store() -> L2StoreResult:
            new_bytes = self._objects.store(keys, objects)
            return L2StoreResult(new_bytes is not None, new_bytes or 0)

        return self._stores.submit(store, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """What became of the stores that have ended, once."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: Sequence[ObjectKey], group_layout_descs: Mapping[int, Described]
    ) -> int:
        """Ask which objects are there, and lease them; the task's number."""
        return self._lookups.submit(
            lambda: _bitmap(self._objects.look_up(keys, group_layout_descs)), Bitmap(len(keys))
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which objects are there, once; None before that is known."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        """What a lookup has leased may go: at once, or within seconds where that cannot be told."""
        self._objects.unlock(keys)

    def submit_load_task(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObject]) -> int:
        """Have objects copied to the memory of these; the task's number."""
        return self._loads.submit(
            lambda: _bitmap(self._objects.load(keys, objects)), Bitmap(len(keys))
        )

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which objects have come, once; None before the load has ended."""
        return self._loads.take(task_id)

    # The rest.

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Take out what this server has stored."""
        self._objects.delete(keys)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Keys in the pool, of all servers; ValueError for a wrong page size or cursor."""
        page, after = self._objects.page(model_name, page_size, cursor)
        entries = tuple(
            KeyEntry(
                EncodedObjectKey(
                    chunk_hash_hex=each.chunk_hash.hex(),
                    model_name=each.model_name,
                    kv_rank=each.kv_rank,
                    object_group_id=each.object_group_id,
                    cache_salt=each.cache_salt,
                ),
                size_bytes,
            )
            for each, size_bytes in page
        )
        return KeyListPage(entries, after)

    def report_status(self) -> dict[str, Any]:
        """Whether the pool is worth asking, and how often it was not."""
        pool = self._objects.pooled.pool
        return {
            "is_healthy": pool.is_worth_asking,
            "type": "kvharbor",
            "masters": self._settings.masters,
            "troubles": pool.troubles,
            "times_given_up": pool.times_opened,
        }

    def close(self) -> None:
        """End tasks that are under way, then the connection. Safe to repeat."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close(END_S)
        self._objects.pooled.close()


def _bitmap(flags: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(flags))
    for number, flag in enumerate(flags):
        if flag:
            bitmap.set(number)
    return bitmap
