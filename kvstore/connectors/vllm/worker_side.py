"""The half that sits in a vLLM worker: blocks out of the engine's memory, and verified ones in.

Saves are copied out before `save` returns, so that the engine may reuse a block at once; a thread
puts them into the pool from our buffers. Loads run in the engine's own thread between two steps:
threads beside an engine's loop get little of the interpreter.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Hit, Refused, Stored
from kvstore.connectors.engine_events import PutBlock
from kvstore.connectors.engine_namespace import part_of
from kvstore.connectors.one_thread import OneThread
from kvstore.connectors.vllm.blocks import GroupBlocks
from kvstore.errors import BufferClosed, ConfigError, KVStoreError
from kvstore.ids import ROOT_PARENT, PageKey
from kvstore.namespace import Attention
from kvstore.page import PageChain, engine_key

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from kvstore.client.locations import Locations
    from kvstore.connectors.engine_pool import EnginePool, Reached
    from kvstore.connectors.engine_saves import BlockRun, Load
    from kvstore.namespace import Namespace
    from kvstore.transfer.buffer import Buffer

_LOG: Final = logging.getLogger("kvharbor")
BUFFER_BYTES: Final = 32 * limits.MIB
"""Of one buffer, unless a page is larger: so much is read, or put, by one call."""
LOAD_BYTES_PER_STEP: Final = 256 * limits.MIB
"""Loads of one step; the others wait for the next, so that running requests go on."""
CLOSE_TIMEOUT_S: Final = 10.0


class Arrived(NamedTuple):
    """What became of loads since it was last asked."""

    finished: frozenset[str]
    """Requests whose loads have ended, well or not."""
    failed: frozenset[str]
    """Of those, requests with more than one cache group that lack some block."""
    bad_blocks: frozenset[int]
    """Blocks that did not come, of engines with one cache group."""


NOTHING_ARRIVED: Final = Arrived(frozenset(), frozenset(), frozenset())


class _Group(NamedTuple):
    """One cache group on this rank."""

    namespace: Namespace
    part: int
    writes: bool
    chained: bool
    memory: GroupBlocks


class WorkerSide:
    """One rank's connector, for the engine's thread."""

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        rank: int,
        pool: EnginePool,
        timeout_s: float,
        save_buffer_bytes: int,
    ) -> None:
        """`namespaces` has one for each cache group, in vLLM's order."""
        self._namespaces = tuple(namespaces)
        self._parts = [part_of(each, rank) for each in namespaces]
        self._pool = pool
        self._timeout_s = timeout_s
        page_bytes = max(each.parts[0].size_bytes for each in namespaces)
        self._buffer_bytes = max(BUFFER_BYTES, page_bytes)
        self._buffers_max = max(1, save_buffer_bytes // self._buffer_bytes)
        self._idle: deque[Buffer] = deque()
        self._made = 0
        self._load_buffer: Buffer | None = None
        self._groups: list[_Group] = []
        self._waiting: deque[Load] = deque()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._put_blocks: deque[PutBlock] = deque()
        self._is_told_apart = False
        self.tells_puts = False
        """Whether somebody takes what `put_blocks` has to say."""
        self._thread = OneThread("kvharbor-saves")
        self._lease_ids = itertools.count(1)
        self.counts: Counter[str] = Counter()
        """Pages and bytes by what became of them; see connector statistics."""

    def register(
        self, caches: Mapping[str, torch.Tensor], layers: Sequence[Sequence[str]], blocks: int
    ) -> None:
        """Take the engine's memory: `layers` names those of each group, in a page's order."""
        for number, namespace in enumerate(self._namespaces):
            part, writes = self._parts[number]
            attention = namespace.content.groups[0].attention
            try:
                tensors = [caches[name] for name in layers[number]]
            except KeyError as error:
                raise ConfigError(f"layer {error} has no KV cache on this rank") from error
            memory = GroupBlocks(tensors, blocks, namespace.parts[part].size_bytes)
            chained = attention is not Attention.SLIDING
            self._groups.append(_Group(namespace, part, writes, chained, memory))

    def reach(self) -> None:
        """Have the pool looked for beside the engine's thread, before it is needed."""
        self._thread.run(lambda: self._pool.call("reaching the pool", lambda _: None, None))

    def is_of_one_mind(self, namespace_ids: Sequence[bytes]) -> bool:
        """Whether the scheduler means the namespaces that this rank has; said once where not."""
        ours = [bytes(each.id) for each in self._namespaces]
        is_same = ours == list(namespace_ids)
        if not is_same and not self._is_told_apart:
            self._is_told_apart = True
            _LOG.warning(
                "kvharbor: a rank of this engine has other KV than its scheduler says: nothing is "
                "loaded or saved (some models change their configuration as they are loaded)"
            )
        return is_same

    # Loads.

    def load(self, loads: Sequence[Load]) -> None:
        """Bring what these requests wait for, and what waited for its turn; some next time."""
        self._waiting += loads
        room = LOAD_BYTES_PER_STEP
        while self._waiting and room > 0:
            load = self._waiting.popleft()
            room -= sum(len(run.blocks) * self._page_bytes(run.group) for run in load.runs)
            self._end(load, [block for run in load.runs for block in self._load(run)])

    def refuse(self, loads: Sequence[Load]) -> None:
        """Bring nothing of this: tell that all of it has failed."""
        for load in loads:
            self._end(load, [block for run in load.runs for block in run.blocks])

    def abandon(self, requests: Collection[str]) -> None:
        """These have ended: what still waits for its turn is not brought to them."""
        if not self._waiting or not requests:
            return
        left = deque([load for load in self._waiting if load.request not in requests])
        self._finished |= {load.request for load in self._waiting} & set(requests)
        self._waiting = left

    def _end(self, load: Load, missing: Sequence[int]) -> None:
        self._finished.add(load.request)
        if missing and len(self._groups) > 1:
            self._failed.add(load.request)
        self._bad_blocks.update(missing if len(self._groups) == 1 else ())

    def arrived(self) -> Arrived:
        """What became of loads, told once."""
        arrived = Arrived(
            frozenset(self._finished), frozenset(self._failed), frozenset(self._bad_blocks)
        )
        self._finished, self._failed, self._bad_blocks = set(), set(), set()
        return arrived

    def _page_bytes(self, group: int) -> int:
        return self._groups[group].memory.page_bytes

    def _load(self, run: BlockRun) -> tuple[int, ...]:
        """Bring the blocks of one run; those that did not come."""
        step = self._buffer_bytes // self._page_bytes(run.group)
        missing: tuple[int, ...] = ()
        for start in range(0, len(run.blocks), step):
            some = _piece(run, start, start + step)
            came = self._pool.call("a load", partial(self._read, run=some), None)
            flags = came or [False] * len(some.blocks)
            lacks = [b for b, ok in zip(some.blocks, flags, strict=True) if not ok]
            self.counts["loaded_pages"] += flags.count(True)
            self.counts["loaded_bytes"] += flags.count(True) * self._page_bytes(run.group)
            self.counts["failed_load_pages"] += len(lacks)
            missing += tuple(lacks)
        return missing

    def _read(self, pool: Reached, run: BlockRun) -> list[bool]:
        """Verified pages into the engine's blocks; which of them came."""
        group, opened = self._groups[run.group], pool.opened[run.group]
        chain = _chain(group.namespace, run)
        find = pool.store.match_prefix if group.chained else pool.store.lookup
        lease_id = next(self._lease_ids)
        found = find(
            opened, chain, parts=(group.part,), timeout_s=self._timeout_s, lease_id=lease_id
        )
        timeout_s = self._timeout_of(found.pages, group)
        came = _in_place(pool, found, group, run.blocks, timeout_s)
        if not came:
            came = self._through_buffer(pool, found, group, run.blocks)
        if all(came):  # else some copy may be on its way yet
            self._thread.run(lambda: self._give_back(run.group, chain, lease_id))
        return came + [False] * (len(run.blocks) - len(came))

    def _through_buffer(
        self, pool: Reached, found: Locations, group: _Group, blocks: Sequence[int]
    ) -> list[bool]:
        """Pages copied twice: from wherever they are, and once verified."""
        buffer = self._load_buffer
        if buffer is None or buffer.closed:
            buffer = self._load_buffer = pool.store.buffer(self._buffer_bytes)
        size = group.memory.page_bytes
        outcomes = pool.store.read(
            found, buffer, range(0, found.pages * size, size), part=group.part,
            timeout_s=self._timeout_of(found.pages, group),
        )  # fmt: skip
        came = [isinstance(each, Hit) for each in outcomes]
        if len(came) == len(blocks) and all(came):  # V4
            group.memory.scatter(blocks, buffer.view)
            return came
        for i, ok in enumerate(came):
            if ok:
                group.memory.scatter(blocks[i : i + 1], buffer.view[i * size :])
        return came

    def _timeout_of(self, pages: int, group: _Group) -> float:
        return self._timeout_s + pages * group.memory.page_bytes / limits.PUT_BYTES_PER_S_MIN

    def _give_back(self, group: int, chain: PageChain, lease_id: int) -> None:
        """In the thread beside the engine's. What is not given back lapses."""

        def give_back(pool: Reached) -> None:
            opened = pool.opened[group]
            pool.store.give_back_lease(opened, chain, lease_id, timeout_s=self._timeout_s)

        self._pool.tell("giving leases back", give_back)

    # Saves.

    def save(self, runs: Sequence[BlockRun]) -> None:
        """Copy these blocks out, and have them put; what finds no room is left out."""
        for run in runs:
            group = self._groups[run.group]
            if not group.writes:
                continue
            step = self._buffer_bytes // group.memory.page_bytes
            for start in range(0, len(run.blocks), step):
                self._copy_out(_piece(run, start, start + step))

    def _copy_out(self, run: BlockRun) -> None:
        buffer = self._take()
        try:
            if buffer is not None:
                with buffer.in_use() as memory:
                    self._groups[run.group].memory.gather(run.blocks, memory.view)  # V3
        except BufferClosed:  # by the other thread, which has just lost the pool
            buffer = None
        if buffer is None:
            self.counts["dropped_pages"] += len(run.blocks)
            return
        self._thread.run(lambda: self._put(run, buffer))

    def _take(self) -> Buffer | None:
        """An idle buffer, or a new one while there are few; None where the pool is not there."""
        while self._idle:
            buffer = self._idle.popleft()
            if not buffer.closed:
                return buffer
            self._made -= 1
        store = self._pool.store
        if store is None:
            self.reach()
            return None
        if self._made >= self._buffers_max:
            return None
        try:
            made = store.buffer(self._buffer_bytes)
        except KVStoreError:  # no memory, or the store is being closed: as if there were no room
            return None
        self._made += 1
        return made

    def _put(self, run: BlockRun, buffer: Buffer) -> None:
        """In the thread beside the engine's."""
        stored = self._pool.call("a save", lambda pool: self._stored(pool, run, buffer), None)
        self._count(run, stored)
        self._idle.append(buffer)

    def _stored(self, pool: Reached, run: BlockRun, buffer: Buffer) -> list[str]:
        group, opened = self._groups[run.group], pool.opened[run.group]
        size = group.memory.page_bytes
        chain = _chain(group.namespace, run)
        chains = [chain] if group.chained else [PageChain(key) for key in chain]
        found: list[str] = []
        place = 0
        for each in chains:
            places = {group.part: range(place, place + len(each) * size, size)}
            outcomes = pool.store.put_parts(
                opened, each, buffer, places, wait=False, hints=run.hints,
                timeout_s=self._timeout_s + len(each) * size / limits.PUT_BYTES_PER_S_MIN,
            )  # fmt: skip
            place += len(each) * size
            found += [_NAMES[type(outcome)] for outcome in outcomes]
        return found

    def _count(self, run: BlockRun, stored: list[str] | None) -> None:
        if stored and self.tells_puts:
            there = zip(run.hashes, stored, strict=True)
            self._put_blocks += [
                PutBlock(run.group, bytes(each)) for each, name in there if name in _THERE
            ]
        for name in stored or ["failed_save_pages"] * len(run.blocks):
            self.counts[name] += 1
            if name == "saved_pages":
                self.counts["saved_bytes"] += self._page_bytes(run.group)

    def put_blocks(self) -> list[PutBlock]:
        """Blocks that were put, or found to be there, since it was last asked."""
        return [self._put_blocks.popleft() for _ in range(len(self._put_blocks))]

    @property
    def totals(self) -> dict[str, int]:
        """Everything that was counted since the start, by the names of stats.TOTALS."""
        return {**self.counts, "circuit_opened": self._pool.times_opened}

    def close(self) -> None:
        """Put what is on its way, end the thread and the connection."""
        self._thread.close(CLOSE_TIMEOUT_S)
        self._pool.close()


_NAMES: Final = {
    Stored: "saved_pages",
    AlreadyThere: "known_pages",
    Refused: "refused_pages",
}
_THERE: Final = frozenset({_NAMES[Stored], _NAMES[AlreadyThere]})


def _in_place(
    pool: Reached, found: Locations, group: _Group, blocks: Sequence[int], timeout_s: float
) -> list[bool]:
    """Pages copied once, from where they lie, where this process can map all of them; else none."""
    if not group.memory.takes_pages:
        return []
    with pool.store.views(found, part=group.part, timeout_s=timeout_s) as pages:
        views = [page for page in pages if isinstance(page, memoryview)]
        if len(views) < len(pages):
            return []
        group.memory.scatter_pages(blocks[: len(views)], views)  # V4: views are verified
    return [True] * len(views)


def _piece(run: BlockRun, start: int, stop: int) -> BlockRun:
    """Blocks [start, stop) of a run as a run of their own."""
    parent = run.hashes[start - 1] if start else run.parent
    hashes, blocks = run.hashes[start:stop], run.blocks[start:stop]
    return run._replace(first=run.first + start, parent=parent, hashes=hashes, blocks=blocks)


def _chain(namespace: Namespace, run: BlockRun) -> PageChain:
    keys = b"".join([engine_key(namespace.id, bytes(each)) for each in run.hashes])
    parent = engine_key(namespace.id, bytes(run.parent)) if run.parent else ROOT_PARENT
    return PageChain(keys, PageKey(parent))
