"""Pages on a disk, read by real transports from a real worker: copies, views, deaths, damage."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import BadValue
from kvstore.page import payload_checksum
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer import shm, tcp
from kvstore.transfer.context import TransferContext
from kvstore.transfer.memory import Memory
from kvstore.transfer.transport import ReadSpan
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.transfers import (
    ReleaseStaged,
    SegmentsShared,
    ShareSegments,
    Staged,
    StageExtents,
)
from tests.contract.scripted_leader import PATIENCE_S, Leader
from tests.contract.worker_rig import Rig, column, pool, running
from tests.fake_disk import FakeDisk
from tests.fakes import ManualClock, payload
from tests.unit import nvme_parts
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE, generation, key
from tests.unit.worker_segments import memory_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.transfer.transport import Transport
    from workers.tiers.part_io import PartRead, PartToRead

SLOTS = CHUNK // PAGE
NUMBERS = range(1, SLOTS + 5)
"""Pages on the disk: more than can be staged at once."""


@pytest.fixture
def disk() -> FakeDisk:
    made = FakeDisk()
    segment, _ = nvme_parts.opened(made)
    found = segment.write(nvme_parts.parts_at(*(offset_of(number) for number in NUMBERS)))
    assert not any(each.outcome for each in found)
    segment.close()
    return made


@pytest.fixture
def rig(disk: FakeDisk) -> Iterator[Rig]:
    with pool(disk) as made:
        yield made


def offset_of(number: int) -> int:
    return (number - 1) * PAGE


def opened(rig: Rig, kind: str = "shm") -> Transport:
    where = rig.unix.removeprefix("unix:") if kind == "shm" else rig.tcp
    address = Address(kind, where, 0)
    context = TransferContext(Identity(Role.ENGINE), address, (address,))
    if kind == "shm":
        return shm.open_transport(context, PATIENCE_S)
    return tcp.open_transport(context, PATIENCE_S)


def shm_of(rig: Rig) -> shm.ShmTransport:
    made = opened(rig)
    assert isinstance(made, shm.ShmTransport)
    return made


def span(rig: Rig, numbers: Sequence[int]) -> ReadSpan:
    """What a lookup leads to."""
    segment = SegmentRef(rig.nvme.id, rig.nvme.incarnation, "nvme", GEOMETRY, "w", "host", ())
    keys = [key(number) for number in numbers]
    return ReadSpan(
        segment, 0, PAGE, b"".join(keys), column([offset_of(number) for number in numbers]),
        column([generation(5)] * len(keys)),
        column([payload_checksum(payload(each, 0, PAGE), each, 0) for each in keys]),
        tuple(range(0, len(keys) * PAGE, PAGE)),
    )  # fmt: skip


def question(rig: Rig, numbers: Iterable[int]) -> StageExtents:
    asked = span(rig, list(numbers))
    return StageExtents(
        asked.segment.segment, asked.segment.incarnation, 0, PAGE, asked.keys, asked.offsets,
        asked.generations, 0.0,
    )  # fmt: skip


def read(rig: Rig, way: Transport, numbers: Sequence[int], timeout_s: float = PATIENCE_S) -> bytes:
    """Read; every OK page's bytes are right, every other place is zero."""
    into = Memory.of("into", bytearray(b"\xee" * (len(numbers) * PAGE)), writable=True)
    outcomes = way.read(span(rig, numbers), into, timeout_s)
    for i, number in enumerate(numbers):
        found = bytes(into.view[i * PAGE : (i + 1) * PAGE])
        assert found == (bytes(PAGE) if outcomes[i] else payload(key(number), 0, PAGE)), number
    return outcomes


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_pages_on_a_disk_are_read(rig: Rig, kind: str) -> None:
    way = opened(rig, kind)
    for _ in range(2):
        assert read(rig, way, NUMBERS) == bytes(len(NUMBERS))
    way.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_damage_on_the_disk_is_a_miss(rig: Rig, disk: FakeDisk, kind: str) -> None:
    place = GEOMETRY.payload_base + offset_of(3) + 7
    disk.names[nvme_parts.PATH].flip(8 * place)
    way = opened(rig, kind)
    want = bytearray(len(NUMBERS))
    want[2] = Outcome.CHECKSUM
    assert read(rig, way, NUMBERS) == bytes(want)
    way.close()


def test_clients_map_memory_alone(rig: Rig) -> None:
    assert rig.service.staging is not None
    with rig.client() as client:
        reply = client.call(ShareSegments())
        assert isinstance(reply, SegmentsShared)
        names = [each.segment for each in reply.segments]
        assert names == [rig.segment.id, rig.service.staging.segment.id]
        for fd in client.link.take_fds(2):
            os.close(fd)


def test_views_outlast_whatever_else_is_staged(rig: Rig) -> None:
    viewer, other = shm_of(rig), shm_of(rig)
    numbers = NUMBERS[:10]
    outcomes, found = viewer.hold(span(rig, numbers), PATIENCE_S)
    assert outcomes == bytes(len(numbers))
    for _ in range(3):
        assert read(rig, other, NUMBERS) == bytes(len(NUMBERS))
    for held in found:
        for place, view in zip(held.places, held.views, strict=True):
            assert view is not None
            assert bytes(view) == payload(key(numbers[place // PAGE]), 0, PAGE)
    assert [held.end() for held in found] == [0] * len(found)
    viewer.close()
    other.close()


def test_only_neighbours_of_one_host_stage(rig: Rig) -> None:
    with rig.client(rig.tcp) as client, pytest.raises(BadValue, match="the Unix socket"):
        client.call(question(rig, [1]))


def test_a_worker_without_disks_stages_nothing() -> None:
    with pool() as rig, rig.client() as client:
        for message in (
            StageExtents("x", 1, 0, PAGE, key(1), bytes(8), bytes(8), 0.0),
            ReleaseStaged(b"", b""),
        ):
            with pytest.raises(BadValue, match="NVMe segments"):
                client.call(message)


def test_a_client_that_dies_gives_its_slots_back(disk: FakeDisk) -> None:
    # The clock stands still: nothing ends by itself.
    with memory_folder() as folder:
        leader = Leader()
        try:
            with running(folder, leader, clock=ManualClock(), disk=disk) as rig:
                way = opened(rig)
                with rig.client() as client:
                    staged = client.call(question(rig, NUMBERS[:SLOTS]))
                    assert isinstance(staged, Staged)
                    assert staged.outcomes == bytes(SLOTS)
                assert read(rig, way, NUMBERS[SLOTS:]) == bytes(len(NUMBERS) - SLOTS)
                way.close()
        finally:
            leader.stop()


def test_a_worker_that_restarts_in_the_middle_of_a_read_is_read_again(
    disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()
    with memory_folder() as folder:
        leader = Leader()
        try:
            with running(folder, leader, disk=disk) as rig:
                whole = rig.nvme.read

                def slow(parts: Sequence[PartToRead]) -> list[PartRead]:
                    entered.set()
                    leave.wait()
                    return whole(parts)

                monkeypatch.setattr(rig.nvme, "read", slow)
                way = opened(rig)
                came: list[bytes] = []
                first = rig
                reader = threading.Thread(target=lambda: came.append(read(first, way, NUMBERS)))
                reader.start()
                assert entered.wait(PATIENCE_S)
                stopping = threading.Thread(target=rig.listeners.close)
                stopping.start()
                # The connection ends before its thread does.
                reader.join()
                leave.set()
                stopping.join()
                assert came == [bytes([Outcome.TRANSPORT] * len(NUMBERS))]
            with running(folder, leader, disk=disk) as rig:
                old = bytes([Outcome.STALE] * len(NUMBERS))
                assert read(first, way, NUMBERS) == old
                assert read(rig, way, NUMBERS) == bytes(len(NUMBERS))
                way.close()
        finally:
            leader.stop()
