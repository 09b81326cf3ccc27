"""Pages that the master drops of its own accord: gone at once, freed when no lease runs."""

from __future__ import annotations

import pytest

from kvstore import limits
from kvstore.lease import inherited_release_s
from kvstore.replica import ExtentState
from kvstore.wire.messages.membership import FreeExtents
from master.events import Tick
from master.retiring import retire_pages
from tests.unit.master_rig import OpenedNamespace, Rig, chain

KEYS = chain(1, 8)


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace with eight pages in one run."""
    made = rig.open_namespace()
    made.put(KEYS)
    return made


def retire(rig: Rig, first: int, count: int) -> int:
    """Drop some pages of the one run."""
    core = rig.master.core
    tree = core.tree(1)
    run = tree.get(KEYS[:32])
    assert run is not None
    freed = retire_pages(core, tree, run, first, count)
    rig.send(Tick())
    return freed


def retired_bytes(rig: Rig) -> int:
    """Bytes that are neither found nor free."""
    return rig.master.core.segments["w1-dram"].allocator.bytes_in[ExtentState.RETIRED]


def test_pages_are_freed_at_once_when_no_lease_runs(rig: Rig, space: OpenedNamespace) -> None:
    rig.holds_commands = True
    assert retire(rig, 5, 3) == 3 * 4096
    assert space.probe(KEYS) == b"\1" * 5 + bytes(3)
    (command,) = rig.commands
    assert isinstance(command.message, FreeExtents)
    assert len(command.message.offsets) == 3 * 8


def test_leased_pages_are_freed_after_the_lease(rig: Rig, space: OpenedNamespace) -> None:
    space.match(KEYS)
    assert retire(rig, 0, 8) == 8 * 4096
    assert space.probe(KEYS) == bytes(8)
    rig.pass_time(limits.LEASE_TTL_S + limits.LEASE_MARGIN_S - 0.1)
    assert retired_bytes(rig) == 8 * 4096
    assert len(rig.workers["w1"].records) == 8
    rig.pass_time(0.3)
    assert retired_bytes(rig) == 0
    assert not rig.workers["w1"].records


def test_only_what_is_there_counts(rig: Rig, space: OpenedNamespace) -> None:
    space.remove(KEYS[6 * 32 : 7 * 32])
    rig.pass_time(0.5)
    assert retire(rig, 5, 3) == 2 * 4096
    assert rig.master.core.tree(1).pages == 5


def test_while_its_worker_is_away_nothing_is_ordered(rig: Rig, space: OpenedNamespace) -> None:
    rig.workers["w1"].leave()
    retire(rig, 0, 8)
    assert space.probe(KEYS) == bytes(8)
    assert not rig.commands
    rig.workers["w1"].join()
    rig.pass_time(inherited_release_s(1.0))
    assert retired_bytes(rig) == 0
    assert not rig.workers["w1"].records
