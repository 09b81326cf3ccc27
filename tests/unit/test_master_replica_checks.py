"""What the full checks say of replicas, broken on purpose and found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import InvariantBroken
from master import repair_queue
from master.replica_checks import check_replicas
from master.wheel import NOWHERE
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import Rig, chain
from tests.unit.replicated_pools import rig_of, run_of

if TYPE_CHECKING:
    from master.core import Core
    from master.replication import Replication


@pytest.fixture
def rig() -> Rig:
    """Pages that are being copied, and others that wait for it."""
    made = rig_of("w1", "w2", "w3")
    made.pass_time(20.0)  # no scan is due any more
    made.holds_moves = True
    made.open_namespace().put(KEYS)
    made.pass_time(0.1)
    made.open_namespace().put(chain(2, 4))
    made.checks = False
    made.master.check_invariants()
    return made


def need_is_dropped(core: Core) -> None:
    queue = core.replication.queue
    for need in queue.take_due(1e9, 64):
        if need.keys == chain(2, 4):
            queue.done(need)
        else:
            queue.wait(need, need.due_s, need.reason)


def run_is_thinned_no_more(core: Core) -> None:
    """A run that was thinned out is not, and nobody was told."""
    need_is_dropped(core)
    run = core.tree(1).get(chain(2, 1))
    assert run is not None
    run.thinned = False


def need_neither_waits_nor_is_ready(core: Core) -> None:
    (need,) = core.replication.queue.take_due(1e9, 1)
    assert need.bucket == NOWHERE


def page_is_copied_to_one_host_twice(core: Core) -> None:
    (move,) = core.moves.in_flight.values()
    core.moves.in_flight[type(next(iter(core.moves.in_flight)))(999)] = move


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (need_is_dropped, "I34"),
        (run_is_thinned_no_more, "I34"),
        (need_neither_waits_nor_is_ready, "I34"),
        (page_is_copied_to_one_host_twice, "I33"),
    ],
)
def test_it_is_found(rig: Rig, spoil: object, number: str) -> None:
    assert callable(spoil)
    spoil(rig.master.core)
    with pytest.raises(InvariantBroken, match=number):
        check_replicas(rig.master.core)


def test_what_a_scan_will_find_need_not_be_noted(rig: Rig) -> None:
    core = rig.master.core
    need_is_dropped(core)
    core.replication.want_scan(core.now + 5.0)
    rig.master.check_invariants()


def test_what_was_thinned_out_need_not_be_noted(rig: Rig) -> None:
    core = rig.master.core
    need_is_dropped(core)
    run = core.tree(1).get(chain(2, 1))
    assert run is not None
    run.thinned = True
    rig.master.check_invariants()


def test_a_queue_beyond_its_bound_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("master.replica_checks.NEEDS_MAX", 0)
    with pytest.raises(InvariantBroken, match="I7"):
        rig.master.check_invariants()


def test_what_found_no_place_in_the_queue_is_found_by_a_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_of("w1", "w2")
    rig.holds_moves = True
    space = rig.open_namespace()
    monkeypatch.setattr(repair_queue, "NEEDS_MAX", 2)
    monkeypatch.setattr("master.census.NEEDS_MAX", 2)
    for number in range(6):
        space.put(chain(number, 2))
    assert rig.master.core.replication.queue.is_cut
    assert rig.master.core.counters["repairs_put_off"] >= 4
    rig.tick(0.1)
    rig.holds_moves = False
    for move in rig.moves:
        rig.obey(move)
    rig.pass_time(3.0)
    for number in range(6):
        run = run_of(rig, chain(number, 1))
        assert len(run.copies) == 2


def test_scans_that_are_due_are_bounded(rig: Rig) -> None:
    state: Replication = rig.master.core.replication
    for second in range(200):
        state.want_scan(rig.now + 10 * second)
    assert len(state.scans) <= 65
