"""A real worker with a segment on a device: puts, reads over streams, commands, moves, ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.errors import BadValue, Unavailable
from kvstore.transfer.memory import zero_bytes
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import (
    CheckExtents,
    ExtentsConfirmed,
    FreeExtents,
    RegisterWorker,
    RetireExtents,
)
from kvstore.wire.messages.puts import EngineSource, ExtentSource, Ingested, Sealed
from kvstore.wire.messages.transfers import (
    CheckRecords,
    RecordsChecked,
    SegmentsShared,
    ShareSegments,
)
from tests.contract.scripted_leader import Leader
from tests.contract.worker_rig import Rig, column, pool, question, read, running, streamed
from tests.devices import DEVICES, TamperedDevice, device_named
from tests.fake_disk import FakeDisk
from tests.unit.worker_scripts import CHUNK, EPOCH, PAGE, generation
from tests.unit.worker_segments import Pages, memory_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.transfer.device import Device, Move
    from workers.tiers.tier import Segment

OK, STALE = Outcome.OK, Outcome.STALE
HIGH = (0, PAGE, 2 * PAGE, CHUNK)
MIDDLE = (CHUNK, 5 * PAGE, 6 * PAGE, 0)
LOW = (2 * PAGE, CHUNK, CHUNK + PAGE, 0)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


@pytest.fixture
def rig(device: Device) -> Iterator[Rig]:
    with pool(FakeDisk(), device) as made:
        yield made


def put(rig: Rig, size: int = PAGE) -> Pages:
    """Pages in the device's segment, of generation 5."""
    pages = Pages(HIGH, size=size)
    with rig.client() as client:
        client.attach(1, pages.source)
        assert client.call(pages.ingest(rig.hbm)) == Ingested(bytes(4))
    return pages


def moved(
    rig: Rig, source: tuple[Segment, Sequence[int], int], to: tuple[Segment, Sequence[int], int],
    size: int = PAGE,
) -> Pages:  # fmt: skip
    """Have the leader copy pages from (segment, offsets, counter) to another such place."""
    where, offsets, counter = source
    generations = column([generation(counter)] * len(offsets))
    origin = ExtentSource(where.id, where.incarnation, column(list(offsets)), generations)
    target, places, number = to
    pages = Pages(places, size=size)
    answer = rig.leader.command(pages.ingest(target, number, origin))
    assert isinstance(answer, Ingested)
    assert answer.outcomes == bytes(len(offsets))
    return pages


def ordered(
    kind: type[FreeExtents | RetireExtents | CheckExtents], rig: Rig, counter: int = 5
) -> bytes:
    hbm, generations = rig.hbm, column([generation(counter)] * 4)
    message = kind(EPOCH, hbm.id, hbm.incarnation, PAGE, column(list(HIGH)), generations)
    answer = rig.leader.command(message)
    assert isinstance(answer, ExtentsConfirmed)
    return answer.outcomes


def test_the_leader_is_told_of_the_tier(rig: Rig) -> None:
    offers = rig.leader.expect(RegisterWorker).segments
    assert (rig.hbm.id, "hbm") in [(each.segment, each.tier) for each in offers]


@pytest.mark.parametrize("size", [100, PAGE])
def test_pages_of_a_clients_buffer_are_read_over_a_stream(rig: Rig, size: int) -> None:
    pages = put(rig, size)
    assert rig.leader.expect(Sealed).segment == rig.hbm.id
    for address in (rig.unix, rig.tcp):
        with rig.client(address) as client:
            assert read(client, pages, 5, rig.hbm) == (bytes(4), pages.source, bytes(4))
            asked = question(CheckRecords, rig, pages, 5, rig.hbm)
            assert client.call(asked) == RecordsChecked(bytes(4))
            assert read(client, pages, 6, rig.hbm)[0] == bytes((STALE,)) * 4


@pytest.mark.parametrize("size", [100, 3 * PAGE])
def test_pages_that_come_over_a_stream(rig: Rig, size: int) -> None:
    pages = Pages((0, 3 * PAGE, CHUNK), size=size)
    with rig.client(rig.tcp) as client:
        request = client.send(streamed(pages.ingest(rig.hbm)), raw=[pages.source])
        assert client.reply(request) == Ingested(bytes(3))
        assert read(client, pages, 5, rig.hbm)[1] == pages.source


def test_a_client_that_dies_in_the_middle_leaves_free_extents(rig: Rig) -> None:
    pages = Pages(HIGH)
    with rig.client(rig.tcp) as client:
        client.send(streamed(pages.ingest(rig.hbm)), raw=[pages.source[: PAGE + 9]])
    again = Pages(HIGH)
    with rig.client() as client:
        client.attach(1, again.source)
        # A higher generation of the same extents waits until the first is settled.
        assert client.call(again.ingest(rig.hbm, 6)) == Ingested(bytes(4))
        assert read(client, again, 6, rig.hbm)[1] == again.source


@pytest.mark.parametrize("size", [100, PAGE])
def test_pages_go_down_both_tiers_and_come_up_from_the_disk(rig: Rig, size: int) -> None:
    put(rig, size)
    down = moved(rig, (rig.hbm, HIGH, 5), (rig.segment, MIDDLE, 6), size)
    assert down.stored(rig.segment) == down.payloads
    moved(rig, (rig.segment, MIDDLE, 6), (rig.nvme, LOW, 7), size)
    assert ordered(FreeExtents, rig) == bytes(4)
    up = moved(rig, (rig.nvme, LOW, 7), (rig.hbm, HIGH, 8), size)
    with rig.client(rig.tcp) as client:
        assert read(client, up, 8, rig.hbm) == (bytes(4), up.source, bytes(4))
    assert rig.service.counts.moves == {"hbm-dram": 4, "dram-nvme": 4, "nvme-hbm": 4}


def test_pages_go_straight_between_the_device_and_a_disk(rig: Rig) -> None:
    put(rig)
    moved(rig, (rig.hbm, HIGH, 5), (rig.nvme, LOW, 6))
    elsewhere = tuple(offset + 2 * CHUNK for offset in HIGH)
    up = moved(rig, (rig.nvme, LOW, 6), (rig.hbm, elsewhere, 7))
    with rig.client() as client:
        assert read(client, up, 7, rig.hbm)[1] == up.source


def test_pages_of_memory_come_up(rig: Rig) -> None:
    pages = Pages(MIDDLE)
    with rig.client() as client:
        assert client.ingest(pages) == Ingested(bytes(4))
        up = moved(rig, (rig.segment, MIDDLE, 5), (rig.hbm, HIGH, 6))
        assert read(client, up, 6, rig.hbm)[1] == pages.source


@pytest.mark.parametrize("kind", [FreeExtents, RetireExtents])
def test_what_was_freed_or_removed_is_gone(
    rig: Rig, kind: type[FreeExtents | RetireExtents]
) -> None:
    pages = put(rig)
    assert ordered(kind, rig) == bytes(4)
    with rig.client() as client:
        assert read(client, pages, 5, rig.hbm)[0] == bytes((STALE,)) * 4


def test_suspects_are_looked_at_on_the_device() -> None:
    with pool(device=TamperedDevice()) as rig:
        put(rig)
        assert ordered(CheckExtents, rig) == bytes(4)
        zero_bytes(rig.hbm.chunks[0].address + PAGE, 0xEE, 9)
        assert ordered(CheckExtents, rig) == bytes((OK, Outcome.CHECKSUM, OK, OK))

        def fail(_: Sequence[Move]) -> None:
            raise Unavailable("CUDA: cuMemcpyAsync failed")

        assert isinstance(rig.hbm.device, TamperedDevice)
        rig.hbm.device.after_copy = fail
        assert ordered(CheckExtents, rig) == bytes((Outcome.TRANSPORT,)) * 4
        with rig.client() as client:
            started, data, ended = read(client, Pages(HIGH), 5, rig.hbm)
        assert (started, ended) == (bytes(4), bytes((Outcome.TRANSPORT,)) * 4)
        assert data == bytes(4 * PAGE)


def test_a_page_freed_while_it_is_sent_is_taken_back() -> None:
    device = TamperedDevice()
    with pool(device=device) as rig:
        pages = put(rig)
        freed = rig.state.holdings.segments[rig.hbm.id].stretches(PAGE, pages.offsets[1:2])[0]
        device.after_copy = lambda _: rig.hbm.records.write_free(freed, PAGE)
        with rig.client() as client:
            started, data, ended = read(client, pages, 5, rig.hbm)
        assert (started, ended) == (bytes(4), bytes((OK, STALE, OK, OK)))
        assert data == pages.source.replace(pages.payloads[1], bytes(PAGE))


def test_nothing_of_it_is_mapped_by_clients_or_pulled_by_an_engine(rig: Rig) -> None:
    with rig.client() as client:
        shared = client.call(ShareSegments())
        assert isinstance(shared, SegmentsShared)
        assert rig.hbm.id not in [each.segment for each in shared.segments]
        client.link.take_fds(len(shared.segments))
        message = Pages(HIGH).ingest(rig.hbm)
        asked = msgspec.structs.replace(message, source=EngineSource("h:1", bytes(32)))
        with pytest.raises(BadValue, match="transport that this worker serves"):
            client.call(asked)


def test_nothing_survives_a_restart(device: Device) -> None:
    leader = Leader()
    try:
        with memory_folder() as folder:
            with running(folder, leader, device=device) as rig:
                pages, first = put(rig), rig.hbm.incarnation
            leader.wants_rows = True
            with running(folder, leader, device=device) as rig:
                assert rig.hbm.incarnation != first
                with rig.client() as client:
                    assert read(client, pages, 5, rig.hbm)[0] == bytes((STALE,)) * 4
    finally:
        leader.stop()


def test_a_worker_gives_the_device_its_memory_back() -> None:
    device = TamperedDevice()
    free = device.free_bytes
    with pool(device=device) as rig:
        put(rig)
        assert device.free_bytes == free - rig.hbm.geometry.payload_bytes
    assert (device.free_bytes, device.pinned) == (free, 0)
