"""An operator and the master: what the pool decides and has, seen and changed at run time."""

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


class ShrinkSegment(Message, frozen=True, tag=77):
    """Operator to master: give memory of a segment on a device back -> SegmentShrinks.

    At most `size_bytes` stay, in whole chunks. Nothing is planned in the others from now on, their
    pages are copied down or dropped, and the memory goes when the last lease on them has ended.
    Holds until the segment's worker starts anew. Safe to repeat.
    """

    segment: str
    size_bytes: int


class SegmentShrinks(Message, frozen=True, tag=78):
    """Master to operator: what will stay, and what is still to be emptied."""

    segment: str
    kept_bytes: int
    left_bytes: int
