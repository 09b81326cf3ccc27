"""Pools and models for tests with engines, and which of them run when nothing is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client.store import KVStore
from tests.cluster.servers import until
from tests.cluster.up import Up, remove_segments
from tests.engines.models import make_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DRAM = "256MiB"
LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have the long tests asked for."""
    parser.addoption("--matrix", action="store_true", help="Run every fault in every mode, too.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the matrix out, unless it is asked for."""
    if config.getoption("matrix", default=False):
        return
    matrix = [each for each in items if each.get_closest_marker("matrix")]
    items[:] = [each for each in items if each not in matrix]
    config.stash[LEFT_OUT] = len(matrix)
    config.hook.pytest_deselected(items=matrix)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was left out, lest a green run be taken for all of it."""
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.section("not run", yellow=True)
        terminalreporter.write_line(
            f"{left_out} tests: every fault of a pool under vLLM in every mode; "
            "`make engines-all` runs them, too"
        )


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of that kind, made when first asked for."""
    root = tmp_path_factory.mktemp("models")

    def find(kind: str) -> Path:
        folder = root / kind
        return folder if folder.exists() else make_model(kind, folder)

    return find


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Up]:
    """A standalone pool. When the test is over nothing may be on its way there, or pinned."""
    data_dir = tmp_path / "pool"
    try:
        with Up(data_dir, dram=DRAM) as up:
            yield up
            assert_idle(up.master)
    finally:
        remove_segments(data_dir)


def assert_idle(master: str) -> None:
    """Nothing that an engine held is held any more: no plan, no pin, no extent of either."""
    with KVStore.connect(master) as store:
        until("nothing is held", lambda: is_idle(store))


def is_idle(store: KVStore) -> bool:
    """Whether nothing is on its way, and nobody keeps anything from going."""
    status = store.stat()
    return not status.open_plans and not status.pins.pins
