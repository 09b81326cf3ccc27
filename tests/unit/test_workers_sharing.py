"""Buffers of clients: what is mapped, what is refused, and how long a mapping lives."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import BadValue, BufferClosed, DeadlineExceeded, OutOfSpace
from tests.unit.worker_segments import memory_folder, opened, sealed_memfd
from workers import client_buffers
from workers.client_buffers import ClientBuffers, SessionBuffers
from workers.sharing import ClientBuffer, shared

if TYPE_CHECKING:
    from pathlib import Path

    from workers.client_buffers import ClientKey

DATA = bytes(range(256)) * 32
CLIENT = ("engine", "a", b"t" * 16)


def is_open(fd: int) -> bool:
    """Whether that descriptor exists in this process."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_sealed_buffer_is_mapped_and_its_descriptor_closed() -> None:
    fd = sealed_memfd(DATA)
    buffer = ClientBuffer(fd, len(DATA))
    assert ctypes.string_at(buffer.address, len(DATA)) == DATA
    assert not is_open(fd)
    buffer.close()


def test_the_mapping_follows_what_the_client_writes() -> None:
    fd = sealed_memfd(DATA)
    mine = os.dup(fd)
    buffer = ClientBuffer(fd, len(DATA))
    os.pwrite(mine, b"new", 0)
    assert ctypes.string_at(buffer.address, 3) == b"new"
    buffer.close()
    os.close(mine)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_a_buffer_that_could_be_truncated_is_refused(seals: int) -> None:
    fd = sealed_memfd(DATA, seals)
    with pytest.raises(BadValue, match="F_SEAL_SHRINK"):
        ClientBuffer(fd, len(DATA))
    assert not is_open(fd)


def test_a_file_is_no_buffer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with pytest.raises(BadValue, match="a memfd"):
        ClientBuffer(os.open(path, os.O_RDONLY), len(DATA))


@pytest.mark.parametrize("size", [0, -1, len(DATA) + 1, 1 << 60])
def test_a_size_beyond_the_memfd_is_refused(size: int) -> None:
    with pytest.raises(BadValue, match="size_bytes"):
        ClientBuffer(sealed_memfd(DATA), size)


def test_shared_descriptors_are_closed_once_they_were_sent() -> None:
    with memory_folder() as folder:
        segment, _ = opened(folder / "segment")
        with shared([segment]) as (message, descriptors):
            (one,) = message.segments
            assert (one.segment, one.incarnation) == (segment.id, segment.incarnation)
            assert one.geometry == segment.geometry
            assert all(is_open(fd) for fd in descriptors)
        assert not any(is_open(fd) for fd in descriptors)
        segment.close()


def test_a_buffer_lives_as_long_as_its_sessions_last_connection() -> None:
    everybody = ClientBuffers()
    with everybody.connection(CLIENT) as first:
        first.attach(1, ClientBuffer(sealed_memfd(DATA), len(DATA)))
        with everybody.connection(CLIENT) as second:
            assert second is first
            with second.use(1) as buffer:
                assert buffer.size_bytes == len(DATA)
        with first.use(1):
            pass
    with everybody.connection(CLIENT) as later, pytest.raises(BufferClosed), later.use(1):
        pass


@pytest.mark.parametrize(
    "other",
    [("engine", "a", b"u" * 16), ("engine", "b", b"t" * 16), ("operator", "a", b"t" * 16)],
    ids=["another token", "another tenant", "another role"],
)
def test_sessions_do_not_see_each_others_buffers(other: ClientKey) -> None:
    everybody = ClientBuffers()
    with everybody.connection(CLIENT) as mine, everybody.connection(other) as theirs:
        mine.attach(1, ClientBuffer(sealed_memfd(DATA), len(DATA)))
        with pytest.raises(BufferClosed), theirs.use(1):
            pass


def test_a_number_attached_again_is_the_new_buffer() -> None:
    buffers = SessionBuffers()
    buffers.attach(1, ClientBuffer(sealed_memfd(DATA), len(DATA)))
    with buffers.use(1) as old:
        buffers.attach(1, ClientBuffer(sealed_memfd(b"other" * 100), 500))
        assert ctypes.string_at(old.address, len(DATA)) == DATA  # a pull may still be at it
        with buffers.use(1) as new:
            assert ctypes.string_at(new.address, 5) == b"other"
    buffers.close()


def test_too_many_buffers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUFFERS_PER_SESSION_MAX", 1)
    buffers = SessionBuffers()
    buffers.attach(1, ClientBuffer(sealed_memfd(DATA), len(DATA)))
    fd = sealed_memfd(DATA)
    with pytest.raises(OutOfSpace, match="a session has 1 at most"):
        buffers.attach(2, ClientBuffer(fd, len(DATA)))
    assert not is_open(fd)
    buffers.attach(1, ClientBuffer(sealed_memfd(DATA), len(DATA)))  # in place of the first
    buffers.close()


def test_detaching_waits_for_the_last_pull() -> None:
    buffers = SessionBuffers()
    buffers.attach(1, ClientBuffer(sealed_memfd(DATA), len(DATA)))
    in_use, release, gone = threading.Event(), threading.Event(), threading.Event()

    def pull() -> None:
        with buffers.use(1) as buffer:
            in_use.set()
            release.wait()
            assert ctypes.string_at(buffer.address, 3) == DATA[:3]

    def detach() -> None:
        buffers.detach(1)
        gone.set()

    threads = [threading.Thread(target=pull), threading.Thread(target=detach)]
    threads[0].start()
    in_use.wait()
    threads[1].start()
    assert not gone.is_set()
    release.set()
    for thread in threads:
        thread.join()
    assert gone.is_set()


def test_detaching_what_is_not_there_is_done_at_once() -> None:
    SessionBuffers().detach(1)


def test_detaching_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_buffers, "DETACH_WAIT_S", 0.0)
    buffers = SessionBuffers()
    buffers.attach(1, ClientBuffer(sealed_memfd(DATA), len(DATA)))
    with buffers.use(1):
        for _ in range(2):  # whoever asks again is not told that it is gone
            with pytest.raises(DeadlineExceeded):
                buffers.detach(1)
        with pytest.raises(BufferClosed):
            buffers.use(1)
    buffers.detach(1)
