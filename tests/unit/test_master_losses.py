"""Workers that were lost and come back to the same master: what it kept of their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.membership import ReportSegment
from tests.unit.stored_pages import KEYS, PAGE, TTL_S, end, offer, ttls

if TYPE_CHECKING:
    from tests.unit.master_rig import OpenedNamespace, Rig


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace of one part, with twelve pages that have a TTL of their own."""
    space = rig.open_namespace()
    space.put(KEYS, ttl_s=TTL_S)
    rig.pass_time(1.0)
    return space


@pytest.mark.parametrize("silent_s", [limits.WORKER_LOST_AFTER_S, 60.0])
def test_a_worker_that_was_lost_brings_its_pages_back_with_their_lives(
    rig: Rig, space: OpenedNamespace, silent_s: float
) -> None:
    worker = rig.workers["w1"]
    worker.leave()
    rig.tick(silent_s)
    if silent_s > limits.WORKER_LOST_AFTER_S:
        rig.settle()
        assert rig.master.core.tree(1).pages == 0
    assert offer(rig).chunk_starts == ()
    end(rig)
    assert space.probe(KEYS) == b"\1" * 12
    assert ttls(rig) == [TTL_S] * 12
    assert len(rig.master.core.restored) == 0


def test_of_a_lost_worker_that_comes_back_with_less_the_rest_goes_on_as_it_was(
    rig: Rig, space: OpenedNamespace
) -> None:
    worker = rig.workers["w1"]
    worker.leave()
    rig.tick(60.0)
    rig.settle()
    assert space.remove(KEYS[:KEY_BYTES]) == b"\0"
    del worker.records[PAGE]
    worker.restart()
    worker.join()
    assert space.probe(KEYS) == bytes(2) + b"\1" * 10
    assert ttls(rig, KEYS[2 * KEY_BYTES :]) == [TTL_S] * 10


def test_a_segment_that_is_forgotten_takes_what_was_kept_of_it_along(
    rig: Rig, space: OpenedNamespace
) -> None:
    rig.workers["w1"].leave()
    rig.tick(60.0)
    rig.settle()
    assert len(rig.master.core.restored) == 1
    rig.tick(limits.SEGMENT_FORGET_S)
    rig.settle()
    assert len(rig.master.core.restored) == 0


def test_nothing_is_kept_of_a_medium_that_failed(rig: Rig, space: OpenedNamespace) -> None:
    worker = rig.workers["w1"]
    worker.ask(ReportSegment(worker.segment, worker.incarnation, "failed", "it is broken"))
    rig.settle()
    assert rig.master.core.tree(1).pages == 0
    assert len(rig.master.core.restored) == 0
