"""What a drill found: counts, times, what was left, and whether that is as it has to be. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from workers.drills.load import Asked, Question

TROUBLES_SHOWN_MAX: Final = 5


class Outcome(msgspec.Struct, frozen=True):
    """What a scenario saw itself."""

    recovery_s: float
    since: str
    """What that counts from."""
    facts: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    """What did not hold."""


class Report(msgspec.Struct, frozen=True):
    """One drill."""

    drill: str
    answers: int
    """Complete ones."""
    refusals: int
    """How often a client was asked to come later, and did."""
    failed: int
    wrong: int
    """Answers, complete or not, that one process would not have given."""
    moved: int
    """Answers that a second prefill or decode worker went on with."""
    silence_s: float
    """The longest in a stream."""
    outcome: Outcome
    leftovers: tuple[str, ...]
    """Of tickets, slots, staging and pins, when nobody asked for anything any more."""
    troubles: tuple[str, ...]
    """Why answers have failed."""

    @property
    def is_good(self) -> bool:
        """Whether the drill showed what it has to."""
        return self.answers > 0 and not any(self.failures())

    def failures(self) -> Iterator[str]:
        """What is not as it has to be, a line each."""
        if self.wrong:
            yield f"{self.wrong} answers are wrong"
        if self.failed:
            yield f"{self.failed} answers failed: {'; '.join(self.troubles)}"
        if self.leftovers:
            yield f"left over: {', '.join(self.leftovers)}"
        yield from self.outcome.faults

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"{self.answers} answers, {self.wrong} of all wrong, {self.failed} failed; "
            f"{self.refusals} times asked to come later; {self.moved} went on elsewhere"
        )
        yield (
            f"recovered {self.outcome.recovery_s:.1f} s after {self.outcome.since}; "
            f"longest silence of a stream {self.silence_s:.1f} s"
        )
        yield from self.outcome.facts
        if not self.leftovers:
            yield "no ticket, slot, staged byte or pin is left"
        yield from (f"FAILED {failure}" for failure in self.failures())
        if self.is_good:
            yield "as it has to be"


def report(
    drill: str,
    asked: Sequence[Asked],
    outcome: Outcome,
    leftovers: Sequence[str],
    alone: Callable[[str, Question], str],
) -> Report:
    """Judge what clients got; `alone` gives the right answer of a model."""
    troubles = [each.trouble for each in asked if each.trouble]
    return Report(
        drill=drill,
        answers=sum(each.is_finished for each in asked),
        refusals=sum(each.refusals for each in asked),
        failed=len(troubles),
        wrong=sum(_is_wrong(each, alone(each.target.model, each.question)) for each in asked),
        moved=sum(each.prefills > 1 or each.routes > 1 for each in asked),
        silence_s=max((each.stall_s for each in asked), default=0.0),
        outcome=outcome,
        leftovers=tuple(leftovers),
        troubles=tuple(sorted(set(troubles))[:TROUBLES_SHOWN_MAX]),
    )


def _is_wrong(asked: Asked, right: str) -> bool:
    """Of an answer that ended early, whether what came of it is."""
    return asked.text != right if asked.is_finished else not right.startswith(asked.text)
