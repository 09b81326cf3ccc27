"""The eviction policy in force: chosen by the configuration, changed by an operator at any time.

Runs keep the numbers of the policy that saw them last. A policy that takes over gives each run its
own when it first meets it: as if the run had been put at its last use. So nothing is scanned and
the change holds at once; how often a run was used is kept where it is counted apart (`touches`),
a policy that keeps it in its own numbers learns it anew. New parameters of the same policy leave
all numbers as they are: times stay times, and counts made under the old ones fade as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.hints import NO_HINTS
from master.in_force import InForce
from policies import registry
from policies.eviction.protocol import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.hints import Hints
    from master.run import Run


class EvictionInForce(InForce[EvictionPolicy]):
    """As an EvictionPolicy, for runs that may carry the numbers of an earlier one."""

    def __init__(self, name: str, parameters: Mapping[str, object]) -> None:
        """BadValue, naming what exists, for an unknown name or parameter."""
        super().__init__(registry.eviction, name, parameters)
        self._era = 0
        """Counts policies; runs carry that of their numbers."""

    def entered(self, run: Run, keys: bytes, now_s: float, hints: Hints) -> int:
        """Pages were put."""
        run.era = self._era
        return self.policy.entered(run, keys, now_s, hints)

    def touched(self, run: Run, now_s: float, hints: Hints) -> None:
        """Pages were used."""
        self._meet(run)
        self.policy.touched(run, now_s, hints)

    def hinted(self, run: Run, now_s: float, hints: Hints) -> None:
        """The future of pages was told."""
        self._meet(run)
        self.policy.hinted(run, now_s, hints)

    def score(self, run: Run, now_s: float) -> float:
        """The lowest goes first."""
        self._meet(run)
        return self.policy.score(run, now_s)

    def spares(self, run: Run, now_s: float) -> bool:
        """Whether the chosen victim stays for once."""
        self._meet(run)
        return self.policy.spares(run, now_s)

    def reuse_probability(self, run: Run, now_s: float) -> float | None:
        """How likely another use is, where that is known."""
        self._meet(run)
        return self.policy.reuse_probability(run, now_s)

    def evicted(self, run: Run, keys: bytes, now_s: float) -> None:
        """Pages left."""
        self._meet(run)
        self.policy.evicted(run, keys, now_s)

    def resize(self, pages: int) -> None:
        """So many pages are in the pool."""
        self.policy.resize(pages)

    def _meet(self, run: Run) -> None:
        if run.era != self._era:
            touches = run.touches
            self.entered(run, run.keys, run.touched_s, NO_HINTS)
            run.touches = touches

    def _replace(self, name: str, policy: EvictionPolicy) -> None:
        super()._replace(name, policy)
        self._era += 1
