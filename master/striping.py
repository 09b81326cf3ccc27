"""Stripes kept whole while their pages live, and dissolved when too few do.

Looks at a few stripes at a time: for shards that were lost, parity that lacks, replicas that are
not needed any more. Parity is made, and what was lost is rebuilt, by copies whose source is the
stripe itself (moves, degraded). Must not know how pages are chosen or read. See the step table
"stripe" in ARCHITECTURE.md.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.hints import NO_HINTS
from kvstore.ids import ROOT_PARENT
from kvstore.replica import Tier
from master import degraded, moves, replica_counts
from master.holes import make_holes
from master.moves import MoveKind
from master.puts import prune
from master.retiring import retire_copy, retire_pages
from master.segments import Segment, SegmentState
from master.stripe_making import make, with_room
from master.stripes import PREFIX, Stripe

if TYPE_CHECKING:
    from master.core import Core
    from master.degraded import Standing
    from master.run import Run
    from master.stripes import Member

LOOK_S: Final = 0.1
MENDED_PER_LOOK: Final = 16
ROUND_PER_LOOK: Final = 8
"""Stripes of which nobody knows that they lack anything."""
SETTLED_S: Final = 60.0
"""After its start a master waits no longer for workers before it believes that pages are gone."""


def look(core: Core) -> None:
    """Tend some stripes, look through a drive, make what can be made."""
    stripes, code = core.stripes, core.erasure.policy.code
    if core.now < stripes.look_at_s:
        return
    stripes.look_at_s = inf
    if code is None and not stripes:
        return
    stripes.look(core.now + LOOK_S)
    for stripe in list(islice(stripes.pending, MENDED_PER_LOOK)):
        del stripes.pending[stripe]
        if _tend(core, stripe):
            stripes.pending[stripe] = None  # behind the others
    for stripe in stripes.next_of_round(ROUND_PER_LOOK):
        if stripe not in stripes.pending and _tend(core, stripe):
            stripes.pending[stripe] = None
    if code is not None:
        make(core, code)


def _tend(core: Core, stripe: Stripe) -> bool:
    """See what it lacks; whether it wants to be looked at again soon."""
    if not stripe.is_durable:
        return False
    every = degraded.standings(core, stripe)
    alive = sum(bool(each.copies) for each in every)
    gone = sum(not each.is_there for each in every[: stripe.k])
    if alive < stripe.k:
        stripe.spare = 0
        for each in every:
            if each.is_decoded and each.run is not None:
                degraded.let_go(core, each)
                prune(core, core.tree(each.member.namespace), each.run)
    if not _is_settled(core):
        return True
    if _is_over(core, stripe, alive, gone):
        _dissolve(core, stripe, every)
        return False
    if alive < stripe.k:
        return False
    lacks = sum(_mend(core, stripe, every, number) for number in range(len(every)))
    if all(each.copies for each in every[stripe.k :]):
        stripe.spare = stripe.m - gone
    _trim(core, stripe, every)
    return lacks > 0


def _is_over(core: Core, stripe: Stripe, alive: int, gone: int) -> bool:
    """Whether parity protects too little, or nothing can be decoded although everybody is there."""
    if alive >= stripe.k:
        return gone >= stripe.m or 2 * gone > stripe.k
    all_here = all(s.state is SegmentState.LIVE for s in core.segments.values())
    return all_here and not core.lenders.absent


def _is_settled(core: Core) -> bool:
    """Whether what is not in the directory is not in the pool."""
    if any(s.state is SegmentState.JOINING for s in core.segments.values()):
        return False
    return not core.lenders.absent or core.now >= core.started_s + SETTLED_S


def _mend(core: Core, stripe: Stripe, every: list[Standing], number: int) -> bool:
    """Rebuild a shard that nobody holds; whether it is one."""
    each, is_parity = every[number], number >= stripe.k
    if is_parity:
        if not each.is_there:
            _hang_parity(core, stripe, each.member)
            each = every[number] = degraded.stand(core, each.member)
        assert each.run is not None, each.member
        # It has no readers, and lives as long as its stripe.
        each.run.expires_s = max(each.run.expires_s, core.now + core.tunables.page_ttl_s)
    if each.is_decoded and each.run is not None:
        _rebuild(core, stripe, every, number, each.run)
        return True
    return False


def _hang_parity(core: Core, stripe: Stripe, member: Member) -> None:
    tree = core.tree(member.namespace)
    found = tree.stretches(member.key)
    life = core.new_life(core.tunables.page_ttl_s)
    make_holes(core, tree, ROOT_PARENT, member.key, found, life, NO_HINTS)
    run = tree.get(member.key)
    assert run is not None, member
    degraded.hang(core, run, run.page_of(member.key), stripe, member)


def _rebuild(core: Core, stripe: Stripe, every: list[Standing], number: int, run: Run) -> None:
    """Have a worker decode a shard, if there is one that should and none that does."""
    each = every[number]
    if core.now < stripe.rebuild_at_s:
        return
    if any(plan.is_open(each.member.key) for plan in run.plans if plan.part == each.member.part):
        return
    copy = next(c for c in run.copies_of(each.member.part) if c.segment is core.stripes.place)
    size_class = moves.class_for(core, run, copy, Tier.NVME)
    others = [other for at, other in enumerate(every) if at != number]
    target = _target(core, others, size_class, is_data=number < stripe.k)
    if target is None:
        core.counters["rebuilds_without_place"] += 1
    elif moves.copy_free_at_s(core, core.stripes.place, target) <= core.now:
        pages = range(each.page, each.page + 1)
        core.counters["shards_rebuilt"] += moves.start(
            core, MoveKind.COPY, run, copy, pages, target
        )


def _target(
    core: Core, others: list[Standing], size_class: int, *, is_data: bool
) -> Segment | None:
    """A drive on a host that no other shard needs.

    Where there is none for data, any other will do: it is read as it was, though it is lost
    together with another shard.
    """
    taken = set(apart([_hosts(core, other) for other in others]))
    roomy = with_room(core, size_class)
    free = (s for s in roomy if replica_counts.domain(core, s) not in taken)
    return next(free, None) or (next(iter(roomy), None) if is_data else None)


def _trim(core: Core, stripe: Stripe, every: list[Standing]) -> None:
    """Let go of replicas that parity stands for, so that each shard is on a host of its own."""
    hosts = [_hosts(core, each) for each in every]
    if max(map(len, hosts)) < 2:
        return  # the usual case: each lies once
    own = apart(hosts)
    for each, mine, kept in zip(every, hosts, own, strict=True):
        run = each.run
        if run is None or run.plans or run.leased_until_s > core.now:
            continue
        asked = replica_counts.asked(core, run) - stripe.spare
        keep = max(1, asked) + replica_counts.for_heat(core, run)
        order = sorted(mine, key=lambda host: (host != kept, host in own))
        unneeded = order[keep:]
        for copy in each.copies:
            if replica_counts.domain(core, copy.segment) in unneeded:
                retire_copy(core, run, copy, each.page, 1)
                core.counters["replicas_trimmed"] += 1


def apart(choices: list[list[str]]) -> list[str]:
    """A host of its own for each shard, of those that it lies on; empty for those that get none.

    As many get one as can: who comes later may have others move on (augmenting paths).
    """
    owner: dict[str, int] = {}

    def settle(shard: int, asked: set[str]) -> bool:
        for host in choices[shard]:
            if host not in asked:
                asked.add(host)
                if host not in owner or settle(owner[host], asked):
                    owner[host] = shard
                    return True
        return False

    for shard in range(len(choices)):
        settle(shard, set())
    found = [""] * len(choices)
    for host, shard in owner.items():
        found[shard] = host
    return found


def _hosts(core: Core, standing: Standing) -> list[str]:
    """Where a shard lies, or is being written: on drives first, last where all is to go."""
    costs: dict[str, int] = {}
    segments = [copy.segment for copy in standing.copies]
    plans = () if standing.run is None else standing.run.plans
    key, part = standing.member.key, standing.member.part
    segments += [plan.segment for plan in plans if plan.part == part and plan.is_open(key)]
    for segment in segments:
        host = replica_counts.domain(core, segment)
        cost = 2 if segment.drained else int(segment.tier is not Tier.NVME)
        costs[host] = min(costs.get(host, cost), cost)
    return sorted(costs, key=lambda host: (costs[host], host))


def _dissolve(core: Core, stripe: Stripe, every: list[Standing]) -> None:
    """Too few of its pages live: they go back to replicas, or into other stripes."""
    for number, each in enumerate(every):
        if each.run is None or not each.run.keys:
            continue
        tree = core.tree(each.member.namespace)
        if each.is_decoded:
            degraded.let_go(core, each)
            prune(core, tree, each.run)
        elif number >= stripe.k and each.is_there:
            retire_pages(core, tree, each.run, each.page, 1)
        elif each.is_there:
            core.replication.note(core, tree, each.member.key, core.now)
    core.stripes.remove(stripe)
    core.counters["stripes_dissolved"] += 1
    core.persist(deletes=(PREFIX + str(stripe.number),), behind=True)
