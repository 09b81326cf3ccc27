"""A client's copies out of a segment on a device of its own machine."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.errors import BufferClosed, Unavailable
from kvstore.transfer.bounce import Bounces
from kvstore.transfer.device import Block, CpuDevice, Move
from kvstore.transfer.device_segment import DeviceSegment
from kvstore.transfer.transport import ReadSpan
from kvstore.wire.messages.common import Outcome
from tests.devices import DEVICES, TamperedDevice, device_named
from tests.unit.hbm_segments import asked, host, opened, put, reference
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE
from tests.unit.worker_segments import Pages
from workers.events import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.transfer.device import Device
    from kvstore.transfer.memory import Memory
    from workers.tiers.hbm import HbmSegment

OFFSETS = (0, PAGE, 5 * PAGE, CHUNK, 3 * CHUNK)
ROOM = 8 * PAGE
PLACES = (3 * PAGE, 0, 100 + PAGE, 6 * PAGE, 5 * PAGE)


class Reader:
    """A worker's segment with pages in it, and a client of the same machine."""

    def __init__(self, device: Device) -> None:
        """The client uses the worker's blocks: opening is the device's own contract."""
        self.pages = Pages(OFFSETS)
        self.worker: HbmSegment = opened(device)
        put(self.worker, self.pages)
        self.bounces = Bounces(device, ROOM)
        fd = self.worker.open_for_reader()
        self.client = DeviceSegment(GEOMETRY, fd, self.worker.chunks, self.bounces)
        os.close(fd)

    def span(self) -> ReadSpan:
        """All pages, at places in some disorder."""
        message = asked(self.worker, self.pages)
        return ReadSpan(
            reference(self.worker.incarnation), 0, PAGE, message.keys,
            message.offsets, message.generations, self.pages.checksums.tobytes(), PLACES,
        )  # fmt: skip

    def expect(self, bad: Sequence[int] = ()) -> bytes:
        """What the destination must hold when these pages are refused."""
        want = bytearray(b"\xee" * ROOM)
        for i, place in enumerate(PLACES):
            want[place : place + PAGE] = bytes(PAGE) if i in bad else self.pages.payloads[i]
        return bytes(want)

    def close(self) -> None:
        """End both."""
        self.bounces.close()
        self.worker.close()


@pytest.fixture(params=DEVICES)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = Reader(device_named(request.param))
    yield made
    made.close()


@pytest.fixture
def tampered() -> Iterator[Reader]:
    made = Reader(TamperedDevice())
    yield made
    made.close()


@pytest.fixture(params=["device", "host"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def destination(reader: Reader, where: str) -> Memory | Block:
    memory = host(b"\xee" * ROOM)
    if where == "host":
        return memory
    block = reader.worker.device.allocate(ROOM)
    block.copy_from(memory, [Move(0, 0, ROOM)])
    return block


def held_by(into: Memory | Block) -> bytes:
    if not isinstance(into, Block):
        return bytes(into.view)
    memory = host(bytes(ROOM))
    into.copy_to(memory, [Move(0, 0, ROOM)])
    return bytes(memory.view)


def test_pages_come_to_their_places(reader: Reader, where: str) -> None:
    into = destination(reader, where)
    assert reader.client.read(reader.span(), into) == bytes(5)
    assert held_by(into) == reader.expect()


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("part", 1, Outcome.STALE),
        ("segment", reference(1), Outcome.STALE),
        ("generations", bytes(40), Outcome.STALE),
        ("keys", bytes(5 * 32), Outcome.STALE),
        ("checksums", bytes(40), Outcome.CHECKSUM),
        ("offsets", array("Q", [PAGE * 7] * 5).tobytes(), Outcome.STALE),
        ("offsets", array("Q", [4 * CHUNK] * 5).tobytes(), Outcome.STALE),
        ("offsets", array("Q", [1 << 63] * 5).tobytes(), Outcome.STALE),
    ],
)
def test_what_is_not_the_page_asked_for_is_refused_and_wiped(
    tampered: Reader, where: str, field: str, value: object, code: Outcome
) -> None:
    into = destination(tampered, where)
    span = msgspec.structs.replace(tampered.span(), **{field: value})
    assert tampered.client.read(span, into) == bytes((code,)) * 5
    assert held_by(into) == tampered.expect(bad=range(5))


def test_a_flipped_bit_in_the_segment_costs_its_page(reader: Reader, where: str) -> None:
    chunk = reader.worker.chunks[0]
    chunk.copy_from(host(b"?"), [Move(PAGE + 17, 0, 1)])
    into = destination(reader, where)
    assert reader.client.read(reader.span(), into) == bytes((0, Outcome.CHECKSUM, 0, 0, 0))
    assert held_by(into) == reader.expect(bad=(1,))


def test_a_page_whose_extent_was_freed_during_the_copy_is_stale(
    tampered: Reader, where: str
) -> None:
    into, device = destination(tampered, where), tampered.worker.device
    assert isinstance(device, TamperedDevice)
    freed = Stretch(0, 1, 0, 5, 5 * PAGE)
    device.after_copy = lambda _: tampered.worker.records.write_free(freed, PAGE)
    assert tampered.client.read(tampered.span(), into) == bytes((0, 0, Outcome.STALE, 0, 0))
    assert held_by(into) == tampered.expect(bad=(2,))


def test_pages_of_chunks_that_were_given_back_are_stale(tampered: Reader, where: str) -> None:
    into = destination(tampered, where)
    fd = tampered.worker.open_for_reader()
    blocks = {n: b for n, b in tampered.worker.chunks.items() if n != 1}
    client = DeviceSegment(GEOMETRY, fd, blocks, tampered.bounces)
    os.close(fd)
    assert client.read(tampered.span(), into) == bytes((0, 0, 0, Outcome.STALE, 0))
    assert held_by(into) == tampered.expect(bad=(3,))


def test_a_device_that_fails_is_a_miss(tampered: Reader, where: str) -> None:
    into, device = destination(tampered, where), tampered.worker.device
    assert isinstance(device, TamperedDevice)

    def fail(_: Sequence[Move]) -> None:
        raise Unavailable("CUDA: cuMemcpyAsync failed")

    device.after_copy = fail
    assert tampered.client.read(tampered.span(), into) == bytes((Outcome.TRANSPORT,)) * 5
    device.after_copy = lambda _: None
    assert held_by(into) == tampered.expect(bad=range(5))


def test_records_of_another_size_are_refused() -> None:
    reader = Reader(CpuDevice())
    fd = os.memfd_create("short")
    with pytest.raises(Unavailable, match="its geometry needs"):
        DeviceSegment(GEOMETRY, fd, {}, reader.bounces)
    os.close(fd)
    reader.close()


def test_a_closed_segment_has_let_its_blocks_go() -> None:
    device = CpuDevice()
    reader = Reader(device)
    block = device.allocate(PAGE)
    fd = reader.worker.open_for_reader()
    client = DeviceSegment(GEOMETRY, fd, {0: block}, reader.bounces)
    os.close(fd)
    client.close()
    client.close()
    with pytest.raises(BufferClosed):
        block.export()
    reader.close()
