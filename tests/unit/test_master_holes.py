"""Nodes of new pages: where they hang, and what is remembered of them."""

from __future__ import annotations

import pytest

from kvstore.hints import NO_HINTS
from kvstore.ids import ROOT_PARENT
from master.holes import make_holes
from master.pool_time import Life
from master.victims import evict_pages
from tests.unit.master_rig import OpenedNamespace, Rig, chain

KEYS = chain(1, 12)
LIFE = Life(100.0, 1000.0, 1100.0)


def touches(rig: Rig, keys: bytes = KEYS) -> list[int]:
    """Uses of each of these pages that is in the tree."""
    stretches = rig.master.core.tree(1).stretches(keys)
    return [stretch.run.touches for stretch in stretches for _ in range(stretch.count)]


def test_new_pages_behind_those_that_come_back_have_no_past(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(KEYS[: 8 * 32])
    for first in (5, 0):
        (stretch,) = rig.master.core.tree(1).stretches(KEYS)
        evict_pages(rig.master.core, stretch.run, first)
    rig.pass_time(20.0)
    space.put(KEYS[: 6 * 32])
    assert touches(rig) == [2] * 6
    space.put(KEYS[6 * 32 :], parent=KEYS[5 * 32 : 6 * 32])
    assert touches(rig) == [2] * 8 + [1] * 4
    assert space.probe(KEYS) == b"\1" * 12


@pytest.mark.parametrize("end", range(1, 13))
def test_only_what_is_missing_is_made(rig: Rig, space: OpenedNamespace, end: int) -> None:
    for first, stop in ((2, 4), (7, 8), (10, 12)):  # as workers may bring them back
        parent = KEYS[(first - 1) * 32 : first * 32]
        keys = KEYS[first * 32 : stop * 32]
        make_holes(rig.master.core, rig.master.core.tree(1), parent, keys, [], LIFE, NO_HINTS)
    tree = rig.master.core.tree(1)
    there = tree.pages
    wanted = KEYS[: end * 32]
    make_holes(rig.master.core, tree, ROOT_PARENT, wanted, tree.stretches(KEYS), LIFE, NO_HINTS)
    assert sum(stretch.count for stretch in tree.stretches(wanted)) == end
    missing = sum(page not in (2, 3, 7, 10, 11) for page in range(end))
    assert tree.pages == there + missing
    assert tree.missing_above(wanted[-32:]) == ROOT_PARENT
