"""Reads over real sockets: shared memory, streams, readers' locks, checks."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from kvstore.record import RecordState
from kvstore.segment import HEADER_BYTES, unpack_header
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import (
    CheckExtents,
    ExtentsConfirmed,
    FreeExtents,
    RetireExtents,
)
from kvstore.wire.messages.puts import Ingested
from kvstore.wire.messages.transfers import (
    CheckRecords,
    RecordsChecked,
    SegmentsShared,
    ShareSegments,
)
from tests.contract.worker_rig import OFFSETS, Client, Rig, order, pool, question, read
from tests.unit.worker_scripts import EPOCH, GEOMETRY, PAGE
from tests.unit.worker_segments import FLOCK, Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

OK = Ingested(bytes(4))


@pytest.fixture
def rig() -> Iterator[Rig]:
    with pool() as made:
        yield made


def shared(client: Client) -> int:
    """The descriptor of the worker's segment."""
    reply = client.call(ShareSegments())
    assert isinstance(reply, SegmentsShared)
    assert reply.segments[0].incarnation == client.rig.segment.incarnation
    return client.link.take_fds(1)[0]


def test_a_reader_maps_the_segment_and_finds_the_page(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        assert client.ingest(pages) == OK
        fd = shared(client)
    with mmap.mmap(fd, GEOMETRY.file_bytes, prot=mmap.PROT_READ) as mapped:
        header = unpack_header(mapped[:HEADER_BYTES])
        assert header.incarnation == rig.segment.incarnation
        for offset, payload in zip(OFFSETS, pages.payloads, strict=True):
            start = GEOMETRY.payload_base + offset
            assert mapped[start : start + PAGE] == payload
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_records_can_be_checked_without_bytes(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        client.ingest(pages)
        assert client.call(question(CheckRecords, rig, pages)) == RecordsChecked(bytes(4))
        retired = rig.leader.command(order(RetireExtents, rig, OFFSETS[:2]))
        assert retired == ExtentsConfirmed(EPOCH, bytes(2))
        stale = bytes((Outcome.STALE, Outcome.STALE, 0, 0))
        assert client.call(question(CheckRecords, rig, pages)) == RecordsChecked(stale)
        assert read(client, pages)[0] == stale
    states = [record.state for record in pages.records(rig.segment) if record]
    assert states == [RecordState.REMOVED] * 2 + [RecordState.SEALED] * 2


def test_a_held_extent_is_busy_and_counted_until_the_reader_is_gone(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client, rig.client() as other:
        client.ingest(pages)
        fd, another = shared(client), shared(other)
        start = GEOMETRY.payload_base + PAGE
        wanted = FLOCK.pack(fcntl.F_RDLCK, 0, start, PAGE, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
        # A second session's unlock frees nothing of the first: they share no description.
        fcntl.fcntl(another, fcntl.F_OFD_SETLK, wanted)
        fcntl.fcntl(another, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_UNLCK, 0, start, PAGE, 0))
        os.close(another)
        busy = bytes((0, Outcome.BUSY, 0, 0))
        assert rig.leader.command(order(FreeExtents, rig)) == ExtentsConfirmed(EPOCH, busy)
        while rig.leader.beats.get(timeout=20).held_extents != 1:
            pass
        assert pages.stored(rig.segment)[1] == pages.payloads[1]  # the reader's bytes stay
        new = Pages((PAGE,), first_key=60)
        assert client.ingest(new, counter=6) == Ingested(bytes((Outcome.BUSY,)))
        os.close(fd)
        assert client.call(new.ingest(rig.segment, counter=7)) == Ingested(bytes(1))


def test_a_flipped_byte_is_found_by_a_check(rig: Rig) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        client.ingest(pages)
    rig.segment.payload[PAGE + 9] ^= 4
    answer = rig.leader.command(order(CheckExtents, rig, (*OFFSETS, 3 * PAGE)))
    want = bytes((0, Outcome.CHECKSUM, 0, 0, Outcome.STALE))
    assert answer == ExtentsConfirmed(EPOCH, want)


def test_an_extent_that_cannot_be_locked_is_not_confirmed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(OFFSETS)
    with rig.client() as client:
        client.ingest(pages)

    def out_of_locks(*_: object) -> bytes:
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr(rig.segment.locks, "try_lock", out_of_locks)
        busy = bytes((Outcome.BUSY,)) * len(OFFSETS)
        assert rig.leader.command(order(FreeExtents, rig)) == ExtentsConfirmed(EPOCH, busy)
    assert rig.leader.command(order(FreeExtents, rig)) == ExtentsConfirmed(EPOCH, bytes(4))
