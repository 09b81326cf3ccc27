"""A read whose first replica fails, in every way there is: the next one serves it in the same call.

Stores of both kinds, over real sockets, towards two workers that hold the same pages; the master
is a line of script.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from kvstore.aio import AsyncKVStore
from kvstore.client.hedge_delay import SAMPLES_MIN
from kvstore.client.outcomes import Hit, Miss, MissReason
from kvstore.client.store import KVStore
from kvstore.clock import SystemClock
from kvstore.record import RecordState
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer.choice import Choice
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Address
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.reads import Located, LocatedRun, MatchPrefix
from kvstore.wire.messages.transfers import ReadExtents, ReadStarted, ShareSegments, StageExtents
from tests.contract.fake_worker import FakeWorker
from tests.contract.transport_ways import hang_up_on, reply
from tests.fakes import payload
from tests.unit.client_scripts import copy, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.framing import Frame
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.common import SegmentRef

SIZE = 8192
PAGES = 6
SPACE = opened(part_bytes=SIZE)
CHAIN = SPACE.chain(range(4 * PAGES))
PLACES = tuple(i * SIZE for i in range(PAGES))
WHOLE = b"".join(payload(key, 0, SIZE) for key in CHAIN)
STALL_S = 0.3
TIMEOUT_S = 10.0
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _short_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.limits.READ_STALL_MAX_S", STALL_S)


class Pool:
    """Two workers with the same pages; the first one is nearer. Plays the link to a master, too."""

    def __init__(self, first: FakeWorker, second: FakeWorker, kind: str) -> None:
        transport, _, tier = kind.partition(" ")
        self.workers = (first, second)
        self.transport = transport
        for worker in self.workers:
            worker.tier = tier or "dram"
            worker.staging.slots = 2 * PAGES  # it reuses slots that views still lock
            self.offsets = worker.file.store(CHAIN, SIZE)
        self.segments = tuple(self._ref(i) for i in range(2))

    def _ref(self, number: int) -> SegmentRef:
        ref, name = self.workers[number].ref(self.transport), f"w{number}"
        (address,) = ref.addresses
        address = Address(address.transport, address.where, number)
        return msgspec.structs.replace(ref, worker=name, addresses=(address,))

    def call(self, message: Message, timeout_s: float) -> Message:
        """The master."""
        del timeout_s
        if not isinstance(message, MatchPrefix):
            return Done()
        copies = tuple(copy(CHAIN, self.offsets, SIZE, i) for i in range(2))
        return Located(1, 10.0, self.segments, (LocatedRun(0, PAGES, copies),))

    def close(self) -> None:
        """The link has nothing to close."""

    def choice(self) -> Choice:
        return Choice([self.transport], lambda: Identity(Role.ENGINE), SystemClock())

    def store(self, *, hedge: bool = False) -> KVStore:
        return KVStore(cast("Any", self), self.choice(), SystemClock(), hedge=hedge)


class AsyncLink:
    """The link of an AsyncKVStore."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def call(self, message: Message, timeout_s: float) -> Message:
        return self.pool.call(message, timeout_s)

    def close(self) -> None:
        """Nothing."""


@contextmanager
def pool_of(folder: Path, kind: str) -> Iterator[Pool]:
    for name in ("a", "b"):
        (folder / name).mkdir()
    with FakeWorker(folder / "a") as first, FakeWorker(folder / "b") as second:
        yield Pool(first, second, kind)


def refuse(pool: Pool) -> None:
    """Its process is gone, and its port with it."""
    pool.segments = (
        msgspec.structs.replace(
            pool.segments[0], addresses=(Address(pool.transport, "127.0.0.1:1", 0),)
        ),
        pool.segments[1],
    )


def hang_up(pool: Pool) -> None:
    pool.workers[0].say = hang_up_on(ReadExtents)


def answer_with_an_error(pool: Pool) -> None:
    pool.workers[0].say = reply(Failure("fenced", "no"), ReadExtents)


def hush(*kinds: type) -> Callable[[Pool], None]:
    def fall_silent(pool: Pool) -> None:
        pool.workers[0].say = lambda link, frame: isinstance(frame.message, kinds)

    return fall_silent


def stall_in_mid_page(pool: Pool) -> None:
    def say(link: FrameSocket, frame: Frame) -> bool:
        if isinstance(frame.message, ReadExtents):
            started = ReadStarted(bytes(PAGES))
            link.send(FrameKind.REPLY, frame.request_id, started, raw=[b"half a page"])
        return isinstance(frame.message, ReadExtents)

    pool.workers[0].say = say


def damage(pool: Pool) -> None:
    for offset in pool.offsets:
        pool.workers[0].file.flip(offset)


def damage_one(pool: Pool) -> None:
    pool.workers[0].file.flip(pool.offsets[2])


def free(pool: Pool) -> None:
    for key, offset in zip(CHAIN, pool.offsets, strict=True):
        pool.workers[0].file.write_record(key, offset, SIZE, state=RecordState.FREE)


def begin_anew(pool: Pool) -> None:
    pool.workers[0].incarnation += 1


OVER_A_NETWORK = (
    refuse,
    hang_up,
    answer_with_an_error,
    hush(ReadExtents),
    stall_in_mid_page,
    damage,
    damage_one,
    free,
    begin_anew,
)
ON_ONE_HOST = (damage, damage_one, free)
WAYS = [
    *[("tcp", fault) for fault in OVER_A_NETWORK],
    *[("shm", fault) for fault in (*ON_ONE_HOST, begin_anew, hush(ShareSegments))],
    *[("shm nvme", fault) for fault in (damage, free, hush(StageExtents))],
]


def assert_read(outcomes: object, into: bytearray) -> None:
    assert outcomes == [Hit()] * PAGES
    assert bytes(into) == WHOLE


@pytest.mark.parametrize("hedge", [False, True])
@pytest.mark.parametrize(("kind", "fault"), WAYS)
def test_a_blocking_read_is_served_by_the_next_replica(
    tmp_path: Path, kind: str, fault: Callable[[Pool], None], hedge: bool
) -> None:
    with pool_of(tmp_path, kind) as pool, closing(pool.store(hedge=hedge)) as store:
        into = bytearray(len(WHOLE))
        fault(pool)
        began_s = time.monotonic()
        match = store.match_prefix(SPACE, CHAIN)
        assert_read(store.read(match, into, PLACES, timeout_s=TIMEOUT_S), into)
        assert time.monotonic() - began_s < STALL_S + TIMEOUT_S / 2


@pytest.mark.parametrize(("kind", "fault"), WAYS)
def test_a_read_on_an_event_loop_is_served_by_the_next_replica(
    tmp_path: Path, kind: str, fault: Callable[[Pool], None]
) -> None:
    async def work(pool: Pool) -> None:
        link = cast("Any", AsyncLink(pool))
        store = AsyncKVStore(link, pool.choice(), tenant="tests", timeout_s=TIMEOUT_S)
        into = bytearray(len(WHOLE))
        fault(pool)
        match = await store.match_prefix(SPACE, CHAIN)
        assert_read(await store.read(match, into, PLACES), into)
        await store.close()

    with pool_of(tmp_path, kind) as pool:
        asyncio.run(work(pool))


@pytest.mark.parametrize(("kind", "fault"), [each for each in WAYS if each[0] != "tcp"])
def test_views_are_of_the_next_replica(
    tmp_path: Path, kind: str, fault: Callable[[Pool], None]
) -> None:
    with pool_of(tmp_path, kind) as pool, closing(pool.store()) as store:
        fault(pool)
        match = store.match_prefix(SPACE, CHAIN)
        with store.views(match, timeout_s=TIMEOUT_S) as views:
            assert b"".join(cast("list[memoryview]", views)) == WHOLE
            views.clear()


def test_a_deadline_shorter_than_a_stall_leaves_time_for_the_next_replica(tmp_path: Path) -> None:
    with pool_of(tmp_path, "tcp") as pool, closing(pool.store()) as store:
        into = bytearray(len(WHOLE))
        hush(ReadExtents)(pool)
        match = store.match_prefix(SPACE, CHAIN)
        outcomes = store.read(match, into, PLACES, timeout_s=STALL_S * 0.8)
        assert_read(outcomes, into)


def test_a_silent_worker_costs_a_store_one_stall(tmp_path: Path) -> None:
    with pool_of(tmp_path, "tcp") as pool, closing(pool.store()) as store:
        into = bytearray(len(WHOLE))
        hush(ReadExtents)(pool)
        began_s = time.monotonic()
        for _ in range(10):
            match = store.match_prefix(SPACE, CHAIN)
            assert_read(store.read(match, into, PLACES), into)
        assert time.monotonic() - began_s >= STALL_S
        asked = [each for each in pool.workers[0].seen if isinstance(each, ReadExtents)]
        assert len(asked) == 1


def test_where_all_replicas_fail_it_is_a_miss(tmp_path: Path) -> None:
    with pool_of(tmp_path, "tcp") as pool, closing(pool.store()) as store:
        into = bytearray(b"\xee" * len(WHOLE))
        for worker in pool.workers:
            worker.say = hang_up_on(ReadExtents)
        outcomes = store.read(store.match_prefix(SPACE, CHAIN), into, PLACES)
        assert outcomes == [Miss(MissReason.TRANSPORT)] * PAGES
        assert not any(into)


class Late:
    """Answers no read until it is let go."""

    def __init__(self, worker: FakeWorker) -> None:
        self.let_go = threading.Event()
        self.holding = threading.Event()
        worker.say = self._say

    def _say(self, link: FrameSocket, frame: Frame) -> bool:
        del link
        if isinstance(frame.message, ReadExtents):
            self.holding.set()
            assert self.let_go.wait(PATIENCE_S)
        return False


def warmed(pool: Pool) -> KVStore:
    """A store that knows how long reads take."""
    store, into = pool.store(hedge=True), bytearray(len(WHOLE))
    match = store.match_prefix(SPACE, CHAIN)
    for _ in range(SAMPLES_MIN):
        assert_read(store.read(match, into, PLACES), into)
    assert store.counters().hedges == 0
    return store


def test_a_late_worker_is_overtaken_by_the_next_replica(tmp_path: Path) -> None:
    with pool_of(tmp_path, "tcp") as pool, closing(warmed(pool)) as store:
        into = bytearray(len(WHOLE))
        match = store.match_prefix(SPACE, CHAIN)
        late = Late(pool.workers[0])
        assert_read(store.read(match, into, PLACES), into)
        counters = store.counters()
        assert (counters.hedges, counters.hedges_won) == (1, 1)
        into[:] = bytes(len(into))
        late.let_go.set()
        store.close()
        assert not any(into)


def test_an_event_loop_s_late_worker_is_overtaken_too(tmp_path: Path) -> None:
    async def work(pool: Pool) -> None:
        link = cast("Any", AsyncLink(pool))
        choice = pool.choice()
        store = AsyncKVStore(link, choice, tenant="tests", timeout_s=TIMEOUT_S, hedge=True)
        into = bytearray(len(WHOLE))
        match = await store.match_prefix(SPACE, CHAIN)
        for _ in range(SAMPLES_MIN):
            await store.read(match, into, PLACES)
        late = Late(pool.workers[0])
        assert_read(await store.read(match, into, PLACES), into)
        late.let_go.set()
        assert store.counters().hedges_won == 1
        await store.close()

    with pool_of(tmp_path, "tcp") as pool:
        asyncio.run(work(pool))


def test_a_forked_child_hedges_with_threads_of_its_own(tmp_path: Path) -> None:
    with pool_of(tmp_path, "tcp") as pool, closing(warmed(pool)) as store:
        into = bytearray(len(WHOLE))
        match = store.match_prefix(SPACE, CHAIN)
        assert_read(store.read(match, into, PLACES), into)  # by a thread
        with warnings.catch_warnings():
            # Newer Pythons warn of forking beside threads, which is what is tested here.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for _ in range(SAMPLES_MIN + 1):
                    assert_read(store.read(match, into, PLACES), into)
                store.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert_read(store.read(match, into, PLACES), into)
