"""The plain values of Mooncake Store's interface: settings of a put, descriptors, enumerations.

Names, defaults and numbers are those of 0.3.13. Pure.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Final


class ObjectDataType(IntEnum):
    """What an object holds, as its writer says; nothing here depends on it."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class SoftPinAction(IntEnum):
    """What a put does about the object's soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicaStatus(IntEnum):
    """State of one replica; those that are listed here are COMPLETE."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskStatus(IntEnum):
    """State of a copy or move by wish."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class TaskType(IntEnum):
    """Kind of a copy or move by wish."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class ReplicateConfig:
    """How a put wants its object kept. Attributes that 0.3.13 lacks are refused, as there."""

    __slots__ = (
        "data_type",
        "dfs_replica_num",
        "group_ids",
        "nof_replica_num",
        "prefer_alloc_in_same_node",
        "preferred_nof_segments",
        "preferred_segment",
        "preferred_segments",
        "replica_num",
        "soft_pin_action",
        "soft_pin_ttl_ms",
        "with_hard_pin",
    )

    def __init__(self) -> None:
        """One replica, wherever there is room, without a pin."""
        self.data_type = ObjectDataType.UNKNOWN
        self.dfs_replica_num = 0
        self.group_ids: list[str] | None = None
        self.nof_replica_num = 0
        self.prefer_alloc_in_same_node = False
        self.preferred_nof_segments: list[str] = []
        self.preferred_segment = ""
        self.preferred_segments: list[str] = []
        self.replica_num = 1
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms: int | None = None
        self.with_hard_pin = False

    def __str__(self) -> str:
        fields = ", ".join(f"{name}: {getattr(self, name)}" for name in self.__slots__)
        return f"ReplicateConfig: {{ {fields} }}"


class BufferHandle(bytearray):
    """An object's bytes in memory of its own, that the buffer protocol reaches."""

    def ptr(self) -> int:
        """Where they lie."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def size(self) -> int:
        """How many there are."""
        return len(self)


class Descriptor:
    """Where the bytes of a replica in memory lie."""

    __slots__ = ("buffer_address", "size", "transport_endpoint")

    def __init__(
        self, size: int = 0, buffer_address: int = 0, transport_endpoint: str = ""
    ) -> None:
        """`buffer_address` counts from the beginning of the segment, which the endpoint names."""
        self.size = size
        self.buffer_address = buffer_address
        self.transport_endpoint = transport_endpoint


class MemoryDescriptor:
    """A replica in memory."""

    __slots__ = ("buffer_descriptor",)

    def __init__(self, buffer_descriptor: Descriptor) -> None:
        """Wrap its place."""
        self.buffer_descriptor = buffer_descriptor


class DiskDescriptor:
    """A replica on a disk."""

    __slots__ = ("file_path", "object_size")

    def __init__(self, file_path: str, object_size: int) -> None:
        """`file_path` is the name of the segment, which lies at its worker."""
        self.file_path = file_path
        self.object_size = object_size


class ReplicaDescriptor:
    """One replica of an object."""

    __slots__ = ("_place", "status")

    def __init__(self, place: MemoryDescriptor | DiskDescriptor) -> None:
        """A replica that can be read."""
        self._place = place
        self.status = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        """Whether it lies in memory of a host or a device."""
        return isinstance(self._place, MemoryDescriptor)

    def is_disk_replica(self) -> bool:
        """Whether it lies on a disk that all can reach: never here."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether it lies on a disk of its worker."""
        return isinstance(self._place, DiskDescriptor)

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """RuntimeError where it does not lie in memory."""
        if not isinstance(self._place, MemoryDescriptor):
            raise RuntimeError("Expected MemoryDescriptor")
        return self._place

    def get_disk_descriptor(self) -> DiskDescriptor:
        """RuntimeError where it does not lie on a disk."""
        if not isinstance(self._place, DiskDescriptor):
            raise RuntimeError("Expected DiskDescriptor")
        return self._place


DEFAULT_CONFIG: Final = ReplicateConfig()
"""Of puts that name none; nobody changes it."""
