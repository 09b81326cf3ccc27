"""The prefix tree against a naive model that knows single pages only."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore import limits
from kvstore.errors import InvariantBroken
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.segment import check_geometry
from kvstore.wire.messages.common import SegmentRef
from master.directory import Tree
from master.packed import pack_words, split_keys, word, words
from master.run import NEVER, Copy, Run
from master.segments import Segment
from master.sharded import SHARD_FROM_ENTRIES
from master.wheel import NOWHERE, Wakeup, Wheel
from tests.unit.master_rig import chain

PARTS = 2
paths = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


def segment(name: str) -> Segment:
    """A segment that may be read."""
    made = Segment(SegmentRef(name, 1, "dram", check_geometry(limits.CHUNK_BYTES), "w", "h", ()))
    made.readable = True
    return made


def key_of(path: tuple[int, ...]) -> bytes:
    """Key of the page at the end of a path."""
    return hashlib.sha256(bytes(path)).digest() if path else ROOT_PARENT


def keys_of(path: tuple[int, ...], start: int = 0) -> bytes:
    """Packed keys of the pages along a path, from the `start`-th on."""
    return b"".join(key_of(path[: i + 1]) for i in range(start, len(path)))


def pattern(parent: bytes = ROOT_PARENT, **fields: float) -> Run:
    """What new runs are made like."""
    run = Run(1, parent, b"", 10.0, 0.0, 100.0, 1.0)
    for name, value in fields.items():
        setattr(run, name, value)
    return run


class Page(msgspec.Struct):
    """One page of the model: its parent, its places by part and segment, its lease."""

    parent: bytes
    places: dict[tuple[int, str], tuple[int, int, int]] = {}
    leased_until_s: float = 0.0


class TreeMachine(RuleBasedStateMachine):
    """Adds, fills, splits, clears and prunes; compares every lookup with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.expiry: Wheel[Run] = Wheel(1.0, Wakeup())
        self.tree = Tree(1, PARTS, self.expiry)
        self.segments = {name: segment(name) for name in ("a", "b")}
        self.pages: dict[bytes, Page] = {}
        self.version = 0
        self.generation = 0

    @rule(path=paths, start=st.integers(0, 8))
    def add(self, path: tuple[int, ...], start: int) -> None:
        """Add a stretch of new pages, below pages that may be missing (an orphan)."""
        start = min(start, len(path) - 1)
        keys = keys_of(path, start)
        new = [i for i, key in enumerate(split_keys(keys)) if key not in self.pages]
        if not new:
            return
        first = new[0]
        count = next((i for i in range(len(new)) if new[i] != first + i), len(new))
        stretch = keys[first * KEY_BYTES : (first + count) * KEY_BYTES]
        parent = key_of(path[: start + first])
        self.tree.add(pattern(parent), stretch)
        for key in split_keys(stretch):
            self.pages[key] = Page(parent, {})
            parent = key
        self.fill_pages(stretch, 0, "a")

    @rule(path=paths, part=st.integers(0, PARTS - 1), name=st.sampled_from("ab"))
    def fill(self, path: tuple[int, ...], part: int, name: str) -> None:
        """Note a copy of the pages along a path that lack it."""
        self.fill_pages(keys_of(path), part, name)

    def fill_pages(self, keys: bytes, part: int, name: str) -> None:
        """Fill page by page, or a stretch at once where all of it is empty."""
        for stretch in self.tree.stretches(keys):
            singles = split_keys(stretch.run.keys)[stretch.page : stretch.page + stretch.count]
            empty = [(part, name) not in self.pages[key].places for key in singles]
            if all(empty):
                self.fill_run(stretch.run, stretch.page, singles, part, name)
                continue
            for i, key in enumerate(singles):
                if empty[i]:
                    self.fill_run(stretch.run, stretch.page + i, [key], part, name)

    def fill_run(self, run: Run, page: int, keys: list[bytes], part: int, name: str) -> None:
        """Fill these pages of a run in one call."""
        places = []
        for key in keys:
            self.generation += 1
            place = self.generation * 4096, self.generation, self.generation + 7
            self.pages[key].places[part, name] = place
            places.append(place)
        offsets, generations, checksums = (
            pack_words(column) for column in zip(*places, strict=True)
        )
        piece = Copy(part, self.segments[name], 4096, offsets, generations, checksums, absent=0)
        run.fill(page, piece)

    @rule(path=paths)
    def lease(self, path: tuple[int, ...]) -> None:
        """Match as readers do: split at the end, lease what was matched."""
        found = self.tree.leading(keys_of(path), self.version)
        for i, stretch in enumerate(found):
            run, end = stretch.run, stretch.page + stretch.count
            if i == len(found) - 1 and end < len(run):
                run, _ = self.tree.split(run, end)
            self.generation += 1
            run.lease(float(self.generation))
            for key in split_keys(run.keys):
                self.pages[key].leased_until_s = run.leased_until_s

    @rule(path=paths, part=st.integers(0, PARTS - 1), name=st.sampled_from("ab"))
    def lose(self, path: tuple[int, ...], part: int, name: str) -> None:
        """Take one copy of the last page of a path away."""
        key = key_of(path)
        run = self.tree.get(key)
        if run is None or (part, name) not in self.pages[key].places:
            return
        del self.pages[key].places[part, name]
        copy = next(c for c in run.copies_of(part) if c.segment.id == name)
        run.clear(copy, run.page_of(key))
        self.prune(run)

    @rule(path=paths, count=st.integers(1, 4))
    def drop_tail(self, path: tuple[int, ...], count: int) -> None:
        """Take every copy of the last pages of a run away, as eviction does."""
        run = self.tree.get(key_of(path))
        if run is None:
            return
        first = max(0, len(run) - count)
        for copy in run.copies:
            run.clear(copy, first, len(run) - first)
        for key in split_keys(run.keys)[first:]:
            self.pages[key].places.clear()
        self.prune(run)

    def prune(self, run: Run) -> None:
        """Prune, and forget in the model what must be gone by the rule."""
        bared = self.tree.prune(run)
        while True:
            parents = {page.parent for page in self.pages.values()}
            gone = [k for k, p in self.pages.items() if not p.places and k not in parents]
            if not gone:
                break
            for key in gone:
                del self.pages[key]
        for each in bared:
            assert each.keys
            assert not self.tree.has_children(each)

    @rule(name=st.sampled_from("ab"))
    def toggle(self, name: str) -> None:
        """A segment can be read, or no longer."""
        self.segments[name].readable = not self.segments[name].readable
        self.version += 1

    def is_readable(self, key: bytes) -> bool:
        """What the model says of one page."""
        places = self.pages[key].places if key in self.pages else {}
        parts = {part for part, name in places if self.segments[name].readable}
        return len(parts) == PARTS

    @rule(paths=st.lists(paths, min_size=1, max_size=4))
    def look_up(self, paths: list[tuple[int, ...]]) -> None:
        """Any pages in any order are found where they are."""
        asked = [key_of(path[: i + 1]) for path in paths for i in range(len(path))]
        found: dict[int, bytes] = {}
        for stretch in self.tree.stretches(b"".join(asked)):
            mask = stretch.run.readable(PARTS, self.version)
            for i in range(stretch.count):
                key = stretch.run.key(stretch.page + i)
                found[stretch.first + i] = key
                assert bool(mask[stretch.page + i]) == self.is_readable(key)
        assert found == {i: key for i, key in enumerate(asked) if key in self.pages}

    @rule(path=paths)
    def match(self, path: tuple[int, ...]) -> None:
        """A match is the longest readable prefix."""
        keys = keys_of(path)
        found = self.tree.leading(keys, self.version)
        count = sum(stretch.count for stretch in found)
        readable = [self.is_readable(key) for key in split_keys(keys)]
        assert count == (readable.index(False) if False in readable else len(readable))
        assert [stretch.first for stretch in found] == [
            sum(s.count for s in found[:i]) for i in range(len(found))
        ]

    @invariant()
    def pages_are_what_the_model_says(self) -> None:
        """Keys, parents, places, leases; nothing is lost by splits and prunes."""
        self.tree.check()
        assert self.tree.pages == len(self.pages)
        for run in self.tree.all_runs():
            assert run.bucket != NOWHERE
            above = run.parent
            for i, key in enumerate(split_keys(run.keys)):
                page = self.pages[key]
                assert page.parent == above
                assert page.leased_until_s == run.leased_until_s or not page.leased_until_s
                held = {
                    (copy.part, copy.segment.id): (
                        copy.offset(i), copy.generation(i), words(copy.checksums)[i]
                    )
                    for copy in run.copies
                    if copy.generation(i)
                }  # fmt: skip
                assert held == page.places
                above = key


TestTree = TreeMachine.TestCase


def filled(tree: Tree, keys: bytes, parent: bytes = ROOT_PARENT) -> list[Run]:
    """New runs with a copy of part 0 in a segment of their own."""
    runs = tree.add(pattern(parent), keys)
    for number, run in enumerate(runs):
        offsets = pack_words(range(0, len(run) * 4096, 4096))
        columns = offsets, word(1) * len(run), bytes(8 * len(run))
        run.fill(0, Copy(0, segment(f"s{number}"), 4096, *columns, absent=0))
    return runs


def small_tree() -> Tree:
    """An empty tree of one part a page."""
    return Tree(1, 1, Wheel(1.0, Wakeup()))


def test_a_long_chain_is_cut_into_runs() -> None:
    tree = small_tree()
    keys = chain(1, 2 * limits.RUN_PAGES_MAX + 5)
    runs = filled(tree, keys)
    assert [len(run) for run in runs] == [256, 256, 5]
    assert [s.count for s in tree.leading(keys, 0)] == [256, 256, 5]
    assert tree.parent_run(runs[1]) is runs[0]
    tree.check()


def test_a_branch_splits_the_run_above_it() -> None:
    tree = small_tree()
    keys = chain(1, 10)
    (trunk,) = filled(tree, keys)
    trunk.leased_until_s, trunk.heat, trunk.bias = 5.0, 7.0, 8.0
    trunk.touches, trunk.touched_s = 9, 10.0
    branch = filled(tree, chain(2, 3), parent=keys[3 * KEY_BYTES : 4 * KEY_BYTES])[0]
    above = tree.parent_run(branch)
    assert above is not None
    assert len(above) == 4
    rest = next(run for run in tree.children(above) if run is not branch)
    for run in (above, rest):
        assert (run.leased_until_s, run.expires_s) == (5.0, 100.0)
        assert (run.heat, run.bias, run.touches, run.touched_s) == (7.0, 8.0, 9, 10.0)
    tree.check()


def test_the_longer_half_keeps_its_object() -> None:
    tree = small_tree()
    (run,) = filled(tree, chain(1, 10))
    head, tail = tree.split(run, 2)
    assert (tail, len(head), len(tail)) == (run, 2, 8)
    head, tail = tree.split(run, 6)
    assert (head, len(head), len(tail)) == (run, 6, 2)
    tree.check()


def test_an_orphan_is_found_by_its_parent_later() -> None:
    tree = small_tree()
    keys = chain(1, 8)
    filled(tree, keys[4 * KEY_BYTES :], parent=keys[3 * KEY_BYTES : 4 * KEY_BYTES])
    assert tree.leading(keys, 0) == []
    assert [s.first for s in tree.stretches(keys)] == [4]
    filled(tree, keys[: 4 * KEY_BYTES])
    assert [s.count for s in tree.leading(keys, 0)] == [4, 4]
    tree.check()


def test_orphans_of_middle_pages_cut_new_runs() -> None:
    tree = small_tree()
    keys = chain(1, 8)
    filled(tree, chain(2, 1), parent=keys[2 * KEY_BYTES : 3 * KEY_BYTES])
    filled(tree, chain(3, 1), parent=keys[5 * KEY_BYTES : 6 * KEY_BYTES])
    assert [len(run) for run in filled(tree, keys)] == [3, 3, 2]
    tree.check()


def test_a_hole_stays_while_something_hangs_below() -> None:
    tree = small_tree()
    keys = chain(1, 4)
    (trunk,) = filled(tree, keys)
    (leaf,) = filled(tree, chain(2, 2), parent=trunk.last_key)
    trunk.clear(trunk.copies[0], 0, 4)
    assert tree.prune(trunk) == []
    assert tree.get(keys[:KEY_BYTES]) is trunk
    leaf.clear(leaf.copies[0], 0, 2)
    assert tree.prune(leaf) == []
    assert (tree.pages, tree.runs) == (0, 0)


def test_pruning_tells_who_lost_the_last_child() -> None:
    tree = small_tree()
    (trunk,) = filled(tree, chain(1, 4))
    (leaf,) = filled(tree, chain(2, 2), parent=trunk.last_key)
    leaf.clear(leaf.copies[0], 0, 2)
    assert tree.prune(leaf) == [trunk]


def test_a_tree_grows_into_shards() -> None:
    tree = small_tree()
    keys = chain(1, SHARD_FROM_ENTRIES + 10)
    filled(tree, keys)
    assert sum(s.count for s in tree.leading(keys, 0)) == SHARD_FROM_ENTRIES + 10
    tree.check()


@pytest.mark.parametrize(
    "spoil", ["index", "count", "child", "keys", "columns", "absent", "hole", "twice", "empty copy"]
)
def test_faults_are_found(spoil: str) -> None:
    tree = small_tree()
    (trunk,) = filled(tree, chain(1, 4))
    (leaf,) = filled(tree, chain(2, 2), parent=trunk.last_key)
    copy = leaf.copies[0]
    match spoil:
        case "index":
            tree.add(pattern(), leaf.keys)
        case "count":
            tree.pages += 1
        case "child":
            leaf.parent = trunk.key(0)
        case "keys":
            leaf.keys = leaf.keys[KEY_BYTES:]
        case "columns":
            copy.checksums += bytes(8)
        case "absent":
            copy.absent = 1
        case "hole":
            leaf.copies = ()
        case "twice":
            leaf.copies = (copy, copy)
        case "empty copy":
            copy.clear(0, 2)
    leaf.mask_version = NEVER
    with pytest.raises(InvariantBroken, match="I16"):
        tree.check()


def test_a_loop_of_parents_is_foreseen_and_found() -> None:
    tree = small_tree()
    above = chain(3, 1)
    (trunk,) = filled(tree, chain(1, 4), parent=above)
    assert tree.is_above([chain(6, 1), above], trunk.last_key)
    assert tree.is_above([chain(5, 1)], chain(5, 1))
    assert not tree.is_above([chain(5, 1)], trunk.last_key)
    assert not tree.is_above([above], ROOT_PARENT)
    tree.check()
    filled(tree, above, parent=trunk.last_key)
    with pytest.raises(InvariantBroken, match="I16: pages are their own ancestors"):
        tree.check()
