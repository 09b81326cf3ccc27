"""What the operations of the master share: the state, the time of the event, the actions so far.

Holds state and the few verbs that every operation needs; decides nothing. Only code called from
MasterState.handle may change it.
"""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import InvariantBroken
from kvstore.hints import NO_HINTS
from kvstore.ids import Epoch, generation_of
from kvstore.lease import granter_release_s
from kvstore.replica import ExtentState
from kvstore.wire.messages.hello import Failure
from master import placing
from master.events import Command, Note, Persist, Reply, SessionId, WriteId
from master.eviction import EvictionInForce
from master.heat import Heat
from master.in_force import AdmissionInForce, as_configured
from master.lenders import Lenders
from master.moves import Moves
from master.namespaces import Namespaces
from master.orders import OrderBook
from master.pins import Pins
from master.plans import Owner
from master.pool_time import Life, PoolTime
from master.relocations import Relocations
from master.removal import Removals
from master.replication import Replication
from master.restored_chunks import Restored
from master.shrinking import Shrinking
from master.stripes import Stripes
from master.tickets import Tickets
from master.tombstones import Tombstones
from master.tunables import LEARNED
from master.waiting import WaitingPuts
from master.wheel import Wakeup, Wheel
from master.write_behind import WriteBehind
from policies import registry
from policies.predictor import Predictor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.errors import KVStoreError
    from kvstore.hints import Hints
    from kvstore.wire.messages.base import Message
    from master.directory import Tree
    from master.events import Action
    from master.in_force import InForce
    from master.inventory import Comparison
    from master.leaving import Leave
    from master.membership import Worker
    from master.namespaces import KnownNamespace
    from master.plans import Incomplete, OwnerKey, Plan, Put
    from master.run import Run
    from master.segments import Segment
    from master.sessions import Caller, Session
    from master.suspects import Suspect
    from master.tunables import Tunables

EXPIRY_GRAIN_S: Final = 0.25
PUT_GRAIN_S: Final = 0.05
DONE: Final = object()
NOT_STARTED: Final = float("-inf")


class Core:
    """State of one master, for the operations in this package."""

    def __init__(self, tunables: Tunables, epoch: Epoch) -> None:
        """Start with nothing known; time starts with the first event."""
        self.tunables = tunables
        self.epoch = epoch
        self.started_s = NOT_STARTED
        self.leads_until_s = inf
        """When the lease that this master leads under may end (I10)."""
        self.now = NOT_STARTED
        self.actions: list[Action] = []
        self.counters: Counter[str] = Counter()
        self.damaged: list[str] = []
        """Keys of the durable values that were no good: set aside, while the rest was loaded."""

        self.sessions: dict[SessionId, Session] = {}
        self.owners: dict[OwnerKey, Owner] = {}
        self.workers: dict[str, Worker] = {}
        self.segments: dict[str, Segment] = {}
        self.leaving: dict[str, Leave] = {}
        """Workers that wait until no reader needs them, by name."""
        self.wakeup = Wakeup()
        """When the next Tick is wanted: every deadline tells it, and what wants to go on."""
        self.version = 0
        """Counts changes of which segments are readable; every run's mask depends on it."""
        self.domains = 0
        """Hosts (or workers) that lend: no page can have more replicas that count."""

        self.expiry: Wheel[Run] = Wheel(EXPIRY_GRAIN_S, self.wakeup)
        self.namespaces = Namespaces()
        self.plans: dict[int, Plan] = {}
        self.put_deadlines: Wheel[Put] = Wheel(PUT_GRAIN_S, self.wakeup)
        self.given_up = Owner(("master", "given up", b""), {}, {}, {})
        """Has the puts that stopped, until a job has failed all their plans."""
        self.waiting = WaitingPuts(self.wakeup)
        self.orders = OrderBook(epoch, self.wakeup)
        self.tombstones = Tombstones()
        self.lenders = Lenders()
        self.pool_time = PoolTime()
        self.saving = WriteBehind(self.wakeup)
        self.restored = Restored()
        self._choose_policies(tunables)
        self._start_looks()

        self.comparisons: dict[str, Comparison] = {}
        """Inventories under way, by segment."""
        self.jobs: deque[Iterator[None]] = deque()
        """Long work, cut in steps; each runs a step in turn."""

        self._sample = int(epoch)
        self._generations = 0
        self._writes = 0
        self._on_persisted: dict[WriteId, list[Callable[[], None]]] = {}

    def _start_looks(self) -> None:
        """What is looked at again and again, by those who move pages and make room."""
        self.rankings = placing.Rankings()
        self.moves = Moves(self.wakeup)
        self.shrinking = Shrinking(self.wakeup)
        self.heat = Heat(self.wakeup)
        self.replication = Replication(self.wakeup)
        self.relocations = Relocations(self.epoch, self.wakeup)
        self.stripes = Stripes(self.wakeup)
        self.removals = Removals(self.wakeup)
        self.pins = Pins(self.wakeup)
        self.tickets = Tickets(self.epoch, self.tunables.staging_s, self.wakeup)
        self.suspects: set[Suspect] = set()
        """Copies that a reader reported and that are being checked."""
        self.pressed: dict[Segment, None] = {}
        """Segments above their high watermark, until they are below the low one."""
        self.wanted_bytes: dict[int, int] = {}
        """Bytes that puts found no room for since room was last made, by size class."""
        self.reclaim_at_s = NOT_STARTED
        """Making room is not tried before: the last try found nothing that could go."""
        self.size_told_s = NOT_STARTED
        """When the eviction policy last heard how large the pool is."""
        self.incomplete: Wheel[Incomplete] = Wheel(PUT_GRAIN_S, self.wakeup)

    def _choose_policies(self, tunables: Tunables) -> None:
        self.eviction = EvictionInForce(tunables.eviction, tunables.eviction_parameters)
        self.admission = AdmissionInForce(
            tunables.nvme_admission, tunables.nvme_admission_parameters
        )
        self.placement = as_configured(registry.placement, tunables)
        self.replica_policy = as_configured(registry.replication, tunables)
        self.erasure = as_configured(registry.erasure, tunables)
        self.prefill_routing = as_configured(registry.prefill_routing, tunables)
        self.decode_routing = as_configured(registry.decode_routing, tunables)
        self.colocation = as_configured(registry.colocation, tunables)
        self.roles = as_configured(registry.roles, tunables)
        kinds: tuple[InForce[Any], ...] = (
            self.eviction, self.admission, self.placement, self.replica_policy, self.erasure,
            self.prefill_routing, self.decode_routing, self.colocation, self.roles,
        )  # fmt: skip
        self.policies = {each.kind.name: each for each in kinds}
        self.predictor = Predictor() if tunables.hints == LEARNED else None

    def set_time(self, now: float) -> None:
        """It is `now`: for the whole of one event."""
        if self.started_s == NOT_STARTED:
            self.started_s = now
            self.pool_time.start(now)
            self.pins.start(self.pool_time)
        assert now >= self.now, (now, self.now)  # I26: the monotonic clock of the shell
        self.now = self.saving.now_s = now

    @property
    def is_in_doubt(self) -> bool:
        """Whether another master may lead: nothing is decided, ordered or stored (I10)."""
        return self.now >= self.leads_until_s

    def take_actions(self) -> list[Action]:
        """What is to be done about the event; orders and writes wait while it is in doubt (I10)."""
        actions, self.actions = self.actions, []
        if self.is_in_doubt:
            self.actions = [each for each in actions if isinstance(each, Command | Persist)]
            return [each for each in actions if not isinstance(each, Command | Persist)]
        return actions

    def note(self, text: str) -> None:
        """Have a line logged; never for each page or request."""
        self.actions.append(Note(text))

    def reply(self, caller: Caller, message: Message) -> None:
        """Answer a request."""
        self.actions.append(Reply(caller.session.id, caller.request_id, message))

    def refuse(self, caller: Caller, error: KVStoreError) -> None:
        """Answer a request that cannot be carried out. Our own bugs are no answers: they raise."""
        if isinstance(error, InvariantBroken):
            raise error
        self.counters[f"refused_{error.code}"] += 1
        self.reply(caller, Failure(error.code, str(error)))

    def new_generation(self) -> int:
        """A number that no allocation of any master has had."""
        self._generations += 1
        return generation_of(self.epoch, self._generations)

    def lease_end_s(self) -> float:
        """Until when a lease granted now keeps extents from being reused (I9)."""
        return granter_release_s(self.now, self.tunables.lease_ttl_s)

    def page_ttl_s(self, known: KnownNamespace) -> float:
        """The TTL of pages of this namespace that come in without one of their own."""
        return self.tunables.page_ttl_s if known.ttl_s is None else known.ttl_s

    def new_life(self, ttl_s: float) -> Life:
        """That of pages which come in now."""
        return Life(ttl_s, self.now, self.now + ttl_s)

    def press(self, segment: Segment) -> None:
        """Note that a segment was filled further."""
        used = segment.allocator.used_bytes
        if used > self.tunables.watermark_demote * segment.allocator.capacity_bytes:
            self.moves.was_filled(segment, self.now)
        if used > self.tunables.watermark_high * segment.allocator.capacity_bytes:
            self.pressed[segment] = None
            self.wakeup.by(self.reclaim_at_s)

    def want_room(self, size_class: int, wanted: int) -> None:
        """Note that a put found no room, as far as what is about to be freed will not do."""
        coming = sum(
            segment.allocator.bytes_in[ExtentState.RETIRED]
            for segment in placing.put_segments(self)
            if segment.takes_plans
        )
        if wanted > coming:
            known = self.wanted_bytes.get(size_class, 0)
            self.wanted_bytes[size_class] = max(known, wanted - coming)
            self.wakeup.by(self.reclaim_at_s)

    def room_is_coming(self, size_class: int, size_bytes: int) -> None:
        """So much has been retired for the puts that found no room in this class."""
        left = self.wanted_bytes.get(size_class, 0) - size_bytes
        if left > 0:
            self.wanted_bytes[size_class] = left
        else:
            self.wanted_bytes.pop(size_class, None)

    def tell_size(self) -> None:
        """Tell the eviction policy how many pages the pool holds."""
        self.size_told_s = self.now
        self.eviction.resize(sum(known.tree.pages for known in self.namespaces))

    def tree(self, namespace: int) -> Tree:
        """The pages of the namespace of this ordinal, which is known."""
        known = self.namespaces.by_ordinal(namespace)
        assert known is not None, namespace
        return known.tree

    def sample(self) -> int:
        """The next of a fixed sequence of 64-bit numbers, for sampling (Knuth's MMIX LCG)."""
        self._sample = (self._sample * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return self._sample

    def start(self, job: Iterator[None]) -> None:
        """Do the first step of a job now, the others bit by bit."""
        if next(job, DONE) is not DONE:
            self.jobs.append(job)

    def run_jobs(self, steps: int) -> None:
        """Do so many steps of the jobs, in turn."""
        for _ in range(steps):
            if not self.jobs:
                return
            self.start(self.jobs.popleft())

    def persist(
        self,
        puts: tuple[tuple[str, bytes], ...] = (),
        deletes: tuple[str, ...] = (),
        then: Callable[[], None] | None = None,
        *,
        behind: bool = False,
    ) -> WriteId:
        """Write durably; `then` runs when that is done. `behind`: when nothing else waits."""
        self._writes += 1
        write = WriteId(self._writes)
        self._on_persisted[write] = [] if then is None else [then]
        self.actions.append(Persist(write, puts, deletes, behind))
        return write

    def when_persisted(self, write: WriteId, then: Callable[[], None]) -> None:
        """Run `then` when this write is durable; it is not yet."""
        self._on_persisted[write].append(then)

    def persisted(self, write: WriteId) -> None:
        """A write is durable."""
        for then in self._on_persisted.pop(write, ()):
            then()

    def touch(self, run: Run, hints: Hints = NO_HINTS) -> None:
        """Note an access: the TTL starts anew, the policy hears of it."""
        self.eviction.touched(run, self.now, hints)
        expires_s = min(self.now + run.ttl_s, run.created_s + self.tunables.page_age_max_s)
        if run.ttl_s == inf:
            expires_s = inf
        run.expires_s = max(run.expires_s, expires_s)
