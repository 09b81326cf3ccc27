"""Shared memory: descriptors that are handed over, and buffers that are let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import KVStoreError, Unavailable
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer import shm
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.context import TransferContext
from kvstore.wire.messages.common import Address
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.transfers import (
    AttachBuffer,
    DetachBuffer,
    SegmentsShared,
    SharedSegment,
    ShareSegments,
)
from tests.contract.fake_worker import FakeWorker
from tests.fakes import payload
from tests.unit.segment_files import INCARNATION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.framing import Frame

from tests.contract.transport_ways import (
    CHAIN,
    PAGES,
    PLACES,
    SIZE,
    TIMEOUT_S,
    Way,
    hang_up_on,
    ingest_span,
    reply,
)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[FakeWorker]:
    with FakeWorker(tmp_path) as made:
        yield made


@pytest.fixture
def source() -> Iterator[Buffer]:
    made = Buffer(1, PAGES * SIZE)
    for key, place in zip(CHAIN, PLACES, strict=True):
        made.view[place : place + SIZE] = payload(key, 0, SIZE)
    yield made
    made.close()


@pytest.mark.parametrize("say", [hang_up_on(ShareSegments), reply(Done(), ShareSegments)])
def test_a_worker_that_shares_nothing_cannot_be_opened(
    worker: FakeWorker, say: Callable[[FrameSocket, Frame], bool]
) -> None:
    worker.say = say
    with pytest.raises(KVStoreError):
        Way("shm", worker)


@pytest.mark.parametrize("incarnation", [INCARNATION - 1, INCARNATION + 1])
def test_another_life_is_mapped_whatever_its_number(worker: FakeWorker, incarnation: int) -> None:
    way = Way("shm", worker)
    worker.incarnation = incarnation
    span = way.stored()
    for key, place in zip(CHAIN, PLACES, strict=True):
        worker.file.write_record(key, place, SIZE, incarnation=incarnation)
    assert span.segment.incarnation == incarnation
    assert way.read(span) == bytes(PAGES)
    way.transport.close()


def test_fewer_descriptors_than_segments_are_refused(worker: FakeWorker) -> None:
    shared = SharedSegment("s", 1, worker.file.geometry)
    worker.say = reply(SegmentsShared((shared,)), ShareSegments)
    with pytest.raises(KVStoreError, match="0 descriptors came, want 1"):
        Way("shm", worker)


def test_a_path_that_leads_nowhere_is_another_host(tmp_path: Path) -> None:
    address = Address("shm", str(tmp_path / "nobody"), 0)
    context = TransferContext(Identity(Role.ENGINE), address, (address,))
    with pytest.raises(Unavailable):
        shm.open_transport(context, TIMEOUT_S)


def test_buffers_are_attached_once_and_let_go_when_they_close(
    worker: FakeWorker, source: Buffer
) -> None:
    way = Way("shm", worker)
    for _ in range(3):
        way.transport.ingest([ingest_span(worker, "shm")], source.memory, TIMEOUT_S)
    assert sum(isinstance(m, AttachBuffer) for m in worker.seen) == 1
    source.close()
    assert worker.seen[-1] == DetachBuffer(1)
    assert not worker.buffers
    way.transport.close()


def test_a_buffer_that_was_only_dropped_is_let_go_with_the_next(worker: FakeWorker) -> None:
    way = Way("shm", worker)
    dropped = Buffer(5, PAGES * SIZE)
    way.transport.ingest([ingest_span(worker, "shm")], dropped.memory, TIMEOUT_S)
    del dropped
    next_one = Buffer(6, PAGES * SIZE)
    way.transport.ingest([ingest_span(worker, "shm")], next_one.memory, TIMEOUT_S)
    assert [m for m in worker.seen if isinstance(m, DetachBuffer)] == [DetachBuffer(5)]
    assert [number for _, number in worker.buffers] == [6]
    next_one.close()
    way.transport.close()
