"""The pages of one namespace: a prefix tree of runs, and an index from page key to run.

Owns the shape of the tree: every page is in exactly one run, children hang below the last page of
a run only, and a page without any copy (a hole) stays while something hangs below it or a plan for
it is open. A run whose parent page is not in the tree is an orphan: it is found by its keys, and
becomes a child when its parent comes. Must not know workers, messages, leases' rules or policies.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from kvstore import limits
from kvstore.errors import InvariantBroken
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from master.packed import NOT_THERE, common_bytes, index_of, split_keys
from master.run import NEVER, Run
from master.sharded import ShardedDict
from master.wheel import NOWHERE, Wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from master.run import Copy

RUN_BYTES = limits.RUN_PAGES_MAX * KEY_BYTES
SCAN_KEYS = 128
"""Looked up in one step of a scan."""


class Stretch(msgspec.Struct, gc=False, eq=False, frozen=True):
    """Pages [first, first + count) of what was asked are pages [page, ...) of `run`."""

    first: int
    count: int
    run: Run
    page: int


class Tree:
    """One namespace's runs. `parts` is how many parts make a page readable."""

    __slots__ = ("_children", "_expiry", "_index", "namespace", "pages", "parts", "runs")

    def __init__(self, namespace: int, parts: int, expiry: Wheel[Run]) -> None:
        """Start empty. Runs are in `expiry` from when they are added until they are gone."""
        self.namespace = namespace
        self.parts = parts
        self.pages = 0
        self.runs = 0
        self._index: ShardedDict[Run] = ShardedDict()
        self._children: ShardedDict[dict[Run, None]] = ShardedDict()  # by the parent page's key
        self._expiry = expiry

    def get(self, key: bytes) -> Run | None:
        """The run that holds `key`."""
        return self._index.get(key)

    def has_children(self, run: Run) -> bool:
        """Whether something hangs below the last page."""
        return run.last_key in self._children

    def children(self, run: Run) -> Iterator[Run]:
        """The runs that hang below the last page, oldest first."""
        return iter(self._children.get(run.last_key) or ())

    def parent_run(self, run: Run) -> Run | None:
        """The run that holds the parent page."""
        return self._index.get(run.parent)

    def missing_above(self, key: bytes) -> bytes:
        """The nearest page from `key` upwards that is not in the tree; ROOT_PARENT if all are."""
        while key != ROOT_PARENT and (run := self._index.get(key)) is not None:
            key = run.parent
        return key

    def is_above(self, keys: list[bytes], page: bytes) -> bool:
        """Whether one of these pages, were it in the tree, would be above `page`, or is itself.

        Hung below `page`, it would be its own ancestor. Without anything below one of them there
        is no need to walk up.
        """
        if page == ROOT_PARENT or not (page in keys or self._children.places(keys)):
            return False
        return self.missing_above(page) in keys

    def runs_of(self, keys: bytes) -> list[Run | None]:
        """The run that holds each page of `keys`; None for those that are not in the tree."""
        shards, mask = self._index.shards, self._index.mask
        return [shards[key[0] & mask].get(key) for key in split_keys(keys)]

    def stretches(self, keys: bytes, *, prefix_only: bool = False) -> list[Stretch]:
        """Where the pages of `keys` are, in order; those that are not in the tree are left out.

        `prefix_only`: those before the first one that is not in the tree.
        """
        found: list[Stretch] = []
        shards, mask = self._index.shards, self._index.mask
        offset, end = 0, len(keys)
        while offset < end:
            key = keys[offset : offset + KEY_BYTES]
            run = shards[key[0] & mask].get(key)
            if run is None:
                if prefix_only:
                    break
                offset += KEY_BYTES
                continue
            if keys.startswith(run.keys, offset):  # the usual case: all of a run
                page, size = 0, len(run.keys)
            else:
                page = index_of(run.keys, key)
                size = common_bytes(run.keys, page * KEY_BYTES, keys, offset)
            found.append(Stretch(offset // KEY_BYTES, size // KEY_BYTES, run, page))
            offset += size
        return found

    def leading(self, keys: bytes, version: int) -> list[Stretch]:
        """The longest run of leading pages that are readable now (I16)."""
        found = self.stretches(keys, prefix_only=True)
        for number, stretch in enumerate(found):
            page, count = stretch.page, stretch.count
            gap = stretch.run.readable(self.parts, version).find(0, page, page + count)
            if gap >= 0:
                del found[number:]
                if gap > page:
                    found.append(Stretch(stretch.first, gap - page, stretch.run, page))
                break
        return found

    def add(self, pattern: Run, keys: bytes) -> list[Run]:
        """New runs for consecutive pages that are not in the tree, below `pattern.parent`.

        Everything but keys and parent is taken from `pattern`. The parent's run is split where
        they branch off, and where a page in the middle is an orphan's parent.
        """
        self._split_after(pattern.parent)
        added: list[Run] = []
        parent = pattern.parent
        for start, stop in self._cuts(keys):
            run = _copied(pattern, parent, keys[start:stop])
            self._link(run)
            added.append(run)
            parent = run.last_key
        return added

    def _cuts(self, keys: bytes) -> Iterator[tuple[int, int]]:
        start, end = 0, len(keys)
        stops = [end]
        if self._children:
            parents = self._children.places(split_keys(keys))
            stops = [(i + 1) * KEY_BYTES for i in parents]
            stops.append(end)
        for stop in stops:
            while start < stop:
                cut = min(stop, start + RUN_BYTES)
                yield start, cut
                start = cut

    def _link(self, run: Run) -> None:
        self._index.put_all(split_keys(run.keys), run)
        self._adopt(run)
        self.runs += 1
        self.pages += len(run)
        self._expiry.place(run, run.expires_s)

    def _adopt(self, run: Run) -> None:
        """Hang `run` below its parent page."""
        if run.parent != ROOT_PARENT:
            siblings = self._children.get(run.parent)
            if siblings is None:
                self._children.put(run.parent, {run: None})
            else:
                siblings[run] = None

    def _split_after(self, key: bytes) -> None:
        run = self._index.get(key)
        if run is not None and not run.keys.endswith(key):
            self.split(run, run.page_of(key) + 1)

    def split(self, run: Run, page: int) -> tuple[Run, Run]:
        """Cut `run` before `page`: (head, tail). Both inherit everything; the longer stays `run`.

        So what is indexed anew is the shorter one, and a head is not always the object it was.
        """
        pages, at = len(run), page * KEY_BYTES
        assert 0 < page < pages, (page, pages)
        other = _copied(run, run.parent, run.keys)
        other.leased_until_s = run.leased_until_s
        other.lapsing_until_s = run.lapsing_until_s
        other.leases = run.leases and dict(run.leases)
        other.read_until_s = run.read_until_s
        other.kept_until_s = run.kept_until_s
        head, tail = (run, other) if 2 * page >= pages else (other, run)
        copies, plans, keys = run.copies, run.plans, run.keys
        tail.copies = tuple(_pieces(copies, page, pages))
        head.copies = tuple(_pieces(copies, 0, page))
        head.keys, tail.keys = keys[:at], keys[at:]
        head.plans = tuple(plan for plan in plans if _overlap(plan.keys, head.keys))
        tail.plans = tuple(plan for plan in plans if _overlap(plan.keys, tail.keys))
        head.mask_version = tail.mask_version = NEVER
        if head is other and run.parent != ROOT_PARENT:
            siblings = self._children.get(run.parent)
            assert siblings is not None, run.parent
            del siblings[run]
            siblings[head] = None
        tail.parent = head.last_key
        self._index.put_all(split_keys(other.keys), other)
        self._adopt(tail)
        self.runs += 1
        if run.bucket != NOWHERE:
            self._expiry.place(other, other.expires_s)
        elif not tail.plans and not self.has_children(tail):
            # An overdue run waits for its plans; those may all be the head's.
            self._expiry.place(tail, tail.expires_s)
        return head, tail

    def cut_at_end(self, stretch: Stretch) -> Stretch:
        """The same pages as the last ones of a run, which is split for it if need be."""
        end = stretch.page + stretch.count
        if end == len(stretch.run):
            return stretch
        head, _ = self.split(stretch.run, end)
        return Stretch(stretch.first, stretch.count, head, stretch.page)

    def prune(self, run: Run) -> list[Run]:
        """Drop holes that nothing hangs below, from the end of `run` and on towards the root.

        Returns the runs whose last page has lost its last child: they may be overdue.
        """
        bared: list[Run] = []
        while run.keys and not self.has_children(run):
            keep = len(run)
            while keep and run.is_hole(keep - 1):
                keep -= 1
            if keep == len(run):
                break
            parent = self.parent_run(run) if not keep else None
            self._cut_tail(run, keep)
            if keep:
                break
            if parent is None or self.has_children(parent):
                break
            run = parent
            bared.append(run)
        return [each for each in bared if each.keys]

    def _cut_tail(self, run: Run, keep: int) -> None:
        dropped = run.keys[keep * KEY_BYTES :]
        for key in split_keys(dropped):
            self._index.pop(key)
        self.pages -= len(dropped) // KEY_BYTES
        if keep:
            run.copies = tuple(_pieces(run.copies, 0, keep))
            run.keys = run.keys[: keep * KEY_BYTES]
            run.mask_version = NEVER
            return
        self.runs -= 1
        self._expiry.discard(run)
        if run.parent != ROOT_PARENT:
            siblings = self._children.get(run.parent)
            assert siblings is not None, run.parent
            del siblings[run]
            if not siblings:
                self._children.pop(run.parent)
        run.keys = b""
        run.copies = ()

    def all_runs(self) -> list[Run]:
        """Every run, in no meaningful order. For checks and dumps only: it takes a full scan."""
        return list(dict.fromkeys(self._index.values()))

    def in_steps(self, scan: int, runs_max: int) -> Iterator[list[Run]]:
        """Every run once, so many at a time at most; numbers of scans rise.

        Of what is added meanwhile some may be left out. What is split meanwhile is not: both halves
        know whether the whole was seen.
        """
        for number in range(len(self._index.shards)):
            keys = list(self._index.shards[number])
            for at in range(0, len(keys), SCAN_KEYS):
                runs: list[Run] = []
                for key in keys[at : at + SCAN_KEYS]:
                    run = self._index.get(key)
                    if run is not None and run.scanned != scan:
                        run.scanned = scan
                        runs.append(run)
                    if len(runs) == runs_max:
                        yield runs
                        runs = []
                yield runs

    def keys_after(self, key: bytes, count: int) -> list[bytes]:
        """The next pages in the order of their keys, whether they can be read or not."""
        return self._index.after(key, count)

    def check(self) -> None:
        """Raise InvariantBroken unless index, runs and children agree (I16)."""
        runs = self.all_runs()
        pages = {key: run for run in runs for key in split_keys(run.keys)}
        if len(pages) != sum(map(len, runs)) or pages != dict(self._index.items()):
            raise InvariantBroken("I16: a page is in no run, or in two")
        if (self.runs, self.pages) != (len(runs), len(pages)):
            raise InvariantBroken(f"I16: counts {self.runs} runs, {self.pages} pages")
        hanging = {run: key for key, under in self._children.items() for run in under}
        wanted = {run: run.parent for run in runs if run.parent != ROOT_PARENT}
        if hanging != wanted:
            raise InvariantBroken("I16: a run does not hang below its parent")
        for key in self._children:
            holder = pages.get(key)
            if holder is not None and holder.last_key != key:
                raise InvariantBroken("I16: something hangs below the middle of a run")
        reached, below = 0, [run for run in runs if run.parent not in pages]
        while below:
            reached += 1
            below += self.children(below.pop())
        if reached != len(runs):
            raise InvariantBroken("I16: pages are their own ancestors")
        for run in runs:
            self._check_run(run)

    def _check_run(self, run: Run) -> None:
        if not 0 < len(run) <= limits.RUN_PAGES_MAX or run.namespace != self.namespace:
            raise InvariantBroken(f"I16: run of {len(run)} pages")
        if not self.has_children(run) and run.is_hole(len(run) - 1):
            raise InvariantBroken("I16: a hole at the end, and nothing below")
        if any(a.segment.rank > b.segment.rank for a, b in pairwise(run.copies)):
            raise InvariantBroken("I16: copies are not fastest first")
        places = [(copy.part, copy.segment.id) for copy in run.copies]
        if len(set(places)) != len(places):
            raise InvariantBroken("I16: two copies of one part in one segment")
        for copy in run.copies:
            absent = copy.present(0, len(run)).count(0)
            columns = copy.offsets, copy.generations, copy.checksums
            if {len(column) for column in columns} != {8 * len(run)} or copy.absent != absent:
                raise InvariantBroken(f"I16: columns of part {copy.part} differ in length")
            if absent == len(run):
                raise InvariantBroken(f"I16: an empty copy of part {copy.part}")


def _copied(pattern: Run, parent: bytes, keys: bytes) -> Run:
    return Run(
        pattern.namespace,
        parent,
        keys,
        pattern.ttl_s,
        pattern.created_s,
        pattern.expires_s,
        pattern.heat,
        pattern.bias,
        pattern.touches,
        pattern.touched_s,
        pattern.era,
        progress_s=pattern.progress_s,
        cold_hits=pattern.cold_hits,
        replicas=pattern.replicas,
        extra=pattern.extra,
        thinned=pattern.thinned,
        reads=pattern.reads,
        reads_at_s=pattern.reads_at_s,
        scanned=pattern.scanned,
    )


def _pieces(copies: tuple[Copy, ...], first: int, stop: int) -> Iterator[Copy]:
    """The copies of pages [first, stop) alone, as far as they have any of them."""
    pieces = (copy.piece(first, stop) for copy in copies)
    return (piece for piece in pieces if piece is not None)


def _overlap(some: bytes, other: bytes) -> bool:
    """Whether two stretches of chains share a page."""
    return (
        index_of(some, other[:KEY_BYTES]) != NOT_THERE
        or index_of(other, some[:KEY_BYTES]) != NOT_THERE
    )
