"""The half that sits in vLLM's scheduler: what may be loaded, what is to be loaded and saved.

Runs in the scheduler's thread and never waits there; a thread beside it asks the pool. Reads
vLLM's requests and outputs by the names of their attributes, and imports none of vLLM.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.connectors.engine_events import PutBlock
from kvstore.connectors.engine_lookups import Answer, Held, Lookups, Question
from kvstore.connectors.engine_saves import BlockRun, Load, Saves, Scheduled, loads_of
from kvstore.connectors.one_thread import OneThread
from kvstore.connectors.vllm.handover import promised_to, told_on
from kvstore.connectors.vllm.hints import hints_of
from kvstore.namespace import Attention
from kvstore.page import PageChain, engine_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.clock import Clock
    from kvstore.connectors.engine_pool import EnginePool, Reached
    from kvstore.connectors.vllm.foreign import Request, StepOutput
    from kvstore.hints import Hints
    from kvstore.namespace import Namespace

_LOG: Final = logging.getLogger("kvharbor")
CLOSE_TIMEOUT_S: Final = 5.0


class Orders(NamedTuple):
    """What the workers are to do around one step."""

    loads: tuple[Load, ...]
    saves: tuple[BlockRun, ...]


class _Local(NamedTuple):
    """A request as the engine last asked for it."""

    blocks: int
    """Those that the engine had itself."""
    tokens: int
    """Of the request."""


class SchedulerSide:
    """One scheduler's connector, for the scheduler's thread."""

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        pool: EnginePool,
        clock: Clock,
        timeout_s: float,
        deadline_s: float,
        handover_deadline_s: float,
        load_tokens_min: int = 0,
    ) -> None:
        """`namespaces` has one for each cache group, in vLLM's order.

        A request is held back for `deadline_s` at most, or for `handover_deadline_s` where another
        engine has computed its prompt; a call to the pool may take `timeout_s`. What saves fewer
        than `load_tokens_min` tokens is computed.
        """
        self._pool = pool
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._handover_deadline_s = handover_deadline_s
        self._namespaces = tuple(namespaces)
        kinds = [each.content.groups[0] for each in namespaces]
        self._chained = tuple(each.attention is not Attention.SLIDING for each in kinds)
        self._block_tokens = namespaces[0].layout.page_tokens
        windows = [-(-(each.window_tokens - 1) // self._block_tokens) for each in kinds]
        reach = [n for n, chained in zip(windows, self._chained, strict=True) if not chained]
        self._lookups = Lookups(reach, self._block_tokens, self._ask, deadline_s, load_tokens_min)
        self._saves = Saves(self._chained)
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._thread = OneThread("kvharbor-lookups")
        self._requests: dict[str, Request] = {}
        self._hints: dict[str, Hints] = {}
        """Of the requests that came with some."""
        self._local: dict[str, _Local] = {}
        self._to_load: list[Load] = []
        self._loading: dict[str, tuple[BlockRun, ...]] = {}
        """What is loaded for each request whose load is not known to have ended."""
        self._lease_ids: dict[str, int] = {}
        """Under which number requests have leases: that of the first question for each."""
        self._leased: dict[int, tuple[bytes, ...]] = {}
        """What is leased under these numbers; for the thread beside the scheduler's alone."""
        self._has_left = False
        """Pages of its namespaces may be of other weights than the engine has by now."""
        self.on_save: Callable[[Request, Sequence[BlockRun]], None] | None = None
        """Told of what is to be saved of a request."""
        self.counts: Counter[str] = Counter()
        """Totals since the start; see connector statistics."""

    def reach(self) -> None:
        """Have the pool looked for beside the scheduler's thread, before it is needed."""
        self._thread.run(lambda: self._pool.call("reaching the pool", lambda _: None, None))

    def on_new_request(self, request: Request) -> None:
        """Ask the pool for it at once."""
        rid = request.request_id
        self._requests[rid] = request
        if self._has_left:
            return
        hints = hints_of(request)
        if hints is not None:
            self._hints[rid] = hints
        now_s, hold = self._clock.now_s(), self._pool.is_worth_asking
        until_s = now_s + self._handover_deadline_s
        promised = promised_to(request, self._namespaces, until_s)
        self._lookups.begin(rid, request.block_hashes, now_s, hold=hold, promised=promised)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond those that the engine has; None: ask again."""
        if self._has_left:
            return 0
        now_s = self._clock.now_s()
        self._hear(now_s)
        first = computed_tokens // self._block_tokens
        rid = request.request_id
        blocks = self._lookups.blocks(rid, request.block_hashes, first, request.num_tokens, now_s)
        if blocks is None:
            return None
        self._local[rid] = _Local(first, request.num_tokens)
        return blocks * self._block_tokens

    def allotted(self, request: Request, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has made room for what was promised, if anything was."""
        if not tokens:
            return
        rid = request.request_id
        first = self._local[rid].blocks
        stop = first + tokens // self._block_tokens
        runs = loads_of(request.block_hashes, tables, first, stop)
        self._to_load.append(Load(rid, runs))
        self._loading[rid] = runs
        self.counts["promised_pages"] += stop - first

    def orders(self, output: StepOutput) -> Orders:
        """What to do around the step that vLLM has just planned."""
        loads, self._to_load = tuple(self._to_load), []
        for new in output.scheduled_new_reqs:
            self._saves.allot(new.req_id, new.block_ids)
        known = output.scheduled_cached_reqs
        for rid, blocks in zip(known.req_ids, known.new_block_ids, strict=True):
            if blocks is None:
                continue
            if rid in known.resumed_req_ids:
                self._saves.allot(rid, blocks)
            else:
                self._saves.append(rid, blocks)
        if self._has_left or not self._pool.is_worth_asking:
            return Orders(loads, ())
        self._hear(self._clock.now_s())
        saves: list[BlockRun] = []
        for new in output.scheduled_new_reqs:
            saves += self._saves_of(new.req_id, new.num_computed_tokens, output)
        for rid, computed in zip(known.req_ids, known.num_computed_tokens, strict=True):
            saves += self._saves_of(rid, computed, output)
        return Orders(loads, tuple(saves))

    def _saves_of(self, rid: str, computed: int, output: StepOutput) -> list[BlockRun]:
        self._loading.pop(rid, None)
        self._give_back(rid)  # it is computed: what it was to be given has come, or will not
        full = (computed + output.num_scheduled_tokens[rid]) // self._block_tokens
        new_from = computed // self._block_tokens
        scheduled = Scheduled(rid, self._requests[rid].block_hashes, new_from, full)
        runs = self._saves.plan(scheduled, self._lookups.held(rid), self._clock.now_s())
        if self.on_save is not None:
            self.on_save(self._requests[rid], runs)
        hints = self._hints.get(rid)
        return runs if hints is None else [run._replace(hints=hints) for run in runs]

    def loads_failed(self, requests: Sequence[str], blocks: Sequence[int]) -> list[PutBlock]:
        """Workers could not bring these requests' blocks, or these blocks; which may be gone."""
        bad = frozenset(blocks)
        failed = {rid for rid, runs in self._loading.items() if not bad.isdisjoint(_blocks(runs))}
        gone: list[PutBlock] = []
        for rid in failed.union(requests):
            self.counts["failed_loads"] += 1
            for run in self._loading.pop(rid, ()):
                pairs = zip(run.hashes, run.blocks, strict=True)
                gone += [PutBlock(run.group, h) for h, block in pairs if not bad or block in bad]
            self._give_back(rid)
            self._lookups.load_failed(rid, self._clock.now_s())
            if rid in self._requests:
                self._saves.start_over(rid, self._requests[rid].block_hashes)
        return gone

    def finished(self, rid: str) -> dict[str, object] | None:
        """The request has ended, by itself or not; its blocks are vLLM's again.

        What its client is to tell the engine that goes on, if it has asked for that.
        """
        request = self._requests.pop(rid, None)
        self._hear(self._clock.now_s())
        self._count_short(rid, self._local.pop(rid, None))
        self._loading.pop(rid, None)
        self._give_back(rid)
        self._lookups.end(rid)
        self._saves.end(rid)
        hints = self._hints.pop(rid, None)
        if request is None or self._has_left:
            return None
        if hints is not None:
            hashes = tuple(request.block_hashes)
            self._thread.run(lambda: self._tell(hashes, hints))
        return told_on(request, self._namespaces)

    def _count_short(self, rid: str, local: _Local | None) -> None:
        """At its end: nobody has waited for what is known of a request that is too short."""
        blocks = 0 if local is None else self._lookups.short(rid, local.blocks, local.tokens)
        self.counts["short_tokens"] += blocks * self._block_tokens

    def leave(self) -> None:
        """From now on load nothing, save nothing and promise nothing to others.

        For an engine that is told to forget all KV, as it is before its weights are changed: the
        namespaces name those that it has begun with (V7).
        """
        if not self._has_left:
            _LOG.warning(
                "kvharbor: this engine was told to forget all KV, as before a change of its "
                "weights: it goes on without the pool until it is started anew"
            )
        self._has_left = True

    @property
    def totals(self) -> dict[str, int]:
        """Everything that was counted since the start, by the names of stats.TOTALS."""
        return {**self.counts, "circuit_opened": self._pool.times_opened}

    @property
    def open_requests(self) -> int:
        """Requests of which something is remembered."""
        books = len(self._requests), len(self._lookups), len(self._saves), len(self._hints)
        return max(books)

    def close(self) -> None:
        """End the thread and the connection."""
        self._thread.close(CLOSE_TIMEOUT_S)
        self._pool.close()

    def _ask(self, question: Question) -> None:
        self.counts["lookups"] += 1
        lease_id = self._lease_ids.setdefault(question.request, question.number)
        self._thread.run(lambda: self._answers.put(self._answered(question, lease_id)))

    def _give_back(self, rid: str) -> None:
        """Its leases are of no use any more; in the order of what the thread was told before."""
        lease_id = self._lease_ids.pop(rid, None)
        if lease_id is not None:
            self._lookups.leases_ended(rid)
            self._thread.run(lambda: self._given_back(lease_id))

    def _given_back(self, lease_id: int) -> None:
        """In the thread beside the scheduler's. What is not given back lapses."""
        hashes = self._leased.pop(lease_id, ())

        def give_back(pool: Reached) -> None:
            for opened in pool.opened:
                chain = _chain(opened.namespace, hashes)
                pool.store.give_back_lease(opened, chain, lease_id, timeout_s=self._timeout_s)

        if hashes:
            self._pool.tell("giving leases back", give_back)

    def _answered(self, question: Question, lease_id: int) -> Answer:
        """In the thread beside the scheduler's."""
        if not question.hashes:
            return Answer(question.request, question.number, Held(0, self._no_windows()))
        ask = partial(self._held, hashes=question.hashes, lease_id=lease_id)
        held = self._pool.call("a lookup", ask, None, self._deadline_s)
        return Answer(question.request, question.number, held)

    def _tell(self, hashes: Sequence[bytes], hints: Hints) -> None:
        """In the thread beside the scheduler's: what becomes of a chain from now on."""

        def tell(pool: Reached) -> None:
            for opened in pool.opened:
                chain = _chain(opened.namespace, hashes)
                pool.store.hint(opened, chain, hints, timeout_s=self._timeout_s)

        if hashes:
            self._pool.tell("a hint", tell)

    def _no_windows(self) -> tuple[bytes, ...]:
        return (b"",) * self._chained.count(False)

    def _held(self, pool: Reached, hashes: tuple[bytes, ...], lease_id: int) -> Held:
        """Ask for the chains first: what follows their end is of no use in a window."""
        leading = len(hashes)
        leased = 0 if True in self._chained else leading
        for chained, opened in zip(self._chained, pool.opened, strict=True):
            if chained and leading:
                chain = _chain(opened.namespace, hashes[:leading])
                match = pool.store.match_prefix(
                    opened, chain, timeout_s=self._timeout_s, lease_id=lease_id
                )
                leading = match.pages
                leased = max(leased, leading)
        before = self._leased.get(lease_id, ())
        self._leased[lease_id] = max(before, hashes[:leased], key=len)
        windows: list[bytes] = []
        for chained, opened in zip(self._chained, pool.opened, strict=True):
            if not chained:
                chain = _chain(opened.namespace, hashes[:leading])
                found = pool.store.lookup(
                    opened, chain, timeout_s=self._timeout_s, lease_id=lease_id
                )
                windows.append(found.readable)
        return Held(leading, tuple(windows))

    def _hear(self, now_s: float) -> None:
        while True:
            try:
                answer = self._answers.get_nowait()
            except Empty:
                return
            self._lookups.hear(answer, now_s)


def _blocks(runs: Sequence[BlockRun]) -> list[int]:
    return [block for run in runs for block in run.blocks]


def _chain(namespace: Namespace, hashes: Sequence[bytes]) -> PageChain:
    return PageChain(b"".join([engine_key(namespace.id, bytes(each)) for each in hashes]))
