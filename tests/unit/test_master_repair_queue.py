"""The queue of repair: what is due, what comes first, and its bound."""

from __future__ import annotations

from math import inf

import pytest

from master import repair_queue
from master.repair_queue import GRAIN_S, Need, RepairQueue
from master.wheel import NOWHERE, Wakeup
from tests.unit.master_rig import chain

LATER_S = 10.0 + 2 * GRAIN_S


def need(
    number: int = 0, due_s: float = 10.0, *, presses: bool = False, is_awaited: bool = False
) -> Need:
    return Need(1, chain(number, 2), due_s, presses, is_awaited)


def everybody(_worker: str) -> bool:
    return True


@pytest.fixture
def queue() -> RepairQueue:
    return RepairQueue(Wakeup())


def test_a_need_is_due_at_its_time(queue: RepairQueue) -> None:
    assert queue.next_s() == inf
    noted = queue.note(need())
    assert 10.0 < queue.next_s() <= LATER_S
    assert queue.take_due(9.9, 8) == []
    assert queue.take_due(LATER_S, 8) == [noted]
    assert len(queue) == 1, "until it is done"
    assert noted is not None
    queue.done(noted)
    assert not len(queue)


def test_what_is_noted_again_is_one_need_due_at_the_earlier_time(queue: RepairQueue) -> None:
    first = queue.note(need(due_s=60.0))
    assert queue.note(need(presses=True, is_awaited=True)) is first
    assert queue.note(need(due_s=70.0)) is first
    assert len(queue) == 1
    assert queue.take_due(LATER_S, 8) == [first]
    assert first is not None
    assert (first.presses, first.is_awaited) == (True, True)


def test_chains_that_begin_alike_are_two_needs(queue: RepairQueue) -> None:
    one = Need(1, chain(1, 1) + chain(2, 3), 10.0)
    other = Need(1, chain(1, 1) + chain(3, 3), 10.0)
    assert queue.note(one) is one
    assert queue.note(other) is other
    assert queue.note(Need(2, one.keys, 10.0)) is not one, "of another namespace"
    assert len(queue) == 3


def test_the_scarcest_come_first_then_awaited_ones_then_the_hottest(queue: RepairQueue) -> None:
    ranks = {0: (2, 9.0), 1: (1, 1.0), 2: (1, 5.0), 3: (1, 0.0), 4: (2, 0.0)}
    for number, (rank, heat) in ranks.items():
        noted = queue.note(need(number, is_awaited=number in {3, 4}))
        assert noted is not None
        queue.take_due(LATER_S, 8)
        queue.make_ready(noted, rank, heat)
    assert dict(queue.ready) == {1: 3, 2: 2}
    order = []
    while (taken := queue.take_ready(everybody)) is not None:
        order.append(taken.keys)
        assert taken.rank < 0
        queue.done(taken)
    assert order == [chain(number, 2) for number in (3, 2, 1, 4, 0)]
    assert not queue.has_ready
    assert not queue.ready.total()


def test_what_a_busy_worker_alone_has_holds_up_no_others(queue: RepairQueue) -> None:
    for number, worker in enumerate(("w1", "w1", "w2", "")):
        noted = queue.note(need(number))
        assert noted is not None
        queue.take_due(LATER_S, 8)
        queue.make_ready(noted, 2 if not worker else 1, -number, worker)
    order = []
    while (taken := queue.take_ready(lambda worker: worker == "w2")) is not None:
        order.append(taken.keys)
    assert order == [chain(number, 2) for number in (2, 3)]
    assert queue.has_ready
    assert dict(+queue.ready) == {1: 2}
    assert queue.take_ready(everybody) is not None


def test_a_need_that_is_ready_is_not_made_to_wait_by_a_note(queue: RepairQueue) -> None:
    noted = queue.note(need())
    assert noted is not None
    queue.take_due(LATER_S, 8)
    queue.make_ready(noted, 1, 0.0)
    queue.note(need(due_s=5.0))
    assert noted.bucket == NOWHERE
    assert queue.take_ready(everybody) is noted


def test_nothing_waits_any_more_when_it_is_to_hurry(queue: RepairQueue) -> None:
    waiting, other = queue.note(need(0, 500.0)), queue.note(Need(2, chain(9, 2), 500.0))
    ready = queue.note(need(1))
    assert waiting is not None
    assert ready is not None
    queue.take_due(LATER_S, 8)
    queue.make_ready(ready, 1, 0.0)
    waiting.tries = 4
    list(queue.hurry(11.0, 1))
    assert queue.take_due(12.0, 8) == [waiting]
    assert (waiting.tries, waiting.surplus_at_s) == (0, -inf)
    queue.done(waiting)
    list(queue.hurry(11.0))
    assert queue.take_due(12.0, 8) == [other]


def test_a_long_queue_is_hurried_in_steps(
    queue: RepairQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_queue, "HURRIED_PER_STEP", 2)
    first, *others = [queue.note(need(number, 500.0)) for number in range(5)]
    steps = queue.hurry(11.0)
    next(steps)
    assert [each.due_s for each in queue] == [11.0] * 2 + [500.0] * 3
    assert first is not None
    for each in queue.take_due(12.0, 8):
        queue.done(each)
    assert len(list(steps)) == 1
    assert queue.take_due(12.0, 8) == others[:0:-1]


def test_the_queue_is_bounded_and_says_that_something_was_left_out(
    queue: RepairQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_queue, "NEEDS_MAX", 2)
    assert queue.note(need(0)) is not None
    assert queue.note(need(1)) is not None
    before = queue.is_cut
    assert queue.note(need(2)) is None
    assert (before, queue.is_cut) == (False, True)
    assert queue.note(need(1)) is not None, "it is in already"
