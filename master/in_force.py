"""A policy in force: chosen by the configuration, changed by an operator at any time.

Must not know who asks for a change, nor how one is kept (policy_requests).
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from kvstore.wire.messages.operator import PolicyRow
from policies import registry
from policies.admission.protocol import AdmissionPolicy
from policies.parameters import Parametrised, amended

if TYPE_CHECKING:
    from collections.abc import Mapping

    from master.tunables import Tunables
    from policies.admission.protocol import Candidate
    from policies.registry import Kind

P = TypeVar("P", bound=Parametrised)


class InForce(Generic[P]):
    """The policy of one kind, by name. Methods that change it change all or nothing."""

    def __init__(self, kind: Kind[P], name: str, parameters: Mapping[str, object]) -> None:
        """Begin with what is configured. BadValue, naming what exists, for what does not."""
        self.kind = kind
        self.policy = kind(name, parameters)
        self.name = name
        self.is_set = False
        """By an operator, who outranks the configuration."""
        self._configured = name, parameters

    def change(self, name: str, parameters: Mapping[str, object]) -> None:
        """Decide so from now on, by an operator's wish; BadValue as at the start.

        What is not named keeps its value while the policy stays or the new one has the same
        parameters; what it has learned, while the policy stays.
        """
        current = self.policy.parameters
        if name == self.name:
            self.policy.parameters = amended(current, parameters)
        else:
            made = self.kind(name, parameters)
            if type(made.parameters) is type(current):
                made.parameters = amended(current, parameters)
            self._replace(name, made)
        self.is_set = True

    def reset(self) -> None:
        """Decide as it is configured from now on."""
        name, parameters = self._configured
        made = self.kind(name, parameters)
        if name == self.name:
            self.policy.parameters = made.parameters
        else:
            self._replace(name, made)
        self.is_set = False

    def row(self) -> PolicyRow:
        """What there is to say of it."""
        parameters, known = msgspec.structs.asdict(self.policy.parameters), sorted(self.kind.known)
        return PolicyRow(self.kind.name, self.name, parameters, tuple(known), self.is_set)

    def _replace(self, name: str, policy: P) -> None:
        self.policy, self.name = policy, name


def as_configured(kind: Kind[P], tunables: Tunables) -> InForce[P]:
    """The policy that is set under the name of its kind."""
    name, parameters = getattr(tunables, kind.name), getattr(tunables, f"{kind.name}_parameters")
    return InForce(kind, name, parameters)


class AdmissionInForce(InForce[AdmissionPolicy]):
    """Of one tier. A policy that takes over has to hear how large it is and what was written."""

    def __init__(self, name: str, parameters: Mapping[str, object]) -> None:
        """As InForce; the tier is empty, and nothing of a budget is used up."""
        super().__init__(registry.admission, name, parameters)
        self._capacity_bytes = 0
        self._noted_bytes = 0

    def admits(self, candidate: Candidate, now_s: float) -> bool:
        """Whether the pages are to be written, as many of them as find room."""
        return self.policy.admits(candidate, now_s)

    def wrote(self, size_bytes: int) -> None:
        """So much of what was just admitted is on its way."""
        self.policy.wrote(size_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """So much the tier holds."""
        self._capacity_bytes = capacity_bytes
        self.policy.resize(capacity_bytes)

    def begin_with(self, spent_bytes: int) -> None:
        """What an earlier master has noted of the budget."""
        self._noted_bytes = spent_bytes
        self.policy.begin_with(spent_bytes)

    def to_note(self) -> int | None:
        """Bytes of the budget to be noted as used up, if the last note is too far off.

        Never less than what is: a grain is noted ahead of being spent.
        """
        spent = self.policy.spent()
        ahead = self._noted_bytes - spent.size_bytes
        if 0 <= ahead <= 4 * spent.grain_bytes:
            return None
        self._noted_bytes = ceil(spent.size_bytes + spent.grain_bytes)
        return self._noted_bytes

    def _replace(self, name: str, policy: AdmissionPolicy) -> None:
        super()._replace(name, policy)
        policy.resize(self._capacity_bytes)
        policy.begin_with(self._noted_bytes)
