"""Writers and readers that die or stop at the worst moment: what they held comes back, and
nobody's bytes are touched."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore import Stored
from tests.cluster.client_program import MODEL
from tests.cluster.pages import Pages
from tests.cluster.servers import until
from tests.cluster.up import clean_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from kvstore.wire.messages.reads import SegmentStatus
    from tests.cluster.up import Up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PATIENCE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


class Client:
    """A client process."""

    def __init__(self, up: Up, transport: str, mode: str) -> None:
        program = "tests.cluster.client_program"
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, up.master, transport, mode],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        said, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert said, "the client says nothing"
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """Let it continue after a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def other(own_pool: Up) -> Iterator[Pages]:
    """Another client, which goes on living."""
    with Pages(own_pool.master, "tcp", MODEL) as made:
        yield made


def segment(pages: Pages) -> SegmentStatus:
    (found,) = pages.store.stat().segments
    return found


def test_extents_of_a_killed_writer_come_back(own_pool: Up, transport: str, other: Pages) -> None:
    with Client(own_pool, transport, "hang") as writer:
        assert writer.line() == "planned"
        assert segment(other).reserved_bytes > 0
        writer.process.kill()
        until(
            "its extents are free",
            lambda: segment(other).reserved_bytes == segment(other).quarantined_bytes == 0,
            timeout_s=10,
        )
    opened = other.open()
    chain = opened.chain(range(64))
    assert other.put(opened, chain) == [Stored()] * 16
    other.assert_readable(opened, chain)


def test_a_put_of_the_same_pages_goes_on_when_its_writer_is_killed(
    own_pool: Up, transport: str, other: Pages
) -> None:
    opened = other.open()
    chain = opened.chain(range(64))
    with Client(own_pool, transport, "hang") as writer:
        assert writer.line() == "planned"
        os.kill(writer.process.pid, signal.SIGKILL)
        assert other.put(opened, chain, timeout_s=20) == [Stored()] * 16
    other.assert_readable(opened, chain)


def test_a_stopped_writer_whose_extents_were_given_away_harms_nobody(
    own_pool: Up, transport: str, other: Pages
) -> None:
    opened = other.open()
    chain = opened.chain(range(64))
    with Client(own_pool, transport, "stop") as writer:
        assert writer.line() == "planned"
        until("its plan is fenced", lambda: segment(other).reserved_bytes == 0)
        other.store_all(opened, chain)
        strangers = [opened.chain([nth, *range(255)]) for nth in range(1, 9)]
        for stranger in strangers:
            other.put(opened, stranger)
        writer.process.send_signal(signal.SIGCONT)
        assert writer.line() == "AlreadyThere"
    other.assert_readable(opened, chain)
    for stranger in strangers:
        match = other.store.match_prefix(opened, stranger)
        assert all(str(o) == "Hit()" for o in other.read_back(match, match.pages))


def test_what_a_stopped_reader_views_is_kept_until_it_dies(own_pool: Up, other: Pages) -> None:
    with Client(own_pool, "shm", "view") as reader:
        assert reader.line() == "viewing"
        reader.process.send_signal(signal.SIGSTOP)
        opened = other.open()
        assert all(other.store.remove(opened, opened.chain(range(64))))
        other.store_all(opened, opened.chain(range(500, 564)))
        held = segment(other)
        assert held.free_bytes < held.capacity_bytes - held.sealed_bytes
        reader.process.kill()
        until(
            "its pages are free",
            lambda: segment(other).retired_bytes == segment(other).quarantined_bytes == 0,
        )
    other.assert_readable(opened, opened.chain(range(500, 564)))


def test_a_reader_that_goes_on_reads_what_it_viewed(own_pool: Up, other: Pages) -> None:
    with Client(own_pool, "shm", "view") as reader:
        assert reader.line() == "viewing"
        opened = other.open()
        assert all(other.store.remove(opened, opened.chain(range(64))))
        reader.go_on()
        assert reader.process.wait(PATIENCE_S) == 0
        until("its pages are free", lambda: segment(other).retired_bytes == 0)
