"""One etcd for all contract tests: each uses a cluster name of its own."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from tests.etcd_server import EtcdServers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def etcd_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """One member that stays up."""
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


@pytest.fixture
def _channels_end() -> Iterator[None]:
    """gRPC's thread ends with the last channel, and what was cancelled or raised may hold one."""
    yield
    gc.collect()
