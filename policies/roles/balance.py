"""One worker at a time, from where it is not missed to where work waits.

Two thresholds a side (hysteresis): a role is short of workers above the one, and can spare one
only if those that stay are below the other afterwards. So what was just done is never a reason to
undo it, and where both are short all stay: then there is too much to do, which is admission's to
answer. The last worker of a role stays.

Prompts are short of workers by the time that waits, as that is what first tokens wait for; they
can spare one by how many are busy, as a queue is empty at nine tenths of what it can do, too.

`observe` and `enforce` are this rule; what it says is only counted by the one, and done by the
other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.parameters import Parameters
from policies.roles.protocol import RolesPolicy, Want

if TYPE_CHECKING:
    from policies.roles.protocol import Crew


class BalanceParameters(Parameters, frozen=True):
    """Parameters of `observe` and `enforce`."""

    queue_s: Annotated[float, Meta(ge=0.01, le=3600)] = 2.0
    """Of prompts that wait: with more, another worker is to compute some."""
    busy_max: Annotated[float, Meta(ge=0.05, le=1)] = 0.8
    """Share of those who compute prompts that may be busy once one has gone."""
    load: Annotated[float, Meta(ge=0.05, le=10)] = 0.7
    """Of those who generate: with more, another worker is to help."""
    load_max: Annotated[float, Meta(ge=0.05, le=1)] = 0.5
    """Of those who stay once one has gone."""
    lasting_s: Annotated[float, Meta(ge=0, le=3600)] = 3.0
    """For so long the same has to be wanted."""
    dwell_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    """From one change to the next of a fleet."""


class Balance(RolesPolicy):
    """Work follows workers, until nobody can be spared."""

    def __init__(self, *, acts: bool) -> None:
        """Start with the default parameters."""
        self.parameters = BalanceParameters()
        self.measures = True
        self.acts = acts

    @property
    def lasting_s(self) -> float:
        """As set."""
        return self.parameters.lasting_s

    def wanted(self, crew: Crew) -> Want | None:
        """The role that is short, if the other can spare one."""
        limits = self.parameters
        if crew.rested_s < limits.dwell_s:
            return None
        if crew.queue_s > limits.queue_s and _left(crew.load, crew.decodes) <= limits.load_max:
            return Want.PREFILL
        if crew.load > limits.load and _left(crew.busy, crew.prefills) <= limits.busy_max:
            return Want.DECODE
        return None


def _left(share: float, workers: int) -> float:
    """The share of each that stays once one has gone; without bound of the last one."""
    return share * workers / (workers - 1) if workers > 1 else float("inf")
