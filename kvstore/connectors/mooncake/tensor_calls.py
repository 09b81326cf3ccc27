"""Calls about torch tensors: whole, from and into memory, and in shards of tensor parallelism."""

from __future__ import annotations

import ctypes
import logging
from operator import index
from typing import TYPE_CHECKING, Final

from kvstore.connectors.mooncake.addresses import is_memory, lengths_agree, place, slices_of
from kvstore.connectors.mooncake.batch_sessions import BatchSessions
from kvstore.connectors.mooncake.codes import Code
from kvstore.connectors.mooncake.objects import Value
from kvstore.connectors.mooncake.session import name_of
from kvstore.connectors.mooncake.tensor_format import (
    HEADER_BYTES,
    contiguous,
    header_of,
    storable,
    tensor_of,
    unpack,
)
from kvstore.connectors.mooncake.values import DEFAULT_CONFIG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvstore.connectors.mooncake.values import ReplicateConfig

_LOG: Final = logging.getLogger("kvharbor")


class TensorCalls(BatchSessions):
    """A tensor comes back as it was put: its type, its shape, its bytes."""

    # Whole tensors.

    def put_tensor(self, key: str, tensor: object) -> int:
        """Store a tensor."""
        return self.batch_pub_tensor([key], [tensor])[0]

    def pub_tensor(self, key: str, tensor: object, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """Store a tensor, kept as told."""
        return self.batch_pub_tensor([key], [tensor], config)[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[object]) -> list[int]:
        """Store several; a code for each."""
        return self.batch_pub_tensor(keys, tensors_list)

    def batch_pub_tensor(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[object],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """Store several, kept as told."""
        return self._store_tensors(keys, tensors_list, config, replace=False)

    def upsert_tensor(self, key: str, tensor: object) -> int:
        """Store a tensor in place of what is there."""
        return self.batch_upsert_pub_tensor([key], [tensor])[0]

    def upsert_pub_tensor(
        self, key: str, tensor: object, config: ReplicateConfig = DEFAULT_CONFIG
    ) -> int:
        """As `upsert_tensor`, kept as told."""
        return self.batch_upsert_pub_tensor([key], [tensor], config)[0]

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[object]) -> list[int]:
        """Several in place of what is there."""
        return self.batch_upsert_pub_tensor(keys, tensors_list)

    def batch_upsert_pub_tensor(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[object],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """Several in place of what is there, kept as told."""
        return self._store_tensors(keys, tensors_list, config, replace=True)

    def _store_tensors(
        self,
        keys: Sequence[str],
        tensors: Sequence[object],
        config: ReplicateConfig,
        *,
        replace: bool,
    ) -> list[int]:
        if not lengths_agree(keys, tensors):
            return [Code.INVALID_PARAMS] * len(keys)
        values: list[Value] = []
        kept: list[object] = []  # the memory that the values are made of
        for key, tensor in zip(keys, tensors, strict=True):
            value, memory = _value_of(name_of(key), tensor)
            values.append(value)
            kept.append(memory)
        return self._store(values, config, replace=replace)

    def get_tensor(self, key: str) -> Tensor | None:
        """A tensor in memory of its own; None where it is not there, or is none."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Tensor | None]:
        """Several, each as `get_tensor`."""
        found = self._read_new(keys, bytearray)
        return [None if value is None else tensor_of(value) for value in found]

    # Tensors in memory that the program names: the header, then the data.

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store a tensor from memory that holds its header and its data."""
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Several; a code for each."""
        return self._store_from(keys, buffer_ptrs, sizes, DEFAULT_CONFIG, replace=False)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """As `put_tensor_from`, in place of what is there."""
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Several in place of what is there."""
        return self._store_from(keys, buffer_ptrs, sizes, DEFAULT_CONFIG, replace=True)

    def _store_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig,
        *,
        replace: bool,
    ) -> list[int]:
        if not lengths_agree(keys, buffer_ptrs, sizes):
            return [Code.INVALID_PARAMS] * len(keys)
        values = [
            Value(name_of(key), ((at, size),) if _holds_tensor(at, size) else ())
            for key, at, size in zip(keys, buffer_ptrs, sizes, strict=True)
        ]
        return self._store(values, config, replace=replace)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """Read header and data to there: the tensor, which shares that memory, or None."""
        return self.batch_get_tensor_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        """Several, each as `get_tensor_into`."""
        read = self.batch_get_into(keys, buffer_ptrs, sizes)
        return [
            tensor_of(memoryview(_memory(at, got)).cast("B")) if got > 0 else None
            for at, got in zip(buffer_ptrs, read, strict=False)
        ]

    # Shards of tensor parallelism: that of rank r lies under the key with _tp_r behind it.

    def put_tensor_with_tp(
        self, key: str, tensor: object, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Cut a whole tensor along a dimension, and store the shards of all ranks."""
        return self.pub_tensor_with_tp(key, tensor, DEFAULT_CONFIG, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: object,
        config: ReplicateConfig = DEFAULT_CONFIG,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """As `put_tensor_with_tp`, kept as told."""
        done = self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)
        return done[0]

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[object],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Several, each as `put_tensor_with_tp`."""
        return self.batch_pub_tensor_with_tp(
            base_keys, tensors_list, DEFAULT_CONFIG, tp_rank, tp_size, split_dim
        )

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[object],
        config: ReplicateConfig = DEFAULT_CONFIG,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Several, kept as told; of each the first code that is not 0."""
        del tp_rank  # all ranks' shards are stored by any of them
        if tp_size <= 1:
            return self.batch_pub_tensor(base_keys, tensors_list, config)
        if not lengths_agree(base_keys, tensors_list):
            return [Code.INVALID_PARAMS] * len(base_keys)
        codes: list[int] = []
        for key, tensor in zip(base_keys, tensors_list, strict=True):
            shards = _shards(tensor, tp_size, split_dim)
            keys = [shard_key(key, rank, tp_size) for rank in range(len(shards))]
            done = self.batch_pub_tensor(keys, shards, config) or [Code.INVALID_PARAMS]
            codes.append(next((code for code in done if code), Code.OK))
        return codes

    def put_tensor_with_tp_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Cut the tensor in that memory, header and data, as `put_tensor_with_tp` does."""
        return self.batch_put_tensor_with_tp_from(
            [key], [buffer_ptr], [size], tp_rank, tp_size, split_dim
        )[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Several, each as `put_tensor_with_tp_from`."""
        if not lengths_agree(base_keys, buffer_ptrs, sizes):
            return [Code.INVALID_PARAMS] * len(base_keys)
        tensors = [
            tensor_of(memoryview(_memory(at, size)).cast("B")) if _holds_tensor(at, size) else None
            for at, size in zip(buffer_ptrs, sizes, strict=True)
        ]
        return self.batch_put_tensor_with_tp(base_keys, tensors, tp_rank, tp_size, split_dim)

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """The shard of a rank."""
        del split_dim
        return self.get_tensor(shard_key(key, tp_rank, tp_size))

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        """Several shards of a rank."""
        return self.batch_get_tensor([shard_key(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> Tensor | None:
        """The shard of a rank, as `get_tensor_into`."""
        del split_dim
        return self.get_tensor_into(shard_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Tensor | None]:
        """Several shards of a rank, each as `get_tensor_into`."""
        keys = [shard_key(key, tp_rank, tp_size) for key in base_keys]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)


def shard_key(key: str, rank: int, size: int) -> str:
    """Where the shard of a rank lies; the whole tensor where there is one rank."""
    return key if size <= 1 else f"{key}_tp_{rank}"


def _value_of(name: bytes, given: object) -> tuple[Value, object]:
    """An object of header and data, and the memory that it lies in; no bytes for no tensor."""
    tensor = storable(given)
    if tensor is None:
        _LOG.error("mooncake: %r: %s is no tensor that can be stored", name, type(given).__name__)
        return Value(name, ()), None
    header, data = header_of(tensor), contiguous(tensor)
    packed = bytearray(header.pack())
    places = slices_of(packed)
    if header.data_bytes:
        places += ((data.data_ptr(), header.data_bytes),)
    return Value(name, places), (packed, data)


def _shards(given: object, size: int, dimension: int) -> list[Tensor]:
    """One for each rank; none where the tensor cannot be cut so."""
    tensor = storable(given)
    if tensor is None or not -tensor.dim() <= dimension < tensor.dim():
        return []
    shards = list(tensor.chunk(size, dimension))
    return shards if len(shards) == size else []


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size).from_address(index(address))


def _holds_tensor(address: int, size: int) -> bool:
    """Whether a header lies there, and the data that it tells of."""
    address, size = place(address, size)
    if not is_memory(address, size) or size < HEADER_BYTES:
        return False
    header = unpack(ctypes.string_at(address, HEADER_BYTES), size)
    return header is not None
