"""How many replicas a load asks for, and that none are made and dropped in turns."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from policies import registry
from policies.parameters import Parameters
from policies.replication.protocol import Load, ReplicationPolicy
from policies.replication.read_rate import ReadRateParameters

PORT = 1000.0


def rule(name: str = "enforce", **parameters: float) -> ReplicationPolicy:
    """Hosts that send a thousand bytes a second, half of which one run may take."""
    return registry.replication(name, {"port_bytes_per_s": PORT} | parameters)


def wanted(load: float, replicas: int = 1, extra: int = 0, domains: int = 10) -> int:
    """What the rule says of reads that fill so many shares of a port."""
    read_bytes_per_s = load * PORT / 2
    return rule(extra_max=15).extra(Load(read_bytes_per_s, replicas, extra, domains))


@pytest.mark.parametrize(
    ("load", "replicas", "extra"),
    [(0.0, 1, 0), (1.0, 1, 0), (1.01, 1, 1), (2.0, 1, 1), (2.01, 1, 2), (2.01, 2, 1), (2.0, 2, 0)],
)
def test_each_replica_serves_half_a_port(load: float, replicas: int, extra: int) -> None:
    assert wanted(load, replicas) == extra


def test_a_replica_goes_when_the_load_is_half_of_what_brought_it() -> None:
    assert wanted(1.01) == 1
    assert wanted(0.51, extra=1) == 1
    assert wanted(0.5, extra=1) == 0
    assert wanted(2.01, extra=1) == 2
    assert wanted(1.01, extra=2) == 2
    assert wanted(1.0, extra=2) == 1, "one after the other"


@given(st.floats(0.8, 1.2), st.lists(st.floats(0.8, 1.2), max_size=50), st.integers(1, 8))
def test_a_load_about_a_threshold_never_makes_a_replica_go(
    first: float, loads: list[float], replicas: int
) -> None:
    extra, changes = wanted(first * replicas, replicas), 0
    for load in loads:
        before, extra = extra, wanted(load * replicas, replicas, extra)
        assert extra >= before
        changes += extra != before
    assert changes <= 2


def test_there_are_no_more_than_hosts_and_than_is_allowed() -> None:
    assert wanted(9.0, domains=3) == 2
    assert wanted(9.0, domains=1) == 0
    assert wanted(9.0, replicas=3, domains=2) == 0, "more were asked for than there are"
    assert rule().extra(Load(9 * PORT, 1, 0, 10)) == ReadRateParameters().extra_max
    assert rule(extra_max=1).extra(Load(9 * PORT, 1, 2, 10)) == 1


@given(
    st.floats(0, 1e6), st.integers(1, 16), st.integers(0, 15), st.integers(0, 20),
)  # fmt: skip
def test_no_load_below_the_quiet_one_makes_a_replica(
    load: float, replicas: int, extra: int, domains: int
) -> None:
    policy = rule()
    asked = Load(load, replicas, extra, domains)
    assert 0 <= policy.extra(asked) <= max(0, domains - replicas)
    if load <= policy.quiet_bytes_per_s:
        assert policy.extra(asked) <= extra


def test_observing_says_the_same_and_does_nothing() -> None:
    observe, enforce = rule("observe"), rule("enforce")
    load = Load(PORT, 1, 0, 10)
    assert observe.extra(load) == enforce.extra(load) == 1
    assert (observe.measures, observe.acts) == (True, False)
    assert (enforce.measures, enforce.acts) == (True, True)


def test_off_counts_nothing_and_wants_nothing() -> None:
    off = registry.replication("off")
    assert (off.measures, off.acts, off.quiet_bytes_per_s) == (False, False, inf)
    assert off.extra(Load(1e12, 1, 2, 10)) == 0
    assert off.parameters == Parameters()


def test_unknown_names_and_parameters_list_those_that_exist() -> None:
    assert set(registry.REPLICATION) == {"off", "observe", "enforce"}
    with pytest.raises(BadValue, match="replication: got 'on', want one of enforce, observe, off"):
        registry.replication("on")
    with pytest.raises(BadValue, match="got 'port', want one of window_s, port_bytes_per_s"):
        registry.replication("enforce", {"port": 1})
    with pytest.raises(BadValue, match=r"hysteresis: got 1\.0, want a number <= 0\.95"):
        registry.replication("enforce", {"hysteresis": 1.0})
    with pytest.raises(BadValue, match="extra_max: got 0, want a whole number >= 1"):
        registry.replication("observe", {"extra_max": 0})
