"""When a fleet is short of workers of one role, and can spare one of the other."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.errors import BadValue
from policies import registry
from policies.roles.protocol import Crew, Want

CALM = Crew(prefills=3, decodes=3, queue_s=1.0, busy=0.5, load=0.3, rested_s=60.0)


def wanted(name: str = "enforce", **changed: float) -> Want | None:
    return registry.roles(name).wanted(msgspec.structs.replace(CALM, **changed))


def test_prompts_that_wait_want_a_worker_that_answers_can_spare() -> None:
    assert wanted() is None
    assert wanted(queue_s=2.1) is Want.PREFILL
    assert wanted(queue_s=2.1, load=0.33) is Want.PREFILL  # half of what two can do
    assert wanted(queue_s=2.1, load=0.34) is None
    assert wanted(queue_s=2.1, decodes=2, load=0.24) is Want.PREFILL
    assert wanted(queue_s=2.1, decodes=2, load=0.26) is None


def test_answers_want_a_worker_that_prompts_can_spare() -> None:
    assert wanted(load=0.71) is Want.DECODE
    assert wanted(load=0.71, busy=0.53) is Want.DECODE
    assert wanted(load=0.71, busy=0.54) is None  # more than 0.8 of what two can do


@pytest.mark.parametrize("role", ["prefills", "decodes"])
def test_the_last_of_a_role_stays(role: str) -> None:
    def wanted_of(count: int) -> Want | None:
        if role == "prefills":
            return wanted(busy=0.0, load=0.8, prefills=count)
        return wanted(queue_s=99.0, load=0.0, decodes=count)

    assert wanted_of(3) is not None
    assert wanted_of(1) is None
    assert wanted_of(0) is None


def test_what_was_done_is_no_reason_to_undo_it() -> None:
    # The worker that left decode raises its load to 0.5 of what two do: that wants nothing back.
    assert wanted(queue_s=0.0, prefills=4, decodes=2, load=0.5) is None


def test_where_both_are_short_all_stay() -> None:
    assert wanted(queue_s=99.0, busy=1.0, load=2.0) is None


def test_one_change_is_left_to_have_its_effect() -> None:
    assert wanted(queue_s=9.0, rested_s=29.9) is None
    policy = registry.roles("enforce", {"dwell_s": 10, "lasting_s": 1})
    changed = msgspec.structs.replace(CALM, queue_s=9.0, rested_s=10.0)
    assert (policy.wanted(changed), policy.lasting_s) == (Want.PREFILL, 1.0)


def test_observing_says_the_same_and_off_says_nothing() -> None:
    assert wanted("observe", queue_s=9.0) is Want.PREFILL
    assert wanted("off", queue_s=9.0) is None
    policies = [registry.roles(name) for name in ("off", "observe", "enforce")]
    asked = [(policy.measures, policy.acts) for policy in policies]
    assert asked == [(False, False), (True, False), (True, True)]


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(BadValue, match="roles: got 'on', want one of enforce, observe, off"):
        registry.roles("on")
    with pytest.raises(BadValue, match="load_max"):
        registry.roles("enforce", {"load_max": 1.5})
