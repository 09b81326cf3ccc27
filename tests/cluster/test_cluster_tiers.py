"""A working set of ten times the memory over a disk, with real processes: used, killed, harmed.

Whatever happens, every page that is read is right or a miss.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random
from threading import Event
from typing import TYPE_CHECKING, Self

import pytest

from kvstore import AlreadyThere, Hit, Miss, Stored
from kvstore.cli.operator import Operator
from kvstore.errors import KVStoreError
from tests.cluster.pages import Pages
from tests.cluster.up import Up, remove_segments
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore import OpenedNamespace, PageChain
    from kvstore.wire.messages.reads import SegmentStatus

SIZE = 256 << 10
MEMORY = 64 << 20
DISK = 1 << 30
CHAIN = 8
CHAINS = 10 * MEMORY // SIZE // CHAIN
PAGES = CHAINS * CHAIN
MOST = 0.6
"""Share of the pages that is found at least; memory holds a tenth. Some leave it uncopied: two
clients together lease nearly all of it.
"""
PACE_S = 0.002
PAUSE_S = 0.1
"""So that not all of memory is leased."""
IN_TIME_S = 20.0
CONFIG = """
[master]
lease_ttl_s = 1.0
[worker]
staging = "64MiB"
"""

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class Tiers:
    """A pool with little memory over a disk."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "pool"
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.config = folder / "pool.toml"
        self.config.write_text(CONFIG)

    def up(self) -> Up:
        """One life of it."""
        return Up(self.data_dir, f"--config={self.config}", f"--nvme={self.disk}:{DISK}")

    @property
    def file(self) -> Path:
        """The segment's file on the disk."""
        (found,) = self.disk.glob("*/kvharbor-*")
        return found


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    """A pool that leaves nothing in /dev/shm."""
    made = Tiers(tmp_path)
    yield made
    remove_segments(made.data_dir)


class Client:
    """One client's connection, and what it does with numbered chains."""

    def __init__(self, up: Up, transport: str) -> None:
        self.pages = Pages(up.master, transport, "tiers")
        self.opened: OpenedNamespace = self.pages.open(SIZE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pages.store.close()

    def chain(self, number: int) -> PageChain:
        """The same pages in every process."""
        return self.opened.chain([number] * CHAIN * Pages.layout().page_tokens)

    def put(self, number: int, timeout_s: float | None = None) -> bool:
        """Put a chain; whether all of it is in the pool."""
        outcomes = self.pages.put(self.opened, self.chain(number), timeout_s=timeout_s)
        return all(isinstance(each, Stored | AlreadyThere) for each in outcomes)

    def read(self, number: int) -> int:
        """Read a chain, every byte right; how many pages were found."""
        match = self.pages.store.match_prefix(self.opened, self.chain(number))
        return self.pages.read_back(match, match.pages).count(Hit()) if match.pages else 0

    def view(self, number: int) -> int:
        """The same by views."""
        match = self.pages.store.match_prefix(self.opened, self.chain(number))
        found = 0
        with self.pages.store.views(match) as views:
            for page, view in enumerate(views):
                if not isinstance(view, Miss):
                    assert view == payload(match.chain.key(page), 0, SIZE)
                    found += 1
        return found


def counters(up: Up) -> dict[str, int]:
    """What the master counted."""
    with Operator(up.master, None) as operator:
        return operator.status().counters


def disk_of(up: Up) -> SegmentStatus:
    """What the status says of the disk."""
    with Operator(up.master, None) as operator:
        (disk,) = (each for each in operator.status().segments if each.tier == "nvme")
        return disk


def in_time(is_so: Callable[[], bool], what: str) -> None:
    """Wait for something that the pool does by itself."""
    ends_s = time.monotonic() + IN_TIME_S
    while not is_so():
        assert time.monotonic() < ends_s, f"not in time: {what}"
        time.sleep(PACE_S)


def keep_pace(operator: Operator, chains: int) -> None:
    """Go on once so few pages have no copy on the disk that another chain loses none."""
    ahead = MEMORY // SIZE - 3 * CHAIN

    def is_copied() -> bool:
        counted = operator.status().counters
        gone = counted.get("moved_pages_nvme", 0) + counted.get("pages_evicted", 0)
        return chains * CHAIN <= gone + ahead

    in_time(is_copied, "copies on the disk")


def fill(up: Up, transport: str, numbers: Sequence[int], put: list[int]) -> int:
    """Put these chains, and after each read one of those that anybody has put; pages read."""
    random, read = Random(transport), 0
    with Client(up, transport) as client, Operator(up.master, None) as operator:
        for number in numbers:
            keep_pace(operator, len(put))
            assert client.put(number)
            put.append(number)
            read += client.read(random.choice(put))
    return read


def found_by(up: Up, transport: str) -> int:
    """Read everything; how many pages were found."""
    with Client(up, transport) as client:
        return sum(client.read(number) for number in range(CHAINS))


def use_until_killed(client: Client, is_killed: Event) -> None:
    """Put new chains as fast as can be, so that copies are always on their way."""
    for number in count(CHAINS):
        try:
            client.put(number, timeout_s=1.0)
        except KVStoreError:
            if is_killed.is_set():
                return


def is_brought_up(up: Up, client: Client) -> bool:
    """Ask for pages in memory; whether any ever came."""
    client.pages.store.prefetch(client.opened, client.chain(0))
    return counters(up).get("moved_pages_dram", 0) > 0


def kill_while_copies_are_made(up: Up) -> None:
    """One client puts, until the worker is killed."""
    is_killed = Event()
    before = counters(up)["moves_demote"]
    with Client(up, "shm") as client, ThreadPoolExecutor(1) as threads:
        using = threads.submit(use_until_killed, client, is_killed)
        in_time(lambda: counters(up)["moves_demote"] > before, "copies")
        is_killed.set()
        os.kill(up.pid("worker"), signal.SIGKILL)
        up.wait()
        using.result()


def test_ten_times_the_memory_is_found_also_after_kills(tiers: Tiers) -> None:
    with tiers.up() as up:
        put: list[int] = []
        halves = range(0, CHAINS, 2), range(1, CHAINS, 2)
        with ThreadPoolExecutor(2) as threads:
            read = list(threads.map(fill, (up, up), ("shm", "tcp"), halves, (put, put)))
        assert sum(read) >= MOST * PAGES
        assert found_by(up, "shm") >= MOST * PAGES
        assert found_by(up, "tcp") >= MOST * PAGES
        with Client(up, "shm") as client:
            assert sum(client.view(number) for number in range(CHAINS)) >= MOST * PAGES
            in_time(lambda: is_brought_up(up, client), "pages come up to memory")
        counted = counters(up)
        assert min(counted["hits_dram"], counted["hits_nvme"]) > 0
        kill_while_copies_are_made(up)
    with tiers.up() as up:
        assert found_by(up, "shm") >= MOST * PAGES
        up.end(signal.SIGKILL)
    with tiers.up() as up:
        assert found_by(up, "tcp") >= MOST * PAGES


def take_no_writes(up: Up, _: Path) -> None:
    """Let every write beyond the records fail."""
    resource.prlimit(up.pid("worker"), resource.RLIMIT_FSIZE, (MEMORY // 2, MEMORY // 2))


def lose_the_bytes(_: Up, file: Path) -> None:
    """Let every read of a page fail."""
    os.truncate(file, MEMORY // 2)


def lose_the_folder(_: Up, file: Path) -> None:
    """Remove it with all that is in it."""
    shutil.rmtree(file.parent, ignore_errors=True)


@pytest.mark.parametrize(
    ("harm", "medium"),
    [(take_no_writes, "read_only"), (lose_the_bytes, "failed"), (lose_the_folder, "read_only")],
)
def test_a_disk_that_fails_takes_nothing_else_with_it(
    tiers: Tiers, harm: Callable[[Up, Path], None], medium: str
) -> None:
    first = range(3 * MEMORY // SIZE // CHAIN // 2)
    with tiers.up() as up, Client(up, "shm") as client, Client(up, "tcp") as other:
        put: list[int] = []
        fill(up, "shm", first, put)
        assert disk_of(up).sealed_bytes > 0
        file = tiers.file
        later, random = count(CHAINS), Random(medium)

        def is_said() -> bool:
            number = next(later)
            harm(up, file)
            assert client.put(number)
            assert client.read(number) == other.read(number) == CHAIN, "memory serves"
            client.read(random.choice(put))
            time.sleep(PAUSE_S)
            return disk_of(up).medium == medium

        in_time(is_said, "the status says so")
        assert disk_of(up).reason
        found = [sum(each.read(number) for number in put) for each in (client, other)]
        below = {"read_only": MEMORY // SIZE, "failed": 0}[medium]
        assert min(found) > below, found
        assert is_said()
    with tiers.up() as up, Client(up, "tcp") as client:
        assert disk_of(up).medium == "serving"
        assert sum(client.read(number) for number in range(next(later))) > 0
