"""Expiry and eviction, where one page takes others along."""

from __future__ import annotations

from tests.unit.master_rig import Rig, chain

TTL_S = 2.0


def test_a_hole_whose_time_is_up_goes_with_its_last_child() -> None:
    rig = Rig()
    rig.add_worker()
    space = rig.open_namespace()
    keys = chain(1, 2)
    parent, child = keys[:32], keys[32:]
    space.put(parent, ttl_s=TTL_S)
    space.put(child, parent, ttl_s=TTL_S)
    space.remove(parent)
    assert space.probe(keys) == b"\0\1"
    rig.now += TTL_S + 0.5  # and not so long that the worker is lost
    rig.tick()  # both are due at once, and the child's end is the hole's
    tree = rig.master.core.tree(space.ordinal)
    assert (tree.pages, tree.runs) == (0, 0)
