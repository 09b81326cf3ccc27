"""Host pools as SGLang's are, as far as its third tier sees them. Not a test."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from kvstore.connectors.engine_namespace import EngineFields, namespaces
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.sglang.pages import KV, share_of
from kvstore.connectors.sglang.rows import Rows
from kvstore.connectors.sglang.tier import Tier
from kvstore.page import PageChain, engine_key
from tests.fakes import ManualClock
from tests.unit.engine_store import EngineFakeStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.locations import Found
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome
    from kvstore.connectors.sglang.foreign import Sglang
    from kvstore.ids import PageKey

LAYERS, PAGE, DIM, PAGES = 2, 4, 3, 8
FIELDS = EngineFields(
    engine="sglang 0.5.23", model="m", revision="r", tenant="t", kv_dtype="float32",
    compute_dtype="float32", quantization="none", config_digest="c", hash_algorithm="sha256",
    hash_seed="s", block_tokens=PAGE, tensor_parallel=1, block_order="o", groups=(),
    rows={"pool": "p"},
)  # fmt: skip


class RowStore(EngineFakeStore):
    """One that knows rows by their namespaces, and whose puts take time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_of: dict[bytes, dict[PageKey, None]] = defaultdict(dict)
        """Keys of the rows of each namespace."""
        self.took_s = 0.0
        """How long a put takes, or a lookup."""
        self.clock = ManualClock()

    def put_objects(  # type: ignore[override]  # engines say other things than programs do
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: object,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Store rows, as FakeStore does."""
        assert not wait, "a full pool would hold the engine's thread"
        assert timeout_s is not None
        self.clock.advance(self.took_s)
        self.rows_of[opened.namespace.id].update(dict.fromkeys(names))
        return super().put_objects(opened, names, source, offsets, size_bytes)

    def lookup(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
        lease_id: int = 0,
    ) -> Found:
        """Find rows, as FakeStore does."""
        self.clock.advance(self.took_s)
        return super().lookup(opened, chain, parts=parts, timeout_s=timeout_s, lease_id=lease_id)

    def list_objects(self, opened: OpenedNamespace) -> list[PageChain]:
        """Keys of a namespace's rows, two a chain."""
        keys = [key for key in self.rows_of[opened.namespace.id] if (key, 0) in self.held]
        return [PageChain(b"".join(keys[i : i + 2])) for i in range(0, len(keys), 2)]


class LatentPool:
    """Pages of one tensor a layer: [layers, tokens, dim], or [pages, layers, tokens, dim]."""

    page_size = PAGE

    def __init__(self, layout: str = "layer_first", seed: int = 0) -> None:
        self.layout = layout
        self.dtype = torch.float32
        count = LAYERS * PAGES * PAGE * DIM
        flat = torch.arange(count, dtype=torch.float32) + 1 + seed * count
        shape: tuple[int, ...] = (LAYERS, PAGES * PAGE, DIM)
        if layout == "page_first_direct":
            shape = (PAGES, LAYERS, PAGE, DIM)
        self.kv_buffer = flat.view(shape)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        places: list[int] = []
        for index in indices.tolist()[::PAGE]:
            if self.layout == "page_first_direct":
                places.append(self.kv_buffer[index // PAGE].data_ptr())
            elif self.layout == "layer_first":
                places += [layer[index].data_ptr() for layer in self.kv_buffer]
            else:
                raise ValueError(f"Unsupported layout: {self.layout}")
        pieces = len(places) * PAGE // len(indices)
        return places, [LAYERS * PAGE * DIM * 4 // pieces] * len(places)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(LAYERS * PAGE * DIM)

    def page(self, number: int) -> torch.Tensor:
        if self.layout == "page_first_direct":
            return self.kv_buffer[number]
        return self.kv_buffer[:, number * PAGE : (number + 1) * PAGE]


class MHATokenToKVPoolHost(LatentPool):
    """One whose class says that it has heads, as SGLang calls it."""


class StatePool(LatentPool):
    """A state is one row, whatever the tokens before it."""

    page_size = 1

    def __init__(self, seed: int = 0, temporal_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(seed=seed)
        self.conv_dtype, self.temporal_dtype = torch.bfloat16, temporal_dtype
        self.kv_buffer = torch.arange(PAGES * DIM, dtype=torch.float32).view(PAGES, DIM) + 1 + seed

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        return [self.kv_buffer[i].data_ptr() for i in indices.tolist()], [DIM * 4] * len(indices)


def config_of(rank: int = 0, ranks: int = 1, *, is_mla: bool = False, **other: object) -> Sglang:
    """A HiCacheStorageConfig."""
    values: dict[str, object] = {
        "tp_rank": rank, "tp_size": ranks, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": is_mla, "dcp_size": 1, "should_split_heads": False,
        "tp_lcm_size": None, **other,
    }  # fmt: skip
    return SimpleNamespace(**values)


def transfer(name: str, keys: Sequence[str], policy: str = "all_pages", at: int = 0) -> Sglang:
    """A PoolTransfer of pages, or states, from place `at` on."""
    size = 1 if name == "mamba" else PAGE
    indices = torch.arange(at * size, (at + len(keys)) * size)
    return SimpleNamespace(name=name, keys=list(keys), hit_policy=policy, host_indices=indices)


class Rank:
    """One rank's tier; all ranks of a test share a store."""

    def __init__(
        self,
        store: RowStore | None = None,
        config: Sglang = None,
        pool: LatentPool | None = None,
        *,
        is_flat: bool = False,
        fields: EngineFields = FIELDS,
    ) -> None:
        self.store = store or RowStore()
        self.clock = self.store.clock
        self.kv = pool or LatentPool()
        (self.namespace,) = namespaces(fields)
        self.pool = EnginePool(lambda: self.store, [self.namespace], self.clock)
        self.config = config or config_of()
        self.tier = Tier(self.config, is_flat=is_flat)
        self.tier.add_kv(self.kv)
        self.tier.open(Rows(self.pool, self.namespace, self.clock, 1.0))

    def key(self, digest: str) -> bytes:
        """Of the row of one of this rank's pages of KV."""
        share = share_of(self.kv, KV, self.config)
        name = f"{KV}/{self.tier.page_bytes}/{self.kv.dtype}/{share}/{digest}"
        return engine_key(self.namespace.id, name.encode())
