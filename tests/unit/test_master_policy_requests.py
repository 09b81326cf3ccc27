"""Policies of every kind: as configured, changed by an operator, and kept for the next master."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.wire.encoding import encode
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.operator import (
    GetPolicies,
    PoliciesInForce,
    PolicyRow,
    ResetPolicy,
    SetPolicy,
)
from master.policy_requests import PREFIX
from master.tunables import Tunables
from policies import registry
from policies.admission.budget import Budget
from policies.placement.most_free import MostFree
from tests.unit.master_rig import Rig, failure
from tests.unit.pools import ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.placement.protocol import Candidate

CONFIGURED = Tunables(
    "test",
    eviction_parameters={"half_life_s": 600.0},
    nvme_admission="second-touch",
    nvme_admission_parameters={"touches": 3},
)
KINDS = {
    "eviction": set(registry.EVICTION),
    "admission": set(registry.ADMISSION),
    "placement": set(registry.PLACEMENT),
    "replication": set(registry.REPLICATION),
    "erasure": set(registry.ERASURE),
    "prefill_routing": set(registry.PREFILL_ROUTING),
    "decode_routing": set(registry.DECODE_ROUTING),
    "colocation": set(registry.COLOCATION),
    "roles": set(registry.ROLES),
}


def brief(rows: dict[str, PolicyRow]) -> dict[str, tuple[str, bool]]:
    """The name of each policy, and whether an operator has set it."""
    return {kind: (row.name, row.is_set) for kind, row in rows.items()}


def test_all_kinds_are_told_as_they_are_configured() -> None:
    told = ask(Rig(CONFIGURED), GetPolicies())
    assert brief(told) == {
        "eviction": ("lrfu", False),
        "admission": ("second-touch", False),
        "placement": ("local_first", False),
        "replication": ("enforce", False),
        "erasure": ("off", False),
        "prefill_routing": ("prefix_load", False),
        "decode_routing": ("kv_aware", False),
        "colocation": ("break_even", False),
        "roles": ("enforce", False),
    }
    assert told["eviction"].parameters["half_life_s"] == 600.0
    assert told["admission"].parameters == {"touches": 3}
    assert {kind: set(row.known) for kind, row in told.items()} == KINDS


def test_admission_changes_at_once_and_knows_the_drives() -> None:
    rig = Rig(CONFIGURED)
    rig.master.core.admission.resize(86_400)
    told = ask(rig, SetPolicy("admission", "budget", {"drive_writes_per_day": "2"}))
    assert told["admission"].parameters["drive_writes_per_day"] == 2.0
    assert told["admission"].is_set
    policy = rig.master.core.admission.policy
    assert isinstance(policy, Budget)
    assert policy.bytes_per_s == 2.0
    ask(rig, SetPolicy("admission", "budget", {"drive_writes_per_day": "4"}))
    assert rig.master.core.admission.policy is policy, "what it has spent stays spent"
    assert policy.bytes_per_s == 4.0


def test_placement_changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(MostFree):
        """Another order."""

        def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
            """The fullest first."""
            return super().ranked(candidates)[::-1]

    monkeypatch.setitem(registry.PLACEMENT, "last", Last)
    rig = Rig(Tunables(placement="most_free"))
    rig.add_worker()
    rig.add_worker("w2")
    space = rig.open_namespace()
    assert space.put(b"a" * 32).segments[0].segment == "w1-dram"
    ask(rig, SetPolicy("placement", "last", {}))
    plans = space.plans(b"b" * 32)
    assert plans.segments[0].segment == "w1-dram", "the ranking made before is not used"


def test_what_is_set_outlives_the_master_until_it_is_reset() -> None:
    rig = Rig(CONFIGURED)
    set_to = ask(rig, SetPolicy("eviction", "ttl-lfu", {"ttl_s": "60"}))
    ask(rig, SetPolicy("admission", "second-touch", {"touches": "5"}))
    assert set(rig.store) == {f"{PREFIX}eviction", f"{PREFIX}admission"}
    rig.takeover(2)
    told = ask(rig, GetPolicies())
    assert told["eviction"] == set_to["eviction"]
    assert told["admission"].parameters == {"touches": 5}
    ask(rig, ResetPolicy("eviction"))
    told = ask(rig, ResetPolicy("admission"))
    assert told == ask(Rig(CONFIGURED), GetPolicies())
    assert not any(key.startswith(PREFIX) for key in rig.store)
    rig.takeover(3)
    assert ask(rig, GetPolicies()) == told


def test_a_change_is_answered_once_it_is_durable() -> None:
    rig = Rig()
    rig.holds_persists = True
    operator = rig.open("operator", "", "kvharbor")
    for message in (SetPolicy("eviction", "lru", {}), ResetPolicy("eviction")):
        assert rig.ask(operator, message) is None
        rig.store_all()
        assert isinstance(rig.reply(operator, rig.last_request), PoliciesInForce)


@pytest.mark.parametrize(
    "value",
    [
        encode(SetPolicy("eviction", "of-another-version", {})),
        encode(SetPolicy("eviction", "lrfu", {"gone": "1"})),
        encode(Done()),
        b"",
    ],
)
def test_what_a_later_version_has_kept_leaves_the_configuration(value: bytes) -> None:
    rig = Rig(CONFIGURED)
    rig.store[f"{PREFIX}eviction"] = value
    rig.store[f"{PREFIX}admission"] = encode(SetPolicy("admission", "all", {}))
    rig.takeover(2)
    told = brief(ask(rig, GetPolicies()))
    assert told["eviction"] == ("lrfu", False)
    assert told["admission"] == ("all", True)
    assert rig.master.core.counters["policies_not_restored"] == 1
    ask(rig, ResetPolicy("eviction"))
    assert f"{PREFIX}eviction" not in rig.store


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            SetPolicy("lru", "", {}),
            "kind: got 'lru', want one of eviction, admission, placement, replication",
        ),
        (
            ResetPolicy("all"),
            "kind: got 'all', want one of eviction, admission, placement, replication",
        ),
        (
            SetPolicy("eviction", "random", {}),
            "eviction: got 'random', want one of lrfu, lru, rent, s3-fifo, ttl-lfu",
        ),
        (
            SetPolicy("admission", "lru", {}),
            "admission: got 'lru', want one of all, budget, learned, none, second-touch",
        ),
        (
            SetPolicy("placement", "lru", {}),
            "placement: got 'lru', want one of local_first, most_free, two_choices",
        ),
        (
            SetPolicy("eviction", "lrfu", {"ghost_factor": "2", "halflife": "1"}),
            "parameter: got 'halflife', want one of ghost_factor,",
        ),
        (
            SetPolicy("eviction", "lru", {"half_life_s": "1"}),
            "parameter: got 'half_life_s', want none",
        ),
        (
            SetPolicy("eviction", "lrfu", {"ghost_factor": "2", "half_life_s": "0"}),
            "half_life_s: got '0', want a number >= 1",
        ),
        (SetPolicy("eviction", "ttl-lfu", {"ttl_s": "soon"}), "ttl_s: got 'soon', want a number"),
        (
            SetPolicy("admission", "second-touch", {"touches": "0"}),
            "touches: got '0', want a whole number",
        ),
        (SetPolicy("placement", "most_free", {"n": "1"}), "parameter: got 'n', want none"),
        (SetPolicy("replication", "on", {}), "replication: got 'on', want one of enforce, obs"),
        (
            SetPolicy("replication", "observe", {"port_share": "2"}),
            "port_share: got '2', want a number <= 1",
        ),
        (SetPolicy("erasure", "raid", {}), "erasure: got 'raid', want one of off, reed-solomon"),
        (SetPolicy("erasure", "reed-solomon", {"m": "0"}), "m: got '0', want a whole number >= 1"),
        (
            SetPolicy("erasure", "reed-solomon", {"cold_after_s": "nan"}),
            "cold_after_s: got 'nan', want a number",
        ),
        (SetPolicy("erasure", "off", {"k": "4"}), "parameter: got 'k', want none"),
        (SetPolicy("placement", "local_first", {"fuller_max": "nan"}), "fuller_max: got 'nan'"),
    ],
)
def test_what_does_not_exist_changes_nothing(message: SetPolicy | ResetPolicy, text: str) -> None:
    rig = Rig(CONFIGURED)
    before = ask(rig, GetPolicies())
    reply = failure(rig.ask(rig.open("operator", "", "kvharbor"), message))
    assert reply.code == "bad_value"
    assert reply.text.startswith(text)
    assert ask(rig, GetPolicies()) == before
    assert not rig.store


def test_only_operators_may_ask() -> None:
    rig = Rig()
    worker = rig.add_worker().session
    assert worker is not None
    for session in (rig.engine, worker):
        for message in (GetPolicies(), SetPolicy("eviction", "lru", {}), ResetPolicy("eviction")):
            assert failure(rig.ask(session, message)).code == "access_denied"
    assert rig.master.core.eviction.name == "lrfu"
