"""The pool as an engine sees it: trouble is a miss, told once, and looked for again by itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, cast

import pytest

from kvstore.connectors.breaker import LATE_MAX, PAUSE_MIN_S
from kvstore.connectors.engine_pool import EnginePool, EngineStore, Reached
from kvstore.errors import (
    BadValue,
    DeadlineExceeded,
    KVStoreError,
    OutOfSpace,
    Throttled,
    Unavailable,
    UnknownNamespace,
)
from kvstore.namespace import Attention, CacheGroup, Content, Layout, Namespace, open_layout
from tests.fake_store import FakeStore
from tests.fakes import ManualClock

if TYPE_CHECKING:
    import threading

    from kvstore.client.namespaces import OpenedNamespace

NAMESPACE = open_layout(
    Content("t", "m", "r", "", "float32", (CacheGroup(Attention.FULL, 1, 1, 4, 4),), ""), Layout(16)
)


class Store(FakeStore):
    """One that tells whether it was closed, and which namespaces were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[bytes] = []
        self.closed = False

    def open(self, content: Content, layout: Layout) -> OpenedNamespace:
        opened = super().open(content, layout)
        self.names.append(bytes(opened.namespace.id))
        return opened

    def close(self) -> None:
        self._enter("close")
        self.closed = True


class Rig:
    """A pool that can be absent."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stores: list[Store] = []
        self.absent: KVStoreError | None = None
        self.pool = EnginePool(self._connect, [NAMESPACE], self.clock)

    def _connect(self) -> EngineStore:
        if self.absent is not None:
            raise self.absent
        self.stores.append(Store())
        return cast("EngineStore", self.stores[-1])

    def call(self, error: Exception | None = None) -> str:
        def work(_: Reached) -> str:
            if error is not None:
                raise error
            return "answer"

        return self.pool.call("a test", work, "otherwise")


def test_the_first_call_connects_and_opens_the_namespaces() -> None:
    rig = Rig()
    assert rig.pool.store is None
    assert [rig.call(), rig.call()] == ["answer", "answer"]
    (store,) = rig.stores
    assert store.names == [bytes(NAMESPACE.id)]


def test_namespaces_that_are_known_late_are_asked_for_by_the_first_call() -> None:
    rig = Rig()
    asked: list[str] = []

    def namespaces() -> list[Namespace]:
        asked.append("asked")
        if len(asked) == 1:
            raise BadValue("hash_seed", "a random one", "a fixed one")
        return [NAMESPACE]

    rig.pool = EnginePool(rig._connect, namespaces, rig.clock)  # noqa: SLF001 -- its own rig
    assert not asked
    assert rig.call() == "otherwise"  # refused as a pool in trouble is
    assert not rig.stores
    rig.clock.advance(PAUSE_MIN_S)
    assert [rig.call(), rig.call()] == ["answer", "answer"]
    assert len(asked) == 2


def test_a_pool_that_is_absent_is_a_miss_and_looked_for_again() -> None:
    rig = Rig()
    rig.absent = Unavailable("nobody there")
    assert rig.call() == "otherwise"
    rig.absent = None
    assert rig.call() == "otherwise"  # for it is left alone for a while
    assert not rig.pool.is_worth_asking
    rig.clock.advance(PAUSE_MIN_S)
    assert rig.call() == "answer"
    assert rig.pool.is_worth_asking


def test_trouble_is_told_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with caplog.at_level(logging.WARNING, "kvharbor"):
        rig.call(Unavailable("slow"))
        for _ in range(3):
            rig.clock.advance(60)
            rig.call(Unavailable("slow"))
        rig.clock.advance(60)
        rig.call()
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "kvharbor: a test: slow; serving goes on without the pool until it is well again",
        "kvharbor: the pool answers again",
    ]
    assert rig.pool.troubles == 4
    assert rig.pool.times_opened == 4


def test_a_fault_of_ours_is_a_miss_too(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    assert rig.call(ZeroDivisionError("a bug")) == "otherwise"
    assert any(record.exc_info for record in caplog.records)


def test_a_pool_that_has_lost_its_memory_is_met_anew() -> None:
    rig = Rig()
    rig.call()
    rig.call(UnknownNamespace("open it first"))
    rig.clock.advance(PAUSE_MIN_S)
    assert rig.call() == "answer"
    first, second = rig.stores
    assert first.closed
    assert second.names == [bytes(NAMESPACE.id)]


def test_a_store_that_does_not_close_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """V5: the thread that has asked goes on, and so does whoever ends the engine."""
    rig = Rig()
    rig.call()
    rig.stores[0].fail["close"] = DeadlineExceeded("buffer 1: still in use after 30 s")
    assert rig.call(UnknownNamespace("open it first")) == "otherwise"
    rig.clock.advance(PAUSE_MIN_S)
    assert rig.call() == "answer"
    rig.stores[1].fail["close"] = DeadlineExceeded("buffer 1: still in use after 30 s")
    rig.pool.close()
    assert [store.closed for store in rig.stores] == [False, False]
    assert sum(record.exc_info is not None for record in caplog.records) == 2


def test_a_store_whose_namespaces_cannot_be_opened_is_closed() -> None:
    rig = Rig()
    store = Store()
    store.fail["open"] = Unavailable("gone")
    rig.pool = EnginePool(lambda: cast("EngineStore", store), [NAMESPACE], rig.clock)
    assert rig.call() == "otherwise"
    assert store.closed


def test_late_answers_in_a_row_leave_the_pool_alone() -> None:
    rig = Rig()

    def slowly(_: Reached) -> str:
        rig.clock.advance(0.1)
        return "answer"

    def prompt(_: Reached) -> str:
        return "answer"

    for _ in range(LATE_MAX - 1):
        assert rig.pool.call("a test", slowly, "otherwise", 0.02) == "answer"
    assert rig.pool.call("a test", prompt, "otherwise", 0.02) == "answer"  # they are counted anew
    for _ in range(LATE_MAX):
        assert rig.call() == "answer", "as when what came too late is given back"
        assert rig.pool.call("a test", slowly, "otherwise", 0.02) == "answer"
    assert rig.call() == "otherwise"


ADVICE_FAILS: Final = [
    (BadValue("priority", 9, "less"), True),
    (OutOfSpace("too many hints"), True),
    (Throttled(1.0, "staging", "full"), True),
    (KVStoreError("of a newer master"), True),
    (Unavailable("gone"), False),
    (DeadlineExceeded("slow"), False),
    (UnknownNamespace("open it first"), False),
    (ZeroDivisionError("a bug"), False),
]


@pytest.mark.parametrize(("error", "goes_on"), ADVICE_FAILS)
def test_a_refusal_of_what_was_only_told_keeps_nobody_from_the_pool(
    error: Exception, goes_on: bool
) -> None:
    """A hint that a master does not take is no reason to do without its pages."""
    rig = Rig()

    def refused(_: Reached) -> None:
        raise error

    rig.pool.tell("a hint", refused)
    assert rig.pool.is_worth_asking == goes_on
    assert rig.pool.troubles == (not goes_on)
    assert rig.call() == ("answer" if goes_on else "otherwise")


def test_what_is_only_told_is_no_try_of_a_pool_in_trouble() -> None:
    rig = Rig()
    rig.call(Unavailable("gone"))
    rig.clock.advance(PAUSE_MIN_S)
    told: list[Reached] = []
    rig.pool.tell("a hint", told.append)
    assert not told
    assert rig.call() == "answer", "the try is for who has something of it"
    rig.pool.tell("a hint", told.append)
    assert told


def test_a_closed_pool_is_a_miss() -> None:
    rig = Rig()
    rig.call()
    rig.pool.close()
    rig.pool.close()
    assert rig.call() == "otherwise"
    assert rig.stores[0].closed


def test_a_pool_that_is_closed_while_a_call_begins_is_not_reached_any_more() -> None:
    rig = Rig()

    class Closing:
        """In the place of the lock that `close` may take before the call does."""

        def __init__(self) -> None:
            self.entered = 0

        def __enter__(self) -> None:
            self.entered += 1
            if self.entered == 1:
                rig.pool.close()

        def __exit__(self, *_: object) -> None:
            pass

    rig.pool._reaching = cast("threading.Lock", Closing())  # noqa: SLF001 -- to come between
    assert rig.call() == "otherwise"
    assert all(store.closed for store in rig.stores), "nobody else would close it"
