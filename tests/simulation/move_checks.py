"""Checks of what tiers add: moves are planned soundly, and no page leaves the pool uncounted."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.record import RecordState
from kvstore.replica import Tier
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import ExtentSource, Ingest, Ingested, PeerSource
from kvstore.wire.messages.relocation import RelocationKind
from master import replica_counts
from master.segments import SegmentState
from tests.simulation import master_view
from tests.simulation.pages import keys_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.base import Message
    from master.core import Core
    from master.events import CommandId
    from master.state import MasterState
    from tests.simulation.checks import Checks
    from tests.simulation.sim_master import SimMaster

REASONS: Final = (
    "pages_evicted", "pages_expired", "pages_lost", "pages_corrupt", "pages_incomplete",
)  # fmt: skip
"""Counters of pages that leave; removed ones are known by name."""


@dataclass(frozen=True)
class Present:
    """Which pages could be read at one moment, and what that could depend on."""

    core: MasterState
    version: int
    """Of the readability of segments."""
    pages: frozenset[bytes]
    gone: int
    """Pages that had left, by the master's own count."""


@dataclass(frozen=True)
class Reading:
    """What a copy reads, and until when that stays."""

    life: tuple[str, int]
    offsets: frozenset[int]
    until_s: float


class MoveChecks:
    """Told of each move, and shown everything at each scan."""

    def __init__(self, checks: Checks) -> None:
        """Nothing moves."""
        self._checks = checks
        self._reading: dict[int, Reading] = {}
        """Copies that no master knows to be over, by generation."""
        self._before: Present | None = None
        self._cores: list[MasterState] = []
        """That have led since then."""

    # --- moves --------------------------------------------------------------------------------

    def begins(self, master: SimMaster, message: Ingest) -> None:
        """The master has a page copied: from sealed extents to free ones, of another worker if it
        says so.
        """
        checks, source = self._checks, message.source
        assert isinstance(source, ExtentSource | PeerSource), source
        name = source.segment if isinstance(source, ExtentSource) else source.segment.segment
        core = master_view.core_of(master)
        target, origin = core.segments[message.segment], core.segments[name]
        word = "moves" if isinstance(source, ExtentSource) else "copies"
        checks.world.note(f"master {word} {len(message.offsets) // 8} to {message.segment}")
        checks.world.counts[f"{word} to {target.tier}"] += 1
        if (target.worker == origin.worker) is isinstance(source, PeerSource):
            checks.fail("I6", f"{word} from {origin.id} to {target.id}")
        checks.answers.is_planned(master, target.ref, message)
        self._is_sealed(master, message, source)
        if isinstance(source, PeerSource):
            self._goes_apart(master, message)
            self._holds(master, message, source)

    def _goes_apart(self, master: SimMaster, message: Ingest) -> None:
        """I33: pages are copied where no replica of them is on the host, but for one that goes."""
        core = master_view.core_of(master)
        leaves = _leaves(core, message.generation)
        place = replica_counts.domain(core, core.segments[message.segment])
        tree = core.tree(message.namespace_ordinal)
        for key in keys_of(message.keys):
            run = tree.get(key)
            assert run is not None, key
            for copy in run.copies_of(message.part):
                there = replica_counts.domain(core, copy.segment)
                is_lost = copy.segment.state is SegmentState.LOST
                if is_lost or copy.segment.drained or copy.segment.worker == leaves:
                    continue
                if copy.generation(run.page_of(key)) and there == place:
                    self._checks.fail(
                        "I33", f"{key[:4].hex()} is copied to {place}, and lies there"
                    )

    def _is_sealed(
        self, master: SimMaster, message: Ingest, source: ExtentSource | PeerSource
    ) -> None:
        """I3: what is copied is what it is said to be."""
        checks = self._checks
        segment, incarnation = _life(source)
        memory = checks.memories[segment]
        for key, offset, generation in _pages(message, source):
            if memory.incarnation != incarnation or offset in memory.damaged:
                continue
            size_class = master_view.size_class_at(master, segment, offset)
            record = memory.record(offset, size_class)
            if (
                record is None
                or record.state is not RecordState.SEALED
                or (record.key, record.generation) != (key, generation)
            ):
                checks.fail("I3", f"{segment}+{offset} is copied, but holds {record}")

    def _holds(self, master: SimMaster, message: Ingest, source: PeerSource) -> None:
        """I35: what another worker reads stays until the copy is over, or has to be."""
        under_way = master_view.core_of(master).moves.in_flight.values()
        move = next(m for m in under_way if m.plan.generation == message.generation)
        self._reading[message.generation] = Reading(
            _life(source), frozenset(array("Q", source.offsets)), move.leased_until_s
        )

    def stays(self, life: tuple[str, int], offset: int, what: str) -> None:
        """I35: an extent is about to be freed or overwritten."""
        for generation, reading in self._reading.items():
            is_read = reading.life == life and offset in reading.offsets
            if is_read and self._checks.world.now < reading.until_s:
                self._checks.fail("I35", f"{life[0]}+{offset} is {what} under {generation:#x}")

    def ended(self, master: SimMaster, command: CommandId, reply: Message | None) -> None:
        """A worker has answered a move, or not."""
        move = master_view.core_of(master).moves.in_flight.get(command)
        if move is not None and isinstance(reply, Ingested):
            self._reading.pop(move.plan.generation, None)
        outcomes = reply.outcomes if isinstance(reply, Ingested) else b""
        for outcome in outcomes:
            self._checks.world.counts[f"moved: {Outcome(outcome).name.lower()}"] += 1

    # --- pages that leave -----------------------------------------------------------------------

    def scan(self, master: SimMaster) -> None:
        """I13: what could be read and cannot any more has been counted, or was removed.

        A new leader is held to what the last one could read, once it has every worker's inventory.
        """
        assert master.core is not None
        if not any(each is master.core for each in self._cores):
            self._cores.append(master.core)
        before = self._before
        is_new = before is not None and before.core is not master.core
        if is_new and not self._has_everything(master):
            return
        now = self._before = self._present(master)
        cores, self._cores = self._cores, [master.core]
        if before is None or (not is_new and before.version != now.version):
            return
        gone = sum(_gone(core) for core in cores) - before.gone
        missing = [key for key in before.pages - now.pages if self._must_stay(key, is_new)]
        if len(missing) > gone:
            keys = [key[:4].hex() for key in missing]
            self._checks.fail("I13", f"{keys} have left, {gone} are counted")
        self._checks.world.counts["pages kept by a new leader"] += is_new * len(now.pages)

    def _has_everything(self, master: SimMaster) -> bool:
        """Whether every worker runs and its inventory is compared."""
        workers = self._checks.workers.values()
        if any(worker.core is None for worker in workers):
            return False
        live = {segment.id for segment in master_view.live_segments(master)}
        return all(live.issuperset(worker.memories) for worker in workers)

    def _must_stay(self, key: bytes, is_new: bool) -> bool:
        """Whether nobody has tried to remove it, and no fault has spoilt it.

        What a disk has lost while nobody led is counted by nobody.
        """
        past = self._checks.history.pages[key]
        if past.remove_began_s != float("-inf"):
            return False
        fails = bool(self._checks.options.disk_faults) and is_new
        for place in past.sealed:
            memory = self._checks.memories[place.segment]
            if place.offset in memory.damaged or (fails and memory.tier is Tier.NVME):
                return False
            if is_new and key in memory.spoilt:  # what was put in its place since is whole
                return False
        return True

    def _present(self, master: SimMaster) -> Present:
        core = master_view.core_of(master)
        assert master.core is not None
        pages: set[bytes] = set()
        for known in core.namespaces:
            for run in known.tree.all_runs():
                mask = run.readable(known.tree.parts, core.version)
                pages.update(run.key(page) for page in range(len(run)) if mask[page])
        return Present(master.core, core.version, frozenset(pages), _gone(master.core))


def _leaves(core: Core, generation: int) -> str:
    """The worker that pages leave once this has been copied; empty: none."""
    for relocation in core.relocations.open.values():
        for each in relocation.copying:
            if each.plan.generation == generation and relocation.kind != RelocationKind.COPY:
                return each.source.worker
    return ""


def _life(source: ExtentSource | PeerSource) -> tuple[str, int]:
    """Segment and incarnation of what is copied."""
    named = source if isinstance(source, ExtentSource) else source.segment
    return named.segment, named.incarnation


def _pages(message: Ingest, source: ExtentSource | PeerSource) -> Iterator[tuple[bytes, int, int]]:
    """(key, offset, generation) of each page where it is copied from."""
    columns = array("Q", source.offsets), array("Q", source.generations)
    return zip(keys_of(message.keys), *columns, strict=True)


def _gone(state: MasterState) -> int:
    return sum(state.core.counters[name] for name in REASONS)
