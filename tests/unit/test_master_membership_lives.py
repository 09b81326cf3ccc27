"""Which lives of a segment a master takes in: later ones of a file, and those of another file."""

from __future__ import annotations

import pytest

from kvstore.ids import first_incarnation
from kvstore.wire.messages.membership import RegisterWorker, SegmentOffer, WorkerAccepted
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure

KEYS = chain(1, 8)
LATE, EARLY = 9, 1
"""Of files, by the number that each has drawn; not by when they were made."""


def registration(rig: Rig, incarnation: int) -> RegisterWorker:
    """What a process called w1 says that has this life of the segment."""
    offer = SegmentOffer("w1-dram", incarnation, "dram", rig.workers["w1"].geometry)
    return RegisterWorker("w1", "w1", (), (offer,))


def is_refused(rig: Rig, incarnation: int) -> bool:
    """Whether such a process may not register."""
    reply = rig.ask(rig.open("worker", "", "w1"), registration(rig, incarnation))
    if isinstance(reply, WorkerAccepted):
        return False
    assert "another worker called w1" in failure(reply).text
    return True


@pytest.mark.parametrize("lineage", [EARLY, LATE])
def test_a_host_that_lost_its_memory_comes_back_with_any_other_file(
    rig: Rig, space: OpenedNamespace, lineage: int
) -> None:
    worker = rig.workers["w1"]
    for each in (5, lineage):
        worker.leave()
        worker.records.clear()
        worker.incarnation = first_incarnation(each)
        worker.join()
        assert space.probe(KEYS) == bytes(8)
        space.put(KEYS)
        assert space.probe(KEYS) == b"\1" * 8


def test_an_earlier_life_of_the_same_file_is_refused(rig: Rig) -> None:
    worker = rig.workers["w1"]
    worker.leave()
    worker.incarnation = first_incarnation(5) + 2
    worker.join()
    assert is_refused(rig, worker.incarnation - 1)
    worker.leave()
    assert is_refused(rig, worker.incarnation - 1)
    assert not is_refused(rig, worker.incarnation)


def test_a_lower_life_of_another_file_is_refused_while_the_worker_is_here(rig: Rig) -> None:
    worker = rig.workers["w1"]
    worker.leave()
    worker.incarnation = first_incarnation(5)
    worker.join()
    assert is_refused(rig, first_incarnation(EARLY))
    rig.pass_time(1.0)
    assert is_refused(rig, first_incarnation(EARLY))
    worker.leave()
    assert not is_refused(rig, first_incarnation(EARLY))
