"""Replicas: how many pages have, and waiting until they have as many as they are to have.

A replica is counted for each host that has one, for a page's scarcest part.
"""

from __future__ import annotations

from kvstore.wire.messages.base import Message


class AwaitReplicas(Message, frozen=True, tag=136):
    """Client to master: tell when these pages have their replicas -> ReplicasCounted.

    Answered once each has as many as are wanted, or can get no more for lack of hosts or of room,
    and after `timeout_s` in any case. Waiting makes no difference to what is done; safe to repeat.
    """

    namespace: bytes
    keys: bytes
    timeout_s: float


class ReplicasCounted(Message, frozen=True, tag=137):
    """One byte a page in each: how many replicas are wanted, and how many can be read now.

    Pages that the pool does not have count 0 in both.
    """

    wanted: bytes
    got: bytes
