"""KV events of vLLM's for what this engine has put into the pool; its own publisher sends them.

Routers take them for blocks that this engine need not compute: STORAGE, and REMOTE to it. An event
has its block's tokens, because most routers hash those anew and pass over events without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvstore.connectors.engine_events import Announcements, PutBlock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.connectors.engine_saves import BlockRun
    from kvstore.connectors.vllm.foreign import Vllm

REMOTE: Final = "REMOTE"


class RankPuts(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there to check
    """What goes from each rank to the scheduler after a step."""

    def __init__(self, blocks: list[PutBlock]) -> None:
        """Blocks that were put since the last step."""
        self.blocks = blocks

    def aggregate(self, other: RankPuts) -> RankPuts:
        """Add another rank's: a block is there as often as ranks have put it."""
        return RankPuts(self.blocks + other.blocks)


class BlockEvents:
    """The scheduler's events, from the plan to save a block until all ranks have put it."""

    def __init__(self, ranks: Sequence[int], block_tokens: int) -> None:
        """`ranks` has, for each cache group, how many ranks put its blocks."""
        self._block_tokens = block_tokens
        self._stored: Announcements[Vllm] = Announcements(ranks)
        self._removed: list[Vllm] = []

    def plan(self, request: Vllm, runs: Iterable[BlockRun]) -> None:
        """These blocks of the request are to be saved."""
        for run in runs:
            parents = (run.parent, *run.hashes[:-1])
            for at, block_hash in enumerate(run.hashes):
                named = block_hash, parents[at]
                told = self._told(request, run.group, run.first + at, named)
                self._stored.plan(PutBlock(run.group, bytes(block_hash)), told)

    def put(self, said: RankPuts | None) -> None:
        """Ranks have put blocks."""
        self._stored.put(() if said is None else said.blocks)

    def lost(self, blocks: Iterable[PutBlock]) -> None:
        """Blocks that were promised did not come; once they are computed they are stored anew."""
        self._removed += [
            BlockRemoved(
                block_hashes=[maybe_convert_block_hash(each.block_hash)],
                medium=MEDIUM_STORAGE,
                group_idx=each.group,
                locality=REMOTE,
            )
            for each in blocks
        ]

    def take(self) -> list[Vllm]:
        """What is to be published now."""
        removed, self._removed = self._removed, []
        return removed + self._stored.take()

    def _told(self, request: Vllm, group: int, at: int, named: tuple[bytes, bytes]) -> Vllm:
        block_hash, parent = named
        start, stop = at * self._block_tokens, (at + 1) * self._block_tokens
        extra, _ = generate_block_hash_extra_keys(request, start, stop, 0)
        adapter = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block_hash)],
            parent_block_hash=maybe_convert_block_hash(parent) if parent else None,
            token_ids=list(request.all_token_ids[start:stop]),
            block_size=self._block_tokens,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM_STORAGE,
            lora_name=adapter.name if adapter else None,
            extra_keys=to_event_extra_keys([extra]),
            group_idx=group,
            locality=REMOTE,
            session_id=request.session_id,
        )
