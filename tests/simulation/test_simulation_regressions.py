"""Seeds that once failed, and the tests that keep each fault from coming back without dice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.simulation.regressions import REGRESSIONS
from tests.simulation.simulation import Simulation

if TYPE_CHECKING:
    from tests.simulation.regressions import Regression

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("seed", sorted({row.seed for row in REGRESSIONS}))
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    simulation = Simulation(seed)
    try:
        simulation.run()
    finally:
        simulation.abandon()


@pytest.mark.parametrize("row", REGRESSIONS, ids=lambda row: str(row.seed))
def test_every_fault_has_a_test_of_its_own(row: Regression) -> None:
    name, _, test = row.kept_by.partition("::")
    assert f"def {test}(" in (TESTS / name).read_text(), row.kept_by
