"""Many clients and a leader that fences, frees and removes, all at once, over real threads.

Whatever the interleaving: every request is answered, the machine's invariants hold, records and
columns agree, and what is sealed has the bytes that its key says. The seed fixes what each party
asks for, not how the threads interleave.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import KVStoreError
from kvstore.record import RecordState, unpack_record
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import (
    ExtentsConfirmed,
    FenceExtents,
    FreeExtents,
    RetireExtents,
)
from kvstore.wire.messages.puts import Ingested, Sealed, SealedNoted
from tests.contract.worker_rig import Client, Rig, order, pool, soon
from tests.fakes import payload
from tests.unit.worker_scripts import PAGE
from tests.unit.worker_segments import Pages

if TYPE_CHECKING:
    from collections.abc import Callable

SLOTS = 12
CLIENTS = 4
PUTS = 80
COMMANDS = 120


class Party(threading.Thread):
    """A thread whose failure is the test's."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        """Work; keep what went wrong."""
        try:
            self.work()
        except BaseException as error:  # `ended` raises it
            self.error = error

    def ended(self) -> None:
        """Wait for it, and raise what it raised."""
        self.join()
        if self.error is not None:
            raise self.error


class Turmoil:
    """A rig, and the generations that everybody draws from."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.seed = seed
        self._counters = count(10)
        self.newest = 0

    def generation(self) -> int:
        """A generation that nobody had."""
        self.newest = next(self._counters)
        return self.newest

    def picked(self, random: Random) -> tuple[int, ...]:
        """Some extents, mostly neighbours."""
        first = random.randrange(SLOTS)
        slots = range(first, min(SLOTS, first + random.randint(1, 5)))
        return tuple(slot * PAGE for slot in slots if random.random() < 0.9) or (first * PAGE,)

    def client(self, number: int) -> None:
        """Put by stream and by buffer, repeat, and die in mid-stream now and then."""
        random, left = Random(f"{self.seed} client {number}"), PUTS
        while left:
            with self.rig.client(random.choice((self.rig.unix, self.rig.tcp))) as client:
                while left:
                    left -= 1
                    if not self.put(client, random):
                        break

    def put(self, client: Client, random: Random) -> bool:
        """One put, or two of the same; whether the connection is still of use."""
        counter = self.generation()
        pages = Pages(self.picked(random), first_key=counter * 100)
        how = random.random()
        try:
            if how < 0.1:
                client.stream(pages, counter, upto=random.randrange(len(pages.source)))
                return False
            if how < 0.2:
                pages.payloads[-1] = bytes(PAGE)
            requests = [client.stream(pages, counter)]
            if how > 0.8:
                requests.append(client.stream(pages, counter))
            for _ in requests:
                self.check(client, pages)
        except KVStoreError:
            return False  # a fence has ended the pull, and the connection with it
        return True

    def check(self, client: Client, pages: Pages) -> None:
        """An answer is an outcome a page."""
        reply = client.link.receive(soon()).message
        assert isinstance(reply, Ingested)
        assert len(reply.outcomes) == len(pages.keys)
        assert set(reply.outcomes) <= set(Outcome)

    def leader(self) -> None:
        """Command whatever comes to mind."""
        random = Random(f"{self.seed} leader")
        for _ in range(COMMANDS):
            offsets = self.picked(random)
            kind = random.choice((FenceExtents, FreeExtents, RetireExtents))
            counter = max(1, self.newest - random.randrange(6))
            reply = self.rig.leader.command(order(kind, self.rig, offsets, counter))
            assert isinstance(reply, ExtentsConfirmed)
            assert len(reply.outcomes) == len(offsets)
            assert set(reply.outcomes) <= {Outcome.OK, Outcome.STALE}

    def noted(self, message: Sealed) -> SealedNoted:
        """Now and then a plan is closed."""
        pages = len(message.offsets) // 8
        closed = message.generation % 7 == 0
        return SealedNoted(bytes((Outcome.PLAN_CLOSED if closed else Outcome.OK,)) * pages)


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once(seed: int) -> None:
    with pool() as rig:
        turmoil = Turmoil(rig, seed)
        rig.leader.on_sealed = turmoil.noted
        parties = [Party(partial(turmoil.client, number)) for number in range(CLIENTS)]
        parties.append(Party(turmoil.leader))
        for party in parties:
            party.start()
        for party in parties:
            party.ended()
        rig.listeners.close()  # every connection's thread has ended: nothing is in progress
        assert not rig.state.holdings.works
        assert not rig.state.pulls.waiting
        assert not rig.state.pulls.reports
        rig.state.check_invariants()
        settled(rig)


def settled(rig: Rig) -> None:
    """Records and columns agree, and sealed extents hold the bytes of their keys."""
    chunk = rig.state.holdings.segments[rig.segment.id].chunk_around(0)
    assert chunk is not None
    for slot in range(SLOTS):
        record = unpack_record(bytes(rig.segment.records.read(slot * PAGE, PAGE)))
        state = RecordState.FREE if record is None else record.state
        assert chunk.states[slot] == state, slot
        if record is None:
            continue
        assert chunk.generations[slot] == record.generation
        if state is RecordState.SEALED:
            stored = bytes(rig.segment.payload[slot * PAGE : (slot + 1) * PAGE])
            assert stored == payload(record.key, 0, PAGE)
