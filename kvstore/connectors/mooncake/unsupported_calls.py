"""Calls of Mooncake Store that have no meaning for this pool, or are not offered.

Each answers with a code that says so, in the form that the call has, and logs once what to do.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvstore.connectors.mooncake.codes import Code
from kvstore.connectors.mooncake.tensor_calls import TensorCalls

if TYPE_CHECKING:
    from collections.abc import Sequence


_LOG: Final = logging.getLogger("kvharbor")
NOT_OFFERED: Final = Code.UNAVAILABLE_IN_CURRENT_MODE
TaskId = tuple[int, int]
_NO_TASK: Final = (0, 0)


def refuse(call: str, instead: str) -> Code:
    """Say that a call is not offered, and what to do instead."""
    _LOG.error("mooncake: %s is not offered: %s", call, instead)
    return NOT_OFFERED


class UnsupportedCalls(TensorCalls):
    """What programs may call, and be refused."""

    # Memory: pool workers lend it, clients do not.

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """There are no clients that work through another one: all of them map workers' memory."""
        del mem_pool_size, local_buffer_size, server_address
        return refuse("setup_dummy", "call setup, which shares memory with workers by itself")

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 0) -> int:
        """The transfer engine alone, without a store."""
        del protocol, device_name, mount_segment_size
        return refuse("init_all", "call setup")

    def alloc_from_mem_pool(self, size: int) -> int:
        """Memory of a dummy client: none, so no address."""
        del size
        refuse("alloc_from_mem_pool", "use memory of your own")
        return 0

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, object]:
        """Memory that a client lends."""
        del path, size, offset, protocol, location
        return {"ret": refuse("mount_segment", "start kvharbor-worker"), "segment_ids": []}

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, object]:
        """Memory that a client lends."""
        del size, protocol, location
        code = refuse("allocate_and_mount_segment", "start kvharbor-worker")
        return {"ret": code, "segment_ids": [], "allocated_size": 0}

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Nothing is mounted."""
        del segment_ids, grace_period_seconds
        return refuse("unmount_segment", "kvharbor drain empties a worker")

    def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Nothing is mounted."""
        del segment_ids, grace_period_seconds
        return refuse("unmount_and_free_segment", "kvharbor drain empties a worker")

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Nothing is mounted."""
        del grace_period_seconds
        return refuse("unmount_local_disk_segment", "kvharbor drain empties a worker")

    def get_offload_rpc_read_count(self) -> int:
        """Reads from disks of other clients: none, workers serve their disks."""
        return 0

    # Copies and moves by wish: an operator's.

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """No task, and why."""
        del key, targets
        return _NO_TASK, refuse("create_copy_task", "see kvharbor copy, or put with replica_num")

    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """No task, and why."""
        del key, source, target
        return _NO_TASK, refuse("create_move_task", "see kvharbor move")

    def query_task(self, task_id: TaskId) -> tuple[None, int]:
        """There is no task."""
        del task_id
        return None, Code.TASK_NOT_FOUND

    # Tensors on devices, in files.

    def get_tensor_into_cuda(self, key: str, tensor: object) -> int:
        """Mooncake's CUDA builds alone have it."""
        del key, tensor
        return refuse("get_tensor_into_cuda", "get_tensor, then copy_")

    def batch_get_tensor_into_cuda(
        self, keys: Sequence[str], tensors_list: Sequence[object]
    ) -> list[int]:
        """As above."""
        del tensors_list
        return [refuse("batch_get_tensor_into_cuda", "batch_get_tensor, then copy_")] * len(keys)

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> None:
        """No tensor."""
        del key, file_name
        refuse("load_tensor_from_safetensor", "safetensors.torch.load_file, then put_tensor")

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """A code."""
        del key, file_name
        return refuse("save_tensor_to_safetensor", "get_tensor, then safetensors.torch.save_file")
