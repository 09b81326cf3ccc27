"""Memory of a device behind the worker's engines: served chunk by chunk, landed in, given back."""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from typing import TYPE_CHECKING, Final

import pytest

from kvstore.errors import ConfigError, OutOfSpace, Unavailable
from kvstore.transfer.device import Block, CpuDevice, Move
from kvstore.transfer.memory import Memory
from kvstore.transfer.mooncake_process import EngineProcess, EngineSettings
from kvstore.wire.messages.engine import EnginePull, EnginePush
from kvstore.wire.messages.puts import EngineSource
from tests.contract.engine_worker import kill
from tests.contract.worker_rig import column, soon
from tests.devices import DEVICES, TamperedDevice, served_device
from tests.unit.hbm_segments import opened
from tests.unit.worker_scripts import CHUNK, PAGE
from tests.unit.worker_segments import sealed_memfd
from workers.engine_child import LANDING, EngineChild

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.transfer.device import Device
    from workers.tiers.hbm import HbmSegment

SETTINGS: Final = EngineSettings()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return served_device(request.param)


@pytest.fixture
def small() -> CpuDevice:
    """A device that says how much of it is taken."""
    return TamperedDevice(4 * CHUNK)


def filled(device: Device) -> HbmSegment:
    """A segment in whose chunks each page holds its chunk's number, and its own."""
    segment = opened(device)
    for number, block in segment.chunks.items():
        data = bytearray(b"".join(page_of(number, i) for i in range(CHUNK // PAGE)))
        block.copy_from(Memory.of("data", data, writable=True), [Move(0, 0, CHUNK)])
    return segment


def page_of(chunk: int, page: int) -> bytes:
    return bytes((chunk + 1, page)) * (PAGE // 2)


def addresses(engine: EngineChild, segment: HbmSegment) -> list[int]:
    found = engine.find(segment.id)
    assert found.block_bytes == CHUNK
    return list(array("Q", found.addresses))


class Peer:
    """An engine of somebody else, with room for two pages."""

    def __init__(self) -> None:
        self.process = EngineProcess(SETTINGS)
        self.fd = sealed_memfd(bytes(2 * PAGE))
        self.region, self.address = self.process.map(
            self.fd, 0, 2 * PAGE, writable=True, served=True
        )

    def read(self, engine: EngineChild, segment: HbmSegment, address: int) -> bytes:
        name = engine.find(segment.id).peer
        self.process.pull(
            EnginePull(name, self.region, PAGE, column([0]), column([address])), soon()
        )
        with open(f"/proc/self/fd/{self.fd}", "rb") as file:
            return file.read(PAGE)

    def write(self, engine: EngineChild, segment: HbmSegment, address: int) -> bool:
        name = engine.find(segment.id).peer
        return self.process.push(EnginePush(name, self.region, PAGE, address), soon())

    def close(self) -> None:
        self.process.close()
        os.close(self.fd)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with contextlib.closing(Peer()) as made:
        yield made


@pytest.fixture
def segment(device: Device) -> Iterator[HbmSegment]:
    made = filled(device)
    yield made
    made.close()


@pytest.fixture
def engine(segment: HbmSegment) -> Iterator[EngineChild]:
    made = EngineChild(SETTINGS, [], [segment])
    yield made
    made.close()


def test_each_chunk_is_read_where_it_lies(
    engine: EngineChild, segment: HbmSegment, peer: Peer
) -> None:
    for chunk, address in enumerate(addresses(engine, segment)):
        for page in (0, 5, CHUNK // PAGE - 1):
            assert peer.read(engine, segment, address + page * PAGE) == page_of(chunk, page)


def test_nobody_writes_into_a_chunk_that_is_served(peer: Peer) -> None:
    segment = filled(CpuDevice())
    engine = EngineChild(SETTINGS, [], [segment])
    for chunk, address in enumerate(addresses(engine, segment)):
        # By another peer each time: one that was refused has lost its connection.
        with contextlib.closing(Peer()) as stranger:
            assert not stranger.write(engine, segment, address)
        assert peer.read(engine, segment, address) == page_of(chunk, 0)
    engine.close()
    segment.close()


def test_a_chunk_that_is_served_writable_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: EngineProcess, block: Block) -> tuple[int, int]:
        return self.map(block.descriptors[0], 0, block.size_bytes, writable=True, served=True)

    monkeypatch.setattr(EngineProcess, "map_block", careless)
    device = CpuDevice(4 * CHUNK)
    segment = opened(device)
    with pytest.raises(ConfigError, match="a peer could write"):
        EngineChild(SETTINGS, [], [segment])
    # What was opened for it is closed: the device gets its memory back.
    segment.release(range(4))
    assert device.free_bytes == 4 * CHUNK
    segment.close()


def test_a_chunk_is_given_back_once_it_is_served_no_more(small: CpuDevice, peer: Peer) -> None:
    segment = filled(small)
    engine = EngineChild(SETTINGS, [], [segment])
    before = addresses(engine, segment)
    segment.release([1, 3])
    assert small.free_bytes == 0
    engine.withdraw(segment.id, [1, 3])
    assert small.free_bytes == 2 * CHUNK
    assert addresses(engine, segment) == [before[0], 0, before[2], 0]
    assert peer.read(engine, segment, before[2]) == page_of(2, 0)
    with pytest.raises(Unavailable):
        peer.read(engine, segment, before[1])
    engine.withdraw(segment.id, [1, 3])
    engine.close()
    segment.close()


def test_a_server_that_died_holds_no_memory(small: CpuDevice, peer: Peer) -> None:
    segment = filled(small)
    engine = EngineChild(SETTINGS, [], [segment])
    kill(engine.server_pid)
    segment.release([0])
    engine.withdraw(segment.id, [0])
    assert small.free_bytes == CHUNK
    # Its replacement opens what is there, and no more than that is kept for it.
    segment.release([1])
    there = addresses(engine, segment)
    assert [bool(address) for address in there] == [False, False, True, True]
    assert small.free_bytes == 2 * CHUNK
    assert peer.read(engine, segment, there[3]) == page_of(3, 0)
    kill(engine.server_pid)
    addresses(engine, segment)
    segment.release([2])
    assert small.free_bytes == 2 * CHUNK
    engine.withdraw(segment.id, [2])
    assert small.free_bytes == 3 * CHUNK
    engine.close()
    segment.release([3])
    assert small.free_bytes == 4 * CHUNK
    segment.close()


def test_pulls_for_a_device_land_in_rooms_of_their_own(
    engine: EngineChild, segment: HbmSegment, peer: Peer
) -> None:
    del segment
    landing = engine.landing
    assert landing is not None
    with open(f"/proc/self/fd/{peer.fd}", "r+b") as file:
        file.write(page_of(8, 1) + page_of(9, 2))
    source = EngineSource(peer.process.peer, column([peer.address, peer.address + PAGE]))
    with landing.one(soon()) as first, landing.one(soon()) as second:
        with pytest.raises(OutOfSpace, match="every room"), landing.one(time.monotonic()):
            raise AssertionError("a third room")
        at = second.address - landing.address
        offsets = column([at + 3 * PAGE, at])
        engine.copy().run(LANDING, source, offsets, PAGE, soon())
        assert bytes(second.view[:PAGE]) == page_of(9, 2)
        assert bytes(second.view[3 * PAGE : 4 * PAGE]) == page_of(8, 1)
        assert not any(first.view)
    with landing.one(time.monotonic()) as room:
        assert room.size_bytes == CHUNK
