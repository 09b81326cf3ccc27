"""An operator and the master: how the pool decides, seen and changed while it runs."""

from __future__ import annotations

from kvstore.wire.messages.base import Message


class GetPolicy(Message, frozen=True, tag=74):
    """Operator to master: by what are victims of eviction chosen? -> PolicyInForce."""


class SetPolicy(Message, frozen=True, tag=75):
    """Operator to master: choose victims so from now on -> PolicyInForce. Safe to repeat.

    Parameters that are not named keep their values where the policy stays, else their defaults.
    Values are written as in a configuration. Holds until the master ends.
    """

    name: str
    parameters: dict[str, str]


class PolicyInForce(Message, frozen=True, tag=76):
    """Master to operator: the policy, all its parameters, and the names of those that exist."""

    name: str
    parameters: dict[str, float]
    known: tuple[str, ...]
