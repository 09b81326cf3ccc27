"""LMCache's own connector for Mooncake Store, unchanged, with LMCache's classes around it.

    python -m tests.engines.lmcache_mooncake_program

In a process of its own that the shim runs: it says which pool `mooncake.store` is.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Final

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector
from lmcache.v1.storage_backend.connector.mooncakestore_adapter import (
    MooncakestoreConnectorAdapter,
)
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from tests.engines.lmcache_remote_program import TOKENS, key, numbers

SETTINGS: Final = {
    "local_hostname": "127.0.0.1",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:1",  # nobody listens there: the shim names the pool
    "transfer_timeout": 60,
}


async def stored_and_found(*, saves_shapes: bool) -> None:
    """One engine's chunks, by another one's connector; each with its shape, or without."""
    one, other = remote(saves_shapes=saves_shapes), remote(saves_shapes=saves_shapes)
    first = 10 if saves_shapes else 20
    keys, lost = [key(first + number) for number in range(4)], key(9)
    shape = torch.Size((2, 2, TOKENS, 8))
    chunks = [one.memory.allocate(shape, torch.float32, one.connector.meta_fmt) for _ in keys]
    for number, chunk in enumerate(chunks):
        chunk.tensor.fill_(number)
    await one.wrapped.batched_put(keys[:3], chunks[:3])
    await one.wrapped.put(keys[3], chunks[3])
    asked = await other.wrapped.batched_async_contains("some", [*keys[:2], lost, keys[2]])
    assert asked == 2, asked
    assert other.wrapped.exists_sync(keys[3])
    assert not await other.wrapped.exists(lost)
    came = await other.wrapped.batched_get([keys[0], lost, keys[3]])
    assert numbers(came) == [0.0, None, 3.0], numbers(came)
    for each in (one, other):
        await each.wrapped.close()


def remote(*, saves_shapes: bool) -> SimpleNamespace:
    """The connector as LMCache makes it, and LMCache's own memory."""
    metadata = LMCacheMetadata(
        model_name="some/model",
        world_size=2,
        local_world_size=2,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(2, 2, TOKENS, 1, 8),
        chunk_size=TOKENS,
    )
    told = {**SETTINGS, "save_chunk_meta": saves_shapes}
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS, max_local_cpu_size=0.1, extra_config=told
    )
    memory = LocalCPUBackend(config=config, metadata=metadata, dst_device="cpu")
    context = SimpleNamespace(
        config=config,
        metadata=metadata,
        local_cpu_backend=memory,
        loop=asyncio.get_running_loop(),
        plugin_name=None,
    )
    connector = MooncakestoreConnectorAdapter().create_connector(context)
    wrapped = InstrumentedRemoteConnector(connector)
    return SimpleNamespace(memory=memory, connector=connector, wrapped=wrapped)


async def main() -> None:
    """Look at both ways; an AssertionError where something is wrong."""
    await stored_and_found(saves_shapes=True)
    await stored_and_found(saves_shapes=False)


if __name__ == "__main__":
    asyncio.run(main())
