"""What a worker asks of its transfer engine for the groups of a pull."""

from __future__ import annotations

import os
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kvstore.clock import SystemClock
from kvstore.errors import BadValue, Unavailable
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import EngineSource
from kvstore.wire.messages.transfers import FindEngine
from tests.unit.worker_scripts import PAGE, SEGMENT, packed
from workers.engine_child import LANDING
from workers.engine_source import EngineDesk, EnginePages, LandedPages
from workers.ingest import PullFailed, Target
from workers.landing import Landing

if TYPE_CHECKING:
    from workers.engine_child import EngineChild, EngineCopy
    from workers.tiers.tier import MemorySegment

BASE = 1 << 20
SOURCE = EngineSource("host:1", packed([10_000, 20_000, 30_000]))


class Copies:
    """Takes down what is asked of the engine."""

    def __init__(self, error: Unavailable | None = None, region: str = SEGMENT) -> None:
        self.asked: list[tuple[list[int], list[int], int]] = []
        self.error = error
        self.region = region

    def run(
        self, region: str, source: EngineSource, offsets: bytes, size: int, deadline_s: float
    ) -> None:
        """From these addresses to these offsets, so many bytes each."""
        assert (region, source.peer) == (self.region, SOURCE.peer)
        assert deadline_s > 0
        places = list(array("Q", source.addresses)), list(array("Q", offsets))
        self.asked.append((*places, size))
        if self.error is not None:
            raise self.error


def pages_of(copies: Copies) -> EnginePages:
    return EnginePages(cast("EngineCopy", copies), SEGMENT, BASE, SOURCE, deadline_s=1.0)


def target(offset: int, size: int, count: int, start: int = 0) -> Target:
    return Target(memoryview(b""), BASE + offset, size, PAGE, count, start)


def test_a_segment_that_is_not_served_is_a_wrong_value() -> None:
    segment = cast("MemorySegment", SimpleNamespace(id=SEGMENT, incarnation=7))
    desk = EngineDesk(cast("EngineChild", None), [segment], SystemClock())
    for name, life in ((SEGMENT, 6), ("strange", 7)):
        with pytest.raises(BadValue, match="in the life that it is in"):
            desk.find(FindEngine(name, life))


def test_neighbours_are_asked_for_at_once() -> None:
    copies = Copies()
    pages_of(copies).fill(1, target(8 * PAGE, 100, 2))
    assert copies.asked == [([20_000, 30_000], [8 * PAGE, 9 * PAGE], 100)]


def test_a_piece_of_a_page_is_asked_for_where_it_begins() -> None:
    copies = Copies()
    pages_of(copies).fill(2, target(8 * PAGE + 512, 100, 1, start=512))
    assert copies.asked == [([30_512], [8 * PAGE + 512], 100)]


def test_pages_for_a_device_are_asked_for_into_a_room_and_a_wait_for_one_has_an_end() -> None:
    landing, copies = Landing(1, 4 * PAGE), Copies(region=LANDING)
    pages = LandedPages(cast("EngineCopy", copies), landing, SOURCE, deadline_s=1.0)
    with pages.room(4 * PAGE) as room:
        pages.fill(0, Target(room.view, room.address + PAGE, 100, PAGE, 2))
        with pytest.raises(PullFailed) as failed, pages.room(PAGE):
            raise AssertionError("a second room")
    assert failed.value.outcome is Outcome.TRANSPORT
    assert copies.asked == [([10_000, 20_000], [PAGE, 2 * PAGE], 100)]
    with pages.room(PAGE):
        landing_fd = landing.fd
    landing.close()
    landing.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(landing_fd)


def test_an_engine_that_fails_fails_the_pull() -> None:
    with pytest.raises(PullFailed) as failed:
        pages_of(Copies(Unavailable("gone"))).fill(0, target(0, PAGE, 1))
    assert failed.value.outcome is Outcome.TRANSPORT
