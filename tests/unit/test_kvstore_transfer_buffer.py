"""Buffers: sealed, aligned, shared without copies, closed safely."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import threading
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import BadValue, BufferClosed, DeadlineExceeded, OutOfSpace
from kvstore.transfer.buffer import Buffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.transfer.memory import Memory


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    made = Buffer(7, 10_000)
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_it_is_zeroed_writable_and_page_aligned(buffer: Buffer) -> None:
    assert bytes(buffer.view) == bytes(10_000)
    assert buffer.address % 4096 == 0
    buffer.view[-1] = 9
    assert buffer.view[9_999] == 9
    assert len(buffer.view) == buffer.size_bytes == 10_000


def test_no_descriptor_left_is_out_of_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines' connectors go on without a buffer; of anything else an engine would end."""

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(OutOfSpace, match="Too many open files"):
        Buffer(1, 4096)


@pytest.mark.parametrize("size_bytes", [1 << 55, 1 << 62, 1 << 70])
def test_more_than_the_host_has_is_out_of_space(size_bytes: int) -> None:
    before = descriptors()
    with pytest.raises(OutOfSpace, match=str(size_bytes)):
        Buffer(1, size_bytes)
    gc.collect()
    assert descriptors() == before


def test_arrays_share_its_memory(buffer: Buffer) -> None:
    array = np.frombuffer(buffer.view, np.uint8)
    array[5] = 77
    assert buffer.view[5] == 77
    assert array.ctypes.data == buffer.address


def test_a_worker_may_map_it_because_it_cannot_shrink(buffer: Buffer) -> None:
    seals = fcntl.fcntl(buffer.descriptor(), fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    for length in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.descriptor(), length)


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_is_no_buffer(size: int) -> None:
    with pytest.raises(BadValue, match="size_bytes"):
        Buffer(1, size)


def test_a_closed_buffer_is_refused_everywhere() -> None:
    buffer = Buffer(1, 100)
    buffer.close()
    buffer.close()
    assert buffer.closed
    for use in (
        lambda: buffer.view,
        lambda: buffer.address,
        lambda: buffer.memory,
        buffer.descriptor,
        buffer.in_use().__enter__,
        lambda: buffer.on_close(print),
    ):
        with pytest.raises(BufferClosed):
            use()


def test_closing_frees_descriptor_and_memory() -> None:
    before = descriptors()
    buffer = Buffer(1, 1 << 20)
    array = np.frombuffer(buffer.view, np.uint8)
    buffer.close()
    assert array.sum() == 0, "memory in use stays"
    del array
    gc.collect()
    assert descriptors() == before


def test_a_buffer_that_is_only_dropped_frees_everything_too() -> None:
    before = descriptors()
    buffer = Buffer(1, 1 << 20)
    del buffer
    assert descriptors() == before


def test_closing_tells_workers_once_and_only_after_uses_ended() -> None:
    buffer = Buffer(3, 100)
    told: list[int] = []
    buffer.on_close(told.append)
    buffer.on_close(told.append)
    entered, leave = threading.Event(), threading.Event()

    def use() -> None:
        with buffer.in_use() as memory:
            entered.set()
            leave.wait()
            memory.view[0] = 1

    user = threading.Thread(target=use)
    user.start()
    entered.wait()
    closer = threading.Thread(target=buffer.close)
    closer.start()
    while not buffer.closed:
        pass
    assert told == []
    with pytest.raises(BufferClosed):
        _ = buffer.view
    leave.set()
    user.join()
    closer.join()
    assert told == [3]


def test_closing_gives_up_on_a_use_that_does_not_end() -> None:
    buffer = Buffer(3, 100)
    with buffer.in_use(), pytest.raises(DeadlineExceeded, match="still in use"):
        buffer.close(timeout_s=0)
    assert buffer.closed


def test_a_forked_child_is_refused(buffer: Buffer) -> None:
    def use() -> Memory:
        with buffer.in_use() as memory:
            return memory

    use()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            use()
        except BufferClosed:
            os._exit(0 if buffer.closed else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not buffer.closed
    use()
