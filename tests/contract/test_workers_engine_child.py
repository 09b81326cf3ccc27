"""The worker's engine processes against a real transfer engine, over loopback."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import threading
import time
from array import array
from typing import TYPE_CHECKING, Final

import pytest

from kvstore import limits
from kvstore.errors import BadValue, ConfigError, DeadlineExceeded, Unavailable
from kvstore.segment import Geometry
from kvstore.transfer.mooncake_process import EngineProcess, EngineSettings
from kvstore.wire.messages.engine import EnginePull, EnginePush
from kvstore.wire.messages.puts import EngineSource
from tests.contract.engine_worker import kill, stop
from workers.engine_child import EngineChild, EngineSegment, check_peer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.wire.messages.transfers import EngineFound

GEOMETRY: Final = Geometry(4 * limits.MIB, 1 * limits.MIB)
PAGE: Final = 64 * limits.KIB
SETTINGS: Final = EngineSettings()
PATIENCE_S: Final = 20.0


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def column(*values: int) -> bytes:
    return array("Q", values).tobytes()


def payload_address(found: EngineFound) -> int:
    """Where a segment of the host's memory is served."""
    assert found.block_bytes == GEOMETRY.payload_bytes
    (address,) = array("Q", found.addresses)
    return address


class File:
    """A file in memory, and this process's view of it."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = os.memfd_create("engine-test")
        os.ftruncate(self.fd, size_bytes)
        self.map = mmap.mmap(self.fd, size_bytes)

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


@pytest.fixture
def segment() -> Iterator[File]:
    file = File(GEOMETRY.file_bytes)
    yield file
    file.close()


@pytest.fixture
def worker(segment: File) -> Iterator[EngineChild]:
    child = EngineChild(SETTINGS, [EngineSegment("s", segment.fd, GEOMETRY)])
    yield child
    child.close()


class Client:
    """An engine that serves a buffer of its own."""

    def __init__(self) -> None:
        self.buffer = File(1 * limits.MIB)
        self.process = EngineProcess(SETTINGS)
        self.region, self.address = self.process.map(
            self.buffer.fd, 0, 1 * limits.MIB, writable=True, served=True
        )

    def source(self, *places: int) -> EngineSource:
        return EngineSource(self.process.peer, column(*(self.address + at for at in places)))

    def close(self) -> None:
        self.process.close()
        self.buffer.close()


@pytest.fixture
def client() -> Iterator[Client]:
    each = Client()
    yield each
    each.close()


def test_a_pull_lands_in_the_payload_and_a_peer_reads_it_there(
    segment: File, worker: EngineChild, client: Client
) -> None:
    pages = [bytes((i + 1,)) * PAGE for i in range(4)]
    client.buffer.map[: 4 * PAGE] = b"".join(pages)

    offsets = column(8 * PAGE, 9 * PAGE, 0, 2 * PAGE)
    worker.copy().run("s", client.source(0, PAGE, 2 * PAGE, 3 * PAGE), offsets, PAGE, soon())

    base = GEOMETRY.payload_base
    for offset, page in zip((8 * PAGE, 9 * PAGE, 0, 2 * PAGE), pages, strict=True):
        assert segment.map[base + offset : base + offset + PAGE] == page
    assert not any(segment.map[:base]), "records are not the engine's to write"

    found = worker.find("s")
    read = EnginePull(
        found.peer,
        client.region,
        PAGE,
        column(15 * PAGE),
        column(payload_address(found) + 9 * PAGE),
    )
    client.process.pull(read, soon())
    assert client.buffer.map[15 * PAGE :] == pages[1]


def test_nobody_can_write_into_a_served_segment(
    segment: File, worker: EngineChild, client: Client
) -> None:
    client.buffer.map[:PAGE] = b"x" * PAGE
    found = worker.find("s")
    assert not client.process.push(
        EnginePush(found.peer, client.region, PAGE, payload_address(found)), soon()
    )
    assert not any(segment.map[:])


def test_a_pull_from_a_stopped_client_ends_by_its_deadline_and_writes_nothing_later(
    segment: File, worker: EngineChild, client: Client
) -> None:
    client.buffer.map[:PAGE] = b"x" * PAGE
    source = client.source(0)
    stopped = client.process.child_pid
    stop(stopped)
    with pytest.raises(DeadlineExceeded):
        worker.copy().run("s", source, column(0), PAGE, time.monotonic() + 0.3)
    os.kill(stopped, signal.SIGCONT)
    # A second pull is answered by the client, so that it has had its chance to send the first.
    worker.copy().run("s", source, column(PAGE), PAGE, soon())
    base = GEOMETRY.payload_base
    assert not any(segment.map[base : base + PAGE])
    assert segment.map[base + PAGE : base + 2 * PAGE] == b"x" * PAGE


def test_a_cancel_ends_a_pull_from_any_thread(worker: EngineChild, client: Client) -> None:
    stop(client.process.child_pid)
    copy = worker.copy()
    ended: list[BaseException] = []

    def run() -> None:
        try:
            copy.run("s", client.source(0), column(0), PAGE, soon())
        except Unavailable as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    copy.cancel()
    thread.join(PATIENCE_S)
    assert len(ended) == 1
    assert not isinstance(ended[0], DeadlineExceeded)


@pytest.mark.parametrize("peer", ["", "localhost", "localhost:", ":1", "a:b", "h:99999", "h:0"])
def test_a_source_that_is_no_peer_is_refused(peer: str) -> None:
    with pytest.raises(BadValue, match=r"source\.peer"):
        check_peer(peer)


@pytest.mark.parametrize(
    ("offsets", "page_bytes"),
    [(column(GEOMETRY.payload_bytes), PAGE), (column(0, PAGE), PAGE), (b"", PAGE), (column(0), 0)],
)
def test_a_pull_outside_the_segment_is_refused(
    worker: EngineChild, client: Client, offsets: bytes, page_bytes: int
) -> None:
    with pytest.raises(BadValue, match="places"):
        worker.copy().run("s", client.source(0), offsets, page_bytes, soon())


def test_an_address_that_is_not_served_fails_the_pull_and_the_next_one_works(
    worker: EngineChild, client: Client
) -> None:
    source = EngineSource(client.process.peer, column(4096))
    with pytest.raises(Unavailable):
        worker.copy().run("s", source, column(0), PAGE, soon())
    worker.copy().run("s", client.source(0), column(0), PAGE, soon())


def test_a_server_that_died_is_replaced(worker: EngineChild, client: Client) -> None:
    before = worker.find("s")
    kill(worker.server_pid)
    found = worker.find("s")
    assert found.peer != before.peer
    read = EnginePull(found.peer, client.region, PAGE, column(0), column(payload_address(found)))
    client.process.pull(read, soon())


def serve_carelessly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are started from now on serve their memory writable."""
    honest = EngineProcess.map

    def careless(
        self: EngineProcess, fd: int, at: int, size: int, *, writable: bool, served: bool
    ) -> tuple[int, int]:
        return honest(self, fd, at, size, writable=writable or served, served=served)

    monkeypatch.setattr(EngineProcess, "map", careless)


def test_a_worker_that_serves_writable_memory_refuses_to_start(
    segment: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_carelessly(monkeypatch)
    with pytest.raises(ConfigError, match="a peer could write"):
        EngineChild(SETTINGS, [EngineSegment("s", segment.fd, GEOMETRY)])


def test_a_replacement_that_serves_writable_memory_is_not_found(
    worker: EngineChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(worker.server_pid)
    with monkeypatch.context() as patch:
        serve_carelessly(patch)
        with pytest.raises(Unavailable, match="a peer could write"):
            worker.find("s")
    assert worker.find("s").peer  # an honest one may serve again


def test_the_children_hold_the_segment_lock_and_end_with_their_parent(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    ready, gone = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:  # The worker that will be killed.
        with contextlib.suppress(BaseException):
            _own_until_killed(path, ready[1])
        os._exit(1)
    os.close(ready[1])
    os.close(gone[0])
    os.close(gone[1])
    with open(ready[0], "rb") as announced:
        pids = [int(pid) for pid in announced.readline().split()]
    assert len(pids) == 1
    with path.open("r+b") as file:
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        # The worker is dead, its engine is not: nobody may own the segment yet.
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(pids[0], signal.SIGCONT)
        fcntl.flock(file, fcntl.LOCK_EX)  # Comes as soon as the engine has ended.


def _own_until_killed(path: Path, ready: int) -> None:
    with path.open("w+b") as file:
        os.ftruncate(file.fileno(), GEOMETRY.file_bytes)
        fcntl.flock(file, fcntl.LOCK_EX)
        child = EngineChild(SETTINGS, [EngineSegment("s", file.fileno(), GEOMETRY)])
        os.write(ready, f"{child.server_pid}\n".encode())
        signal.pause()


def test_the_ports_are_closed_to_other_addresses_when_it_listens_on_loopback(
    worker: EngineChild,
) -> None:
    port = int(worker.find("s").peer.rpartition(":")[2])
    with socket.socket() as local:
        local.settimeout(PATIENCE_S)
        local.connect(("127.0.0.1", port))
    address = _own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    with socket.socket() as stranger:
        stranger.settimeout(0.2)  # A dropped packet is answered by nothing at all.
        with pytest.raises(TimeoutError):
            stranger.connect((address, port))


def _own_address() -> str | None:
    """An address of this host other than loopback; nothing is sent to find it out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return None if address.startswith("127.") else address
