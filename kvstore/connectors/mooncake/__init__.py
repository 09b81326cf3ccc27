"""The names of `mooncake.store` (Mooncake Store 0.3.13), on a pool of kvharbor's.

Change `from mooncake.store import ...` into `from kvstore.connectors.mooncake import ...`, or run
the unchanged program as `kvharbor mooncake-shim -- python program.py`. What differs from Mooncake
stands in README.md.
"""

from __future__ import annotations

from kvstore.connectors.mooncake import tensor_format
from kvstore.connectors.mooncake.buffer_pool import BufferLease as BufferLease
from kvstore.connectors.mooncake.buffer_pool import BufferPool as BufferPool
from kvstore.connectors.mooncake.parallel_calls import ParallelAxis as ParallelAxis
from kvstore.connectors.mooncake.parallel_calls import ParallelCalls
from kvstore.connectors.mooncake.parallel_calls import ReadTarget as ReadTarget
from kvstore.connectors.mooncake.parallel_calls import TensorParallelism as TensorParallelism
from kvstore.connectors.mooncake.values import BufferHandle as BufferHandle
from kvstore.connectors.mooncake.values import Descriptor as Descriptor
from kvstore.connectors.mooncake.values import DiskDescriptor as DiskDescriptor
from kvstore.connectors.mooncake.values import MemoryDescriptor as MemoryDescriptor
from kvstore.connectors.mooncake.values import ObjectDataType as ObjectDataType
from kvstore.connectors.mooncake.values import ReplicaDescriptor as ReplicaDescriptor
from kvstore.connectors.mooncake.values import ReplicaStatus as ReplicaStatus
from kvstore.connectors.mooncake.values import ReplicateConfig as ReplicateConfig
from kvstore.connectors.mooncake.values import SoftPinAction as SoftPinAction
from kvstore.connectors.mooncake.values import TaskStatus as TaskStatus
from kvstore.connectors.mooncake.values import TaskType as TaskType

RegisteredBufferLease = BufferLease
RegisteredBufferPool = BufferPool
# What Mooncake's own Python files call.
_serialize_tensor = tensor_format.serialize_tensor
_deserialize_tensor = tensor_format.deserialize_tensor
_tensor_metadata_size = tensor_format.tensor_header_bytes
# Mooncake exports the members of these beside the types.
globals().update(
    {
        member.name: member
        for kind in (ObjectDataType, ReplicaStatus, TaskStatus, TaskType)
        for member in kind
    }
)


class MooncakeDistributedStore(ParallelCalls):
    """All calls of Mooncake's class; each says what it does where it is defined."""
