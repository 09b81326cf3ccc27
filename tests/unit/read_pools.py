"""Located pages, a script of the master, and the read of them. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.locations import Query, match_steps
from kvstore.client.reads import ReadRequest, read_steps
from kvstore.client.steps import drive
from kvstore.wire.messages.reads import LocatedRun
from tests.unit.client_scripts import Script, copy, located, opened, segment

if TYPE_CHECKING:
    from kvstore.client.locations import Match
    from kvstore.client.outcomes import ReadOutcome
    from kvstore.page import PageChain
    from kvstore.wire.messages.common import Outcome, SegmentRef

SIZE = 4096
SPACE = opened()
COSTS = {"shm": 0, "tcp": 10}


def rank(ref: SegmentRef) -> int | None:
    (address,) = ref.addresses
    return COSTS.get(address.transport)


def chain_of(pages: int) -> PageChain:
    return SPACE.chain(range(pages * 4))


class Pool:
    """Pages 0..n on "near", and again on "far" (worse) if wanted; one located run."""

    def __init__(self, pages: int, *, far: bool = False) -> None:
        self.chain = chain_of(pages)
        self.script = Script()
        self.segments = [segment("near", "shm"), segment("far", "tcp")]
        self.places = tuple(i * SIZE for i in range(pages))
        near = [i * SIZE for i in range(pages)]
        away = [(1 << 20) + i * SIZE for i in range(pages)]
        self.script.store("near", self.chain, near, SIZE)
        self.script.store("far", self.chain, away, SIZE)
        copies = [copy(self.chain, away, SIZE, 1)] if far else []
        copies.append(copy(self.chain, near, SIZE, 0))
        self.run = LocatedRun(0, pages, tuple(copies))

    def match(self, *, lease: bool = True, ttl_s: float = 10.0) -> Match:
        query = Query(SPACE, self.chain, self.script.clock.now_s() + 10, lease=lease)
        self.script.will(located(self.segments, self.run, ttl_s=ttl_s))
        return drive(match_steps(query, self.script.clock), self.script)

    def read(self, match: Match, timeout_s: float = 10.0) -> list[ReadOutcome]:
        request = ReadRequest(match, 0, self.places, self.script.clock.now_s() + timeout_s)
        return drive(read_steps(request, self.script.clock, rank), self.script)

    def view(self, match: Match) -> list[ReadOutcome]:
        """As read, but for what stays where it is."""
        deadline_s = self.script.clock.now_s() + 10.0
        request = ReadRequest(match, 0, self.places, deadline_s, needs_lease=True)
        return drive(read_steps(request, self.script.clock, rank), self.script)

    def spoil(self, where: str, page: int, *codes: Outcome) -> None:
        offset = page * SIZE + ((1 << 20) if where == "far" else 0)
        self.script.transport.spoil[(where, offset)] = list(codes)

    def assert_wiped(self, page: int) -> None:
        place = self.places[page]
        assert bytes(self.script.memory.view[place : place + SIZE]) == bytes(SIZE)
