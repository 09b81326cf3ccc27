"""What an operator is told of the transfer engine when a worker starts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kvstore.clock import SystemClock
from kvstore.rpc.address import TcpAddress
from tests.devices import TamperedDevice
from tests.unit.hbm_segments import opened as hbm_opened
from tests.unit.worker_segments import memory_folder, opened
from workers import program
from workers.config import WorkerConfig

if TYPE_CHECKING:
    from workers.lent_segments import LentSegments

EVERYWHERE = "mooncake: the transfer engine asks nobody for a secret"
DEVICE = "mooncake: that peers only read cpu is a convention"
RDMA = "mooncake over rdma: that peers only read is a convention"


class Child:
    """In the place of the engines' processes."""

    def __init__(self, *_: object) -> None:
        """Start nothing."""

    def close(self) -> None:
        """Nothing runs."""


@pytest.mark.parametrize(
    ("listen", "protocol", "is_enforced", "told"),
    [
        ("127.0.0.1", "tcp", True, []),
        ("127.0.0.1", "tcp", False, [DEVICE]),
        ("10.0.0.1", "tcp", True, [EVERYWHERE]),
        ("10.0.0.1", "rdma", False, [EVERYWHERE, RDMA, DEVICE]),
    ],
)
def test_what_the_engine_does_not_keep_peers_from_is_said(
    listen: str,
    protocol: str,
    is_enforced: bool,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("workers.engine_child.EngineChild", Child)
    config = WorkerConfig(
        id="w", listen=TcpAddress(listen, 1), transports=("tcp", "mooncake"),
        mooncake_protocol=protocol,
    )  # fmt: skip
    device = TamperedDevice()
    device.is_read_only_enforced = is_enforced
    hbm = hbm_opened(device)

    async def start(lent: LentSegments) -> None:
        async with AsyncExitStack() as undo:
            assert program.open_engine(config, lent, SystemClock(), undo) is not None

    with memory_folder() as folder:
        memory, _ = opened(folder / "segment")
        lent = SimpleNamespace(memory=memory, devices=(hbm,))
        asyncio.run(start(cast("LentSegments", lent)))
        memory.close()
    hbm.close()
    for said, want in zip(caplog.messages, told, strict=True):
        assert said.startswith(want)


def test_no_engine_is_started_unless_it_is_asked_for() -> None:
    with_tcp = WorkerConfig(id="w", transports=("shm", "tcp"))
    lent = cast("LentSegments", None)
    assert program.open_engine(with_tcp, lent, SystemClock(), AsyncExitStack()) is None
