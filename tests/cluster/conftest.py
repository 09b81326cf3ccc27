"""Fixtures of real pools: one for tests that only use it, a fresh one for those that harm it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.pages import Pages
from tests.cluster.transports import TRANSPORTS, every_transport
from tests.cluster.up import Up, remove_segments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A standalone pool that all tests share; they use namespaces of their own."""
    folder = tmp_path_factory.mktemp("shared") / "pool"
    with Up(folder, every_transport(folder), dram="768MiB") as up:
        yield up
    remove_segments(folder)


@pytest.fixture
def own_pool(tmp_path: Path) -> Iterator[Up]:
    """A small standalone pool for one test, which may kill or damage it."""
    folder = tmp_path / "pool"
    with Up(folder, every_transport(folder), dram="64MiB") as up:
        yield up
    remove_segments(folder)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport that we offer."""
    return str(request.param)


@pytest.fixture
def pages(shared_pool: Up, transport: str, request: pytest.FixtureRequest) -> Iterator[Pages]:
    """A store on the shared pool by one transport, and a namespace that no other test uses."""
    with Pages(shared_pool.master, transport, request.node.nodeid) as made:
        yield made
