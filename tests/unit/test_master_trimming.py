"""Replicas that are too many: whose goes first."""

from __future__ import annotations

from master import trimming
from tests.unit.master_pages import KEY, KEYS
from tests.unit.relocation_rig import holders, made, start


def test_what_a_drained_worker_has_is_the_first_to_go() -> None:
    rig = made(16, 16, 16)
    space = rig.open_namespace()
    space.put(KEYS)
    (first,) = holders(space, KEYS)
    others = sorted({"w1", "w2", "w3"} - {first})
    start(rig, "copy", namespace=space.id, target=others[0])
    rig.pass_time(5.0)
    core = rig.master.core
    run = core.tree(space.ordinal).get(KEY)
    assert run is not None
    fullest = next(s for s in core.segments.values() if s.worker == others[0])
    fullest.allocator.plan(4096, core.new_generation(), space.ordinal, KEYS)
    for segment in core.segments.values():
        segment.drained = segment.worker == first
    trimming.trim(core, run, 1, 1)
    assert [copy.segment.worker for copy in run.copies] == [others[0]]
