"""Devices for tests: `cpu`, a CUDA device where there is one, and one that misbehaves."""

from __future__ import annotations

import threading
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Final

import pytest

from kvstore.transfer.cuda import cuda_devices
from kvstore.transfer.device import CPU, CpuDevice, open_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.transfer.device import Device, Move

NO_CUDA_BUILD: Final = "mooncake-transfer-engine-non-cuda"
DEVICES: Final = [CPU, pytest.param("cuda:0", marks=pytest.mark.gpu)]


def device_named(name: str) -> Device:
    """That device; the test is skipped, and says so, where this machine has none of that name."""
    if name not in (CPU, *cuda_devices()):
        pytest.skip(f"this machine has no {name}: nothing of CUDA was tested")
    return open_device(name)


def served_device(name: str) -> Device:
    """The same for tests in which the transfer engine serves its memory: not every build can."""
    device = device_named(name)
    if name != CPU and NO_CUDA_BUILD in {each.name for each in distributions()}:
        pytest.skip(f"{NO_CUDA_BUILD} is installed: the engine was not tested with CUDA")
    return device


class TamperedDevice(CpuDevice):
    """Host memory, and a chance to do something in the middle of what it is asked."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        """Behave, until told otherwise."""
        super().__init__(capacity_bytes)
        self.after_copy: Callable[[Sequence[Move]], None] = lambda _: None
        self.pinned = 0
        self.trims = 0
        self.asked_by: list[int] = []
        """Threads that had their work noted."""
        self.waits = 0

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy, then whatever `after_copy` does."""
        super().copy(moves)
        self.after_copy(moves)

    def asked(self) -> Callable[[], object]:
        """Count the waits."""
        self.asked_by.append(threading.get_ident())

        def wait() -> None:
            self.waits += 1

        return wait

    def pin(self, address: int, size_bytes: int) -> Callable[[], object]:
        """Count the bytes that are pinned."""
        del address
        self.pinned += size_bytes

        def unpin() -> None:
            self.pinned -= size_bytes

        return unpin

    def trim(self) -> None:
        """Count."""
        self.trims += 1
