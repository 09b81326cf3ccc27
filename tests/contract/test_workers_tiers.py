"""A real worker with a segment on a (fake) disk: moves down and up, reads, commands, failures."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import (
    CheckExtents,
    ExtentsConfirmed,
    FenceExtents,
    FreeExtents,
    OfferInventory,
    RegisterWorker,
    ReportSegment,
    RetireExtents,
)
from kvstore.wire.messages.puts import ExtentSource, Ingest, Ingested, Sealed
from kvstore.wire.messages.transfers import CheckRecords, RecordsChecked, StageExtents
from tests.contract.scripted_leader import PATIENCE_S, Leader
from tests.contract.worker_rig import Rig, column, order, pool, question, read, running
from tests.fake_disk import FakeDisk
from tests.unit import nvme_parts
from tests.unit.worker_scripts import CHUNK, EPOCH, PAGE, generation
from tests.unit.worker_segments import Pages, memory_folder
from workers.tiers.guarded_file import ServiceState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.tiers.tier import Segment

OK = Outcome.OK
UP = (0, PAGE, 2 * PAGE, CHUNK)
DOWN = (CHUNK, 5 * PAGE, 6 * PAGE, 0)


def source_of(segment: Segment, offsets: tuple[int, ...], counter: int) -> ExtentSource:
    generations = column([generation(counter)] * len(offsets))
    return ExtentSource(segment.id, segment.incarnation, column(list(offsets)), generations)


def at(pages: Pages, offsets: tuple[int, ...]) -> Pages:
    """The same pages elsewhere."""
    moved = Pages(offsets, size=pages.size)
    assert moved.keys == pages.keys
    return moved


def put(rig: Rig) -> Pages:
    pages = Pages(UP)
    with rig.client() as client:
        assert client.ingest(pages) == Ingested(bytes(4))
    return pages


def demotion(rig: Rig, counter: int = 6) -> Ingest:
    return at(Pages(UP), DOWN).ingest(rig.nvme, counter, source_of(rig.segment, UP, 5))


def demote(rig: Rig) -> Pages:
    """Put pages, have them copied down, and give their memory back; where they lie now."""
    pages = put(rig)
    assert rig.leader.command(demotion(rig)) == Ingested(bytes(4), PAGE)
    assert rig.leader.command(order(FreeExtents, rig, UP)) == ExtentsConfirmed(EPOCH, bytes(4))
    return at(pages, DOWN)


def ordered(
    kind: type[FenceExtents | FreeExtents | RetireExtents | CheckExtents], rig: Rig,
    counter: int = 6,
) -> ExtentsConfirmed:  # fmt: skip
    """Command what lies below."""
    generations = column([generation(counter)] * 4)
    nvme = rig.nvme
    message = kind(EPOCH, nvme.id, nvme.incarnation, PAGE, column(list(DOWN)), generations)
    answer = rig.leader.command(message)
    assert isinstance(answer, ExtentsConfirmed)
    return answer


@contextlib.contextmanager
def held_up(disk: FakeDisk) -> Iterator[threading.Event]:
    """The disk answers nothing until the block ends; set once it has been asked."""
    asked, gate = threading.Event(), threading.Event()

    def spend() -> None:
        asked.set()
        assert gate.wait(PATIENCE_S)

    disk.spend = spend  # type: ignore[method-assign]  # a disk that takes its time
    try:
        yield asked
    finally:
        del disk.spend
        gate.set()


def test_the_leader_is_told_of_both_tiers() -> None:
    with pool(FakeDisk()) as rig:
        offers = rig.leader.expect(RegisterWorker).segments
        assert [(each.segment, each.tier) for each in offers] == [
            (rig.segment.id, "dram"), (rig.nvme.id, "nvme"),
        ]  # fmt: skip


def test_pages_that_were_moved_down_are_read_over_a_stream() -> None:
    with pool(FakeDisk()) as rig:
        pages = demote(rig)
        with rig.client(rig.tcp) as client:
            assert read(client, pages, 6, rig.nvme) == (bytes(4), pages.source, bytes(4))
            asked = question(CheckRecords, rig, pages, 6, rig.nvme)
            assert client.call(asked) == RecordsChecked(bytes(4))
            assert read(client, pages, 7, rig.nvme)[0] == bytes((Outcome.STALE,)) * 4


def test_pages_come_up_again() -> None:
    with pool(FakeDisk()) as rig:
        pages = demote(rig)
        up = at(pages, (3 * CHUNK, 3 * CHUNK + PAGE, 2 * CHUNK, 8 * PAGE))
        message = up.ingest(rig.segment, 7, source_of(rig.nvme, DOWN, 6))
        assert rig.leader.command(message) == Ingested(bytes(4))
        assert up.stored(rig.segment) == up.payloads


def test_a_client_may_put_on_a_disk_where_the_leader_planned_it() -> None:
    with pool(FakeDisk()) as rig:
        pages = Pages(DOWN)
        with rig.client() as client:
            client.attach(1, pages.source)
            assert client.call(pages.ingest(rig.nvme)) == Ingested(bytes(4), PAGE)
            assert read(client, pages, 5, rig.nvme) == (bytes(4), pages.source, bytes(4))


@pytest.mark.parametrize("kind", [FreeExtents, RetireExtents])
def test_what_was_freed_or_removed_is_gone_after_a_restart_too(
    kind: type[FreeExtents | RetireExtents],
) -> None:
    disk = FakeDisk()
    with pool(disk) as rig:
        pages = demote(rig)
        assert ordered(kind, rig).outcomes == bytes(4)
        with rig.client() as client:
            assert read(client, pages, 6, rig.nvme)[0] == bytes((Outcome.STALE,)) * 4
    segment, found = nvme_parts.opened(disk)
    segment.close()
    assert not found.adopted


def test_a_restart_finds_what_lay_on_the_disk() -> None:
    disk, leader = FakeDisk(), Leader()
    try:
        with memory_folder() as folder, running(folder, leader, disk=disk) as rig:
            pages = demote(rig)
        with memory_folder() as folder:  # of another boot: nothing is left of memory
            leader.wants_rows = True
            with running(folder, leader, disk=disk) as rig:
                assert len(rig.adopted.adopted)
                offers = {leader.expect(OfferInventory).segment: 1 for _ in range(2)}
                assert set(offers) == {rig.segment.id, rig.nvme.id}
                with rig.client() as client:
                    assert read(client, pages, 6, rig.nvme)[1] == pages.source
    finally:
        leader.stop()


def test_a_suspect_on_the_disk_is_looked_at() -> None:
    disk = FakeDisk()
    with pool(disk) as rig:
        pages = demote(rig)
        place = rig.nvme.geometry.payload_base + DOWN[1] + 9
        disk.names[nvme_parts.PATH].flip(place * 8)
        with rig.client() as client:
            started, data, ended = read(client, pages, 6, rig.nvme)
        assert (started, ended) == (bytes(4), bytes((OK, Outcome.CHECKSUM, OK, OK)))
        assert data == pages.source.replace(pages.payloads[1], bytes(PAGE))
        found = ordered(CheckExtents, rig).outcomes
        assert found == bytes((OK, Outcome.CHECKSUM, OK, OK))


def test_a_suspect_is_staged_anew() -> None:
    with pool(FakeDisk()) as rig:
        pages, nvme = demote(rig), rig.nvme
        staging = rig.service.require_staging()
        request = StageExtents(
            nvme.id, nvme.incarnation, 0, PAGE, b"".join(pages.keys), pages.offsets.tobytes(),
            column([generation(6)] * 4), 0.0,
        )  # fmt: skip
        first = staging.stage(1, request)
        assert staging.stage(1, request) == first
        assert ordered(CheckExtents, rig).outcomes == bytes(4)
        assert not set(staging.stage(1, request).generations) & set(first.generations) - {0}


def test_a_fence_ends_a_move_that_waits_for_the_disk() -> None:
    disk = FakeDisk()
    with pool(disk) as rig:
        put(rig)
        with held_up(disk) as asked:
            moved = rig.leader.begin_command(demotion(rig))
            assert asked.wait(PATIENCE_S)
            generations = column([generation(6)] * 4)
            fence = FenceExtents(
                EPOCH, rig.nvme.id, rig.nvme.incarnation, PAGE, column(list(DOWN)), generations
            )
            fenced = rig.leader.begin_command(fence)
        assert fenced() == ExtentsConfirmed(EPOCH, bytes(4))
        assert isinstance(moved(), Ingested)
        assert not any(record for record in at(Pages(UP), DOWN).records(rig.nvme))


def test_a_free_of_what_is_being_copied_waits() -> None:
    disk = FakeDisk()
    with pool(disk) as rig:
        put(rig)
        with held_up(disk) as asked:
            moved = rig.leader.begin_command(demotion(rig))
            assert asked.wait(PATIENCE_S)
            freed = rig.leader.begin_command(order(FreeExtents, rig, UP))
            rig.leader.beats.get(timeout=PATIENCE_S)  # the link lives, and goes on
            assert len(rig.state.commands.open) == 1
        assert moved() == Ingested(bytes(4), PAGE)
        assert freed() == ExtentsConfirmed(EPOCH, bytes(4))
        pages = at(Pages(UP), DOWN)
        with rig.client() as client:
            assert read(client, pages, 6, rig.nvme)[1] == pages.source


def test_a_disk_that_fails_takes_its_pages_and_nothing_else() -> None:
    disk = FakeDisk()
    with pool(disk) as rig:
        pages = demote(rig)
        disk.read_error = errno.EIO
        lost = bytes((Outcome.TRANSPORT,)) * 4
        with rig.client() as client:
            assert read(client, pages, 6, rig.nvme)[0] == lost
            assert rig.nvme.service is ServiceState.FAILED
            told = rig.leader.expect(ReportSegment)
            assert (told.segment, told.state) == (rig.nvme.id, "failed")
            assert os.strerror(errno.EIO) in told.reason
            assert ordered(CheckExtents, rig).outcomes == lost
            assert ordered(FreeExtents, rig).outcomes == lost
            up = at(pages, UP)
            back = up.ingest(rig.segment, 7, source_of(rig.nvme, DOWN, 6))
            outcomes = rig.leader.command(back)
            assert isinstance(outcomes, Ingested)
            assert any(outcomes.outcomes)
            fresh = Pages((8 * PAGE,), first_key=40)
            assert client.ingest(fresh) == Ingested(bytes(1))


def test_a_disk_that_takes_no_writes_still_serves() -> None:
    disk = FakeDisk()
    with pool(disk) as rig:
        pages = demote(rig)
        disk.write_error = errno.EROFS
        again = Pages((2 * CHUNK,), first_key=50)
        with rig.client() as client:
            client.attach(1, again.source)
            refused = client.call(again.ingest(rig.nvme, 8))
            assert refused == Ingested(bytes((Outcome.TRANSPORT,)), PAGE)
            assert rig.nvme.service is ServiceState.READ_ONLY
            assert rig.leader.expect(ReportSegment).state == "read_only"
            assert read(client, pages, 6, rig.nvme)[1] == pages.source


def test_moves_end_with_their_worker() -> None:
    disk = FakeDisk()
    with pool(disk) as rig:
        put(rig)
        rig.leader.expect(Sealed)
        for counter in range(6, 30):
            message = demotion(rig, counter)
            rig.leader.begin_command(message)
    segment, found = nvme_parts.opened(disk)
    assert len(nvme_parts.require_never_wrong(segment, found)) == len(found.adopted)
    assert not found.damaged
    segment.close()
