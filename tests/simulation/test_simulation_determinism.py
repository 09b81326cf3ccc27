"""A seed is a history: the same in every run, and in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.simulation import Simulation

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.simulation.test_simulation_determinism import trace
print(trace(int(sys.argv[2])))
"""


def trace(seed: int) -> str:
    """The hash of a run's whole story."""
    simulation = Simulation(seed)
    try:
        simulation.run()
        return simulation.world.trace_hash()
    finally:
        simulation.close()


@pytest.mark.parametrize("seed", [3, 17, 101, 555])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    assert trace(seed) == trace(seed)


def test_other_seeds_give_other_histories() -> None:
    assert len({trace(seed) for seed in (1, 2, 3)}) == 3


@pytest.mark.parametrize("seed", [5, 42])
def test_the_history_is_the_same_in_another_process(seed: int) -> None:
    """Where str and bytes hash otherwise: nothing may depend on the order of a set."""
    environment = dict(os.environ, PYTHONHASHSEED="12345")
    command = [sys.executable, "-P", "-c", PROGRAM, str(ROOT), str(seed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == trace(seed)
