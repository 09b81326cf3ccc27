"""What operators ask about replicas, and change: a report, a namespace's number, repair now."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue
from kvstore.require import require_replicas
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.replicas import NamespaceReplicas, ReplicaReport
from master import heat, namespaces, replica_counts
from master.repairing import COPYING, RATE, SURPLUS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.replicas import GetReplicas, RepairNow, SetReplicas
    from master.census import Count
    from master.core import Core
    from master.namespaces import KnownNamespace
    from master.repair_queue import Need
    from master.sessions import Caller

ROWS_MAX: Final = 1024
"""Namespaces of one report."""
NEEDS_PER_STEP: Final = 1024


def get_replicas(core: Core, caller: Caller, _message: GetReplicas) -> None:
    """Answer ReplicaReport once all pages were counted."""
    caller.session.must_be_operator()
    core.replication.census.ask(core, lambda: core.start(_report(core, caller)))


def _report(core: Core, caller: Caller) -> Iterator[None]:
    """A job: what was counted, and what is in the queue."""
    queued: Counter[int] = Counter()
    waiting: Counter[str] = Counter()
    backlog_bytes = 0
    for number, need in enumerate(list(core.replication.queue)):
        if need.rank >= 0:
            queued[need.rank] += 1
        else:
            waiting[need.reason or "due"] += 1
        if need.reason != SURPLUS:
            backlog_bytes += _need_bytes(core, need)
        if number % NEEDS_PER_STEP == NEEDS_PER_STEP - 1:
            yield
    counts = core.replication.census.by_namespace
    worst = sorted(counts, key=lambda ordinal: (_rank(counts[ordinal]), ordinal))
    rows = [_row(core, ordinal, counts[ordinal]) for ordinal in worst[:ROWS_MAX]]
    rate, hot = core.replication.copied.bytes_per_s(core.now), heat.totals(core)
    # What waits for its time alone is not copied at the rate of what was copied before.
    goes_on = rate > 0 and (any(queued.values()) or RATE in waiting or COPYING in waiting)
    core.reply(
        caller,
        ReplicaReport(
            tuple(rows),
            max(0, len(worst) - ROWS_MAX),
            core.tunables.replicas,
            core.domains,
            replica_counts.column(queued),
            dict(waiting),
            backlog_bytes,
            rate,
            0.0 if not backlog_bytes else backlog_bytes / rate if goes_on else inf,
            core.replica_policy.name,
            hot.runs,
            hot.replicas,
        ),
    )


def _rank(count: Count) -> tuple[int, int, bool]:
    """Namespaces are listed in this order: those of which nothing is there last."""
    return -count.lacking, -count.unreadable, not count.pages


def _need_bytes(core: Core, need: Need) -> int:
    """Of one replica of its pages."""
    stretches = core.tree(need.namespace).stretches(need.keys)
    return sum(stretch.count * stretch.run.page_bytes for stretch in stretches)


def _row(core: Core, ordinal: int, count: Count) -> NamespaceReplicas:
    known = core.namespaces.by_ordinal(ordinal)
    assert known is not None, ordinal
    content = known.namespace.content
    return NamespaceReplicas(
        known.namespace.id,
        content.tenant,
        content.model,
        known.replicas,
        count.pages,
        replica_counts.column(count.got),
        replica_counts.column(count.wanted),
        count.lacking,
        count.without_host,
        count.thinned,
        count.unreadable,
    )


def set_replicas(core: Core, caller: Caller, message: SetReplicas) -> None:
    """So many replicas of a namespace's pages; answer Done once that is durable."""
    caller.session.must_be_operator()
    require_replicas("replicas", message.replicas)
    known = _known(core, message.namespace)
    core.note(f"replicas of namespace {known.namespace.id.hex()}: {message.replicas}")
    namespaces.set_replicas(core, known, message.replicas, lambda: core.reply(caller, Done()))


def repair_now(core: Core, caller: Caller, message: RepairNow) -> None:
    """Nothing waits for its time any more; answer Done."""
    caller.session.must_be_operator()
    ordinal = _known(core, message.namespace).ordinal if message.namespace else None
    core.start(core.replication.queue.hurry(core.now, ordinal))
    core.replication.patient_until_s = core.now
    core.replication.want_scan(core.now)
    core.reply(caller, Done())


def _known(core: Core, namespace: bytes) -> KnownNamespace:
    known = core.namespaces.find(namespace)
    if known is None or not known.is_durable:
        raise BadValue("namespace", namespace.hex(), "the id of a namespace that is open")
    return known
