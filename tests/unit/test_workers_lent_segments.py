"""What an operator is told of the segments that a worker lends."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest

from kvstore.config_values import DeviceSpace, SizeBytes
from kvstore.errors import BadValue
from kvstore.transfer.device import Block, Handle
from tests.devices import TamperedDevice
from tests.fakes import ManualClock
from tests.unit.worker_segments import memory_folder
from workers import lent_segments
from workers.config import WorkerConfig

SIZE = SizeBytes(4 << 20)


async def _open_and_close(config: WorkerConfig) -> None:
    async with AsyncExitStack() as undo:
        lent_segments.open_segments(config, "testing", ManualClock(), undo)


def warnings(
    device: TamperedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """What is said of this device when it is lent."""
    monkeypatch.setattr(lent_segments, "open_device", lambda _: device)
    with memory_folder() as folder, caplog.at_level(logging.WARNING):
        config = WorkerConfig(
            id="w", segment_dir=folder, dram=SIZE, chunk=SizeBytes(1 << 20),
            hbm=(DeviceSpace("cpu", SIZE),),
        )  # fmt: skip
        asyncio.run(_open_and_close(config))
    return caplog.messages


@pytest.mark.parametrize("is_enforced", [True, False])
def test_whether_clients_can_only_read_a_device_is_said_at_the_start(
    is_enforced: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = TamperedDevice()
    device.is_read_only_enforced = is_enforced
    told = "cpu: that clients of this host only read is a convention"
    assert warnings(device, monkeypatch, caplog) == ([] if is_enforced else [told])


def test_memory_that_nobody_else_can_open_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Block) -> Handle:
        raise BadValue("block", 4096, "memory of cudaMalloc, not of expandable segments")

    monkeypatch.setattr(Block, "export", refuse)
    (told,) = warnings(TamperedDevice(), monkeypatch, caplog)
    assert told.startswith("cpu: clients of this host cannot open its memory")
    assert "expandable segments" in told
