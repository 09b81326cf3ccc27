"""Device to device, with a real worker: pulled out of a client's block, copied into one."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore import limits
from kvstore.client.device_mover import DeviceMover
from kvstore.client.performer import HostMover
from kvstore.client.staging import SpareBuffers
from kvstore.clock import SystemClock
from kvstore.errors import BadValue, BufferClosed, Unavailable
from kvstore.rpc.failure import error_of
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer import worker_devices
from kvstore.transfer.bounce import Bounces
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.choice import Choice
from kvstore.transfer.context import TransferContext
from kvstore.transfer.device import CPU, Move
from kvstore.transfer.shm import open_transport
from kvstore.transfer.transport import IngestSpan, ReadSpan
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import RegisterWorker, ReleaseChunks
from kvstore.wire.messages.transfers import AttachDeviceBuffer, ShareDeviceSegment
from tests.contract.scripted_leader import Leader
from tests.contract.worker_rig import Rig, column, pool, running
from tests.devices import TamperedDevice
from tests.unit.hbm_segments import host
from tests.unit.worker_scripts import CHUNK, EPOCH, PAGE, generation
from tests.unit.worker_segments import Pages, memory_folder
from workers.events import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.performer import Mover
    from kvstore.transfer.device import Block, Device
    from kvstore.transfer.shm import ShmTransport
    from kvstore.wire.messages.base import Message
    from workers.tiers.tier import Segment

OFFSETS = (0, PAGE, 2 * PAGE, CHUNK)
PLACES = (4 * PAGE, 100, PAGE + 100, 6 * PAGE)
ROOM = 8 * PAGE
TIMEOUT_S = 10.0


class Client:
    """A client of the worker's machine, with a device of its own name for the same memory."""

    def __init__(self, rig: Rig, device: Device | None = None) -> None:
        self.rig = rig
        self.device = device or TamperedDevice()
        self.bounces = Bounces(self.device, ROOM)
        self.address = Address("shm", rig.unix.removeprefix("unix:"), 0)
        self.context = TransferContext(Identity(Role.ENGINE), self.address, (self.address,))
        self.transport: ShmTransport = open_transport(self.context, TIMEOUT_S)

    def ref(self, segment: Segment) -> SegmentRef:
        return SegmentRef(
            segment.id, segment.incarnation, segment.tier, segment.geometry, "w", "here",
            (self.address,),
        )  # fmt: skip

    def block(self, pages: Pages) -> Block:
        """The pages in memory of the device."""
        made = self.device.allocate(ROOM)
        rows = zip(PLACES, pages.places(), strict=True)
        moves = [Move(place, at, pages.size) for place, at in rows]
        made.copy_from(host(pages.source), moves)
        return made

    def open_anew(self) -> None:
        """As is done after a call in which nothing moved."""
        self.transport.close()
        self.transport = open_transport(self.context, TIMEOUT_S)

    def ingest(
        self, segment: Segment, pages: Pages, block: Block, timeout_s: float = TIMEOUT_S
    ) -> list[bytes] | None:
        span = IngestSpan(
            EPOCH, self.ref(segment), generation(5), 1, 0, pages.size, 64, bytes(32),
            b"".join(pages.keys), pages.offsets.tobytes(), PLACES,
        )  # fmt: skip
        return self.transport.devices.ingest([span], block, self.bounces, timeout_s)

    def span(self, segment: Segment, pages: Pages) -> ReadSpan:
        return ReadSpan(
            self.ref(segment), 0, pages.size, b"".join(pages.keys), pages.offsets.tobytes(),
            column([generation(5)] * 4), pages.checksums.tobytes(), PLACES,
        )  # fmt: skip

    def read(self, segment: Segment, pages: Pages) -> tuple[bytes | None, list[bytes]]:
        """Outcomes, and what lies at the places of a fresh block."""
        into, seen = self.device.allocate(ROOM), host(bytes(ROOM))
        into.copy_from(host(b"\xee" * ROOM), [Move(0, 0, ROOM)])
        span = self.span(segment, pages)
        found = self.transport.devices.read(span, into, self.bounces, TIMEOUT_S)
        into.copy_to(seen, [Move(0, 0, ROOM)])
        return found, [bytes(seen.view[at : at + pages.size]) for at in PLACES]

    def close(self) -> None:
        self.transport.close()
        self.bounces.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with pool(device=TamperedDevice()) as made:
        yield made


@pytest.fixture
def client(rig: Rig) -> Iterator[Client]:
    made = Client(rig)
    yield made
    made.close()


@pytest.mark.parametrize("size", [100, PAGE])
def test_pages_go_from_block_to_segment_to_block(rig: Rig, client: Client, size: int) -> None:
    pages = Pages(OFFSETS, size=size)
    assert client.ingest(rig.hbm, pages, client.block(pages)) == [bytes(4)]
    assert client.read(rig.hbm, pages) == (bytes(4), pages.payloads)


def test_a_segment_in_memory_is_filled_from_a_block_too(rig: Rig, client: Client) -> None:
    pages = Pages(OFFSETS)
    assert client.ingest(rig.segment, pages, client.block(pages)) == [bytes(4)]
    assert pages.stored(rig.segment) == pages.payloads
    assert client.read(rig.segment, pages) == (None, [b"\xee" * PAGE] * 4), "mapped, not shared"


def test_nothing_of_a_block_stays_with_the_worker(rig: Rig, client: Client) -> None:
    pages, first = Pages(OFFSETS), Pages(OFFSETS, first_key=50)
    client.ingest(rig.segment, first, client.block(first))  # opens all connections
    before = len(os.listdir("/proc/self/fd"))
    block = client.block(pages)
    client.ingest(rig.hbm, pages, block)
    (buffers,) = rig.service.buffers._sessions.values()  # noqa: SLF001 -- nothing else tells
    assert not buffers._held  # noqa: SLF001 -- as above
    block.close()
    del block
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_block_is_kept_until_the_worker_has_closed_it(rig: Rig, client: Client) -> None:
    pages, device, go_on = Pages(OFFSETS), rig.hbm.device, threading.Event()
    assert isinstance(device, TamperedDevice)
    block = client.block(pages)
    left = weakref.ref(block)

    def hang(_: object) -> None:
        go_on.wait()

    device.after_copy = hang
    lost = bytes((Outcome.TRANSPORT,)) * 4
    assert client.ingest(rig.hbm, pages, block, timeout_s=0.2) == [lost]
    del block
    client.open_anew()
    assert left() is not None, "the worker copies out of it"
    device.after_copy = lambda _: None
    go_on.set()
    pages = Pages(OFFSETS, first_key=50)
    assert client.ingest(rig.segment, pages, client.block(pages)) == [bytes(4)]
    assert left() is None
    (buffers,) = rig.service.buffers._sessions.values()  # noqa: SLF001 -- nothing else tells
    assert not buffers._held  # noqa: SLF001 -- as above


def test_a_block_that_cannot_be_opened_now_takes_another_way_and_the_next_one_this(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(OFFSETS)
    block = client.block(pages)

    def fail(_: object, descriptors: list[int]) -> Block:
        for descriptor in descriptors:
            os.close(descriptor)
        raise Unavailable("CUDA: cuIpcOpenMemHandle_v2 failed")

    with monkeypatch.context() as patch:
        patch.setattr(rig.hbm.device, "open", fail)
        assert client.ingest(rig.hbm, pages, block) is None
    with monkeypatch.context() as patch:
        patch.setattr(limits, "BUFFERS_PER_SESSION_MAX", 0)
        assert client.ingest(rig.hbm, pages, block) is None
    assert client.ingest(rig.hbm, pages, block) == [bytes(4)]


def test_pages_that_change_after_they_were_hashed_are_refused(rig: Rig, client: Client) -> None:
    pages, device = Pages(OFFSETS), client.device
    block = client.block(pages)
    assert isinstance(device, TamperedDevice)

    def spoil(_: object) -> None:
        device.after_copy = lambda _: None
        block.copy_from(host(b"\xff\x00"), [Move(PLACES[1] + 5, 0, 2)])

    device.after_copy = spoil
    assert client.ingest(rig.hbm, pages, block) == [bytes((0, Outcome.CHECKSUM, 0, 0))]


def test_memory_that_nobody_else_can_open_takes_another_way(rig: Rig, client: Client) -> None:
    mine = host(bytes(ROOM))
    block = client.device.wrap(mine.address, ROOM, mine)
    assert client.ingest(rig.hbm, Pages(OFFSETS), block) is None


def test_a_device_that_the_worker_does_not_lend_takes_another_way() -> None:
    with pool() as rig:
        client = Client(rig)
        pages = Pages(OFFSETS)
        assert client.ingest(rig.segment, pages, client.block(pages)) is None
        rig.listeners.close()
        assert client.ingest(rig.segment, pages, client.block(pages)) is None, "it is known by now"
        client.close()


def test_a_worker_that_is_gone_is_no_transport(rig: Rig, client: Client) -> None:
    pages = Pages(OFFSETS)
    rig.listeners.close()
    lost = bytes((Outcome.TRANSPORT,)) * 4
    assert client.ingest(rig.hbm, pages, client.block(pages)) == [lost]
    assert client.read(rig.hbm, pages)[0] is None


def test_a_page_that_is_gone_or_damaged_is_not_delivered(rig: Rig, client: Client) -> None:
    pages = Pages(OFFSETS)
    client.ingest(rig.hbm, pages, client.block(pages))
    rig.hbm.records.write_free(Stretch(0, 1, 0, 1, PAGE), PAGE)
    rig.hbm.chunks[0].copy_from(host(b"\xff\x00"), [Move(2 * PAGE, 0, 2)])
    want = bytes((0, Outcome.STALE, Outcome.CHECKSUM, 0))
    payloads = [p if not bad else bytes(PAGE) for p, bad in zip(pages.payloads, want, strict=True)]
    assert client.read(rig.hbm, pages) == (want, payloads)


def test_pages_for_another_device_come_through_the_host(rig: Rig) -> None:
    device = TamperedDevice()
    device.identity = "another"
    client = Client(rig, device)
    assert client.read(rig.hbm, Pages(OFFSETS)) == (None, [b"\xee" * PAGE] * 4)
    client.close()


def test_a_segment_that_cannot_be_shared_is_not_asked_for_again(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(OFFSETS)
    client.ingest(rig.hbm, pages, client.block(pages))
    monkeypatch.setattr(limits, "DESCRIPTORS_SENT_MAX", 4)
    assert client.read(rig.hbm, pages)[0] is None
    monkeypatch.undo()
    assert client.read(rig.hbm, pages)[0] is None
    monkeypatch.setattr(worker_devices, "SHARE_S", 0.0)
    assert client.read(rig.hbm, pages) == (bytes(4), pages.payloads)
    assert release(rig, 3) == Done()
    assert list(rig.hbm.chunks) == [0, 1, 2]


def test_who_finds_a_segment_being_opened_waits_for_its_own_deadline_only(
    rig: Rig, client: Client
) -> None:
    devices, pages = client.transport.devices, Pages(OFFSETS)
    into = client.device.allocate(ROOM)
    with devices._mutex:  # noqa: SLF001 -- held as by a call whose worker hangs
        found = devices.read(client.span(rig.hbm, pages), into, client.bounces, 0.01)
    assert found is None


def test_another_life_of_the_segment_is_opened_anew() -> None:
    leader = Leader()
    try:
        with memory_folder() as folder:
            pages = Pages(OFFSETS)
            with running(folder, leader, device=TamperedDevice()) as rig:
                client = Client(rig)
                client.ingest(rig.hbm, pages, client.block(pages))
                assert client.read(rig.hbm, pages)[0] == bytes(4)
            with running(folder, leader, device=TamperedDevice()) as rig:
                assert client.read(rig.hbm, pages)[0] == bytes((Outcome.STALE,)) * 4
                assert client.ingest(rig.hbm, pages, client.block(pages)) == [bytes(4)]
                assert client.read(rig.hbm, pages) == (bytes(4), pages.payloads)
                client.close()
    finally:
        leader.stop()


def test_memory_that_is_given_back_waits_for_who_has_it_open(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, device = Pages(OFFSETS), rig.hbm.device
    client.ingest(rig.hbm, pages, client.block(pages))
    assert client.read(rig.hbm, pages)[0] == bytes(4)
    full = device.free_bytes
    assert release(rig, 2, 3) == Done()
    assert device.free_bytes == full, "the client has it open"
    assert client.read(rig.hbm, pages)[0] == bytes(4)
    monkeypatch.setattr(worker_devices, "SHARE_S", 0.0)
    assert client.read(rig.hbm, pages)[0] == bytes(4)
    assert device.free_bytes == full + 2 * CHUNK
    assert release(rig, 2, 3) == Done()


def test_memory_that_is_given_back_waits_for_sessions_to_end(rig: Rig) -> None:
    free, other = rig.hbm.device.free_bytes, Client(rig)
    other.read(rig.hbm, Pages(OFFSETS))
    assert release(rig, 0) == Done()
    assert rig.hbm.device.free_bytes == free
    other.close()
    while rig.hbm.device.free_bytes == free:  # the worker's thread hears of the end
        os.sched_yield()
    assert rig.hbm.device.free_bytes == free + CHUNK


def test_memory_in_which_something_lies_is_not_given_back(rig: Rig, client: Client) -> None:
    pages = Pages(OFFSETS)
    client.ingest(rig.hbm, pages, client.block(pages))
    for chunks, text in (((2, 1), "chunks in which nothing lies"), ((4,), "0 to 3")):
        with pytest.raises(BadValue, match=text):
            release(rig, *chunks)
    with pytest.raises(BadValue, match="one whose chunks can be given back"):
        release(rig, 0, segment=rig.segment)
    with pytest.raises(BadValue, match="at least"):
        release(rig, 2, epoch=EPOCH - 1)
    with pytest.raises(BadValue, match="in its life"):
        release(rig, 2, incarnation=1)
    assert list(rig.hbm.chunks) == [0, 1, 2, 3]


def test_a_new_leader_is_told_of_what_was_given_back(rig: Rig) -> None:
    assert release(rig, 1, 3) == Done()
    rig.leader.expect(RegisterWorker)
    rig.control.drop("for this test")
    again = rig.leader.expect(RegisterWorker).segments
    assert [each.released for each in again] == [(), (1, 3)]


def release(
    rig: Rig, *chunks: int, segment: Segment | None = None, epoch: int = EPOCH, incarnation: int = 0
) -> Message:
    """What the worker says to its leader's command."""
    segment = segment or rig.hbm
    command = ReleaseChunks(epoch, segment.id, incarnation or segment.incarnation, chunks)
    answer = rig.leader.command(command)
    if isinstance(answer, Failure):
        raise error_of(answer)
    return answer


def test_handles_travel_over_the_unix_socket_alone(rig: Rig) -> None:
    attach = AttachDeviceBuffer(1, PAGE, CPU, b"", 0)
    share = ShareDeviceSegment(rig.hbm.id, rig.hbm.incarnation)
    with rig.client(rig.tcp) as client:
        for message in (attach, share):
            with pytest.raises(BadValue, match="the Unix socket for it"):
                client.call(message)


def test_what_cannot_be_opened_is_refused(rig: Rig) -> None:
    good = AttachDeviceBuffer(1, PAGE, CPU, b"", 0)
    with rig.client() as client:
        block = TamperedDevice().allocate(PAGE)
        assert client.call(good, fds=block.descriptors) == Done()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(BadValue):
            client.call(msgspec.structs.replace(good, device="cuda-00"))
        for size in (2 * PAGE, 0):
            message = msgspec.structs.replace(good, size_bytes=size)
            with pytest.raises(BufferClosed, match="cannot be opened"):
                client.call(message, fds=block.descriptors)
        for name, incarnation in (("strange", 1), (rig.segment.id, rig.segment.incarnation),
                                  (rig.hbm.id, 1)):  # fmt: skip
            with pytest.raises(BadValue, match="a segment on a device, in the life that it is in"):
                client.call(ShareDeviceSegment(name, incarnation))
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_block_is_read_into_from_a_device_before_memory_and_host_memory_from_memory(
    rig: Rig, client: Client
) -> None:
    choice = Choice(["shm"], lambda: Identity(Role.ENGINE), SystemClock())
    block = client.device.allocate(PAGE)
    refs = [client.ref(rig.hbm), client.ref(rig.segment)]

    def best(mover: Mover) -> str:
        return min(refs, key=lambda ref: mover.rank(ref, TIMEOUT_S) or 0).tier

    buffers = SpareBuffers(lambda size: Buffer(1, size))
    assert best(DeviceMover(choice, block, client.bounces, buffers.take)) == "hbm"
    assert best(HostMover(choice, host(bytes(PAGE)))) == "dram"
    choice.close()
