"""The remote storage with LMCache's own classes around it, as in an engine without a GPU.

    python -m tests.engines.lmcache_remote_program MASTERS NOBODY

In a process of its own: importing LMCache warns, and changes what vLLM can import.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from kvstore.connectors.lmcache.remote import KvharborRemoteAdapter
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.connectors.lmcache.foreign import Lmcache
    from kvstore.connectors.lmcache.pooled import Item

TOKENS: Final = 256
"""Of a chunk."""
LONG_S: Final = 30.0


class Remote:
    """A remote storage as LMCache makes it, and LMCache's own memory."""

    def __init__(self, masters: str, dtype: torch.dtype = torch.float32, **more: object) -> None:
        metadata = LMCacheMetadata(
            model_name="some/model",
            world_size=2,
            local_world_size=2,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=dtype,
            kv_shape=(2, 2, TOKENS, 1, 8),
            chunk_size=TOKENS,
        )
        told = {"kvharbor": {"masters": masters, "timeout_s": 5.0}}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS, max_local_cpu_size=0.1, extra_config=told, **more
        )
        self.memory = LocalCPUBackend(config=config, metadata=metadata, dst_device="cpu")
        context = SimpleNamespace(config=config, metadata=metadata, local_cpu_backend=self.memory)
        self.connector = KvharborRemoteAdapter().create_connector(context)
        # LMCache has this around every connector; it takes back the references of what was put.
        self.wrapped = InstrumentedRemoteConnector(self.connector)

    def chunk(self, number: int, tokens: int = TOKENS) -> Lmcache:
        """A chunk full of that number."""
        shape = torch.Size((2, 2, tokens, 8))
        made = self.memory.allocate(shape, self.connector.meta_dtypes[0], self.connector.meta_fmt)
        made.tensor.fill_(number)
        return made


def key(number: int, **tags: str) -> CacheEngineKey:
    """A key of the model's, with tags as requests name them."""
    named = {f"lmcache.tag.{name}": value for name, value in tags.items()}
    return CacheEngineKey("some/model", 2, 0, number, torch.float32, named)


def numbers(chunks: list[Lmcache]) -> list[float | None]:
    """The number that each is full of; None where there is none."""
    full = [None if each is None else each.tensor.unique().tolist() for each in chunks]
    assert all(each is None or len(each) == 1 for each in full)
    return [None if each is None else each[0] for each in full]


async def stored_and_found(one: Remote, other: Remote) -> None:
    keys, lost = [key(number) for number in range(4)], key(9)
    chunks = [one.chunk(number, TOKENS if number < 3 else 100) for number in range(4)]
    assert [each.get_ref_count() for each in chunks] == [1] * 4
    for each in chunks[:3]:
        each.ref_count_up()
    await one.wrapped.batched_put(keys[:3], chunks[:3])
    await one.wrapped.put(keys[3], chunks[3])
    assert [each.get_ref_count() for each in chunks] == [1, 1, 1, 0]
    assert await other.wrapped.batched_async_contains("some", [*keys[:2], lost, keys[2]]) == 2
    assert other.wrapped.batched_contains(keys) == 4
    assert not other.wrapped.exists_sync(lost)
    assert not await other.wrapped.exists(key(0, adapter="a"))
    came = await other.wrapped.batched_get([keys[0], lost, keys[3]])
    assert numbers(came) == [0.0, None, 3.0]
    assert [tuple(each.get_shape()) for each in came if each] == [
        (2, 2, TOKENS, 8), (2, 2, 100, 8),
    ]  # fmt: skip
    leading = await other.wrapped.batched_get_non_blocking("some", [*keys[:2], lost, keys[2]])
    assert numbers(leading) == [0.0, 1.0]
    assert sorted(await other.wrapped.list()) == sorted(each.to_string() for each in keys)
    assert other.wrapped.remove_sync(keys[1])
    assert await one.wrapped.get(keys[1]) is None
    assert await one.wrapped.ping() == 0


async def given_up(one: Remote) -> None:
    """LMCache waits so long for a get: then its memory comes back, once it is written to no more.

    And of a put it takes its reference back at once, whether or not the memory is read still.
    """
    begun, go_on, made = threading.Event(), threading.Event(), []
    allocate, chunk = one.memory.allocate, one.chunk(7)

    def slow(work: Callable[[list[Item]], list[bool]], items: list[Item]) -> list[bool]:
        begun.set()
        assert go_on.wait(LONG_S)
        return work(items)

    def allocated(*told: object) -> Lmcache:
        made.append(allocate(*told))
        return made[-1]

    objects = one.connector._objects  # noqa: SLF001 -- to hold up what is under way
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(one.memory, "allocate", allocated)
        for name in ("load", "store"):
            patched.setattr(objects, name, partial(slow, getattr(objects, name)))
        for act, held in (
            (one.wrapped.batched_get([key(0), key(2)]), made),
            (one.wrapped.put(key(7), chunk), [chunk]),
        ):
            begun.clear()
            go_on.clear()
            task = asyncio.ensure_future(act)
            assert await asyncio.to_thread(begun.wait, LONG_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [each.get_ref_count() for each in held] == [1] * len(held) != []
            go_on.set()
            async with asyncio.timeout(LONG_S):
                while any(each.get_ref_count() for each in held):  # noqa: ASYNC110 -- who tells?
                    await asyncio.sleep(0.01)
    assert numbers(await one.wrapped.batched_get([key(7), key(0)])) == [7.0, 0.0]


async def without_a_pool(remote: Remote) -> None:
    """All is a miss, and nothing raises."""
    assert await remote.wrapped.get(key(0)) is None
    assert not await remote.wrapped.exists(key(0))
    chunk = remote.chunk(5)
    await remote.wrapped.put(key(5), chunk)
    assert chunk.get_ref_count() == 0
    assert await remote.wrapped.ping() != 0
    assert not remote.wrapped.remove_sync(key(0))
    assert await remote.wrapped.list() == []


async def main(masters: str, nobody: str) -> None:
    """Look at everything; an AssertionError where something is wrong."""
    one, other = Remote(masters), Remote(masters)
    whole = Remote(masters, torch.int32)
    alone = Remote(nobody)
    await stored_and_found(one, other)
    await given_up(one)
    assert not whole.connector.exists_sync(key(0)), "another dtype of as many bytes"
    await without_a_pool(alone)
    for each in (one, other, whole, alone):
        await each.wrapped.close()
    with pytest.raises(BadValue, match="use_layerwise"):
        Remote(masters, use_layerwise=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
