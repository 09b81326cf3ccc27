"""Which pages are written to a tier, and that a drive's budget holds."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from policies import registry
from policies.admission.budget import Budget, BudgetParameters
from policies.admission.protocol import USED_AGAIN_PROBABILITY, USED_ONCE_PROBABILITY, Candidate

SIZE = 1000
ONCE, TWICE = Candidate(SIZE, 1), Candidate(SIZE, 2)
SURE, UNLIKELY = Candidate(SIZE, 1, 0.95), Candidate(SIZE, 9, 0.05)
PINNED = Candidate(SIZE, 1, 0.0, is_pinned=True)


def budget(bytes_per_s: float, burst_s: float = 100.0) -> Budget:
    """A drive that stands so much."""
    policy = Budget()
    policy.parameters = BudgetParameters(drive_writes_per_day=1.0, burst_s=burst_s)
    policy.resize(int(bytes_per_s * 86_400))
    return policy


@pytest.mark.parametrize(
    ("name", "admitted"),
    [
        ("all", [True, True, True, True, True]),
        ("none", [False, False, False, False, False]),
        ("second-touch", [False, True, False, True, True]),
        ("learned", [True, True, True, False, True]),
        ("budget", [False, False, False, False, True]),  # of no drive
    ],
)
def test_what_each_admits(name: str, admitted: list[bool]) -> None:
    policy = registry.admission(name)
    asked = (ONCE, TWICE, SURE, UNLIKELY, PINNED)
    assert [policy.admits(candidate, 0.0) for candidate in asked] == admitted
    assert len(registry.ADMISSION) == 5


def test_thresholds_can_be_set() -> None:
    third = registry.admission("second-touch", {"touches": 3})
    assert [third.admits(each, 0.0) for each in (TWICE, Candidate(SIZE, 3))] == [False, True]
    choosy = registry.admission("learned", {"probability": 0.5})
    assert [choosy.admits(each, 0.0) for each in (ONCE, TWICE, SURE)] == [False, True, True]


def test_unknown_names_and_parameters_list_those_that_exist() -> None:
    with pytest.raises(BadValue, match=r"admission.*'some'.*all.*budget.*learned"):
        registry.admission("some")
    with pytest.raises(BadValue, match=r"dwpd.*one of drive_writes_per_day, burst_s"):
        registry.admission("budget", {"dwpd": 1})
    with pytest.raises(BadValue, match="drive_writes_per_day"):
        registry.admission("budget", {"drive_writes_per_day": 0})


def test_uses_stand_in_for_a_probability() -> None:
    assert ONCE.likelihood == USED_ONCE_PROBABILITY
    assert TWICE.likelihood == USED_AGAIN_PROBABILITY
    assert UNLIKELY.likelihood == 0.05


def test_a_budget_is_the_drives_life_in_bytes_a_second() -> None:
    policy = Budget()
    policy.parameters = BudgetParameters(drive_writes_per_day=3.0)
    policy.resize(86_400 * 1000)
    assert policy.bytes_per_s == 3000.0


def takes(policy: Budget, candidate: Candidate, now_s: float) -> bool:
    """Whether it admits the pages; then all of them are written."""
    admitted = policy.admits(candidate, now_s)
    if admitted:
        policy.wrote(candidate.size_bytes)
    return admitted


def test_only_what_is_written_is_spent() -> None:
    policy = budget(bytes_per_s=SIZE)
    assert all(policy.admits(SURE, 0.0) for _ in range(1000))
    policy.wrote(SIZE // 2)
    assert policy.spent().size_bytes == SIZE // 2


def test_within_its_budget_everything_is_written() -> None:
    policy = budget(bytes_per_s=SIZE)
    assert all(takes(policy, UNLIKELY, float(second)) for second in range(1000))


def test_the_likely_pages_are_written_when_it_runs_dry() -> None:
    policy = budget(bytes_per_s=SIZE)
    written = Counter[Candidate]()
    for step in range(40_000):  # four times the budget, half of it used before
        candidate = (ONCE, TWICE, UNLIKELY, ONCE)[step % 4]
        if takes(policy, candidate, step / 4):
            written[candidate] += 1
    assert written[TWICE] > 9_900
    assert written.total() == pytest.approx(10_000, abs=100)


def test_an_idle_drive_fills_with_pages_that_were_used_once() -> None:
    policy = Budget()
    policy.resize(1000 * SIZE)
    assert all(takes(policy, ONCE, 0.0) for _ in range(1000))
    burst = 1000 + sum(takes(policy, ONCE, 0.0) for _ in range(5000))
    day = sum(takes(policy, ONCE, second * 60.0) for second in range(1440) for _ in range(10))
    assert 2700 <= burst < 2800, "nine tenths, and a quarter of the last"
    assert day == pytest.approx(3000, abs=10)  # three times the drive


@given(
    st.integers(0, 1 << 30),
    st.floats(0.0, 10.0),
    st.floats(1.0, 1000.0),
)
def test_the_budget_holds_over_any_time(seed: int, mean_gap_s: float, burst_s: float) -> None:
    random, policy, now = Random(seed), budget(10_000.0, burst_s), 0.0
    writes: list[tuple[float, int]] = []
    for _ in range(200):
        now += mean_gap_s * random.expovariate(1.0)
        candidate = Candidate(int(random.expovariate(1 / 50_000)) + 1, 1, random.betavariate(2, 2))
        if takes(policy, candidate, now):
            writes.append((now, candidate.size_bytes))
    for first, (start, _) in enumerate(writes):
        spent = 0
        for at, size in writes[first:]:
            spent += size
            assert spent <= 10_000.0 * (at - start + burst_s) + 1.0


def test_a_page_larger_than_the_whole_bucket_is_never_written() -> None:
    assert not takes(budget(bytes_per_s=1.0, burst_s=999.0), SURE, 1e6)


def test_pinned_pages_overdraw_the_budget_at_the_cost_of_others() -> None:
    policy = budget(bytes_per_s=SIZE)
    assert all(takes(policy, PINNED, 0.0) for _ in range(150))
    assert not takes(policy, SURE, 50.0)
    assert takes(policy, SURE, 60.0)


def test_a_budget_goes_on_where_the_last_one_was() -> None:
    policy = budget(bytes_per_s=SIZE)
    policy.begin_with(100 * SIZE)
    assert not takes(policy, SURE, 1e6), "its time has not begun before"
    assert policy.spent().size_bytes == 100 * SIZE
    assert not takes(policy, SURE, 1e6 + 0.5)
    assert takes(policy, SURE, 1e6 + 9.0)
    assert policy.spent().size_bytes == 92 * SIZE


@pytest.mark.parametrize(("burst_s", "grain_s"), [(86_400.0, 864.0), (6001.0, 60.01), (1.0, 60.0)])
def test_notes_of_what_is_spent_are_coarse(burst_s: float, grain_s: float) -> None:
    assert budget(10.0, burst_s).spent().grain_bytes == pytest.approx(10 * grain_s)
    nothing = registry.admission("all").spent()
    assert (nothing.size_bytes, nothing.grain_bytes) == (0.0, 0.0)
