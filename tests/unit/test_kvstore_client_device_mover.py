"""Pages that reach a device through host memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from kvstore.client import device_mover, performer
from kvstore.client.device_mover import DeviceMover
from kvstore.client.staging import SpareBuffers
from kvstore.transfer import bounce
from kvstore.transfer.bounce import Bounces
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.device import CpuDevice
from kvstore.transfer.transport import IngestSpan, ReadSpan
from tests.devices import TamperedDevice
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

    def note_read(self, by: SlowWay, span: ReadSpan, outcomes: bytes, took_s: float) -> None:
        """Learn nothing."""

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """Take note of the timeout."""
        del into
        self.timeouts_s.append(round(timeout_s, 6))
        self.now_s += PIECE_S
        return bytes(len(span))


class NotingWay(SlowWay):
    """Takes note of how often the device was waited for before it was asked."""

    def __init__(self, device: TamperedDevice) -> None:
        super().__init__()
        self.device = device
        self.waits: list[int] = []

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """Take note."""
        self.waits.append(self.device.waits)
        return super().read(span, into, timeout_s)

    def ingest(self, spans: list[IngestSpan], source: Memory, timeout_s: float) -> list[bytes]:
        """Take note."""
        del source, timeout_s
        self.waits.append(self.device.waits)
        return [bytes(len(span)) for span in spans]


def test_the_work_of_the_thread_that_called_is_waited_for_in_the_one_that_moves() -> None:
    device = TamperedDevice()
    way, block = NotingWay(device), device.allocate(SIZE)
    device.after_copy = lambda _: way.waits.append(device.waits)
    bounces, buffers = Bounces(device, SIZE), SpareBuffers(lambda size: Buffer(1, size))
    read = ReadSpan(reference(1), 0, SIZE, bytes(32), bytes(8), bytes(8), bytes(8), (0,))
    put = IngestSpan(1, reference(1), 1, 1, 0, SIZE, 64, bytes(32), bytes(32), bytes(8), (0,))
    for move in (lambda mover: mover.read([read], 1.0), lambda mover: mover.ingest([put], 1.0)):
        way.waits, device.waits, device.asked_by = [], 0, []
        mover = DeviceMover(cast("Choice", way), block, bounces, buffers.take)
        assert device.waits == 0
        thread = threading.Thread(target=move, args=(mover,))
        thread.start()
        thread.join()
        assert device.asked_by == [threading.get_ident()]
        assert way.waits == [1, 1]  # the transport, and the copy before or after it
    buffers.close()
    bounces.close()


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
