"""Fixtures of real pools: one for tests that only use it, a fresh one for those that harm it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.pages import PAGE_TOKENS, PAGES, Pages
from tests.cluster.servers import until
from tests.cluster.transports import TRANSPORTS, every_transport
from tests.cluster.up import ADMIN, Up, remove_segments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore import OpenedNamespace, PageChain
    from tests.cluster.rig import Rig


@pytest.fixture(scope="session")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A standalone pool that all tests share; they use namespaces of their own."""
    folder = tmp_path_factory.mktemp("shared") / "pool"
    with Up(folder, every_transport(folder), *ADMIN, dram="768MiB") as up:
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


@pytest.fixture
def rig(harmed_rig: Rig) -> Rig:
    """The rig that a file's tests share and harm: each test begins with everything at work."""
    harmed_rig.heal()
    until("everything is at work again", harmed_rig.is_whole)
    return harmed_rig


@pytest.fixture
def opened(pages: Pages) -> OpenedNamespace:
    """A namespace of small pages."""
    return pages.open()


@pytest.fixture
def chain(pages: Pages, opened: OpenedNamespace) -> PageChain:
    """A chain of pages that is stored."""
    made = opened.chain(range(PAGES * PAGE_TOKENS))
    pages.store_all(opened, made)
    return made
