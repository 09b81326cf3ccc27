"""What a caller asks of replicas, from real workers: beside the writer, on hosts of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import AlreadyThere, KVStore, Refused, Stored
from kvstore.client.outcomes import RefusedReason
from tests.cluster.pages import SIZE, Pages, content
from tests.cluster.rig import Rig, Shape
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore import OpenedNamespace, PageChain
    from kvstore.client.outcomes import PutOutcome

pytestmark = pytest.mark.cluster

COPIED_S = 60.0
"""Long enough for a machine that has much else to do."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two workers, each of a host of its own."""
    shape = Shape(masters=1, members=0, workers=2)
    with Rig(tmp_path_factory.mktemp("replicas") / "pool", shape) as rig:
        yield rig


@pytest.fixture
def store(pool: Rig) -> Iterator[KVStore]:
    """A process of the host of the second worker."""
    with KVStore.connect(pool.addresses, transports=("tcp",), host="w1") as made:
        yield made


def put(
    store: KVStore, opened: OpenedNamespace, chain: PageChain, replicas: int, *, strict: bool
) -> list[PutOutcome]:
    """Put every page's payload, and wait for replicas."""
    source = bytearray(b"".join(payload(key, 0, SIZE) for key in chain))
    offsets = range(0, len(source), SIZE)
    return store.put(
        opened, chain, source, offsets, replicas=replicas, strict=strict, replicas_now=True,
        timeout_s=COPIED_S,
    )  # fmt: skip


def held(store: KVStore) -> dict[str, int]:
    """Pages that lie at each worker."""
    return {each.worker: each.sealed_bytes // SIZE for each in store.stat().segments}


def test_a_put_lies_beside_its_writer_and_then_on_another_host(store: KVStore) -> None:
    opened = store.open(content("beside"), Pages.layout(), replicas=1)
    chain = opened.chain(range(64))
    pages, before = len(chain), held(store)
    assert put(store, opened, chain, 0, strict=False) == [Stored(True, 1, 1)] * pages
    assert held(store) == before | {"w1": before["w1"] + pages}
    assert put(store, opened, chain, 2, strict=True) == [AlreadyThere(2, 2)] * pages
    assert held(store) == {worker: count + pages for worker, count in before.items()}


def test_more_replicas_than_hosts_are_refused_to_who_takes_no_fewer(store: KVStore) -> None:
    opened = store.open(content("more"), Pages.layout())
    chain = opened.chain(range(16))
    pages = len(chain)
    refused = put(store, opened, chain, 3, strict=True)
    assert {type(each) for each in refused} == {Refused}
    assert {each.reason for each in refused if isinstance(each, Refused)} == {
        RefusedReason.TOO_FEW_HOSTS
    }
    assert not any(store.probe(opened, chain))
    assert put(store, opened, chain, 3, strict=False) == [Stored(True, 3, 2)] * pages
