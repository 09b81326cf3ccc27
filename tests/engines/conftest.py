"""Pools and models for tests with engines."""

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
