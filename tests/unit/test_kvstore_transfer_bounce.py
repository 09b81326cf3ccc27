"""Bounce buffers, checksums of device memory, and reads that end on a device."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import BadValue, Unavailable
from kvstore.page import payload_checksum
from kvstore.transfer import bounce
from kvstore.transfer.bounce import (
    BUFFERS,
    Bounces,
    checksums,
    read_to_device,
    span_checksums_on_device,
    wipe,
)
from kvstore.transfer.device import CpuDevice, Move
from kvstore.transfer.transport import IngestSpan, ReadSpan, span_checksums
from kvstore.wire.messages.common import Outcome
from tests.devices import DEVICES, TamperedDevice, device_named
from tests.fakes import payload
from tests.unit.hbm_segments import host, reference
from tests.unit.worker_scripts import key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.transfer.device import Block, Device
    from kvstore.transfer.memory import Memory

PAGES = 7
SIZE = 1000
KEYS = [key(i) for i in range(PAGES)]
PAYLOADS = [payload(each, 0, SIZE) for each in KEYS]
PLACES = tuple(5 + i * 1234 for i in reversed(range(PAGES)))
SEGMENT = reference(1)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


@pytest.fixture
def bounces(device: Device) -> Iterator[Bounces]:
    made = Bounces(device, 16 * 4096)
    yield made
    made.close()


def block_with_pages(device: Device) -> Block:
    block = device.allocate(10_000)
    moves = [Move(place, i * SIZE, SIZE) for i, place in enumerate(PLACES)]
    block.copy_from(host(b"\xee" * 10_000), [Move(0, 0, 10_000)])
    block.copy_from(host(b"".join(PAYLOADS)), moves)
    return block


def held_by(block: Block) -> bytes:
    into = host(bytes(block.size_bytes))
    block.copy_to(into, [Move(0, 0, block.size_bytes)])
    return bytes(into.view)


def ingest_span() -> IngestSpan:
    return IngestSpan(
        1, SEGMENT, 1, 1, 0, SIZE, 64, bytes(32), b"".join(KEYS), bytes(8 * PAGES), PLACES
    )


def read_span() -> ReadSpan:
    column = bytes(8 * PAGES)
    return ReadSpan(SEGMENT, 0, SIZE, b"".join(KEYS), column, column, column, PLACES)


@pytest.mark.parametrize("group_bytes", [1, 2 * SIZE, 1 << 20])
def test_checksums_are_the_writers(
    device: Device, bounces: Bounces, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounce, "GROUP_BYTES", group_bytes)
    want = array("Q", [payload_checksum(p, k, 0) for p, k in zip(PAYLOADS, KEYS, strict=True)])
    block = block_with_pages(device)
    assert span_checksums_on_device(ingest_span(), block, bounces) == want.tobytes()
    assert span_checksums(ingest_span(), memoryview(held_by(block))) == want.tobytes()


def test_a_page_larger_than_a_bounce_buffer_is_refused() -> None:
    device = CpuDevice()
    small = Bounces(device, 4096)
    block = device.allocate(8192)
    with pytest.raises(BadValue, match="move: got"):
        checksums(block, [0], 4097, [0], small)
    with pytest.raises(BadValue, match="move: got"):
        checksums(block, [8192 - 10], 11, [0], small)
    small.close()


def test_wiped_places_are_zeros_and_nothing_else_is(device: Device, bounces: Bounces) -> None:
    block = block_with_pages(device)
    want = bytearray(held_by(block))
    for place in PLACES[2:4]:
        want[place : place + SIZE] = bytes(SIZE)
    wipe(block, PLACES[2:4], SIZE, bounces)
    wipe(block, (), SIZE, bounces)
    assert held_by(block) == want


@pytest.mark.parametrize("group_bytes", [1, 3 * SIZE, 1 << 20])
def test_a_read_lands_on_the_device_and_refused_pages_as_zeros(
    device: Device, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounce, "GROUP_BYTES", group_bytes)
    wanted = read_span()

    def read(span: ReadSpan, into: Memory) -> bytes:
        outcomes = bytearray()
        for i, place in enumerate(span.places):
            number = KEYS.index(span.keys[i * 32 : (i + 1) * 32])
            data, code = PAYLOADS[number], Outcome.OK
            if number in (2, 3):
                data, code = bytes(SIZE), Outcome.STALE
            into.view[place : place + SIZE] = data
            outcomes.append(code)
        return bytes(outcomes)

    block = device.allocate(10_000)
    block.copy_from(host(b"\xee" * 10_000), [Move(0, 0, 10_000)])
    outcomes = read_to_device(read, wanted, block, host(bytes(16 * 4096)))
    assert outcomes == bytes((0, 0, Outcome.STALE, Outcome.STALE, 0, 0, 0))
    want = bytearray(b"\xee" * 10_000)
    for i, place in enumerate(PLACES):
        want[place : place + SIZE] = bytes(SIZE) if i in (2, 3) else PAYLOADS[i]
    assert held_by(block) == want


def test_who_finds_no_buffer_waits_for_one() -> None:
    bounces = Bounces(CpuDevice(), 4096)
    got = threading.Event()

    def third() -> None:
        with bounces.one():
            got.set()

    waiting = threading.Thread(target=third)
    with bounces.one() as first:
        with bounces.one() as second:
            assert first.address != second.address
            waiting.start()
            assert BUFFERS == 2
            assert not got.is_set()
        got.wait()
    waiting.join()
    bounces.close()


def test_buffers_are_pinned_and_the_pins_undone() -> None:
    device = TamperedDevice()
    bounces = Bounces(device, 4096)
    assert device.pinned == BUFFERS * 4096
    bounces.close()
    bounces.close()
    assert device.pinned == 0


def test_memory_that_cannot_be_pinned_leaves_nothing_behind() -> None:
    device = TamperedDevice()
    pin = device.pin

    def second_fails(address: int, size_bytes: int) -> object:
        if device.pinned:
            raise Unavailable("CUDA: cuMemHostRegister_v2 failed")
        return pin(address, size_bytes)

    device.pin = second_fails  # type: ignore[method-assign,assignment]  # the test's own device
    with pytest.raises(Unavailable):
        Bounces(device, 4096)
    assert device.pinned == 0
