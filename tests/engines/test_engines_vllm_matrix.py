"""Every fault of a pool under real vLLM engines in every mode: `make engines-all`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from tests.engines.vllm_matrix import HIT, Mode, Rig
from tests.engines.worst import spoil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.matrix

LATENT: Final = "bfloat16"
"""Some processors have kernels for these 16 bits only."""
MODES: Final = {
    "one process": Mode("grouped"),
    "a process of its own": Mode("grouped", own_process=True),
    "two ranks": Mode("grouped", own_process=True, ranks=2),
    "windows": Mode("windows"),
    "windows on two ranks": Mode("windows", own_process=True, ranks=2),
    "latents": Mode("latent", dtype=LATENT),
    "latents on two ranks": Mode("latent", own_process=True, ranks=2, dtype=LATENT),
}


class Fault(NamedTuple):
    """What happens to the pool between a lookup and its load."""

    do_worst: Callable[[Rig], object]
    fails: bool
    """Whether the load does; else all of it comes."""


FAULTS: Final = {
    "nothing": Fault(lambda rig: None, fails=False),
    "others want the memory": Fault(Rig.flood, fails=False),  # leases keep what was found
    "pages are removed": Fault(lambda rig: rig.pausing.remove.touch(), fails=True),
    "bits flip": Fault(lambda rig: spoil(rig.up), fails=True),
    "the worker is silent": Fault(lambda rig: rig.up.stop("worker"), fails=False),
    "the master is silent": Fault(lambda rig: rig.up.stop("master"), fails=True),
    "the worker is killed": Fault(lambda rig: rig.kill("worker"), fails=True),
    "the master is killed": Fault(lambda rig: rig.kill("master"), fails=True),
    "the pool is stopped": Fault(lambda rig: rig.up.end(), fails=True),
    "all of it is killed": Fault(lambda rig: rig.up.end(signal.SIGKILL), fails=True),
}


@pytest.fixture(scope="module", params=list(MODES.values()), ids=list(MODES))
def rig(
    request: pytest.FixtureRequest,
    model_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """One engine of each mode, which begins without its pool."""
    mode: Mode = request.param
    rig = Rig(mode, model_of(mode.kind), tmp_path_factory.mktemp("matrix"))
    with rig.engine:
        rig.learn()
        try:
            yield rig
        finally:
            rig.end()


@pytest.fixture
def warm(rig: Rig) -> Iterator[Rig]:
    """The engine, over a pool that has its whole prompt."""
    rig.heal()
    rig.be_warm()
    yield rig
    rig.heal()


def test_a_request_that_is_taken_back_in_mid_load_leaves_nothing(warm: Rig) -> None:
    before = warm.failed_loads()
    for _ in range(3):
        warm.abort()
        assert warm.hit() == HIT
    assert warm.failed_loads() == before
    warm.abort()
    warm.assert_nothing_is_held()


@pytest.mark.parametrize("fault", list(FAULTS.values()), ids=list(FAULTS))
def test_a_fault_in_mid_load_costs_time_alone(warm: Rig, fault: Fault) -> None:
    before = warm.failed_loads()
    came = warm.pausing.generate(warm.engine, lambda: fault.do_worst(warm))
    hit = warm.checked(came)
    assert warm.failed_loads() - before == fault.fails
    assert hit == HIT or fault.fails  # vLLM counts what it recomputes of a load as cached, too
    warm.heal()
    warm.be_warm()


def test_nothing_is_held_in_the_end(warm: Rig) -> None:
    """After all of the above."""
    warm.assert_nothing_is_held()
    warm.be_warm()
