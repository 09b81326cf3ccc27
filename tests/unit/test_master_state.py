"""Dispatch: who is answered, what is refused, what the shell is told about time; replay."""

from __future__ import annotations

import gc

import msgspec
import pytest

from kvstore import limits
from kvstore.errors import CallerError, IllegalTransition
from kvstore.ids import ROOT_PARENT, Epoch
from kvstore.replica import ExtentEvent
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans
from kvstore.wire.messages.reads import GetStatus, Probe
from master import event_ring
from master.core import Core
from master.event_ring import EventRing
from master.events import Event, Persisted, Request, SessionClosed, SessionId, Tick, WriteId
from master.plans import Owner, Put
from master.removal import Removal
from master.segments import Segment
from master.state import MasterState
from master.tunables import Tunables
from tests.unit.master_rig import Rig, chain, failure


def test_every_request_is_answered_or_refused() -> None:
    rig = Rig()
    reply = failure(rig.ask(rig.engine, Done()))
    assert (reply.code, "Done" in reply.text) == ("caller_error", True)
    assert rig.master.core.counters["refused_caller_error"] == 1


def test_our_own_bugs_are_no_answers() -> None:
    rig = Rig()
    rig.add_worker()
    space = rig.open_namespace()
    plans = space.plans(chain(1, 2))
    reports = space.write(plans, chain(1, 2))
    rig.checks = False
    (plan,) = rig.master.core.plans.values()
    plan.segment.allocator.apply(plan.spans[0], ExtentEvent.PLAN_FAILED)  # behind its back
    with pytest.raises(IllegalTransition, match="QUARANTINED"):
        space.report(reports)


def test_strangers_get_nothing() -> None:
    rig = Rig()
    assert rig.ask(SessionId(99), GetStatus()) is None
    rig.send(SessionClosed(SessionId(99)))
    rig.send(Persisted(WriteId(99)))


def ids_of_parts() -> set[int]:
    """Of all that is there of the parts of masters that refer to others."""
    kinds = Core, Segment, Put, Owner, Removal
    # By type(): isinstance asks each object for its class, and some of others' warn of that.
    return {id(each) for each in gc.get_objects() if type(each) in kinds}


def test_nothing_of_a_term_outlives_it() -> None:
    """A master may lead many times; what is open then is let go of with the rest."""
    successor = MasterState(Tunables(), Epoch(2))  # now: later it could get an id that was freed
    others = ids_of_parts()
    rig = Rig()
    rig.add_worker(chunks=64)
    space = rig.open_namespace()
    space.put(chain(1, 8))
    rig.holds_commands = rig.holds_persists = True
    chains = tuple(PutChain(ROOT_PARENT, chain(number, 1)) for number in range(10, 400))
    many = BeginPut(bytes(16), space.id, chains, (0,), (4096,), 5.0, wait=False)
    assert rig.ask(rig.engine, many) is None  # it takes more than one step
    space.plans(chain(2, 4))
    space.begin(chain(2, 4), wait=True, session=rig.open("engine", "tenant", "another"))
    space.match(chain(1, 4))
    space.remove(chain(1, 2))
    rig.add_worker("w2", join=False)
    mine = ids_of_parts() - others
    rig.master = successor
    gc.collect()
    gc.collect()  # what only the first round has set free
    assert len(mine) > len(rig.workers)
    assert mine & ids_of_parts() == set()


def test_an_idle_master_sleeps() -> None:
    state = MasterState(Tunables(), Epoch(1))
    assert state.handle(Tick(), 5.0) == []
    assert state.wakeup_s == float("inf")


def test_an_idle_pool_wants_few_ticks() -> None:
    rig = Rig()
    worker = rig.add_worker()
    space = rig.open_namespace()
    space.put(chain(1, 8))
    rig.pass_time(limits.put_timeout_s(8 * 4096))  # the alarm of the put's deadline, too
    space.match(chain(1, 8))
    end_s, beat_s, ticks = rig.now + 60.0, rig.now, 0
    while rig.now < end_s:
        if beat_s < rig.master.wakeup_s:
            rig.now = max(rig.now, beat_s)
            worker.beat()
            beat_s += limits.HEARTBEAT_INTERVAL_S
        else:
            rig.tick(max(0.0, rig.master.wakeup_s - rig.now))
            ticks += 1
    # One is for the worker that might have fallen silent, every three seconds less a heartbeat.
    assert ticks <= 60.0 / (limits.WORKER_LOST_AFTER_S - limits.HEARTBEAT_INTERVAL_S)


def test_time_never_goes_back() -> None:
    state = MasterState(Tunables(), Epoch(1))
    state.handle(Tick(), 5.0)
    with pytest.raises(AssertionError):
        state.handle(Tick(), 4.9)


def test_the_same_events_give_the_same_actions() -> None:
    def story() -> tuple[list[tuple[float, Event]], list[object]]:
        rig = Rig(Tunables(watermark_high=0.5, watermark_low=0.3, watermark_demote=0.2))
        rig.add_worker()
        space = rig.open_namespace()
        for number in range(30):
            space.put(chain(number, 5), ttl_s=3.0 + number / 5)
            space.match(chain(number // 2, 4))
            rig.pass_time(0.3)
        return list(rig.master.ring), [rig.master.core.counters, sorted(rig.store)]

    events, outcome = story()
    assert story() == (events, outcome)
    again = MasterState(
        Tunables(watermark_high=0.5, watermark_low=0.3, watermark_demote=0.2), Epoch(1)
    )
    for now, event in events:
        again.handle(event, now)
    again.check_invariants()
    assert again.core.counters == outcome[0]


def test_the_ring_is_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVENT_RING_ENTRIES", 3)
    ring = EventRing()
    for number in range(5):
        ring.append(float(number), Tick())
    assert [now for now, _ in ring] == [2.0, 3.0, 4.0]
    assert len(ring) == 3


def test_the_ring_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_ring, "RING_BYTES_MAX", 10_000)
    ring = EventRing()
    for number in range(5):
        message = Probe(bytes(32), bytes(4000))
        ring.append(float(number), Request(SessionId(1), number, message))
    assert [now for now, _ in ring] == [3.0, 4.0]
    chains = (PutChain(bytes(32), bytes(9000)),)
    put = BeginPut(bytes(16), bytes(32), chains, (0,), (1,), 1.0)
    ring.append(5.0, Request(SessionId(1), 5, put))
    assert [now for now, _ in ring] == [5.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease_ttl_s", 0.0),
        ("lease_ttl_s", limits.LEASE_TTL_MAX_S + 1),
        ("watermark_high", 1.1),
        ("watermark_low", 0.96),
        ("watermark_demote", 0.93),
        ("move_bytes_per_s", 0),
        ("metadata_bytes_per_s", 0),
        ("promote_hits", 0),
        ("worker_lost_after_s", 0.9),
        ("eviction", "random"),
        ("placement", "nearest"),
    ],
)
def test_settings_that_cannot_be_right_stop_the_start(field: str, value: float | str) -> None:
    with pytest.raises(CallerError, match=field):
        MasterState(msgspec.structs.replace(Tunables(), **{field: value}), Epoch(1))


def test_generations_carry_the_epoch() -> None:
    rig = Rig(epoch=7)
    rig.add_worker()
    space = rig.open_namespace()
    first, second = space.plans(chain(1, 1)), space.plans(chain(2, 1))
    assert isinstance(first, PutPlans)
    assert [plans.spans[0].generation for plans in (first, second)] == [
        (7 << 32) + 1,
        (7 << 32) + 2,
    ]
