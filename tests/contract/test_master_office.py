"""Masters over one metadata store that knows leases: who leads, and what peers hear."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ConfigError, InvariantBroken, NotLeader, StaleEpoch, Unavailable
from kvstore.rpc.identity import Role
from kvstore.standing import IN_DOUBT, Standing
from kvstore.wire.messages.membership import RegisterWorker, WorkerAccepted
from kvstore.wire.messages.reads import GetStatus, Located, MatchPrefix
from master.leadership import Leadership, StandingTick
from tests.contract.two_masters import (
    CALL_S,
    LEASE_S,
    OPEN,
    OneMaster,
    World,
    eventually,
    open_namespace,
    refusal,
    run,
)

if TYPE_CHECKING:
    from master.leadership import LeadershipAction, LeadershipEvent


def test_a_standby_names_the_leader_and_its_epoch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def use(world: World) -> None:
        await world.both()
        error = await refusal(world.second, OPEN)
        assert isinstance(error, NotLeader)
        assert error.where == ("m1:7700",)
        for master in (world.first, world.second):
            peer = await master.dial()
            assert peer.welcome is not None
            assert peer.welcome.epoch == 1
        told = await world.second.status()
        assert (told.master, told.standing, told.epoch) == ("m2", "standby", 1)
        assert told.leader == ("m1:7700",)
        told = await world.first.status()
        assert (told.master, told.standing, told.leader) == ("m1", "leading", ("m1:7700",))

    run(use)
    said = [each.getMessage() for each in caplog.records]
    assert said.count("m1 leads in epoch 1, at m1:7700") == 1


def test_an_engine_is_sent_on_by_a_standby_even_when_it_asks_for_the_status() -> None:
    async def use(world: World) -> None:
        await world.both()
        assert isinstance(await refusal(world.second, GetStatus()), NotLeader)

    run(use)


def test_who_stops_lets_another_lead_at_once() -> None:
    async def use(world: World) -> None:
        await world.both()
        namespace = await open_namespace(world.first)
        began_s = world.clock.now_s()
        await world.first.stop()
        await world.second.until(Standing.LEADING, 2)
        assert world.clock.now_s() < began_s + LEASE_S / 2
        assert await open_namespace(world.second) == namespace
        found = await world.second.ask(MatchPrefix(namespace, b""))
        assert isinstance(found, Located)
        assert (found.epoch, found.lease_ttl_s > 0) == (2, True)

    run(use)


def test_what_waits_for_the_store_is_stored_before_another_leads() -> None:
    async def use(world: World) -> None:
        await world.both()
        world.disk.refusals = [Unavailable("away for a moment")]
        asked = asyncio.create_task(world.first.ask(OPEN))
        await eventually(lambda: not world.disk.refusals)
        await world.first.stop()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert any(key.startswith("namespaces/") for key in world.disk.entries)

    run(use)


def test_a_leader_that_is_gone_is_followed_when_its_lease_has_ended() -> None:
    async def use(world: World) -> None:
        await world.both()
        world.first.store.is_cut_off = True
        world.clock.ahead_s += LEASE_S
        await world.second.until(Standing.LEADING, 2)
        assert world.first.office.leadership.standing is Standing.LEADING  # and knows nothing
        assert (await world.first.status()).standing == IN_DOUBT
        error = await refusal(world.first, OPEN)
        assert "in doubt" in str(error)
        await open_namespace(world.second)

    run(use)


def test_the_deposed_leader_closes_its_sessions_and_stands_by() -> None:
    async def use(world: World) -> None:
        await world.both()
        peer = await world.first.dial()
        world.first.store.is_cut_off = True
        asked = asyncio.create_task(peer.call(OPEN, CALL_S))
        await eventually(lambda: world.first.office.look()[1].persist_failures > 0)
        world.clock.ahead_s += LEASE_S
        await world.second.until(Standing.LEADING, 2)
        assert not world.first.office.look()[1].is_persisting
        world.first.store.is_cut_off = False
        await world.first.stepped_down()
        assert world.first.office.look()[1].is_persisting  # it has nothing to store any more
        with pytest.raises(Unavailable):
            await asked
        with pytest.raises(Unavailable):
            await peer.call(OPEN, CALL_S)
        await eventually(lambda: world.first.office.leadership.leader is not None)
        error = await refusal(world.first, OPEN)
        assert isinstance(error, NotLeader)
        assert error.where == ("m2:7700",)
        # The core of the old term heard nothing of its end: nothing can follow from it.
        assert len(world.first.states[0].core.sessions) > 1

    run(use)


def test_lookups_are_answered_in_doubt_and_the_term_goes_on_when_it_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> list[str]:
        said = [each.getMessage() for each in caplog.records]
        return [text for text in said if text.startswith("the lease of epoch 1")]

    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING)
        namespace = await open_namespace(world.first)
        peer = await world.first.dial()
        world.first.store.is_cut_off = True
        leads_until_s = world.first.office.leadership.leads_until_s
        # In doubt by its own margin; the store has not ended the lease.
        world.clock.ahead_s += leads_until_s - world.clock.now_s()
        found = await peer.call(MatchPrefix(namespace, b""), CALL_S)
        assert isinstance(found, Located)
        assert found.lease_ttl_s == 0.0
        with pytest.raises(Unavailable, match="in doubt"):
            await peer.call(OPEN, CALL_S)
        failed = world.first.office.leadership.renewals_failed
        await eventually(lambda: world.first.office.leadership.renewals_failed > failed + 1)
        assert told() == ["the lease of epoch 1 is in doubt: lookups only"]
        world.disk.prolong()  # a renewal did come through, but its answer was lost
        world.first.store.is_cut_off = False
        await eventually(lambda: world.first.office.look()[0].standing == Standing.LEADING)
        found = await peer.call(MatchPrefix(namespace, b""), CALL_S)
        assert isinstance(found, Located)
        assert (found.epoch, found.lease_ttl_s > 0) == (1, True)
        assert len(world.first.states) == 1
        assert told()[1:] == ["the lease of epoch 1 is sure again"]

    run(use)


def test_a_leader_whose_key_is_gone_leads_anew_in_another_term() -> None:
    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING)
        namespace = await open_namespace(world.first)
        peer = await world.first.dial()
        world.first.store.is_cut_off = True
        world.clock.ahead_s += LEASE_S
        found = await peer.call(MatchPrefix(namespace, b""), CALL_S)
        assert isinstance(found, Located)
        assert found.lease_ttl_s == 0.0
        world.first.store.is_cut_off = False
        await world.first.until(Standing.LEADING, 2)
        assert await open_namespace(world.first) == namespace
        assert world.first.standings == [
            (Standing.LOADING, 1), (Standing.LEADING, 1), (Standing.STANDBY, 1),
            (Standing.LOADING, 2), (Standing.LEADING, 2),
        ]  # fmt: skip

    run(use)


def test_a_write_that_is_refused_ends_the_term() -> None:
    async def use(world: World) -> None:
        await world.both()
        both = (world.first, world.second)
        world.disk.expire_lease()  # falsely, and the renewal is not due yet
        asked = asyncio.create_task(world.first.ask(OPEN))
        await world.first.stepped_down()
        with pytest.raises(Unavailable):
            await asked
        await eventually(
            lambda: any(each.office.leadership.leads(world.clock.now_s()) for each in both)
        )
        assert not any(key.startswith("namespaces/") for key in world.disk.entries)

    run(use)


def test_a_term_that_is_over_does_not_go_on_trying_to_write() -> None:
    async def use(world: World) -> None:
        await world.both()
        world.disk.is_full = True
        asked = asyncio.create_task(world.first.ask(OPEN))
        await eventually(lambda: world.first.office.look()[1].persist_failures > 0)
        world.disk.expire_lease()
        await world.first.stepped_down()
        world.disk.is_full = False
        with pytest.raises(Unavailable):
            await asked
        world.clock.ahead_s += LEASE_S
        await asyncio.sleep(0.3)
        assert not any(key.startswith("namespaces/") for key in world.disk.entries)

    run(use)


def test_a_store_that_is_away_at_the_start_is_waited_for() -> None:
    async def use(world: World) -> None:
        world.first.store.is_cut_off = True
        await world.first.start()
        error = await refusal(world.first, OPEN)
        assert isinstance(error, NotLeader)
        assert error.where == ()
        assert (await world.first.status()).standing == "standby"
        world.first.store.is_cut_off = False
        await world.first.until(Standing.LEADING, 1)

    run(use)


def test_a_store_that_hangs_at_the_start_does_not_keep_the_master_from_ending() -> None:
    async def use(world: World) -> None:
        world.first.store.reaches.clear()
        await world.first.start()
        assert isinstance(await refusal(world.first, OPEN), NotLeader)
        await world.first.stop()

    run(use)


def test_a_place_of_another_cluster_ends_the_start() -> None:
    async def use(world: World) -> None:
        world.disk.cluster = "other"
        await world.first.start()
        with pytest.raises(ConfigError, match="holds cluster 'other'"):
            await world.first.ended()

    run(use)


def test_metadata_that_cannot_be_taken_over_ends_the_master_and_frees_the_lead() -> None:
    async def use(world: World) -> None:
        world.first.bad_metadata = True
        await world.first.start()
        with pytest.raises(ConfigError, match="not ours"):
            await world.first.ended()
        assert world.disk.leader is None
        assert (Standing.LEADING, 1) not in world.first.standings

    run(use)


def test_a_bug_in_the_core_frees_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(world: World) -> None:
        await world.both()

        def broken(*_: object) -> list[object]:
            raise InvariantBroken("I5: two extents overlap")

        monkeypatch.setattr(world.first.states[0], "handle", broken)
        assert isinstance(await refusal(world.first, OPEN), Unavailable)
        with pytest.raises(InvariantBroken, match="I5"):
            await world.first.ended()
        began_s = world.clock.now_s()
        await world.second.until(Standing.LEADING, 2)
        assert world.clock.now_s() < began_s + LEASE_S / 2

    run(use)


def test_who_waits_at_a_standby_learns_that_it_leads() -> None:
    async def use(world: World) -> None:
        await world.both()
        waiting = await world.second.dial()
        await world.first.stop()
        await eventually(lambda: waiting.closed_because is not None)
        await world.second.until(Standing.LEADING, 2)
        peer = await world.second.dial()
        assert peer.welcome is not None
        assert peer.welcome.epoch == 2

    run(use)


def test_the_first_life_of_a_master_is_not_told_as_its_leader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING)
        world.second = OneMaster(world, "m1")
        await world.second.start()
        await eventually(lambda: world.second.office.leadership.leader is not None)
        error = await refusal(world.second, OPEN)
        assert isinstance(error, NotLeader)
        assert error.where == ()

    run(use)
    said = [each.getMessage() for each in caplog.records]
    found = "m1 leads in epoch 1, at m1:7700: an earlier life of this master, or another"
    assert len([each for each in said if each.startswith(found)]) == 1


def test_lost_renewals_are_counted() -> None:
    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING)
        world.first.store.is_cut_off = True
        await eventually(lambda: world.first.office.look()[1].renewals_failed >= 2)
        _, counts = world.first.office.look()
        assert (counts.terms, counts.lease_left_s < LEASE_S) == (1, True)

    run(use)


def test_a_worker_that_has_met_a_higher_epoch_is_led_in_one_above_it() -> None:
    """The metadata was put back to an earlier state."""

    async def use(world: World) -> None:
        await world.first.start()
        await world.first.until(Standing.LEADING, 1)
        register = RegisterWorker("n", "h", (), (), epoch=7)
        with pytest.raises(StaleEpoch):
            await world.first.ask(register, Role.WORKER)
        await world.first.until(Standing.LEADING, 8)
        assert (Standing.STANDBY, 7) in world.first.standings
        accepted = await world.first.ask(register, Role.WORKER)
        assert isinstance(accepted, WorkerAccepted)
        assert (accepted.epoch, world.disk.epoch) == (8, 8)

    run(use)


def test_a_leadership_that_does_not_say_when_it_is_to_be_woken_ends_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or it would neither renew nor stand for election any more, and look alive."""

    class Sleepless(Exception):
        """What nobody expects."""

    handle, woken = Leadership.handle, set[Leadership]()

    def noted(self: Leadership, event: LeadershipEvent, now: float) -> list[LeadershipAction]:
        if isinstance(event, StandingTick):
            woken.add(self)
        return handle(self, event, now)

    def wakeup_s(self: Leadership) -> float:
        if self in woken:
            raise Sleepless
        return 0.0

    async def use(world: World) -> None:
        await world.both()
        with monkeypatch.context() as patched:
            patched.setattr(Leadership, "handle", noted)
            patched.setattr(Leadership, "wakeup_s", property(wakeup_s))
            with pytest.raises(Sleepless):
                await world.first.ended()

    run(use)
