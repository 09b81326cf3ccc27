"""Pulls out of a client's memory on a device, into a segment in host memory."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import BadValue, Unavailable
from kvstore.transfer.device import Move
from kvstore.wire.messages.common import Outcome
from tests.devices import DEVICES, TamperedDevice, device_named
from tests.unit.hbm_segments import host
from tests.unit.worker_scripts import PAGE
from tests.unit.worker_segments import Pages, memory_folder, opened
from workers.device_source import DeviceSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.transfer.device import Block, Device
    from workers.tiers.dram import DramSegment

OFFSETS = (0, PAGE, 2 * PAGE, 5 * PAGE)


@pytest.fixture
def segment() -> Iterator[DramSegment]:
    with memory_folder() as folder:
        made, _ = opened(folder / "segment")
        yield made
        made.close()


def block_with(device: Device, data: bytes) -> Block:
    block = device.allocate(len(data))
    block.copy_from(host(data), [Move(0, 0, len(data))])
    return block


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("size", [100, PAGE])
@pytest.mark.parametrize("group_bytes", [PAGE, 1 << 20])
def test_pages_on_a_device_are_pulled_verified_and_sealed(
    segment: DramSegment, name: str, size: int, group_bytes: int
) -> None:
    pages, device = Pages(OFFSETS, size=size), device_named(name)
    block = block_with(device, b"before" + b"".join(reversed(pages.payloads)))
    places = array("Q", [6 + i * size for i in reversed(range(4))])
    source = DeviceSource(block, places, size)
    source.group_bytes = group_bytes
    assert pages.pull(segment, source).run() == bytes(4)
    assert pages.stored(segment) == pages.payloads


def test_a_page_larger_than_a_group_comes_in_pieces(segment: DramSegment) -> None:
    pages, device = Pages((0, 4 * PAGE), size=3 * PAGE + 100), TamperedDevice()
    source = DeviceSource(block_with(device, pages.source), pages.places(), pages.size)
    source.group_bytes = PAGE
    sizes: list[int] = []
    device.after_copy = lambda moves: sizes.extend(move.size_bytes for move in moves)
    assert pages.pull(segment, source).run() == bytes(2)
    assert sizes == [PAGE, PAGE, PAGE, 100] * 2
    assert pages.stored(segment) == pages.payloads


def test_a_block_that_a_client_shares_is_read_where_it_lies(segment: DramSegment) -> None:
    pages, device = Pages(OFFSETS), TamperedDevice()
    theirs = block_with(device, pages.source)
    ours = device.open(theirs.export(), [os.dup(each) for each in theirs.descriptors])
    assert pages.pull(segment, DeviceSource(ours, pages.places(), PAGE)).run() == bytes(4)
    assert pages.stored(segment) == pages.payloads
    ours.close()


def test_a_page_outside_of_the_block_is_refused() -> None:
    block = TamperedDevice().allocate(2 * PAGE)
    for place in (PAGE + 1, 2 * PAGE, (1 << 64) - 1):
        with pytest.raises(BadValue, match=rf"source\.offsets: got {place}, want 0 to {PAGE}"):
            DeviceSource(block, array("Q", [0, place]), PAGE)


def test_a_device_that_fails_is_a_lost_source(segment: DramSegment) -> None:
    pages, device = Pages(OFFSETS), TamperedDevice()
    source = DeviceSource(block_with(device, pages.source), pages.places(), PAGE)

    def fail(_: Sequence[Move]) -> None:
        raise Unavailable("CUDA: cuMemcpyAsync failed")

    device.after_copy = fail
    assert pages.pull(segment, source).run() == bytes((Outcome.SOURCE_LOST,)) * 4
    assert pages.records(segment) == [None] * 4


def test_a_page_that_the_client_changed_after_hashing_is_refused(segment: DramSegment) -> None:
    pages = Pages(OFFSETS)
    block = block_with(TamperedDevice(), pages.source)
    block.copy_from(host(b"\xff\x00"), [Move(PAGE + 5, 0, 2)])
    source = DeviceSource(block, pages.places(), PAGE)
    assert pages.pull(segment, source).run() == bytes((0, Outcome.CHECKSUM, 0, 0))
    source.cancel()
