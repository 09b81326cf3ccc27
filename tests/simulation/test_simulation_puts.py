"""Interleavings of puts with failures, other puts and removes, one test each (I6, I14, I18)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Refused, RefusedReason, Stored
from kvstore.errors import DeadlineExceeded
from kvstore.page import PageChain
from kvstore.replica import ExtentState
from kvstore.wire.messages.membership import FenceExtents
from kvstore.wire.messages.puts import BeginPut, BufferSource, Ingest, Ingested, PutPlans, Sealed
from tests.simulation.pages import HALVES, SMALL, WIDE
from tests.simulation.rpc import Call
from tests.simulation.world import Weather

if TYPE_CHECKING:
    from kvstore.client.outcomes import PutOutcome
    from tests.simulation.conftest import MakeScene
    from tests.simulation.scene import Scene

QUARANTINED, RESERVED, SEALED = (
    ExtentState.QUARANTINED,
    ExtentState.RESERVED,
    ExtentState.SEALED,
)


def far_scene(make_scene: MakeScene) -> Scene:
    """The second client is on another host than the worker: its puts are streams."""
    scene = make_scene(clients=2, hosts=2)
    assert not scene.world.same_host("worker0", "client1")
    return scene


def reasons(outcomes: list[PutOutcome]) -> list[RefusedReason]:
    """Why pages were refused."""
    return [outcome.reason for outcome in outcomes if isinstance(outcome, Refused)]


# --- visibility ---


def test_after_a_put_has_returned_every_client_finds_the_page(scene: Scene) -> None:
    chain = scene.chain(4)
    assert scene.stored(chain) == [Stored(visible=True)] * 4
    assert scene.match(chain, client=1).pages == 4


def test_a_put_returns_only_after_the_leader_has_noted_the_seal(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Sealed)
    put = scene.put(chain)
    scene.run(1.0)
    assert not put.is_over
    assert scene.probe(chain) == [False, False]
    scene.release()
    assert scene.finish(put) == [Stored()] * 2


def test_a_page_is_visible_when_its_last_part_is_in(scene: Scene) -> None:
    chain = scene.chain(2, namespace=HALVES)
    first = scene.stored(chain, namespace=HALVES, parts=(0,))
    assert first == [Stored(visible=False)] * 2
    assert scene.match(chain, namespace=HALVES).pages == 0
    second = scene.stored(chain, namespace=HALVES, parts=(1,), client=1)
    assert second == [Stored(visible=True)] * 2
    assert scene.match(chain, namespace=HALVES).pages == 2


def test_parts_of_a_page_that_stays_incomplete_are_freed(scene: Scene) -> None:
    chain = scene.chain(2, namespace=HALVES)
    scene.stored(chain, namespace=HALVES, parts=(0,))
    assert scene.bytes_in(SEALED) == 2 * WIDE
    scene.run(limits.PUT_TIMEOUT_BASE_S + 2.0)
    assert scene.bytes_in(SEALED) == 0


# --- two writers ---


def test_of_two_puts_of_a_page_the_second_waits_and_finds_it_there(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Sealed)
    first = scene.put(chain)
    scene.run(0.2)
    second = scene.put(chain, client=1)
    scene.run(0.5)
    assert not second.is_over
    scene.release()
    assert scene.finish(first) == [Stored()] * 2
    assert scene.finish(second) == [AlreadyThere()] * 2
    assert scene.bytes_in(SEALED) == 2 * SMALL


def test_a_put_that_does_not_wait_is_refused_while_another_is_open(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Sealed)
    first = scene.put(chain)
    scene.run(0.2)
    outcomes = scene.stored(chain, client=1, wait=False)
    assert reasons(outcomes) == [RefusedReason.IN_PROGRESS] * 2
    scene.release()
    scene.finish(first)


def test_a_waiting_put_gets_a_plan_of_its_own_when_the_first_fails(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Ingest)
    scene.put(chain)
    scene.run(0.2)
    second = scene.put(chain, client=1)
    scene.run(0.2)
    scene.lose_held()
    scene.simulation.crash("client0")
    assert scene.finish(second) == [Stored()] * 2


def test_puts_of_different_parts_do_not_wait_for_each_other(scene: Scene) -> None:
    chain = scene.chain(1, namespace=HALVES)
    scene.hold(Sealed)
    first = scene.put(chain, namespace=HALVES, parts=(0,))
    second = scene.put(chain, namespace=HALVES, parts=(1,), client=1)
    scene.run(0.5)
    assert scene.bytes_in(RESERVED) == 2 * WIDE
    scene.release()
    assert {outcome.visible for outcome in scene.finish(first) if isinstance(outcome, Stored)} == {
        True
    }
    assert scene.finish(second) == [Stored()]


# --- failed pulls ---


def test_a_failed_pull_is_tried_elsewhere(make_scene: MakeScene) -> None:
    scene = make_scene(workers=2, clients=1)
    chain = scene.chain(2)
    scene.hold(Ingest)
    put = scene.put(chain, timeout_s=30.0)
    scene.run(0.2)
    (plan,) = {plan.segment.worker for plan in scene.core.plans.values()}
    scene.lose_held()
    scene.simulation.crash(plan)
    assert scene.finish(put) == [Stored()] * 2
    assert {p.segment for p in scene.checks.history.pages[chain.key(0)].sealed} != {f"{plan}-dram"}
    scene.simulation.restart(plan)


def test_a_pull_is_tried_three_times_in_all(scene: Scene) -> None:
    chain = scene.chain(1)
    tries = 0

    def spoil(source: str, target: str, message: object) -> bool:
        nonlocal tries
        del source, target
        inner = getattr(message, "message", None)
        if isinstance(inner, Ingest) and isinstance(inner.source, BufferSource):
            tries += 1
            scene.client().buffers[inner.source.buffer][0] ^= 0xFF
        return False

    scene.world.holds = spoil
    outcomes = scene.stored(chain, timeout_s=30.0)
    assert reasons(outcomes) == [RefusedReason.CHECKSUM]
    assert tries == limits.PULL_TRIES_MAX


def test_bytes_that_change_during_a_pull_are_never_sealed(scene: Scene) -> None:
    chain = scene.chain(1)
    scene.worker().copy_delay_max_s = 0.2
    put = scene.put(chain, timeout_s=20.0)
    scene.run_until(lambda: bool(scene.worker().pulls))
    (buffer,) = scene.client().buffers.values()
    buffer[SMALL - 1] ^= 1
    scene.run(0.001)
    assert scene.finish(put) == [Stored()]  # the second try finds the right bytes
    assert len(scene.checks.history.pages[chain.key(0)].sealed) == 1


def test_a_repeated_ingest_joins_the_first(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Ingested)
    put = scene.put(chain)
    scene.run(0.5)  # sealed and noted, but the client does not know
    sealed = len(scene.checks.history.pages[chain.key(0)].sealed)
    connection = next(iter(scene.worker().peers))
    ingests = [
        message
        for _, event in scene.worker_core().ring.entries
        if isinstance(message := getattr(event, "message", None), Ingest)
    ]
    connection.receive(Call(999, ingests[0]))  # as if the network brought it twice
    scene.run(0.2)
    assert len(scene.checks.history.pages[chain.key(0)].sealed) == sealed
    scene.release()
    assert scene.finish(put) == [Stored()] * 2


# --- writers that die or stop ---


def test_extents_of_a_dead_writer_come_back_within_ten_seconds(scene: Scene) -> None:
    scene.hold(Ingest)
    scene.put(scene.chain(8))
    scene.run(0.2)
    assert scene.bytes_in(RESERVED) == 8 * SMALL
    scene.lose_held()
    scene.simulation.crash("client0")
    scene.run(10.0)
    assert scene.bytes_in(RESERVED) == scene.bytes_in(QUARANTINED) == 0


def test_a_writer_that_nobody_sees_die_is_noticed_by_its_timeout(scene: Scene) -> None:
    scene.hold(Ingest)
    scene.put(scene.chain(8))
    scene.run(0.2)
    scene.lose_held()
    scene.cut_off("client0")
    scene.simulation.crash("client0")
    scene.run(limits.PUT_TIMEOUT_BASE_S + 1.0)
    assert scene.bytes_in(RESERVED) == scene.bytes_in(QUARANTINED) == 0


def test_a_writer_stopped_in_mid_put_does_no_harm_when_it_goes_on(make_scene: MakeScene) -> None:
    scene = far_scene(make_scene)
    chain = scene.chain(7)
    victim = scene.put(chain, client=1, timeout_s=4.0)
    scene.run_until(lambda: any(pull.arrived for pull in scene.worker().pulls.values()))
    scene.world.pause("client1")
    scene.run(limits.PUT_TIMEOUT_BASE_S + 2.0)
    others = [scene.chain(7, number) for number in (1, 2)]
    for other in others:
        assert scene.stored(other) == [Stored()] * 7  # most of the pool: also what it was given
    scene.world.resume("client1")
    scene.run(1.0)
    assert victim.is_over
    for other in others:
        assert [type(outcome).__name__ for outcome in scene.read_all(other)] == ["Hit"] * 7


def test_late_pieces_of_an_ended_pull_go_nowhere(make_scene: MakeScene) -> None:
    scene = far_scene(make_scene)
    chain = scene.chain(2)
    scene.worker().copy_delay_max_s = 0.2
    scene.put(chain, client=1, timeout_s=20.0)
    scene.run_until(lambda: any(pull.arrived for pull in scene.worker().pulls.values()))
    scene.world.pause("client1")
    scene.run(limits.PUT_TIMEOUT_BASE_S + 2.0)
    assert scene.bytes_in(QUARANTINED) == 0
    assert not scene.worker().pulls
    scene.world.resume("client1")
    scene.run(25.0)


# --- fences ---


def test_what_is_quarantined_is_not_planned_before_the_fence_is_confirmed(scene: Scene) -> None:
    scene.hold(FenceExtents, Ingest)
    scene.put(scene.chain(3))
    scene.run(0.2)
    scene.simulation.crash("client0")
    scene.run(1.0)
    scene.hold(FenceExtents)
    assert scene.bytes_in(QUARANTINED) == 3 * SMALL
    assert scene.stored(scene.chain(12, 1), client=1) == [Stored()] * 12
    assert scene.bytes_in(QUARANTINED) == 3 * SMALL
    scene.release()
    scene.run(2.0)
    assert scene.bytes_in(QUARANTINED) == 0


def test_a_fence_frees_what_was_sealed_meanwhile(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Sealed)
    put = scene.put(chain, timeout_s=2.0)
    scene.run(0.5)
    assert len(scene.worker().memories["worker0-dram"].all_records()) == 2
    scene.simulation.crash("client0")
    scene.run(1.0)
    assert scene.worker().memories["worker0-dram"].all_records() == []
    scene.release()  # the report comes when the plan is closed
    scene.run(1.0)
    assert scene.bytes_in(SEALED) == scene.bytes_in(QUARANTINED) == 0
    assert not put.is_over


def test_the_seal_of_a_closed_plan_frees_the_extent(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.hold(Sealed, FenceExtents)
    scene.put(chain, timeout_s=2.0)
    scene.run(0.5)
    scene.simulation.crash("client0")
    scene.run(1.0)
    scene.hold(FenceExtents)  # the seal passes, the fence does not
    held, scene.world.held = scene.world.held, []
    for let_go in held[:1]:
        let_go()
    scene.run(1.0)
    scene.world.held = held[1:] + scene.world.held
    assert scene.worker().memories["worker0-dram"].all_records() == []
    scene.release()


# --- room ---


def test_a_put_parked_for_space_goes_on_when_a_lease_ends(make_scene: MakeScene) -> None:
    scene = make_scene(clients=2, lease_ttl_s=2.0)
    full = scene.chain(16)
    assert scene.stored(full) == [Stored()] * 16
    scene.match(full, client=1)
    put = scene.put(scene.chain(1, 1), timeout_s=8.0)
    scene.run(1.5)
    assert not put.is_over
    assert scene.finish(put) == [Stored()]


def test_a_pool_full_of_leased_pages_refuses_with_advice(scene: Scene) -> None:
    full = scene.chain(16)
    scene.stored(full)
    scene.match(full, client=1)
    (outcome,) = scene.stored(scene.chain(1, 1), timeout_s=1.0)
    assert isinstance(outcome, Refused)
    assert outcome.reason is RefusedReason.OUT_OF_SPACE
    assert outcome.retry_after_s > 0


def test_a_page_whose_parent_was_evicted_after_the_match_is_refused(scene: Scene) -> None:
    chain = scene.chain(4)
    scene.stored(chain.slice(0, 3))
    match = scene.match(chain, lease=False)
    assert match.pages == 3
    scene.removed(chain.slice(0, 3), client=1)
    rest = PageChain(chain.key(3), chain.key(2))
    (outcome,) = scene.stored(rest)
    assert isinstance(outcome, Refused)
    assert outcome.reason is RefusedReason.PARENT_MISSING


# --- retries ---


def test_a_repeated_begin_gets_the_same_plans(scene: Scene) -> None:
    chain = scene.chain(2)
    scene.world.weather = Weather(ordered=False)  # a client asks again where answers vanish
    scene.hold(PutPlans)
    put = scene.put(chain)
    scene.run(0.2)
    scene.lose_held()
    plans = dict(scene.core.plans)
    assert scene.finish(put) == [Stored()] * 2
    assert len(plans) == 1
    (generation,) = plans
    assert {p.generation for p in scene.checks.history.pages[chain.key(0)].sealed} == {generation}


def test_a_call_ends_by_its_deadline_when_nobody_answers(scene: Scene) -> None:
    scene.hold(BeginPut)
    began_s = scene.world.now
    put = scene.put(scene.chain(1), timeout_s=2.0)
    with pytest.raises(DeadlineExceeded):
        scene.finish(put)
    assert scene.world.now - began_s <= 2.1
    scene.lose_held()
