"""Mooncake's calls for tensors of any parallelism: whole ones are stored, cut ones are refused.

Whoever names no parallelism stores and reads whole tensors, as with the plain calls. Shards by
axes, and reads that put them together anew, are not offered: the calls for tensor parallelism
(`*_with_tp`) are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.connectors.mooncake.unsupported_calls import UnsupportedCalls, refuse
from kvstore.connectors.mooncake.values import DEFAULT_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvstore.connectors.mooncake.values import ReplicateConfig

_INSTEAD = "put and get whole tensors, or their shards by the calls with _with_tp"


class ParallelAxis:
    """One axis that a tensor is cut along."""

    def __init__(self) -> None:
        """Of no kind."""
        self.kind = ""
        self.rank = 0
        self.size = 1
        self.split_dim: int | None = None
        self.expert_id: int | None = None
        self.stage_id: int | None = None


class TensorParallelism:
    """Which shard of a tensor is meant."""

    def __init__(self) -> None:
        """The whole tensor."""
        self.axes: list[ParallelAxis] = []


class ReadTarget:
    """As what a tensor is wanted."""

    def __init__(self) -> None:
        """As it was stored."""
        self.mode = "as_stored"
        self.parallelism: TensorParallelism | None = None


class ParallelCalls(UnsupportedCalls):
    """Each is the plain call where nothing is to be cut."""

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: object,
        parallelism: object = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partition: object = None,
    ) -> int:
        """See pub_tensor."""
        return self.batch_put_tensor_with_parallelism(
            [key], [tensor], [parallelism], config, [writer_partition]
        )[0]

    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[object],
        parallelisms: Sequence[object] | None = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partitions: Sequence[object] | None = None,
    ) -> list[int]:
        """See batch_pub_tensor."""

        def store() -> list[int]:
            return self.batch_pub_tensor(keys, tensors_list, config)

        return _whole(len(keys), store, parallelisms, writer_partitions)

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: object,
        parallelism: object = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partition: object = None,
    ) -> int:
        """See upsert_pub_tensor."""
        return self.batch_upsert_tensor_with_parallelism(
            [key], [tensor], [parallelism], config, [writer_partition]
        )[0]

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[object],
        parallelisms: Sequence[object] | None = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partitions: Sequence[object] | None = None,
    ) -> list[int]:
        """See batch_upsert_pub_tensor."""

        def store() -> list[int]:
            return self.batch_upsert_pub_tensor(keys, tensors_list, config)

        return _whole(len(keys), store, parallelisms, writer_partitions)

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: object = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partition: object = None,
    ) -> int:
        """See put_tensor_from."""
        return self.batch_put_tensor_with_parallelism_from(
            [key], [buffer_ptr], [size], [parallelism], config, [writer_partition]
        )[0]

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[object] | None = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partitions: Sequence[object] | None = None,
    ) -> list[int]:
        """See batch_put_tensor_from."""

        def store() -> list[int]:
            return self._store_from(keys, buffer_ptrs, sizes, config, replace=False)

        return _whole(len(keys), store, parallelisms, writer_partitions)

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: object = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partition: object = None,
    ) -> int:
        """See upsert_tensor_from."""
        return self.batch_upsert_tensor_with_parallelism_from(
            [key], [buffer_ptr], [size], [parallelism], config, [writer_partition]
        )[0]

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[object] | None = None,
        config: ReplicateConfig = DEFAULT_CONFIG,
        writer_partitions: Sequence[object] | None = None,
    ) -> list[int]:
        """See batch_upsert_tensor_from."""

        def store() -> list[int]:
            return self._store_from(keys, buffer_ptrs, sizes, config, replace=True)

        return _whole(len(keys), store, parallelisms, writer_partitions)

    def get_tensor_with_parallelism(self, key: str, target: object = None) -> Tensor | None:
        """See get_tensor."""
        return self.batch_get_tensor_with_parallelism([key], [target])[0]

    def batch_get_tensor_with_parallelism(
        self, keys: Sequence[str], targets: Sequence[object] | None = None
    ) -> list[Tensor | None]:
        """See batch_get_tensor."""
        if not _as_stored(targets):
            return [None] * len(keys)
        return self.batch_get_tensor(keys)

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: object = None
    ) -> Tensor | None:
        """See get_tensor_into."""
        return self.batch_get_tensor_with_parallelism_into([key], [buffer_ptr], [size], [target])[0]

    def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: Sequence[object] | None = None,
    ) -> list[Tensor | None]:
        """See batch_get_tensor_into."""
        if not _as_stored(targets):
            return [None] * len(keys)
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)


def _whole(count: int, store: Callable[[], list[int]], *cuts: Sequence[object] | None) -> list[int]:
    """Store whole tensors; where one is to be cut, none is stored."""
    if any(cut is not None for each in cuts for cut in each or ()):
        return [refuse("storing by parallelism", _INSTEAD)] * count
    return store()


def _as_stored(targets: Sequence[object] | None) -> bool:
    """Whether all are wanted as they were stored."""
    wanted = [target for target in targets or () if target is not None]
    if all(isinstance(each, ReadTarget) and each.mode == "as_stored" for each in wanted):
        return True
    refuse("reading by parallelism", _INSTEAD)
    return False
