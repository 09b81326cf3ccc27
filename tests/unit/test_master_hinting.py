"""Hints: from a request to the eviction policy, the caller's own and those that the pool learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.hints import NO_HINTS, Hints
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans
from kvstore.wire.messages.reads import Lookup, MatchPrefix, RenewLease
from master.tunables import LEARNED, Tunables
from policies.eviction.lru import Lru
from policies.eviction.protocol import SAME_USE_S
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure

if TYPE_CHECKING:
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


@pytest.mark.parametrize("kind", ["match", "lookup", "put"])
def test_a_hint_that_is_never_right_is_named_and_changes_nothing(kind: str) -> None:
    pool = Pool()
    wrong, chains = Hints(reuse_probability=1.5), (PutChain(ROOT_PARENT, KEYS),)
    message = {
        "match": MatchPrefix(pool.space.id, KEYS, hints=wrong),
        "lookup": Lookup(pool.space.id, KEYS, hints=wrong),
        "put": BeginPut(bytes(16), pool.space.id, chains, (0,), (4096,), 1.0, hints=wrong),
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
