"""What is read much by an engine of another host gets a replica there, while that lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import Hit, KVStore
from kvstore.wire.messages.operator import PoliciesInForce, SetPolicy
from kvstore.wire.messages.replicas import GetReplicas, ReplicaReport
from tests.cluster.pages import SIZE, Pages, content
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore import OpenedNamespace, PageChain

pytestmark = pytest.mark.cluster

PAGES = 4
WINDOW_S = 2.0
HOT = 1.0 * SIZE * PAGES
"""Bytes a second: all pages are read more than once."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Two workers, each of a host of its own; pages have one replica. Nobody minds heat yet."""
    settings = {
        "replicas": 1,
        "repair_after_s": 0.5,
        "lease_ttl_s": 1.0,
        "replication": "observe",
        "replication_parameters": f"port_bytes_per_s={HOT},port_share=1,window_s={WINDOW_S}",
    }
    shape = Shape(masters=1, members=0, workers=2, master=settings)
    with Rig(tmp_path / "pool", shape) as made:
        yield made


def held(store: KVStore) -> dict[str, int]:
    """Pages that lie at each worker."""
    return {each.worker: each.sealed_bytes // SIZE for each in store.stat().segments}


def stored(rig: Rig) -> PageChain:
    """Pages that are put on the first host."""
    with KVStore.connect(rig.addresses, transports=("tcp",), host="w0") as writer:
        opened = writer.open(content("heat"), Pages.layout())
        chain = opened.chain(range(PAGES * Pages.layout().page_tokens))
        source = bytearray(b"".join(payload(key, 0, SIZE) for key in chain))
        writer.put(opened, chain, source, range(0, len(source), SIZE))
    assert len(chain) == PAGES
    return chain


def read(store: KVStore, opened: OpenedNamespace, chain: PageChain) -> None:
    """All pages, once."""
    target = bytearray(PAGES * SIZE)
    match = store.match_prefix(opened, chain)
    found = store.read(match, target, range(0, len(target), SIZE))
    assert found == [Hit()] * PAGES
    assert target == b"".join(payload(key, 0, SIZE) for key in chain)


def report(rig: Rig) -> ReplicaReport:
    """What an operator is told."""
    return rig.ask(GetReplicas(), ReplicaReport)


def test_what_is_read_much_lies_on_its_readers_host_until_it_has_cooled(rig: Rig) -> None:
    chain = stored(rig)
    with KVStore.connect(rig.addresses, transports=("tcp",), host="w1") as store:
        opened = store.open(content("heat"), Pages.layout())
        before = held(store)
        for _ in range(20):
            read(store, opened, chain)
        told = report(rig)
        assert (told.heat, told.hot_runs, told.for_heat) == ("observe", 1, 1)
        assert held(store) == before
        rig.ask(SetPolicy("replication", "enforce", {}), PoliciesInForce)
        there = {"w0": before["w0"], "w1": PAGES}

        def is_there() -> bool:
            read(store, opened, chain)
            return held(store) == there

        until("a replica is where it is read", is_there)
        until("the replica is gone", lambda: sum(held(store).values()) == PAGES)
        assert report(rig).for_heat == 0
        read(store, opened, chain)
