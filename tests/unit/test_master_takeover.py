"""Takeovers at any moment of the store: what is adopted is what the workers hold sealed.

Random puts, removes, expiry, moves, absences and time; then a new master with all that is written
at once and any earlier state of what is written behind, as if the old one had died there. Its
directory equals the workers' records, and pages never live longer for it than their TTL allows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.record import RecordState
from kvstore.replica import ExtentState
from master.packed import words
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig

if TYPE_CHECKING:
    from kvstore.record import Record

TTL_S = 20.0
TUNABLES = Tunables(
    "test", page_ttl_s=TTL_S, watermark_demote=0.2, watermark_low=0.6, watermark_high=0.7,
    nvme_admission="all",
)  # fmt: skip
paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
steps = st.one_of(
    st.tuples(st.just("put"), st.booleans(), paths),
    st.tuples(st.just("put"), st.booleans(), paths),
    st.tuples(st.just("read"), st.booleans(), paths),
    st.tuples(st.just("remove"), st.booleans(), paths),
    st.tuples(st.just("time"), st.sampled_from([0.06, 0.3, 6.0, 13.0]), st.none()),
    st.tuples(st.just("restart"), st.sampled_from(["w1", "w2"]), st.none()),
)


def keys_of(two: bool, path: tuple[int, ...]) -> bytes:
    """Packed keys of the pages along a path."""
    names = (bytes([two, *path[: i + 1]]) for i in range(len(path)))
    return b"".join(hashlib.sha256(name).digest() for name in names)


class History:
    """A pool of two workers, one with a drive, and two namespaces."""

    def __init__(self) -> None:
        self.rig = Rig(TUNABLES)
        self.rig.checks = False  # of every event; they are made at the end
        self.rig.add_worker("w1", chunks=2, nvme_chunks=2)
        self.rig.add_worker("w2", chunks=2)
        self.rig.workers["w1"].stored_bytes = dict.fromkeys(
            (keys_of(False, path) for path in [(0,), (1,)]), 4000
        )
        self.spaces = self.opened()

    def opened(self) -> list[OpenedNamespace]:
        """Both namespaces: of one part of 8 KiB, and of two of 4 KiB."""
        return [self.rig.open_namespace(1, heads=2), self.rig.open_namespace(2)]

    def step(self, what: str, one: object, path: tuple[int, ...] | None) -> None:
        """Let one thing happen, and some time pass: values are written after every other step."""
        self.rig.tick(0.03)
        match what, one, path:
            case "time", float(), _:
                self.rig.pass_time(one)
            case "restart", str(), _:
                self.rig.workers[one].restart()
                self.rig.workers[one].join()
            case "put", bool(), tuple():
                self.spaces[one].put(keys_of(one, path), parts=(0, 1) if one else (0,))
            case "read", bool(), tuple():
                self.spaces[one].match(keys_of(one, path), lease=False)
            case "remove", bool(), tuple():
                self.spaces[one].remove(keys_of(one, path)[-KEY_BYTES:])

    def die(self, unwritten: int) -> None:
        """The master dies before the last so many writes behind; another one comes."""
        rig = self.rig
        behind = [persist for persist in rig.written if persist.behind]
        lost = behind[len(behind) - min(unwritten, len(behind)) :]
        rig.store.clear()
        for persist in rig.written:
            if not any(persist is each for each in lost):
                rig.store.update(persist.puts)
                for key in persist.deletes:
                    rig.store.pop(key, None)
        rig.takeover(2)
        self.spaces = self.opened()


def place(segment: str, record: Record) -> tuple[object, ...]:
    """All that a master knows of a copy."""
    return (
        segment, record.offset, record.key, record.part, record.generation, record.checksum,
        record.parent, record.namespace_ordinal,
    )  # fmt: skip


def held(rig: Rig) -> Counter[tuple[object, ...]]:
    """What the workers hold sealed."""
    return Counter(
        place(segment.segment, record)
        for worker in rig.workers.values()
        for segment in worker.segments
        for record in segment.records.values()
        if record.state is RecordState.SEALED
    )


def known(rig: Rig) -> Counter[tuple[object, ...]]:
    """What the directory says is readable."""
    found: Counter[tuple[object, ...]] = Counter()
    for each in rig.master.core.namespaces:
        for run in each.tree.all_runs():
            for copy in run.copies:
                columns = words(copy.offsets), words(copy.generations), words(copy.checksums)
                for page, (offset, generation, checksum) in enumerate(zip(*columns, strict=True)):
                    if generation:
                        parent = run.key(page - 1) if page else run.parent
                        found[
                            copy.segment.id, offset, run.key(page), copy.part, generation,
                            checksum, parent, run.namespace,
                        ] += 1  # fmt: skip
    return found


def unaccounted(rig: Rig) -> set[tuple[object, ...]]:
    """Extents that the new master will have fenced."""
    return {
        (segment.id, chunk.offset(slot))
        for segment in rig.master.core.segments.values()
        for chunk in segment.allocator.chunk_list
        for slot in chunk.slots_in(ExtentState.QUARANTINED)
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=6, max_size=30), st.integers(0, 12), st.booleans())
def test_the_directory_is_what_workers_hold(
    history: list[tuple[str, object, tuple[int, ...] | None]], unwritten: int, restarted: bool
) -> None:
    pool = History()
    rig = pool.rig
    for each in history:
        pool.step(*each)
    before = known(rig)
    pool.die(unwritten)
    for worker in rig.workers.values():
        if restarted:
            worker.restart()
        worker.join()
    rig.master.check_invariants()
    # Evicted and expired pages whose extents the old master had not freed yet come back as well;
    # of those that were put again meanwhile one is kept and the other is fenced.
    fenced = unaccounted(rig)
    assert known(rig) == Counter({e: 1 for e in held(rig) if (e[0], e[1]) not in fenced})
    lost = [each for each in before if each not in known(rig)]
    assert not [each for each in lost if (each[0], each[1]) not in fenced]
    assert not [each for each in lost if each[2] not in {e[2] for e in known(rig)}]
    for run in (run for each in rig.master.core.namespaces for run in each.tree.all_runs()):
        assert run.expires_s <= rig.now + max(TTL_S, run.ttl_s)
        assert run.leased_until_s >= rig.master.core.started_s
        assert run.parent == ROOT_PARENT or len(run.parent) == KEY_BYTES
    rig.pass_time(45.0, step_s=1.0)
    rig.master.check_invariants()
    assert not any(known(rig).values())
    assert not held(rig)
    assert not [key for key in rig.store if key.startswith("segments/")]
