"""Readers' locks against the owner's: who is refused, what is counted, what a death frees."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.wire.messages.common import Outcome
from tests.unit.worker_scripts import CHUNK, PAGE
from tests.unit.worker_segments import FLOCK, Pages, memory_folder, opened, reader_lock
from workers.events import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.tiers.dram import DramSegment

FOUR = Stretch(0, 4, 0, 0, 0)


@pytest.fixture
def segment() -> Iterator[DramSegment]:
    with memory_folder() as folder:
        made, _ = opened(folder / "segment")
        yield made
        made.close()


def test_extents_without_readers_are_locked_and_given_back(segment: DramSegment) -> None:
    assert segment.locks.try_lock(FOUR, PAGE) == b"\1\1\1\1"
    segment.locks.unlock(FOUR, PAGE)
    with reader_lock(segment, 0):
        pass


def test_a_reader_keeps_only_what_it_holds(segment: DramSegment) -> None:
    with reader_lock(segment, PAGE, 2 * PAGE):
        assert segment.locks.try_lock(FOUR, PAGE) == b"\1\0\0\1"
        segment.locks.unlock(FOUR, PAGE)
    assert segment.locks.try_lock(FOUR, PAGE) == b"\1\1\1\1"


def test_one_byte_of_an_extent_is_enough(segment: DramSegment) -> None:
    with reader_lock(segment, 2 * PAGE - 1, 1):
        assert segment.locks.try_lock(FOUR, PAGE) == b"\1\0\1\1"


def test_the_owner_keeps_readers_out_while_it_writes(segment: DramSegment) -> None:
    segment.locks.try_lock(FOUR, PAGE)
    with pytest.raises(BlockingIOError), reader_lock(segment, 0):
        pass
    segment.locks.unlock(FOUR, PAGE)
    with reader_lock(segment, 0):
        pass


def test_readers_do_not_free_each_others_locks(segment: DramSegment) -> None:
    with reader_lock(segment, 0):
        with reader_lock(segment, 0):
            pass
        assert segment.locks.try_lock(FOUR, PAGE) == b"\0\1\1\1"


def test_a_reader_that_is_killed_holds_nothing(segment: DramSegment) -> None:
    fd = segment.open_for_reader()
    start = segment.geometry.payload_base
    program = (
        "import fcntl, sys\n"
        "fcntl.fcntl(int(sys.argv[1]), fcntl.F_OFD_SETLK, bytes.fromhex(sys.argv[2]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    wanted = FLOCK.pack(fcntl.F_RDLCK, 0, start, PAGE, 0).hex()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(fd), wanted],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,),
    ) as reader:  # fmt: skip
        os.close(fd)  # the worker's own copy goes once it is sent
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"held\n"
        assert segment.locks.try_lock(FOUR, PAGE) == b"\0\1\1\1"
        segment.locks.unlock(FOUR, PAGE)
        reader.kill()
    assert segment.locks.try_lock(FOUR, PAGE) == b"\1\1\1\1"


def test_a_pull_leaves_what_a_reader_holds(segment: DramSegment) -> None:
    old, new = Pages((0, PAGE, 2 * PAGE)), Pages((0, PAGE, 2 * PAGE), first_key=50)
    old.put(segment, counter=5)
    with reader_lock(segment, PAGE):
        outcomes = new.put(segment, counter=6)
    assert outcomes == bytes((Outcome.OK, Outcome.BUSY, Outcome.OK))
    assert new.stored(segment)[1] == old.payloads[1]
    held = old.records(segment)[1]
    assert held is not None
    assert held.key == old.keys[1]  # not even its record was touched
    assert not any(Pages((PAGE,), first_key=51).put(segment, counter=7))


def test_locks_are_given_back_after_every_pull(segment: DramSegment) -> None:
    Pages((0, CHUNK)).put(segment)
    with reader_lock(segment, 0, 2 * CHUNK):
        pass
