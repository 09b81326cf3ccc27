"""Pages that reach a device through host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from kvstore.client import device_mover, performer
from kvstore.client.device_mover import DeviceMover
from kvstore.client.staging import SpareBuffers
from kvstore.transfer import bounce
from kvstore.transfer.bounce import Bounces
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.device import CpuDevice
from kvstore.transfer.transport import ReadSpan
from tests.unit.hbm_segments import reference

if TYPE_CHECKING:
    import pytest

    from kvstore.transfer.choice import Choice
    from kvstore.transfer.memory import Memory
    from kvstore.wire.messages.common import SegmentRef

SIZE = 4096
PIECE_S = 0.4


class SlowWay:
    """The only transport there is: each read takes PIECE_S of the clock that it is."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timeouts_s: list[float] = []

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_s

    def transport(self, segment: SegmentRef, timeout_s: float) -> SlowWay:
        """Itself, for every segment."""
        del segment, timeout_s
        return self

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """Take note of the timeout."""
        del into
        self.timeouts_s.append(round(timeout_s, 6))
        self.now_s += PIECE_S
        return bytes(len(span))


def test_the_pieces_of_a_read_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    way, device = SlowWay(), CpuDevice()
    clock = SimpleNamespace(monotonic=way.monotonic)
    monkeypatch.setattr(device_mover, "time", clock)
    monkeypatch.setattr(performer, "time", clock)
    monkeypatch.setattr(bounce, "GROUP_BYTES", SIZE)
    bounces, buffers = Bounces(device, SIZE), SpareBuffers(lambda size: Buffer(1, size))
    block = device.allocate(4 * SIZE)
    mover = DeviceMover(cast("Choice", way), block, bounces, buffers.take)
    column = bytes(4 * 8)
    places = tuple(range(0, 4 * SIZE, SIZE))
    span = ReadSpan(reference(1), 0, SIZE, bytes(4 * 32), column, column, column, places)
    assert mover.read([span], 1.0) == [bytes(4)]
    assert way.timeouts_s == [1.0, 0.6, 0.2, 0.0]
    buffers.close()
    bounces.close()
