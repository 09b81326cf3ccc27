"""The learned index: what it learns of classes and ages, and that its counts are right."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.hints import NO_HINTS, Hints
from policies.eviction.rent import AGES_S, HINTS, Rent
from tests.unit.policy_entries import Pages, evict, put

LIKELY, UNLIKELY = Hints(reuse_probability=0.9), Hints(reuse_probability=0.1)


def waiting(policy: Rent) -> int:
    """Pages that the policy counts as waiting for a use."""
    return sum(sum(slots.values()) for slots in policy.waiting)


def taught(gap_s: float, hints: Hints = NO_HINTS, share: float = 1.0) -> Rent:
    """Every 10 s for an hour a run is put; this share of them is used once more, after a gap."""
    policy, random = Rent(), Random(1)
    uses: list[tuple[float, int, Pages | None]] = [(10.0 * n, n, None) for n in range(360)]
    while uses:
        uses.sort(key=lambda use: (use[0], use[1]))
        at_s, number, entry = uses.pop(0)
        if entry is not None:
            policy.touched(entry, at_s, hints)
            continue
        entry = put(policy, at_s, str(number), pages=10, hints=hints)
        if random.random() < share:
            uses.append((at_s + gap_s, number, entry))
    return policy


def scores(policy: Rent, ages: tuple[float, ...], touches: int = 1) -> list[float]:
    """Scores of a run of so many uses, by age."""
    entry = put(policy, 3600.0, "new", pages=10)
    for use in range(1, touches):
        policy.touched(entry, 3600.0 + 20.0 * use, NO_HINTS)
    return [policy.score(entry, entry.touched_s + age) for age in ages]


def test_before_it_has_learned_younger_pages_stay() -> None:
    before = scores(Rent(), (0.0, 50.0, 500.0, 4000.0, 9000.0))
    assert before == sorted(before, reverse=True)
    assert len(set(before)) == len(before)


def test_pages_stay_until_the_time_at_which_others_came_back() -> None:
    just_put, before, after = scores(taught(gap_s=100.0), (0.0, 85.0, 150.0))
    assert before > just_put > after


def test_it_learns_whether_a_second_use_is_followed_by_a_third() -> None:
    policy = taught(gap_s=100.0)
    (once,) = scores(policy, (50.0,))
    (twice,) = scores(policy, (50.0,), touches=2)
    assert once > 5 * twice


def test_pages_that_left_teach_too() -> None:
    policies = (taught(gap_s=100.0), taught(gap_s=100.0))
    for policy, comes_back in zip(policies, (True, False), strict=True):
        policy.resize(10_000)
        for number in range(100):
            at_s = 3600.0 + 10.0 * number
            entry = put(policy, at_s, f"x{number}", pages=10)
            evict(policy, entry, at_s + 1.0)
            if comes_back:
                again = put(policy, at_s + 60.0, f"x{number}", pages=10)
                assert (again.touches, again.touched_s) == (2, at_s + 60.0)
    back, gone = (scores(policy, (20.0,))[0] for policy in policies)
    assert back > gone


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (LIKELY, NO_HINTS),
        (NO_HINTS, UNLIKELY),
        (Hints(tool_call_s=5.0), NO_HINTS),
        (NO_HINTS, Hints(session_closed=True)),
        (LIKELY, Hints(session_closed=True, reuse_probability=0.9)),
    ],
)
def test_hints_count_before_they_have_proved_right(better: Hints, worse: Hints) -> None:
    policy = Rent()
    kept, dropped = put(policy, 0.0, "a", hints=better), put(policy, 0.0, "b", hints=worse)
    assert policy.score(kept, 30.0) > policy.score(dropped, 30.0)
    chances = [policy.reuse_probability(entry, 30.0) for entry in (kept, dropped)]
    assert chances == sorted(chances, key=lambda chance: -(chance or 0.0))


def test_hints_that_are_wrong_lose_their_weight() -> None:
    policy = taught(gap_s=60.0, hints=UNLIKELY)
    denied, promised = (
        put(policy, 3600.0, name, hints=hints) for name, hints in (("a", UNLIKELY), ("b", NO_HINTS))
    )
    assert policy.score(denied, 3640.0) > 0.9 * policy.score(promised, 3640.0)


def test_a_hint_within_the_same_use_changes_the_class_only() -> None:
    policy = Rent()
    entry = put(policy, 0.0)
    policy.touched(entry, 5.0, LIKELY)
    assert (entry.touches, entry.touched_s, entry.heat % HINTS) == (1, 0.0, 3.0)
    policy.touched(entry, 6.0, NO_HINTS)
    assert entry.heat % HINTS == 3.0
    policy.touched(entry, 20.0, NO_HINTS)
    assert entry.heat % HINTS == 0.0


def test_a_hint_without_a_use_changes_the_class_only() -> None:
    policy = Rent()
    entry = put(policy, 0.0, pages=3)
    policy.hinted(entry, 50.0, LIKELY)
    assert (entry.touches, entry.touched_s, entry.heat % HINTS) == (1, 0.0, 3.0)
    policy.hinted(entry, 60.0, Hints(turn=2))
    assert entry.heat % HINTS == 3.0
    assert waiting(policy) == 3


def test_what_is_worth_more_stays_longer_until_the_next_use() -> None:
    policy = Rent()
    usual, worth = put(policy, 0.0, "a"), put(policy, 0.0, "b", hints=Hints(priority=2))
    assert policy.score(worth, 30.0) == 4 * policy.score(usual, 30.0)
    policy.touched(worth, 5.0, NO_HINTS)
    assert policy.score(worth, 30.0) == 4 * policy.score(usual, 30.0)
    for entry in (usual, worth):
        policy.touched(entry, 50.0, NO_HINTS)
    assert policy.score(worth, 60.0) == policy.score(usual, 60.0)


def test_the_probability_is_what_was_seen() -> None:
    for share in (0.2, 0.5, 0.9):
        policy = taught(gap_s=100.0, share=share)
        entry = put(policy, 3600.0, "new", pages=10)
        assert policy.reuse_probability(entry, 3600.0) == pytest.approx(share, abs=0.12)
        assert (policy.reuse_probability(entry, 3600.0 + 150.0) or 0.0) < 0.1


def test_every_page_waits_once_and_not_for_ever() -> None:
    policy, random, now_s = Rent(), Random(5), 0.0
    policy.resize(10**6)
    here = [put(policy, now_s, str(number), pages=3) for number in range(20)]
    away: list[Pages] = []
    for _ in range(500):
        now_s += random.uniform(0.0, 6.0)
        if here and random.random() < 0.5:
            policy.touched(random.choice(here), now_s, random.choice((NO_HINTS, LIKELY, UNLIKELY)))
        elif here and random.random() < 0.5:
            away.append(here.pop())
            evict(policy, away[-1], now_s)
        elif away:
            entry = away.pop()
            assert policy.entered(entry, entry.keys, now_s, NO_HINTS) == 3
            here.append(entry)
        assert waiting(policy) == 60
    policy.score(here[0], now_s + AGES_S[-1] + 20.0)
    assert waiting(policy) == 0


def test_after_a_long_pause_it_still_knows_what_it_learned() -> None:
    policy = taught(gap_s=100.0)
    before = scores(policy, (85.0,))
    policy.score(put(policy, 9000.0), 9000.0)
    assert scores(policy, (85.0,)) == pytest.approx(before, rel=0.3)
