"""What a put gets: which of its pages are there, in progress, granted, or refused, chain by chain.

Checks what was asked, reserves extents and makes the tree's nodes for what it grants. Must not
know sessions, waiting or how the answer is sent.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES, NO_PARENT, ROOT_PARENT
from kvstore.namespace import check_part_sizes
from kvstore.replica import check_tier
from kvstore.require import require_replicas, require_ttl
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import PageRange, PlanSpan, PutChain, PutPlans, RefusedRange
from master import hinting, placing
from master.holes import make_holes, make_objects
from master.packed import NOT_THERE, index_of, split_keys
from master.plans import Plan, Put, Wanted, reserve
from master.seconds import check_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.hints import Hints
    from kvstore.wire.messages.puts import BeginPut
    from master.core import Core
    from master.directory import Stretch, Tree
    from master.namespaces import KnownNamespace
    from master.run import Run
    from master.segments import Segment

REQUEST_BYTES: Final = 16
BATCH_PARTS_MAX: Final = 16 * limits.BATCH_PAGES_MAX
"""Parts of all pages of one put."""
RETRY_AFTER_S: Final = {
    Outcome.IN_PROGRESS: 0.05,
    Outcome.OUT_OF_SPACE: 0.1,
    Outcome.TOO_MANY_QUARANTINED: 0.5,
    Outcome.PARENT_MISSING: 0.0,
    Outcome.TOO_FEW_HOSTS: 1.0,
}

PRESENT: Final = 0
IN_PROGRESS: Final = 1
NEEDED: Final = 2
"""How one part of one page stands before it is planned."""
Standings = tuple[int, int, int]
"""(first, count, standing): pages of a chain that stand alike."""
PARTS_PER_STEP: Final = 256
"""Parts of chains; each costs 10 us and may cost a plan."""


def check_put(known: KnownNamespace, message: BeginPut) -> None:
    """Raise CallerError naming the field; nothing has changed by then."""
    if len(message.request) != REQUEST_BYTES:
        raise BadValue("request", message.request, f"{REQUEST_BYTES} bytes")
    check_seconds("timeout_s", message.timeout_s)
    if message.ttl_s is not None:
        require_ttl("ttl_s", message.ttl_s)
    hinting.given(message.hints)
    check_tier(message.tier)
    require_replicas("replicas", message.replicas)
    check_part_sizes(known.namespace, list(message.parts), list(message.part_bytes))
    if not message.parts or len(set(message.parts)) != len(message.parts):
        raise BadValue("parts", message.parts, "at least one part, each once")
    opaque = known.namespace.is_opaque
    if opaque and message.parts != tuple(range(known.namespace.parts_a_page)):
        want = f"{known.namespace.parts_a_page}, all of an object in one put"
        raise BadValue("parts", message.parts, want)
    pages = 0
    for chain in message.chains:
        if not chain.keys or len(chain.keys) % KEY_BYTES:
            raise BadValue("keys", len(chain.keys), f"a positive multiple of {KEY_BYTES} bytes")
        if index_of(chain.keys, ROOT_PARENT) != NOT_THERE:
            raise BadValue("keys", ROOT_PARENT, "keys of pages, not the root's")
        parent_bytes = 0 if opaque else KEY_BYTES
        if len(chain.parent) != parent_bytes:
            raise BadValue("parent", len(chain.parent), f"{parent_bytes} bytes: objects have none")
        pages += len(chain.keys) // KEY_BYTES
    if pages > limits.BATCH_PAGES_MAX:
        raise BadValue("chains", pages, f"at most {limits.BATCH_PAGES_MAX} pages")
    if pages * len(message.parts) > BATCH_PARTS_MAX:
        raise BadValue("parts", len(message.parts), f"at most {BATCH_PARTS_MAX} parts in all")


class Planner:
    """Plans one put. Every (page, part) ends in exactly one of spans, present and refused."""

    def __init__(self, core: Core, known: KnownNamespace, put: Put, message: BeginPut) -> None:
        """Plan nothing yet."""
        self.blocked_on: dict[bytes, None] = {}
        """Pages that another put has open: the first one of each chain and part."""
        self.wanted_bytes: dict[int, int] = {}
        """Bytes that could find room if others went, by the size class that found none."""
        self._core = core
        self._tree: Tree = known.tree
        self._ttl_s = core.page_ttl_s(known) if message.ttl_s is None else message.ttl_s
        self._token_count = known.namespace.layout.page_tokens
        self._is_refused = message.strict and _lacks_hosts(core, known, message)
        self._put = put
        self._message = message
        self._segments: dict[Segment, int] = {}
        self._places: list[Segment] = []
        """Where it is tried to plan, best first."""
        self._is_cut = False
        """Whether the chain being planned found no room for its rest."""
        self._spans: list[PlanSpan] = []
        self._present: list[PageRange] = []
        self._refused: list[RefusedRange] = []

    def plan(self) -> Iterator[None]:
        """A job: plan every chain in turn. On BadValue, what was granted is in the put's plans."""
        first = parts = 0
        self._choose_places()
        for chain in chains_of(self._message):
            if parts >= PARTS_PER_STEP:
                parts = 0
                yield
                self._choose_places()
            self._plan_chain(first, chain)
            pages = len(chain.keys) // KEY_BYTES
            first += pages
            parts += len(self._message.parts) * (1 if chain.parent else pages)

    def _choose_places(self) -> None:
        """What is put in one step lies together, as far as there is room: it is one transfer."""
        asker = self._put.asker
        assert asker is not None, self._put.request  # whose owner has gone plans nothing more
        self._places = placing.ranked(self._core, self._message.tier, asker.session.host)

    def answer(self) -> PutPlans:
        """The reply; what was filled is looked at by those who make room."""
        for segment in self._segments:
            self._core.press(segment)
        return PutPlans(
            self._core.epoch,
            tuple([segment.ref for segment in self._segments]),
            tuple(self._spans),
            tuple(self._present),
            tuple(self._refused),
        )

    def _plan_chain(self, first: int, chain: PutChain) -> None:
        tree, parts = self._tree, self._message.parts
        if self._is_refused:
            self._refuse_chain(first, chain, Outcome.TOO_FEW_HOSTS)
            return
        has_parent = chain.parent not in (NO_PARENT, ROOT_PARENT)
        above = tree.get(chain.parent) if has_parent else None
        if above is None and has_parent:
            self._refuse_chain(first, chain, Outcome.PARENT_MISSING)
            return
        found = tree.stretches(chain.keys)
        _check_chain(tree, chain, found)
        for end in _ends(chain, found, above):
            end.kept_until_s = 0.0  # by an earlier round of the put, which goes on now
        hints = hinting.of_put(self._core, self._message, chain)
        self._use(found, hints)
        plans: list[Plan] = []
        self._is_cut = False
        sizes = list(zip(parts, self._message.part_bytes, strict=True))
        if not chain.parent:  # what is left without room has as little of it as can be
            sizes.sort(key=itemgetter(1))
        for part, part_bytes in sizes:
            plans += self._plan_part(first, chain, found, part, part_bytes)
        if plans:
            self._take_in(chain, found, plans, hints)
        if self._is_cut and self._message.wait:
            self._keep_end(chain)

    def _use(self, found: list[Stretch], hints: Hints) -> None:
        """Pages that are there are used by a put; they live as long, and have as many replicas, as
        it asks.
        """
        asked_s, replicas = self._message.ttl_s or 0.0, self._message.replicas
        if found and (asked_s > found[-1].run.ttl_s or replicas > found[-1].run.replicas):
            found[-1] = self._tree.cut_at_end(found[-1])  # what follows was not asked for
        each_told = hinting.for_each(self._tree, found, hints)
        for stretch, told in zip(found, each_told, strict=True):
            run = stretch.run
            run.ttl_s = max(run.ttl_s, asked_s)
            if replicas > run.replicas:
                self._want_more(run)
            self._core.touch(run, told)

    def _want_more(self, run: Run) -> None:
        """It may lack some now (I34), even if it did well with fewer until now."""
        core = self._core
        run.replicas, run.thinned = self._message.replicas, False
        core.replication.note(core, self._tree, run.keys, core.now, presses=True)

    def _keep_end(self, chain: PutChain) -> None:
        """Keep the last page of the chain that is in the tree, while its rest waits for room.

        It has no child yet: the victims for the rest would be the pages that the rest hangs on, or
        other parts of the objects themselves.
        """
        core, found = self._core, self._tree.stretches(chain.keys)
        above = None if found or not chain.parent else self._tree.get(chain.parent)
        for run in _ends(chain, found, above):
            run.kept_until_s = min(core.now + self._message.timeout_s, core.lease_end_s())

    def _plan_part(
        self, first: int, chain: PutChain, found: list[Stretch], part: int, part_bytes: int
    ) -> list[Plan]:
        """Grant one part of as many leading pages of the chain as can be, or of any objects."""
        plans: list[Plan] = []
        pages = len(chain.keys) // KEY_BYTES
        for at, count, standing in _chain_standings(found, part, pages):
            end = pages if chain.parent else at + count
            if standing == PRESENT:
                self._present.append(PageRange(first + at, count, part))
            elif standing == IN_PROGRESS:
                self.blocked_on[chain.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]] = None
                self._refuse(first + at, end - at, part, Outcome.IN_PROGRESS)
                if end == pages:
                    break
            else:
                keys = chain.keys[at * KEY_BYTES : (at + count) * KEY_BYTES]
                parent = _parent_of(chain, at)
                made = self._reserve(at, parent, keys, part, part_bytes)
                plans += made
                self._spans += [self._span(first, plan) for plan in made]
                done = at + sum(map(len, made))
                if done < at + count:
                    self._no_room(first + done, end - done, part, part_bytes)
                    if end == pages:
                        break
        return plans

    def _reserve(
        self, at: int, parent: bytes, keys: bytes, part: int, part_bytes: int
    ) -> list[Plan]:
        """Plans for as many of these pages as there is room for, one a segment."""
        core, plans = self._core, []
        size_class = size_class_of(part_bytes)
        wanted = Wanted(self._tree.namespace, part, part_bytes, size_class, self._token_count)
        for segment in self._places:
            if not keys:
                break
            if not placing.is_open(core, segment, size_class):
                continue
            generation = core.new_generation()
            plan = reserve(self._put, generation, wanted, segment, parent, keys, at)
            core.plans[generation] = plan
            plans.append(plan)
            at, parent = at + len(plan), plan.keys[-KEY_BYTES:] if parent else NO_PARENT
            keys = keys[len(plan.keys) :]
        return plans

    def _span(self, first: int, plan: Plan) -> PlanSpan:
        index = self._segments.setdefault(plan.segment, len(self._segments))
        start = first + plan.page_in_chain
        return PlanSpan(start, len(plan), plan.part, index, plan.generation, plan.offsets)

    def _no_room(self, first: int, count: int, part: int, part_bytes: int) -> None:
        self._is_cut = True
        size_class = size_class_of(part_bytes)
        reason = placing.refusal(self._core, size_class)
        self._refuse(first, count, part, reason)
        wanted = self.wanted_bytes.get(size_class, 0)
        if reason is Outcome.OUT_OF_SPACE:  # a full quarantine is no reason to evict
            wanted += count * size_class
        self.wanted_bytes[size_class] = wanted

    def _refuse_chain(self, first: int, chain: PutChain, reason: Outcome) -> None:
        for part in self._message.parts:
            self._refuse(first, len(chain.keys) // KEY_BYTES, part, reason)

    def _refuse(self, first: int, count: int, part: int, reason: Outcome) -> None:
        self._refused.append(RefusedRange(first, count, part, reason, RETRY_AFTER_S[reason]))

    def _take_in(
        self, chain: PutChain, found: list[Stretch], plans: list[Plan], hints: Hints
    ) -> None:
        """Have every page that was granted, and those before it, in the tree, with its plans."""
        core, tree = self._core, self._tree
        life = core.new_life(self._ttl_s)
        if chain.parent:
            granted = max([plan.page_in_chain + len(plan.states) for plan in plans])
            keys = chain.keys[: granted * KEY_BYTES]
            make_holes(core, tree, chain.parent, keys, found, life, hints)
        else:
            make_objects(core, tree, [plan.keys for plan in plans], life, hints)
        for plan in plans:
            for stretch in tree.stretches(plan.keys):
                run = stretch.run
                run.plans = (*run.plans, plan)
                run.progress_s = run.created_s = core.now
                run.ttl_s = max(run.ttl_s, self._ttl_s)
                run.replicas = max(run.replicas, self._message.replicas)
                run.expires_s = max(run.expires_s, core.now + run.ttl_s)


def _lacks_hosts(core: Core, known: KnownNamespace, message: BeginPut) -> bool:
    """Whether fewer hosts could take the put's pages now than were asked for.

    What nobody asked for is bounded by the hosts that there are.
    """
    size_class = size_class_of(max(message.part_bytes))
    return placing.hosts_for(core, size_class) < (message.replicas or known.replicas)


def _check_chain(tree: Tree, chain: PutChain, found: list[Stretch]) -> None:
    """Raise BadValue unless the chain's pages hang together as those in the tree do."""
    known = 0
    for stretch in found if chain.parent else ():
        at = stretch.first * KEY_BYTES
        claimed = chain.keys[at - KEY_BYTES : at] if at else chain.parent
        run, page = stretch.run, stretch.page
        if claimed != (run.key(page - 1) if page else run.parent):
            raise BadValue("chains", stretch.first, "the parent that this page is known to have")
        known += stretch.count
    if known * KEY_BYTES < len(chain.keys):
        keys = split_keys(chain.keys)
        if len(set(keys)) != len(keys):
            raise BadValue("chains", len(keys), "every page once in a chain")
        if chain.parent and tree.is_above(keys, chain.parent):
            raise BadValue("chains", chain.parent, "a parent that does not hang below the chain")


def chains_of(message: BeginPut) -> Iterator[PutChain]:
    """The chains of a put; objects, of which each has a run of its own, in groups of a step each.

    A plan is of one group at most, so that no seal and no failure of one takes longer, either.
    """
    step = PARTS_PER_STEP // len(message.parts) * KEY_BYTES
    for chain in message.chains:
        if chain.parent:
            yield chain
            continue
        for at in range(0, len(chain.keys), step):
            yield PutChain(NO_PARENT, chain.keys[at : at + step])


def _ends(chain: PutChain, found: list[Stretch], above: Run | None) -> list[Run]:
    """Where more of the chain would hang; of objects, all that are in the tree."""
    if not chain.parent:
        return [stretch.run for stretch in found]
    end = found[-1].run if found else above
    return [] if end is None else [end]


def _parent_of(chain: PutChain, page: int) -> bytes:
    at = page * KEY_BYTES
    return chain.keys[at - KEY_BYTES : at] if page and chain.parent else chain.parent


def _chain_standings(found: list[Stretch], part: int, pages: int) -> Iterator[Standings]:
    at = 0
    for stretch in found:
        if at < stretch.first:
            yield at, stretch.first - at, NEEDED
        yield from _run_standings(stretch, part)
        at = stretch.first + stretch.count
    if at < pages:
        yield at, pages - at, NEEDED


def _run_standings(stretch: Stretch, part: int) -> Iterator[Standings]:
    run, first, count = stretch.run, stretch.first, stretch.count
    present = run.part_present(part)[stretch.page : stretch.page + count]
    if 0 not in present:
        yield first, count, PRESENT
        return
    plans = [plan for plan in run.plans if plan.part == part]
    if 1 not in present and not plans:
        yield first, count, NEEDED
        return
    standings = [
        _page_standing(there, run.key(stretch.page + i), plans) for i, there in enumerate(present)
    ]
    start = 0
    for i in range(1, count + 1):
        if i == count or standings[i] != standings[start]:
            yield first + start, i - start, standings[start]
            start = i


def _page_standing(there: int, key: bytes, plans: list[Plan]) -> int:
    if there:
        return PRESENT
    if any(plan.is_open(key) for plan in plans):
        return IN_PROGRESS
    return NEEDED
