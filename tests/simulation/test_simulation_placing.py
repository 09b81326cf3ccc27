"""Where puts lie, and what their callers hear of replicas, whatever happens meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kvstore.client.outcomes import AlreadyThere, Refused, RefusedReason, Stored
from kvstore.replica import ExtentState
from kvstore.wire.messages.puts import Ingest
from tests.simulation.pages import SMALL

if TYPE_CHECKING:
    from tests.simulation.conftest import MakeScene
    from tests.simulation.scene import Scene

TWO: Final = {"workers": 2, "hosts": 2, "clients": 2}
TIMEOUT_S: Final = 6.0


@pytest.fixture
def two(make_scene: MakeScene) -> Scene:
    """Two hosts, each with a worker and a client."""
    return make_scene(**TWO)


def sealed(scene: Scene) -> list[int]:
    """Pages that lie at each worker."""
    return [scene.bytes_in(ExtentState.SEALED, worker) // SMALL for worker in (0, 1)]


@pytest.mark.parametrize("client", [0, 1])
def test_a_put_lies_on_its_writers_host(two: Scene, client: int) -> None:
    for number in range(3):
        two.stored(two.chain(2, number), client=client)
    assert sealed(two) == ([6, 0] if client == 0 else [0, 6])


def test_who_waits_for_replicas_hears_when_they_are_there(two: Scene) -> None:
    chain = two.chain(3)
    found = two.stored(chain, replicas=2, replicas_now=True)
    assert found == [Stored(True, 2, 2)] * 3
    assert sealed(two) == [3, 3]
    assert two.stored(chain, client=1, replicas_now=True) == [AlreadyThere(2, 2)] * 3


@pytest.mark.parametrize("strict", [False, True])
def test_copies_that_do_not_come_cost_the_time_that_the_caller_gave(
    two: Scene, strict: bool
) -> None:
    chain = two.chain(2)
    two.hold(Ingest, source="master")
    began_s = two.world.now
    found = two.stored(chain, replicas=2, replicas_now=True, strict=strict, timeout_s=TIMEOUT_S)
    assert TIMEOUT_S / 2 < two.world.now - began_s < TIMEOUT_S + 0.1
    if strict:
        assert {each.reason for each in found if isinstance(each, Refused)} == {
            RefusedReason.TOO_FEW_REPLICAS
        }
    else:
        assert found == [Stored(True, 2, 1)] * 2
    assert two.match(chain, client=1).pages == 2, "what it got stays"
    two.release()
    two.rest()


def test_who_waits_goes_on_waiting_at_the_next_leader(two: Scene) -> None:
    chain = two.chain(2)
    two.hold(Ingest, source="master")
    put = two.put(chain, replicas=2, replicas_now=True, timeout_s=30.0)
    two.run(0.5)
    assert two.held_messages(Ingest)
    two.lose_held()
    two.take_over()
    assert two.finish(put) == [Stored(True, 2, 2)] * 2, "also if it knew of no page when asked"


def test_a_wish_that_was_lost_with_its_leader_is_not_taken_for_fulfilled(two: Scene) -> None:
    chain = two.chain(2)
    two.hold(Ingest, source="master")
    put = two.put(chain, replicas=2, strict=True, timeout_s=30.0)
    two.run_until(lambda: bool(two.held_messages(Ingest)))  # before that could be stored
    two.lose_held()
    two.take_over()
    assert {type(each) for each in two.finish(put)} == {Refused}
    assert two.stored(chain, replicas=2, strict=True) == [AlreadyThere(2, 2)] * 2


def test_a_strict_put_is_refused_while_the_other_host_is_away(two: Scene) -> None:
    chain = two.chain(2)
    two.simulation.crash("worker1")
    two.run(0.5)
    found = two.stored(chain, replicas=2, strict=True)
    assert {type(each) for each in found} == {Refused}
    assert two.probe(chain) == [False, False]
    two.simulation.restart("worker1")
    two.settle()
    assert two.stored(chain, replicas=2, strict=True) == [Stored(True, 2, 2)] * 2
