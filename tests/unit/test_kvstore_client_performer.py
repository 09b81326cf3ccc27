"""Steps carried out where transports lead nowhere, or to workers that fall silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvstore.client.performer import HostMover, Viewer
from kvstore.limits import READ_STALL_MAX_S
from kvstore.page import PageChain
from kvstore.rpc.identity import Identity, Role
from kvstore.segment import Geometry
from kvstore.transfer.choice import Choice
from kvstore.transfer.memory import Memory
from kvstore.transfer.shm import ShmTransport
from kvstore.transfer.transport import ReadSpan
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from tests.fakes import LoopbackTransport, ManualClock, payload
from tests.unit.segment_files import SegmentFile

if TYPE_CHECKING:
    from kvstore.transfer.mapped_segment import HeldSpan

SIZE = 4096


def test_pages_that_were_never_held_can_be_let_go() -> None:
    file = SegmentFile(chunks=1)
    span = file.span(PageChain(payload(b"keys", 0, 64)), [0, SIZE], SIZE, (0, 1))
    file.close()
    viewer = Viewer(Choice(["tcp"], lambda: Identity(Role.ENGINE), ManualClock()))
    assert viewer.read([span], 1.0) == [bytes([Outcome.TRANSPORT] * 2)]
    viewer.wipe(span.places, SIZE)
    viewer.end_or_warn()


class Silent(LoopbackTransport):
    """A worker that answers for no page from `good` on, and lets its reader wait."""

    def __init__(self, clock: ManualClock, good: int) -> None:
        super().__init__()
        self.reads = 0
        self._clock = clock
        self._good = good

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """Say nothing for as long as anybody waits."""
        del into, timeout_s
        self.reads += 1
        self._clock.advance(READ_STALL_MAX_S)
        good = min(self._good, len(span))
        return bytes(good) + bytes([Outcome.TRANSPORT]) * (len(span) - good)


@pytest.mark.parametrize("good", [0, 1])
def test_a_silent_worker_is_waited_for_once_however_many_spans_lie_there(
    monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    clock = ManualClock()
    silent = Silent(clock, good)
    kind = SimpleNamespace(open_transport=lambda context, timeout_s: silent)
    monkeypatch.setattr("kvstore.transfer.choice.load_kind", lambda name: kind)
    monkeypatch.setattr("kvstore.client.performer.time", SimpleNamespace(monotonic=clock.now_s))
    mover = HostMover(
        Choice(["tcp"], lambda: Identity(Role.ENGINE), clock),
        Memory.of("into", bytearray(2 * SIZE), writable=True),
    )
    span = ReadSpan(reference(), 0, SIZE, bytes(64), bytes(16), bytes(16), bytes(16), (0, SIZE))
    gone = bytes([Outcome.TRANSPORT])
    found = mover.read([span] * 3, 10.0)
    assert found == [bytes(good) + gone * (2 - good), gone * 2, gone * 2]
    assert silent.reads == 1


def test_a_silent_worker_is_waited_for_once_by_whoever_wants_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, holds = ManualClock(), []

    class SilentShm(ShmTransport):
        """Holds nothing, and takes its time."""

        def hold(self, span: ReadSpan, timeout_s: float) -> tuple[bytes, list[HeldSpan]]:
            """Say nothing."""
            del timeout_s
            holds.append(span)
            clock.advance(READ_STALL_MAX_S)
            return bytes([Outcome.TRANSPORT]) * len(span), []

    kind = SimpleNamespace(open_transport=lambda context, timeout_s: SilentShm(context))
    monkeypatch.setattr("kvstore.transfer.choice.load_kind", lambda name: kind)
    monkeypatch.setattr("kvstore.client.performer.time", SimpleNamespace(monotonic=clock.now_s))
    viewer = Viewer(Choice(["shm"], lambda: Identity(Role.ENGINE), clock))
    place = reference("shm")
    span = ReadSpan(place, 0, SIZE, bytes(64), bytes(16), bytes(16), bytes(16), (0, 1))
    assert viewer.read([span] * 3, 10.0) == [bytes([Outcome.TRANSPORT] * 2)] * 3
    assert len(holds) == 1
    assert viewer.rank(place, 10.0) is None


def reference(kind: str = "tcp") -> SegmentRef:
    return SegmentRef("s", 1, "dram", Geometry(1 << 26), "w", "h", (Address(kind, "there", 0),))
