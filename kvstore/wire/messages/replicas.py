"""Replicas: how many pages have, and waiting until they have as many as they are to have.

A replica is counted for each host that has one, for a page's scarcest part.
"""

from __future__ import annotations

import msgspec

from kvstore.wire.messages.base import Message


class AwaitReplicas(Message, frozen=True, tag=136):
    """Client to master: tell when these pages have their replicas -> ReplicasCounted.

    Answered once each has as many as are wanted, or can get no more for lack of hosts or of room,
    and after `timeout_s` in any case. They are copied before others that are as scarce. Safe to
    repeat.
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


class GetReplicas(Message, frozen=True, tag=138):
    """Operator to master: count the replicas of all pages -> ReplicaReport.

    Counted in steps, so that the answer may take a while in a large pool; whoever asks while others
    wait is answered with them.
    """


class NamespaceReplicas(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The readable pages of one namespace, by how many hosts can serve them."""

    namespace: bytes
    tenant: str
    model: str
    replicas: int
    """What was asked for the namespace; 0: the pool's."""
    pages: int
    by_got: tuple[int, ...]
    """Pages with one replica, with two, and so on."""
    by_wanted: tuple[int, ...]
    """Pages that are to have one, two, and so on."""
    lacking: int
    """Pages with fewer than they are to have; the next two are among them."""
    without_host: int
    """All hosts have them already."""
    thinned: int
    """Eviction took some, or no room was found: nothing is made again before they are used."""
    unreadable: int
    """Pages besides that are known and of which no replica can be read: the last one went, or its
    worker is away. Those that are being put are not among them."""


class ReplicaReport(Message, frozen=True, tag=139):
    """Master to operator: the namespaces that lack most come first, `others` are left out."""

    namespaces: tuple[NamespaceReplicas, ...]
    others: int
    replicas: int
    """What pages have for which nobody asked for more or fewer."""
    hosts: int
    """That lend something; workers, where replicas are kept apart by them."""
    queued: tuple[int, ...]
    """Chains of pages to be looked at, by the replicas of their scarcest page: 1, 2 and so on."""
    waiting: dict[str, int]
    """Others, by what they wait for."""
    backlog_bytes: int
    """Of copies that are to be made, as far as they were looked at."""
    bytes_per_s: float
    """Copied lately."""
    eta_s: float
    """Backlog by that; infinity while nothing is copied."""
    heat: str
    """The policy that says how many more are wanted of what is read much."""
    hot_runs: int
    """Runs of pages of which it says so."""
    for_heat: int
    """Replicas more, of all of them; by `observe` they are only counted."""


class SetReplicas(Message, frozen=True, tag=140):
    """Operator to master: so many replicas of a namespace's pages -> Done, once that is durable.

    Holds for pages whose put did not ask for more or fewer; 0: as many as pages of the pool get
    for which nobody asks. Safe to repeat.
    """

    namespace: bytes
    replicas: int


class RepairNow(Message, frozen=True, tag=141):
    """Operator to master: look through all pages and let none wait for its time -> Done.

    Of one namespace, or (empty) of all.
    """

    namespace: bytes
