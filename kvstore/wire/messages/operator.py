"""An operator and the master: what the pool decides and has, seen and changed at run time."""

from __future__ import annotations

import msgspec

from kvstore.wire.messages.base import Message


class GetPolicies(Message, frozen=True, tag=74):
    """Operator to master: by what does the pool decide? -> PoliciesInForce."""


class SetPolicy(Message, frozen=True, tag=75):
    """Operator to master: decide so from now on -> PoliciesInForce. Safe to repeat.

    Parameters that are not named keep their values where the policy stays, or the new one has the
    same ones; else they have their defaults.
    Values are written as in a configuration. Outranks the configuration of every master until
    ResetPolicy.
    """

    kind: str
    """What it decides: eviction, admission (to drives), placement, replication, erasure,
    prefill_routing, decode_routing, colocation or roles (of inference workers)."""
    name: str
    parameters: dict[str, str]


class ResetPolicy(Message, frozen=True, tag=79):
    """Operator to master: decide as it is configured -> PoliciesInForce. Safe to repeat."""

    kind: str


class PolicyRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The policy of one kind, all its parameters, and the names of those that exist."""

    kind: str
    name: str
    parameters: dict[str, float]
    known: tuple[str, ...]
    is_set: bool
    """By an operator; else it is configured so."""


class PoliciesInForce(Message, frozen=True, tag=76):
    """Master to operator: one of each kind; a change is durable."""

    policies: tuple[PolicyRow, ...]


class ForgetWorker(Message, frozen=True, tag=148):
    """Operator to master: this worker, which is lost or has left, will not come back -> Done.

    What it held is given up at once: its segments, if they come back after all, come back empty.
    A worker that nobody knows is refused, so also one that was forgotten already.
    """

    worker: str


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
