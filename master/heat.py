"""Replicas for what is read much: how much is read of each run, and how many more that asks for.

Whoever is granted a lease is taken to read what it covers, also where it has a replica on its own
host: else one that is made near a reader would end the load that it was made for. Runs of which
more replicas are wanted than were asked for are kept in a table and looked at again and again: of
what cools one fewer is wanted, and then one fewer still. Must not know how replicas are made and
dropped (replication), nor what a load asks for (policies/replication). None of this is stored:
after a takeover heat starts anew. See the step table "heat" in ARCHITECTURE.md.
"""

from __future__ import annotations

from itertools import islice
from math import exp, inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import InvariantBroken
from kvstore.ids import KEY_BYTES
from master import replica_counts
from policies.replication.protocol import Load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.core import Core
    from master.directory import Stretch, Tree
    from master.run import Copy, Run
    from master.wheel import Wakeup

HOT_MAX: Final = 1024
"""Entries of the table. The runs that are worth it are few: of an hour of conversations, one."""
LOOK_S: Final = 1.0
HOT_PER_LOOK: Final = 64
"""A full table is looked through in 16 s, a quarter of the usual window."""


class Hot(msgspec.Struct, gc=False, eq=False):
    """Pages of a chain that were one run when one replica more was wanted of them."""

    namespace: int
    keys: bytes
    near: str
    """Host of the reader whose lease tipped the balance: one more replica is to be there."""


class Heat:
    """Which runs have more replicas wanted than were asked for (I38)."""

    __slots__ = ("_wakeup", "look_at_s", "table")

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with none."""
        self.table: dict[tuple[int, bytes], Hot] = {}
        """By namespace and keys; what was looked at longest ago is first."""
        self.look_at_s = inf
        self._wakeup = wakeup

    def look(self, at_s: float) -> None:
        """The table is to be looked at by then."""
        self.look_at_s = min(self.look_at_s, at_s)
        self._wakeup.by(self.look_at_s)


def is_measured(core: Core) -> bool:
    """Whether reads are counted: the policy wants to know, and there is a second host."""
    return core.domains > 1 and core.replica_policy.policy.measures


def note_reads(
    core: Core, tree: Tree, found: list[Stretch], parts: tuple[int, ...], host: str
) -> None:
    """A reader on this host was granted leases on these parts, or (none named) all, of pages."""
    if not is_measured(core):
        return
    policy, now_s = core.replica_policy.policy, core.now
    window_s, quiet_bytes = policy.window_s, policy.quiet_bytes_per_s * policy.window_s
    share = min(len(parts) or tree.parts, tree.parts) / tree.parts
    for stretch in found:  # one of many runs of a chain takes half a microsecond
        run = stretch.run
        pages = len(run.keys) // KEY_BYTES
        faded = run.reads * exp((run.reads_at_s - now_s) / window_s)
        run.reads = reads = faded + share * stretch.count / pages
        run.reads_at_s = now_s
        is_simple = tree.parts == 1 and run.copies
        page_bytes = run.copies[0].part_bytes if is_simple else run.page_bytes
        if reads * pages * page_bytes > quiet_bytes:
            _consider(core, run, _read_bytes_per_s(core, run), host)


def _consider(core: Core, run: Run, read_bytes_per_s: float, host: str) -> None:
    """Want one replica more if the load asks for it and this reader has none on its host.

    One at a time: the next one is for the next reader that has none.
    """
    if host and any(_is_whole_at(copy, host) for copy in run.copies):
        return
    if _extra(core, run, read_bytes_per_s) <= run.extra:
        return
    table = core.heat.table
    if len(table) >= HOT_MAX:  # I7: while it is read it asks again
        core.counters["replicas_for_heat_refused"] += 1
        return
    run.extra += 1
    acts = core.replica_policy.policy.acts
    core.counters[f"replicas_for_heat_{'wanted' if acts else 'observed'}"] += 1
    hot = table[run.namespace, run.keys] = Hot(run.namespace, run.keys, host)
    core.heat.look(core.now + LOOK_S)
    if acts:
        _tell(core, hot)


def _tell(core: Core, hot: Hot) -> None:
    """Have those who make and drop replicas look at it."""
    core.replication.note(core, core.tree(hot.namespace), hot.keys, core.now)


def policy_changed(core: Core) -> None:
    """What was only observed may be done from now on, or the other way round."""
    for hot in core.heat.table.values():
        _tell(core, hot)


def _is_whole_at(copy: Copy, host: str) -> bool:
    """Whether all pages of a run can be read on this host: one of their parts, at least."""
    return copy.segment.host == host and copy.segment.readable and not copy.absent


def _extra(core: Core, run: Run, read_bytes_per_s: float) -> int:
    """How many replicas more than were asked for the policy wants."""
    asked = replica_counts.asked(core, run)
    load = Load(read_bytes_per_s, asked, run.extra, core.domains)
    return core.replica_policy.policy.extra(load)


def near(core: Core, run: Run) -> str:
    """The host of a reader that one replica more would serve; empty: none in particular."""
    hot = core.heat.table.get((run.namespace, run.keys)) if run.extra else None
    return "" if hot is None else hot.near


def look(core: Core) -> None:
    """See what has cooled, some of the table at a time."""
    heat = core.heat
    if core.now < heat.look_at_s:
        return
    heat.look_at_s = inf
    for place in list(islice(heat.table, HOT_PER_LOOK)):
        hot = heat.table.pop(place)
        _cool(core, hot)
        if any(run.extra for run in _runs(core, hot)):
            heat.table[place] = hot
    if heat.table:
        heat.look(core.now + LOOK_S)


def _cool(core: Core, hot: Hot) -> None:
    """Want one replica fewer of what is read less."""
    for run in _runs(core, hot):
        if run.extra and _extra(core, run, _read_bytes_per_s(core, run)) < run.extra:
            run.extra -= 1
            core.counters["replicas_for_heat_ended"] += 1
            _tell(core, hot)


def _read_bytes_per_s(core: Core, run: Run) -> float:
    """As of now; nothing where nobody counts any more."""
    if not is_measured(core):
        return 0.0
    window_s = core.replica_policy.policy.window_s
    reads = run.reads * exp((run.reads_at_s - core.now) / window_s)
    return reads / window_s * len(run) * run.page_bytes


def _runs(core: Core, hot: Hot) -> Iterator[Run]:
    """What has become of the run: its pieces, as far as they are still there."""
    return (stretch.run for stretch in core.tree(hot.namespace).stretches(hot.keys))


def let_go(core: Core, run: Run) -> None:
    """Eviction has taken a replica that only the heat wanted: others want the room more.

    Another is not wanted before the run has been read much for a while.
    """
    if replica_counts.for_heat(core, run):
        run.extra -= 1
        run.reads = 0.0
        core.counters["replicas_for_heat_evicted"] += 1
        # Of its other pages there is one too many now.
        core.replication.note(core, core.tree(run.namespace), run.keys, core.now)


class HeatTotals(msgspec.Struct, frozen=True):
    """How much is wanted because of heat, or was found to be wanted where that is observed."""

    runs: int
    replicas: int


def totals(core: Core) -> HeatTotals:
    """Of the whole table."""
    hot = {run: run.extra for each in core.heat.table.values() for run in _runs(core, each)}
    extras = [extra for extra in hot.values() if extra]
    return HeatTotals(len(extras), sum(extras))


def check(core: Core) -> None:
    """InvariantBroken unless each run that has more replicas wanted is in the table (I38)."""
    heat = core.heat
    if len(heat.table) > HOT_MAX:
        raise InvariantBroken(f"I7: {len(heat.table)} runs are hot")
    if heat.table and heat.look_at_s == inf:
        raise InvariantBroken("I38: nobody looks whether hot runs have cooled")
    known = {run for each in heat.table.values() for run in _runs(core, each)}
    for namespace in core.namespaces:
        for run in namespace.tree.all_runs():
            if run.extra and run not in known:
                raise InvariantBroken(f"I38: {run.extra} replicas more are wanted for ever")
