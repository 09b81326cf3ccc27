"""How long a reader bears a worker that says nothing: so that another replica has its turn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import KVStoreError
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer import shm
from kvstore.transfer.context import TransferContext
from kvstore.transfer.data_links import patience_s
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.transfers import ReadExtents, ShareSegments, StageExtents
from tests.contract.fake_worker import FakeWorker
from tests.contract.transport_ways import PAGES, TIMEOUT_S, Way

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.framing import Frame

STALL_S = 0.05
SILENT = bytes([Outcome.TRANSPORT] * PAGES)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[FakeWorker]:
    with FakeWorker(tmp_path) as made:
        yield made


def hushed(worker: FakeWorker, *kinds: type) -> None:
    """Leave these requests without an answer from now on."""

    def say(link: FrameSocket, frame: Frame) -> bool:
        del link
        return isinstance(frame.message, kinds)

    worker.say = say


@pytest.mark.parametrize(
    ("kind", "unanswered"),
    [
        ("tcp", ReadExtents),
        ("tcp nvme", ReadExtents),
        ("shm hbm", ReadExtents),
        ("shm nvme", StageExtents),
        ("shm", ShareSegments),
    ],
)
def test_a_stall_costs_a_reader_little_whichever_way_it_reads(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, kind: str, unanswered: type
) -> None:
    way = Way(kind, worker)
    span = way.stored()
    if unanswered is ShareSegments:
        # Another life of the segment has to be asked for.
        worker.incarnation += 1
        span = way.stored()
    monkeypatch.setattr("kvstore.limits.READ_STALL_MAX_S", STALL_S)
    hushed(worker, unanswered)
    began_s = time.monotonic()
    assert way.read(span) == SILENT
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    way.transport.close()


def test_who_waits_for_room_on_the_worker_s_behalf_waits_longer(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Way("shm nvme", worker)
    span = way.stored()
    monkeypatch.setattr("kvstore.limits.READ_STALL_MAX_S", STALL_S)

    def say(link: FrameSocket, frame: Frame) -> bool:
        if isinstance(frame.message, StageExtents):
            worker.staging.slots = 2 * PAGES if frame.message.timeout_s else 0
            time.sleep(2 * STALL_S if frame.message.timeout_s else 0)
        return False

    worker.say = say
    assert way.read(span) == bytes(PAGES)
    way.transport.close()


def test_a_worker_that_does_not_share_its_memory_is_not_waited_for(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.limits.READ_STALL_MAX_S", STALL_S)
    hushed(worker, ShareSegments)
    address = worker.address("shm")
    began_s = time.monotonic()
    with pytest.raises(KVStoreError):
        shm.open_transport(TransferContext(Identity(Role.ENGINE), address, (address,)), TIMEOUT_S)
    assert time.monotonic() - began_s < TIMEOUT_S / 2


def test_half_of_the_time_is_kept_for_another_replica(worker: FakeWorker) -> None:
    way = Way("tcp", worker)
    span = way.stored()
    hushed(worker, ReadExtents)
    timeout_s = 0.4
    began_s = time.monotonic()
    assert way.transport.read(span, way.into, timeout_s) == SILENT
    assert time.monotonic() - began_s < 0.9 * timeout_s
    way.transport.close()


@pytest.mark.parametrize("left_s", [-1.0, 0.0])
def test_nobody_is_patient_beyond_the_deadline(left_s: float) -> None:
    assert patience_s(time.monotonic() + left_s) == 0.0
