"""Copies between two real workers: the target's leader asks, the target reads and seals."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from kvstore.errors import AccessDenied, BadValue
from kvstore.rpc.identity import Identity, Role
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.membership import ExtentsConfirmed, FenceExtents, FreeExtents
from kvstore.wire.messages.puts import ExtentSource, Ingested, PeerSource, Sealed
from tests.contract.scripted_leader import PATIENCE_S
from tests.contract.worker_rig import Rig, column, order, pool, read, streamed
from tests.devices import device_named
from tests.fake_disk import FakeDisk
from tests.unit.worker_scripts import CHUNK, EPOCH, PAGE, generation
from tests.unit.worker_segments import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.tiers.tier import Segment

FROM = (0, PAGE, 2 * PAGE, CHUNK)
TO = (3 * CHUNK, 3 * CHUNK + 2 * PAGE, 3 * CHUNK + PAGE, 2 * CHUNK)
WAYS = ("shm", "tcp")
TIERS = ("dram", "nvme", "hbm")


class Two(NamedTuple):
    """The worker that has pages, and the one that they are copied to."""

    source: Rig
    target: Rig


@contextlib.contextmanager
def two(*, all_tiers: bool = False) -> Iterator[Two]:
    """Two workers, each with a leader of its own."""
    with contextlib.ExitStack() as undo:
        rigs = []
        for name in ("there", "here"):
            disk, device = (FakeDisk(), device_named("cpu")) if all_tiers else (None, None)
            rigs.append(undo.enter_context(pool(disk, device, worker=name)))
        yield Two(*rigs)


def segment_of(rig: Rig, tier: str) -> Segment:
    """A worker's segment in a tier."""
    return next(each for each in rig.service.segments.values() if each.tier == tier)


def generations(counter: int) -> bytes:
    return column([generation(counter)] * len(FROM))


def peer(rig: Rig, way: str, counter: int = 5, tier: str = "dram") -> PeerSource:
    """Where the pages of FROM lie, and the one way to there."""
    segment = segment_of(rig, tier)
    where = rig.unix.removeprefix("unix:") if way == "shm" else rig.tcp
    ref = SegmentRef(
        segment.id, segment.incarnation, segment.tier, segment.geometry, rig.worker, "host",
        (Address(way, where, 0),),
    )  # fmt: skip
    return PeerSource(ref, column(list(FROM)), generations(counter))


def put(rig: Rig, tier: str = "dram") -> int:
    """Store pages at FROM in a tier; at which count of the generation they lie there."""
    pages = Pages(FROM)
    with rig.client() as client:
        assert client.ingest(pages) == Ingested(bytes(4))
    if tier == "dram":
        return 5
    source = ExtentSource(
        rig.segment.id, rig.segment.incarnation, column(list(FROM)), generations(5)
    )
    moved = rig.leader.command(pages.ingest(segment_of(rig, tier), 6, source))
    assert isinstance(moved, Ingested)
    assert moved.outcomes == bytes(4)
    return 6


def copied(target: Rig, source: PeerSource, tier: str = "dram") -> bytes:
    """Have the pages copied to TO; the outcomes."""
    answer = target.leader.command(Pages(TO).ingest(segment_of(target, tier), 9, source))
    assert isinstance(answer, Ingested), answer
    return answer.outcomes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("above", TIERS)
@pytest.mark.parametrize("below", TIERS)
def test_pages_of_any_tier_are_copied_to_any_other(way: str, above: str, below: str) -> None:
    with two(all_tiers=True) as (source, target):
        counter = put(source, above)
        assert copied(target, peer(source, way, counter, above), below) == bytes(4)
        report = target.leader.expect(Sealed)
        assert (report.segment, report.offsets) == (segment_of(target, below).id, column(list(TO)))
        pages = Pages(TO)
        with target.client() as client:
            found = read(client, pages, 9, segment_of(target, below))
        assert found == (bytes(4), pages.source, bytes(4))
        counts = target.service.counts
        assert counts.copies == {"ok": 4}
        assert counts.bytes_copied_in == {way: 4 * PAGE}
    # Its threads have ended: each counts what it sent once that has arrived.
    sent = way == "tcp" or above == "hbm"
    assert source.service.counts.bytes_copied_out == (4 * PAGE if sent else 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_page_that_is_gone_or_damaged_there_costs_itself_alone(way: str) -> None:
    with two() as (source, target):
        put(source)
        freed = order(FreeExtents, source, FROM[:1])
        assert source.leader.command(freed) == ExtentsConfirmed(EPOCH, b"\0")
        source.segment.payload[PAGE + 5] ^= 1
        outcomes = bytes((Outcome.SOURCE_LOST, Outcome.CHECKSUM, 0, 0))
        assert copied(target, peer(source, way)) == outcomes
        states = [record and record.state.name for record in Pages(TO).records(target.segment)]
        assert states == [None, None, "SEALED", "SEALED"]
        assert target.service.counts.copies == {"source_lost": 1, "checksum": 1, "ok": 2}


@pytest.mark.parametrize("way", WAYS)
def test_another_life_of_the_source_is_a_lost_source(way: str) -> None:
    with two() as (source, target):
        put(source)
        right = peer(source, way)
        other = msgspec.structs.replace(right.segment, incarnation=99)
        wrong = msgspec.structs.replace(right, segment=other)
        assert copied(target, wrong) == bytes((Outcome.SOURCE_LOST,)) * 4


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_is_not_there_is_a_failed_transport(way: str) -> None:
    with two() as (source, target):
        put(source)
        nowhere = Address(way, "/nowhere" if way == "shm" else "127.0.0.1:1", 0)
        right = peer(source, way)
        ref = msgspec.structs.replace(right.segment, addresses=(nowhere,))
        gone = msgspec.structs.replace(right, segment=ref)
        assert copied(target, gone) == bytes((Outcome.TRANSPORT,)) * 4


@contextlib.contextmanager
def silent_worker() -> Iterator[tuple[str, threading.Event]]:
    """An address where connections are taken and nothing is ever said; set once one was."""
    asked, held = threading.Event(), []

    def take() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listening.accept()[0])
                asked.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=take)
        thread.start()
        yield "{}:{}".format(*listening.getsockname()), asked
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    for each in held:
        each.close()


def test_a_worker_that_hangs_holds_up_no_move_and_a_fence_ends_the_wait() -> None:
    with two(all_tiers=True) as (source, target), silent_worker() as (address, asked):
        put(source)
        put(target)
        right = peer(source, "tcp")
        ref = msgspec.structs.replace(right.segment, addresses=(Address("tcp", address, 0),))
        copy = Pages(TO).ingest(target.segment, 9, msgspec.structs.replace(right, segment=ref))
        answers = [target.leader.begin_command(copy)]
        assert asked.wait(PATIENCE_S)
        local = ExtentSource(
            target.segment.id, target.segment.incarnation, column(list(FROM)), generations(5)
        )
        moved = target.leader.command(Pages(TO).ingest(target.nvme, 7, local))
        assert moved == Ingested(bytes(4), PAGE)
        fence = target.leader.command(order(FenceExtents, target, TO, 9))
        assert fence == ExtentsConfirmed(EPOCH, bytes(4))
        assert answers[0]() == Ingested(bytes((Outcome.FENCED,)) * 4)


def test_a_copy_that_hangs_ends_with_its_worker() -> None:
    with contextlib.ExitStack() as undo:
        address, asked = undo.enter_context(silent_worker())
        source, target = undo.enter_context(two())
        right = peer(source, "tcp")
        ref = msgspec.structs.replace(right.segment, addresses=(Address("tcp", address, 0),))
        copy = Pages(TO).ingest(target.segment, 9, msgspec.structs.replace(right, segment=ref))
        target.leader.begin_command(copy)
        assert asked.wait(PATIENCE_S)


def test_another_worker_may_read_and_nothing_else() -> None:
    with two() as (source, _):
        put(source)
        stranger = Identity(Role.WORKER, name="here")
        pages = Pages(FROM)
        with source.client(identity=stranger) as client:
            assert read(client, pages) == (bytes(4), pages.source, bytes(4))
            with pytest.raises(AccessDenied, match="may only read"):
                client.call(pages.ingest(source.segment, 6))
            with pytest.raises(AccessDenied, match="may only read"):
                client.attach(1, pages.source)
        with source.client(identity=stranger) as client, pytest.raises(AccessDenied):
            client.call(streamed(pages.ingest(source.segment, 6)))


def test_only_the_leader_names_another_worker_and_never_this_one() -> None:
    with two() as (source, target):
        put(source)
        put(target)
        with target.client() as client, pytest.raises(BadValue, match="source"):
            client.call(Pages(TO).ingest(target.segment, 9, peer(source, "tcp")))
        with pytest.raises(BadValue, match=r"source\.segment"):
            copied(target, peer(target, "tcp"))
