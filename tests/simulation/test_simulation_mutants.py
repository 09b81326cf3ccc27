"""The checkers at work: with one guard switched off, some seed must fail, and by that guard."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from kvstore.errors import InvariantBroken
from tests.simulation import leader_mutants, mutants
from tests.simulation import test_simulation_copies as copies
from tests.simulation import test_simulation_failover as failover
from tests.simulation import test_simulation_losses as losses
from tests.simulation import test_simulation_tiers as tiers
from tests.simulation.mutants import MUTANTS
from tests.simulation.options import options_of
from tests.simulation.scene import Scene
from tests.simulation.simulation import Failed, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.mutants import Changes

SEEDS_MAX: Final = 100


def failure(seed: int, options: Changes) -> str:
    """What a seed fails with; nothing when it does not."""
    # Who looks for a guard of tickets says so; the others' stories are short without any.
    changes: Changes = {"tickets": 0.0, **options}
    changed = replace(options_of(seed), **changes)  # type: ignore[arg-type]  # fields of Options
    simulation = Simulation(seed, changed)
    try:
        simulation.run()
    except Failed as error:
        return str(error)
    finally:
        simulation.abandon()
    return ""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_notices_a_missing_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    stories = (failure(seed, mutant.options) for seed in range(SEEDS_MAX))
    story = next(filter(None, stories), "")
    assert story, f"{SEEDS_MAX} seeds without this guard and nobody noticed"
    first = story.splitlines()[0]
    assert any(f"{number}:" in first for number in mutant.noticed_by), first


@pytest.mark.parametrize(
    ("mutant", "scene_of"),
    [
        (mutants.epochs_are_not_compared, losses.test_a_command_of_an_old_leader_is_refused),
        (
            leader_mutants.workers_go_back,
            failover.test_a_worker_does_not_go_back_to_a_leader_of_the_past,
        ),
        (leader_mutants.epochs_that_were_are_kept_quiet, failover.put_etcd_back),
        (
            leader_mutants.doubt_counts_as_silence,
            failover.test_pages_are_read_while_etcd_is_away_for_minutes,
        ),
        (
            leader_mutants.robbed_leaders_are_forgotten,
            failover.test_leases_of_a_leader_that_was_robbed_of_its_own_are_honoured,
        ),
        (mutants.incarnations_are_not_compared, losses.test_a_command_for_another_life_is_refused),
        (mutants.no_self_fence, losses.test_a_pull_that_runs_when_the_fence_falls_ends),
        (
            mutants.pulls_go_on_during_an_inventory,
            losses.test_no_pull_starts_between_the_offer_and_its_answer,
        ),
        (mutants.quarantine_has_no_bound, losses.test_a_pool_whose_quarantine_is_full_says_so),
        (
            mutants.refused_writes_count_as_done,
            tiers.test_a_page_that_a_disk_did_not_free_does_not_return_once_it_is_removed,
        ),
        (
            mutants.failed_disks_have_inventories,
            tiers.test_an_inventory_that_cannot_be_read_does_not_hide_what_lies_there,
        ),
        (
            mutants.failures_of_disks_are_not_told,
            tiers.test_a_disk_that_gives_nothing_back_takes_its_pages_along,
        ),
        (mutants.copies_are_not_leased, copies.page_is_removed_meanwhile),
    ],
)
def test_a_scene_notices_a_missing_guard(
    mutant: Callable[[pytest.MonkeyPatch], None],
    scene_of: Callable[[Scene], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against what connections that keep their order make rare: directed, not drawn."""
    mutant(monkeypatch)
    how: dict[str, Changes] = {
        tiers.__name__: {"lease_ttl_s": 1.0, **tiers.AHEAD},
        failover.__name__: {"masters": 2, "etcd": True},
        copies.__name__: copies.TWO,
    }
    more = how.get(scene_of.__module__, {})
    scene = Scene(**{"clients": 2, **more})  # type: ignore[arg-type]  # as of Scene
    try:
        with pytest.raises((AssertionError, InvariantBroken)):
            scene_of(scene)
    finally:
        scene.simulation.abandon()
