"""Leaders and lives: restarts, takeovers, silence, strangers, and the end of a worker."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.errors import AccessDenied, Unavailable
from kvstore.rpc.dialling import dial
from kvstore.rpc.identity import Identity, Role
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import InventoryRows, OfferInventory, RegisterWorker
from kvstore.wire.messages.puts import Ingested, Sealed
from kvstore.wire.messages.reads import GetStatus
from kvstore.wire.messages.transfers import CheckRecords, RecordsChecked
from tests.contract.scripted_leader import Leader
from tests.contract.worker_rig import OFFSETS, Rig, question, read, running, soon
from tests.fakes import ManualClock
from tests.unit.worker_scripts import CHUNK, EPOCH, GEOMETRY, PAGE
from tests.unit.worker_segments import Pages, memory_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OK = Ingested(bytes(4))


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as made:
        yield made


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.stop()


@pytest.fixture
def rig(folder: Path, leader: Leader) -> Iterator[Rig]:
    with running(folder, leader) as made:
        yield made


def test_random_bytes_end_only_their_own_connection(rig: Rig) -> None:
    host, _, port = rig.tcp.rpartition(":")
    for noise in (b"\0" * 64, os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
            while stranger.recv(4096):  # the challenge, then the end
                pass
    with rig.client(rig.tcp) as client:
        assert client.reply(client.stream(Pages(OFFSETS))) == OK


def test_a_wrong_secret_or_cluster_is_refused(folder: Path) -> None:
    secret = b"a secret of some length"
    leader = Leader(secret=secret)
    try:
        with running(folder, leader, secret=secret) as rig:
            for identity in (
                Identity(Role.ENGINE, secret=b"another secret entirely"),
                Identity(Role.ENGINE),
                Identity(Role.ENGINE, secret=secret, cluster="elsewhere"),
            ):
                with pytest.raises(AccessDenied):
                    dial(rig.tcp, identity, soon())
            with rig.client(rig.tcp) as client:
                assert client.reply(client.stream(Pages(OFFSETS))) == OK
    finally:
        leader.stop()


def test_a_restart_offers_its_pages_under_a_new_life(folder: Path, leader: Leader) -> None:
    pages = Pages(OFFSETS)
    with running(folder, leader) as rig, rig.client() as client:
        assert client.ingest(pages) == OK
        was = rig.segment.incarnation
    leader.wants_rows = True
    with running(folder, leader) as rig:
        assert rig.segment.incarnation == was + 1
        offer = leader.expect(OfferInventory)
        while offer.incarnation == was:
            offer = leader.expect(OfferInventory)
        assert [chunk.chunk_start for chunk in offer.chunks] == [0, CHUNK]
        rows = [leader.expect(InventoryRows) for _ in offer.chunks]
        assert sorted(len(each.rows) for each in rows) == [192, 3 * 192]
        with rig.client(rig.tcp) as client:
            assert read(client, pages) == (bytes(4), pages.source, bytes(4))
            stale = msgspec.structs.replace(question(CheckRecords, rig, pages), incarnation=was)
            assert client.call(stale) == RecordsChecked(bytes((Outcome.STALE,)) * 4)


def test_a_link_that_ends_begins_no_call(rig: Rig) -> None:
    """Else a task is left that nobody awaits, which is told wherever it is collected."""
    link = rig.control
    loop, main = link._loop, link._main  # noqa: SLF001 -- as `stop` does, between two calls

    def ask_again() -> None:
        link.call(0, GetStatus())
        loop.call_soon(ask_again)

    loop.call_soon_threadsafe(ask_again)
    loop.call_soon_threadsafe(main.cancel)
    link.stop()
    assert not asyncio.all_tasks(loop)
    gc.collect()


def test_a_new_leader_is_found_and_told_what_the_old_one_did_not_hear(
    folder: Path, leader: Leader
) -> None:
    pages = Pages(OFFSETS)
    with running(folder, leader) as rig, rig.client() as client:
        leader.on_sealed = lambda _: None
        client.attach(1, pages.source)
        request = client.send(pages.ingest(rig.segment))
        report = leader.expect(Sealed)
        leader.stop()
        assert client.reply(request) == Ingested(bytes((Outcome.TRANSPORT,)) * 4)
        successor = Leader(EPOCH + 1, leader.address)
        try:
            successor.await_served()
            assert successor.expect(Sealed) == report
            late = client.call(pages.ingest(rig.segment))
            assert late == Ingested(bytes((Outcome.FENCED,)) * 4)  # I10: a plan of the old epoch
        finally:
            successor.stop()


def test_a_silent_leader_fences_the_worker_but_not_its_readers(folder: Path) -> None:
    leader, clock = Leader(), ManualClock()
    leader.answers_beats = False
    pages = Pages(OFFSETS)
    try:
        with running(folder, leader, clock) as rig, rig.client() as client:
            assert client.ingest(pages) == OK
            clock.advance(leader.lost_after_s / 2)
            late = client.call(Pages((8 * PAGE,), first_key=50).ingest(rig.segment))
            assert late == Ingested(bytes((Outcome.FENCED,)))
            assert read(client, pages) == (bytes(4), pages.source, bytes(4))
    finally:
        leader.stop()


def test_heartbeats_go_on_while_data_flows(rig: Rig, leader: Leader) -> None:
    with rig.client(rig.tcp) as client:
        client.stream(Pages(OFFSETS), upto=100)  # a pull that hangs
        while not rig.state.pulls.running:
            leader.beats.get(timeout=20)
        leader.beats.get(timeout=20)


def test_a_worker_that_is_refused_at_first_says_so(folder: Path) -> None:
    leader = Leader(secret=b"a secret of some length")
    rig = Rig(folder, leader)
    try:
        assert isinstance(rig.refusals.get(timeout=20), AccessDenied)
    finally:
        rig.stop()
        leader.stop()


def test_stopping_ends_clients_that_do_nothing_and_pulls_that_hang(
    folder: Path, leader: Leader
) -> None:
    rig = Rig(folder, leader)
    leader.await_served()
    host, _, port = rig.tcp.rpartition(":")
    with (
        rig.client() as idle,
        rig.client(rig.tcp) as hanging,
        socket.create_connection((host, int(port))) as silent,
    ):
        hanging.stream(Pages(OFFSETS), upto=100)
        while not rig.state.pulls.running:
            pass
        rig.stop()
        for client in (idle, hanging):
            with pytest.raises(Unavailable):
                client.link.receive(soon())
        while silent.recv(4096):
            pass
    assert not os.path.exists(folder / "w.sock")


def test_the_worker_registers_as_itself(folder: Path, leader: Leader) -> None:
    with running(folder, leader) as rig:
        said = leader.expect(RegisterWorker)
        assert (said.worker, said.host) == ("w", "host")
        assert said.segments[0].incarnation == rig.segment.incarnation
        assert said.segments[0].geometry == GEOMETRY
