"""What vLLM's tiers need to run on CPUs, and a tier that a test can stop; loaded by module path.

vLLM's copies between an engine's memory and its CPU tier want streams of a GPU. Here they are
plain copies; the manager, its first tier and the scheduler's side of them are vLLM's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.connectors.vllm.tier import KvharborTier
from kvstore.page import PageChain, engine_key
from tests.engines.vllm_faults import REMOVE, pause_before_load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.store import KVStore
    from kvstore.connectors.engine_pool import Reached
    from kvstore.connectors.vllm.foreign import Vllm

SOME_S: Final = 1e-6
"""Copies are over when they have begun; vLLM wants to know how long they took."""


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not there for the checker
    """One rank's copies between blocks of the engine and chunks of the tier."""

    def __init__(self, caches: Vllm, blocks_a_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_a_chunk = blocks_a_chunk
        self._region = region
        self._done: list[TransferResult] = []
        self._tensors_of = [sorted({each.tensor_idx for each in refs})
                            for refs in caches.group_data_refs]  # fmt: skip
        sizes = [each.page_size_bytes for each in caches.tensors]
        self._blocks = [
            each.tensor.view(torch.int8).view(-1, size)
            for each, size in zip(caches.tensors, sizes, strict=True)
        ]
        self._chunks = [
            region.create_next_worker_view(blocks_a_chunk * size).unflatten(1, (-1, size))
            for size in sizes
        ]

    def _pairs(self, blocks: Vllm, chunks: Vllm) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each block of the engine, and its place in the tier, for each tensor of its group."""
        block_ids, chunk_ids = iter(blocks.block_ids.tolist()), iter(chunks.block_ids.tolist())
        groups = zip(self._tensors_of, blocks.group_sizes, blocks.block_indices, strict=True)
        for tensors, count, first in groups:
            chunk = -1
            for i in range(first, first + count):
                place = i % self._blocks_a_chunk
                if place == 0 or i == first:
                    chunk = next(chunk_ids)
                block = next(block_ids)
                for t in tensors:
                    yield self._blocks[t][block], self._chunks[t][chunk, place]

    def submit_store(self, job_id: int, src_spec: Vllm, dst_spec: Vllm) -> bool:
        """Copy out."""
        for block, place in self._pairs(src_spec, dst_spec):
            place.copy_(block)
        return self._ended(job_id)

    def submit_load(self, job_id: int, src_spec: Vllm, dst_spec: Vllm) -> bool:
        """Copy in."""
        for block, place in self._pairs(dst_spec, src_spec):
            block.copy_(place)
        return self._ended(job_id)

    def _ended(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, success=True, transfer_size=1,
                                         transfer_time=SOME_S))  # fmt: skip
        return True

    def get_finished(self) -> list[TransferResult]:
        """All of them, at once."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        """Let go of the tier's memory."""
        self._chunks.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # likewise
    """vLLM's tiers, on a CPU."""

    _copying: CopyingWorker | None = None

    def get_worker(self, kv_caches: Vllm) -> CopyingWorker:
        """One that copies."""
        if self._copying is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copying = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._copying


class PausingTier(KvharborTier):
    """The tier itself, at which a test can stop between lookup and load, and hear its events."""

    told_rows = 0
    """Of which vLLM was told that they are in the pool."""

    def take_events(self) -> list[Vllm]:
        """Count them."""
        events = list(super().take_events())
        self.told_rows += sum(len(each.keys) for each in events)
        return events

    def submit_load(self, job_metadata: Vllm) -> None:
        """Wait for the test."""
        pause_before_load()
        if Path(os.environ[REMOVE]).exists():
            self._remove(list(job_metadata.keys)[1:])
        super().submit_load(job_metadata)

    def _remove(self, keys: list[bytes]) -> None:
        def remove(pool: Reached) -> None:
            opened = pool.opened[0]
            chain = PageChain(b"".join([engine_key(opened.namespace.id, key) for key in keys]))
            cast("KVStore", pool.store).remove(opened, chain)

        self.rows._pool.call("removing rows", remove, None)  # noqa: SLF001 -- as a user of it
