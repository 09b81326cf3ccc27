"""The scheduler's half of the vLLM connector with a store, for what vLLM tells it. Not a test."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore.connectors.engine_lookups import DEADLINE_S
from kvstore.connectors.engine_namespace import EngineFields, EngineGroup, namespaces
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.one_thread import OneThread
from kvstore.connectors.vllm.scheduler_side import SchedulerSide
from kvstore.namespace import Attention
from kvstore.page import engine_key
from tests.fakes import ManualClock
from tests.unit.engine_store import EngineFakeStore

TOKENS = 16
HASHES = [bytes([i]) * 32 for i in range(1, 9)]
FULL = EngineGroup(Attention.FULL, ("l0",), 1, 8, 8)
SLIDING = EngineGroup(Attention.SLIDING, ("l1",), 1, 8, 8, 32)
FIELDS = EngineFields(
    engine="e", model="m", revision="r", tenant="t", kv_dtype="float32", compute_dtype="float32",
    quantization="", config_digest="", hash_algorithm="sha256_cbor", hash_seed="s",
    block_tokens=TOKENS, tensor_parallel=1, block_order="o", groups=(FULL, SLIDING),
)  # fmt: skip


class Request(msgspec.Struct):
    """As the scheduler has it."""

    request_id: str = "r"
    num_tokens: int = 8 * TOKENS
    block_hashes: list[bytes] = msgspec.field(default_factory=lambda: list(HASHES))
    kv_transfer_params: dict[str, object] | None = None


class New(msgspec.Struct):
    """A request that a step is the first for."""

    req_id: str
    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int


class GoingOn(msgspec.Struct, frozen=True):
    """Requests of earlier steps."""

    req_ids: Sequence[str] = ()
    new_block_ids: Sequence[Sequence[Sequence[int]] | None] = ()
    num_computed_tokens: Sequence[int] = ()
    resumed_req_ids: frozenset[str] = frozenset()


class Step(msgspec.Struct):
    """What the scheduler has planned."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Sequence[New] = ()
    scheduled_cached_reqs: GoingOn = GoingOn()


class Rig:
    """A scheduler's half with a store that the test fills."""

    def __init__(self, load_tokens_min: int = 0) -> None:
        self.store = EngineFakeStore()
        self.clock = ManualClock()
        self.namespaces = namespaces(FIELDS)
        self.pool = EnginePool(lambda: self.store, self.namespaces, self.clock)
        self.side = SchedulerSide(
            self.namespaces, self.pool, self.clock, 1.0, DEADLINE_S, 2.0, load_tokens_min
        )

    def hold(self, group: int, *places: int) -> None:
        """Have the pool hold these blocks of a group."""
        for place in places:
            key = engine_key(self.namespaces[group].id, HASHES[place])
            self.store.held[key, 0] = b"payload"

    def come(self, request: Request) -> None:
        """A request comes, and the pool has been asked."""
        self.side.on_new_request(request)
        self.answered()

    def answered(self) -> None:
        """Wait until the thread beside the scheduler has nothing left to do."""
        self.side._thread.close(30.0)  # noqa: SLF001 -- it has no other end
        self.side._thread = OneThread("lookups")  # noqa: SLF001 -- and goes on afterwards
