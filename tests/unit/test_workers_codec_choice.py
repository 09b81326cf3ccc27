"""The codec of a namespace: measured on a few parts, kept for many, bounded in number."""

from __future__ import annotations

import pytest

from kvstore import limits
from kvstore.codec import Codec
from workers.tiers.codec_choice import KEPT_PARTS, SAMPLE_PARTS, CodecChoice, Trial

SIZE = 1000


def trials(**stored: tuple[int, float]) -> list[Trial]:
    """What each codec made of SIZE bytes: (stored bytes, seconds)."""
    return [Trial(Codec[name], SIZE, size, seconds) for name, (size, seconds) in stored.items()]


def sampled(choice: CodecChoice, namespace: int, made: list[Trial]) -> Codec | None:
    """Take a whole sample of such parts; the choice."""
    for _ in range(SAMPLE_PARTS):
        assert choice.choose(namespace) is None
        choice.learn(namespace, made)
    return choice.choose(namespace)


@pytest.mark.parametrize(
    ("made", "best"),
    [
        (trials(LZ4=(990, 0.1), ZSTD=(700, 1.0)), Codec.ZSTD),
        (trials(LZ4=(850, 0.2), ZSTD=(700, 1.0)), Codec.LZ4),  # 750 bytes a second against 300
        (trials(LZ4=(850, 0.2), ZSTD_PLANES=(400, 0.5)), Codec.ZSTD_PLANES),
        (trials(LZ4=(901, 0.001), ZSTD=(950, 0.001)), Codec.NONE),
        (trials(LZ4=(900, 9.0), ZSTD=(950, 0.001)), Codec.LZ4),
        (trials(LZ4=(1000, 0.0), ZSTD=(1000, 0.0)), Codec.NONE),
        (trials(LZ4=(500, 0.0), ZSTD=(400, 0.0)), Codec.ZSTD),  # a clock too coarse to tell
    ],
)
def test_what_saves_most_bytes_a_second_is_chosen(made: list[Trial], best: Codec) -> None:
    assert sampled(CodecChoice(), 1, made) is best


def test_namespaces_are_chosen_for_apart() -> None:
    choice = CodecChoice()
    assert sampled(choice, 1, trials(ZSTD=(500, 1.0))) is Codec.ZSTD
    assert sampled(choice, 2, trials(ZSTD=(999, 1.0))) is Codec.NONE
    assert choice.choose(1) is Codec.ZSTD


def test_a_choice_is_kept_for_long_and_then_measured_anew() -> None:
    choice = CodecChoice()
    sampled(choice, 1, trials(ZSTD=(500, 1.0)))
    kept = [choice.choose(1) for _ in range(KEPT_PARTS - 1)]
    assert set(kept) == {Codec.ZSTD}
    assert sampled(choice, 1, trials(LZ4=(500, 1.0))) is Codec.LZ4


def test_a_trial_that_comes_late_changes_nothing() -> None:
    choice = CodecChoice()
    sampled(choice, 1, trials(ZSTD=(500, 1.0)))
    choice.learn(1, trials(LZ4=(1, 0.001)))
    assert choice.choose(1) is Codec.ZSTD


def test_what_was_measured_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_MAX", 2)
    choice, made = CodecChoice(), trials(ZSTD=(500, 1.0))
    for namespace in (1, 2):
        sampled(choice, namespace, made)
    for _ in range(KEPT_PARTS - 1):
        choice.choose(1)
    for namespace in (1, 3):
        sampled(choice, namespace, made)
    assert [choice.choose(namespace) for namespace in (1, 2, 3)] == [Codec.ZSTD, None, Codec.ZSTD]


def test_the_number_of_namespaces_is_bounded() -> None:
    choice = CodecChoice()
    for namespace in range(limits.NAMESPACES_MAX + 5):
        for _ in range(SAMPLE_PARTS):
            choice.learn(namespace, trials(ZSTD=(500, 1.0)))
    known = [choice.choose(n) is not None for n in range(limits.NAMESPACES_MAX + 5)]
    assert known.count(True) == limits.NAMESPACES_MAX
    assert not any(known[:5])
