"""Hints: from a request to the eviction policy, the caller's own and those that the pool learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.hints import NO_HINTS, Hints
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans
from kvstore.wire.messages.reads import (
    GetStatus,
    GiveHints,
    Lookup,
    MatchPrefix,
    RenewLease,
    Status,
)
from master.replay.pool import ENGINE, Setting, VirtualPool
from master.tunables import LEARNED, Tunables
from policies.eviction.lru import Lru
from policies.eviction.protocol import SAME_USE_S
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.eviction.protocol import Entry

KEYS = chain(1, 8)
SAID = Hints(reuse_probability=0.9, turn=2)


class Hearing(Lru):
    """Notes the hints that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Hints] = []

    def entered(self, entry: Entry, keys: bytes, now_s: float, hints: Hints) -> int:
        self.heard.append(hints)
        return super().entered(entry, keys, now_s, hints)

    def touched(self, entry: Entry, now_s: float, hints: Hints) -> None:
        self.heard.append(hints)
        super().touched(entry, now_s, hints)

    def hinted(self, entry: Entry, now_s: float, hints: Hints) -> None:
        self.heard.append(hints)
        super().hinted(entry, now_s, hints)


class Pool:
    """A pool whose policy listens."""

    def __init__(self, hints: str = "given") -> None:
        self.rig = Rig(Tunables("test", hints=hints))
        self.rig.add_worker()
        self.space: OpenedNamespace = self.rig.open_namespace()
        self.policy = self.rig.master.core.eviction.policy = Hearing()

    def heard(self) -> list[Hints]:
        """What the policy heard since it was asked last."""
        heard, self.policy.heard = self.policy.heard, []
        return heard

    def put(self, keys: bytes, parent: bytes = ROOT_PARENT, hints: Hints | None = None) -> None:
        self.rig.puts += 1
        request = self.rig.puts.to_bytes(16, "little")
        chains = (PutChain(parent, keys),)
        message = BeginPut(request, self.space.id, chains, (0,), (4096,), 5.0, hints=hints)
        plans = self.rig.ask(self.rig.engine, message)
        assert isinstance(plans, PutPlans), plans
        self.space.report(self.space.write(plans, keys, parent))

    def match(self, keys: bytes, hints: Hints | None = None) -> None:
        self.rig.ask(self.rig.engine, MatchPrefix(self.space.id, keys, (), False, hints))

    def hint(self, keys: bytes, hints: Hints) -> object:
        return self.rig.ask(self.rig.engine, GiveHints(self.space.id, keys, hints))


def test_a_callers_hints_reach_the_policy() -> None:
    pool = Pool()
    pool.put(KEYS, hints=SAID)
    assert pool.heard() == [SAID]
    pool.match(KEYS, SAID)
    pool.rig.ask(pool.rig.engine, Lookup(pool.space.id, KEYS, (), False, SAID))
    pool.put(KEYS, hints=SAID)
    assert pool.heard() == [SAID] * 3
    pool.match(KEYS)
    pool.rig.ask(pool.rig.engine, RenewLease(pool.space.id, KEYS, bytes(8 * 8)))
    assert pool.heard() == [NO_HINTS]


def test_a_hint_alone_is_no_use() -> None:
    pool = Pool()
    pool.put(KEYS)
    pool.heard()
    (run,) = pool.rig.master.core.tree(pool.space.ordinal).all_runs()
    before = run.expires_s, run.leased_until_s, run.touched_s, run.touches
    pool.rig.pass_time(30.0)
    assert pool.hint(KEYS[: 6 * KEY_BYTES] + chain(9, 1), SAID) == Done()
    assert pool.heard() == [SAID], "for the pages that were named, and are there"
    assert len(run) == 6
    assert (run.expires_s, run.leased_until_s, run.touched_s, run.touches) == before
    assert pool.hint(KEYS, NO_HINTS) == Done()
    assert pool.hint(chain(9, 2), SAID) == Done()
    assert not pool.heard()


def test_a_hint_is_for_the_tenant_of_the_pages() -> None:
    pool = Pool()
    other = pool.rig.open("engine", "another tenant", "engine")
    refused = failure(pool.rig.ask(other, GiveHints(pool.space.id, KEYS, SAID)))
    assert refused.code == "access_denied"
    refused = failure(pool.rig.ask(pool.rig.engine, GiveHints(pool.space.id, KEYS[:-1], SAID)))
    assert (refused.code, refused.text[:5]) == ("bad_value", "keys:")


CLOSED = Hints(session_closed=True)
SYSTEM, ONE, OTHER = chain(1, 4), chain(2, 4), chain(3, 4)


@pytest.mark.parametrize("kind", ["hint", "match", "put"])
def test_the_end_of_a_session_is_told_of_its_own_pages_only(kind: str) -> None:
    pool = Pool()
    pool.put(SYSTEM + ONE)
    pool.put(OTHER, SYSTEM[-KEY_BYTES:])
    pool.heard()
    tell: dict[str, Callable[[], object]] = {
        "hint": lambda: pool.hint(SYSTEM + ONE, CLOSED),
        "match": lambda: pool.match(SYSTEM + ONE, CLOSED),
        "put": lambda: pool.put(SYSTEM + ONE, hints=CLOSED),
    }
    tell[kind]()
    assert pool.heard() == [NO_HINTS, CLOSED]
    pool.hint(SYSTEM, CLOSED)
    assert pool.heard() == [NO_HINTS], "both others go on from it"


def test_pages_below_the_end_of_a_closed_session_are_of_another() -> None:
    pool = Pool()
    pool.put(KEYS)
    pool.heard()
    pool.rig.ask(pool.rig.engine, Lookup(pool.space.id, KEYS[: 3 * KEY_BYTES], (), False, CLOSED))
    pool.hint(KEYS[: 3 * KEY_BYTES], CLOSED)
    assert pool.heard() == [NO_HINTS, NO_HINTS]
    pool.hint(KEYS, CLOSED)
    assert pool.heard() == [CLOSED, CLOSED]


def test_requests_are_counted_by_what_they_told() -> None:
    pool = Pool()
    pool.put(KEYS, hints=Hints(turn=1, priority=-1))
    pool.match(KEYS, Hints(tool_call_s=0.0))
    pool.match(KEYS)
    pool.hint(KEYS, CLOSED)
    pool.hint(KEYS, Hints(tool_call_s=5.0, reuse_probability=1.0))
    status = pool.rig.ask(pool.rig.engine, GetStatus())
    assert isinstance(status, Status)
    told = {name: n for name, n in status.counters.items() if name.startswith("hints_")}
    assert told == {
        "hints_turn": 1,
        "hints_priority": 1,
        "hints_tool_call": 2,
        "hints_session_closed": 1,
        "hints_reuse_probability": 1,
    }


class Chats:
    """Two chats of four pages each in a full pool of eight, and what a third one puts out."""

    def __init__(self, policy: str) -> None:
        self.pool = VirtualPool(Setting(8, policy), 512)
        for first in (10, 20):
            assert self.pool.put(range(first, first + 4), None) == 4
            self.pool.advance(self.pool.now_s + 20.0)

    def hint(self, first: int, hints: Hints) -> None:
        keys = self.pool.packed(range(first, first + 4))
        assert self.pool.ask(ENGINE, GiveHints(self.pool.namespace, keys, hints)) == Done()

    def crowd_out(self) -> list[int]:
        """The chats that are whole after two pages have come."""
        assert self.pool.put((30, 31), None) == 2
        self.pool.master.check_invariants()
        return [first for first in (10, 20) if self.pool.holds(first + 3)]


@pytest.mark.parametrize("policy", ["lrfu", "rent"])
def test_under_pressure_hints_choose_who_goes(policy: str) -> None:
    assert Chats(policy).crowd_out() == [20], "the one that was used last stays"
    for first, hints in (
        (20, CLOSED),
        (20, Hints(priority=-2)),
        (10, Hints(priority=2)),
        (10, Hints(tool_call_s=30.0)),
    ):
        chats = Chats(policy)
        chats.hint(first, hints)
        assert chats.crowd_out() == [10], hints


def test_a_tool_call_holds_pages_for_no_longer_than_it_was_to_take() -> None:
    for used_s, stays in ((460.0, 10), (800.0, 20)):
        chats = Chats("lrfu")
        chats.pool.advance(400.0)
        chats.hint(10, Hints(tool_call_s=60.0))
        chats.pool.advance(used_s)
        assert chats.pool.match(range(20, 24)).total() == 4
        assert chats.crowd_out() == [stays]


@pytest.mark.parametrize("kind", ["match", "lookup", "put", "hint"])
def test_a_hint_that_is_never_right_is_named_and_changes_nothing(kind: str) -> None:
    pool = Pool()
    wrong, chains = Hints(reuse_probability=1.5), (PutChain(ROOT_PARENT, KEYS),)
    message = {
        "match": MatchPrefix(pool.space.id, KEYS, hints=wrong),
        "lookup": Lookup(pool.space.id, KEYS, hints=wrong),
        "put": BeginPut(bytes(16), pool.space.id, chains, (0,), (4096,), 1.0, hints=wrong),
        "hint": GiveHints(pool.space.id, KEYS, wrong),
    }[kind]
    reply = failure(pool.rig.ask(pool.rig.engine, message))
    assert (reply.code, reply.text) == ("bad_value", "reuse_probability: got 1.5, want 0 to 1")
    assert not pool.heard()


def chance(hints: list[Hints]) -> float:
    """The one probability that was told."""
    (told,) = {each.reuse_probability for each in hints}
    assert told is not None
    return told


def test_the_pool_learns_which_chains_are_continued() -> None:
    pool = Pool(LEARNED)
    assert pool.rig.master.core.predictor is not None
    for number in range(40):  # single pages that nobody goes on from, pairs that everybody does
        pool.match(chain(100 + number, 1))
        first = chain(200 + number, 4)
        pool.match(first[: 2 * KEY_BYTES])
        pool.rig.pass_time(SAME_USE_S)
        pool.match(first)
    pool.heard()
    pool.match(chain(300, 1))
    pool.put(chain(300, 1))
    cold = chance(pool.heard())
    pool.match(chain(301, 2))
    pool.put(chain(301, 3))  # and what was generated
    warm = chance(pool.heard())
    assert cold < 0.3 < 0.6 < warm
    pool.put(chain(301, 4)[3 * KEY_BYTES :], chain(301, 3)[2 * KEY_BYTES :])
    pool.put(chain(302, 1))
    assert pool.heard() == [NO_HINTS, NO_HINTS], "no question told of these"


def test_what_the_caller_says_counts_before_what_is_learned() -> None:
    pool = Pool(LEARNED)
    pool.match(KEYS, SAID)
    pool.put(KEYS, hints=SAID)
    assert pool.heard() == [SAID]
    pool.match(KEYS, Hints(session_closed=True))
    assert pool.heard() == [Hints(session_closed=True)]


def test_the_rest_of_a_chain_is_no_chain_of_its_own() -> None:
    pool = Pool(LEARNED)
    pool.match(KEYS)
    pool.put(KEYS)
    predictor = pool.rig.master.core.predictor
    assert predictor is not None
    assert len(predictor) == 1
    pool.match(KEYS[: 4 * KEY_BYTES])
    pool.match(KEYS[4 * KEY_BYTES :])
    assert len(predictor) == 2
