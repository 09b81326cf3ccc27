"""Whom a pool of one host talks to by which socket: control goes over Unix sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from kvstore import KVStore
from kvstore.aio import AsyncKVStore
from tests.cluster.pages import Pages

if TYPE_CHECKING:
    from tests.cluster.up import Up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ESTABLISHED: Final = "01"


def connected_to(address: str) -> int:
    """How many TCP connections to a listener of this host are open."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(port) and row[3] == ESTABLISHED for row in rows)


def socket_of(up: Up) -> str:
    """The master's Unix address."""
    return f"unix:{up.ready['master']['unix']}"


def test_everybody_on_the_host_goes_over_to_the_masters_socket(own_pool: Up) -> None:
    async def ask() -> None:
        async with await AsyncKVStore.connect(own_pool.master) as store:
            await store.stat()
            assert connected_to(own_pool.master) == 0

    with Pages(own_pool.master, "tcp", "nearby") as pages:  # a put needs the worker's report line
        opened = pages.open()
        pages.store_all(opened, opened.chain(range(16)))
        assert connected_to(own_pool.master) == 0
        asyncio.run(ask())


def test_a_store_may_be_told_the_socket_itself(own_pool: Up) -> None:
    with KVStore.connect(socket_of(own_pool)) as store:
        assert store.stat().cluster == "local"


def test_without_the_socket_the_pool_stays_with_tcp(own_pool: Up) -> None:
    Path(socket_of(own_pool).removeprefix("unix:")).unlink()
    with KVStore.connect(own_pool.master) as store:
        assert store.stat().cluster == "local"
        assert connected_to(own_pool.master) == 1
