"""Which of equally good replicas is read, after what was seen of their workers."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest

from kvstore.segment import Geometry
from kvstore.transfer.worker_load import ALIKE, LOOK_AGAIN, NOMINAL_S, WORKERS_MAX, WorkerLoads
from kvstore.wire.messages.common import SegmentRef

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 1 << 18
SOON_S, LATE_S = 0.0005, 0.005
SEED = 1


def ref(worker: str, tier: str = "dram") -> SegmentRef:
    return SegmentRef(f"s-{worker}", 1, tier, Geometry(1 << 26), worker, "h", ())


A, B, C = ref("a"), ref("b"), ref("c")


def loads(**took_s: float) -> WorkerLoads:
    """What a client thinks that has read from each worker for long."""
    made = WorkerLoads(Random(SEED))
    for worker, seconds in took_s.items():
        for _ in range(50):
            made.took(ref(worker), SIZE, seconds)
    return made


def firsts(made: WorkerLoads, alike: Sequence[SegmentRef], tries: int) -> Counter[str]:
    return Counter(alike[made.order(alike)[0]].worker for _ in range(tries))


def test_the_faster_of_two_is_read() -> None:
    assert firsts(loads(a=LATE_S, b=SOON_S), [A, B], LOOK_AGAIN) == {"b": LOOK_AGAIN}


def test_every_replica_is_in_the_order_and_the_slowest_is_failed_over_to_last() -> None:
    made = loads(a=LATE_S, b=SOON_S, c=2 * SOON_S)
    for _ in range(LOOK_AGAIN):
        order = made.order([A, B, C])
        assert sorted(order) == [0, 1, 2]
        assert order[2] == 0


def test_a_worker_that_was_passed_over_for_long_is_looked_at_once() -> None:
    made = loads(a=LATE_S, b=SOON_S)
    assert firsts(made, [A, B], 10 * (LOOK_AGAIN + 1)) == {"a": 10, "b": 10 * LOOK_AGAIN}


def test_a_worker_that_became_fast_again_is_read_as_before() -> None:
    made = loads(a=SOON_S, b=SOON_S)
    made.failed(A)
    assert firsts(made, [A, B], LOOK_AGAIN) == {"b": LOOK_AGAIN}
    for _ in range(20):
        made.took(A, SIZE, SOON_S)
    assert min(firsts(made, [A, B], 200).values()) > 50


def test_those_about_as_fast_share_the_reads() -> None:
    made = loads(a=SOON_S, b=SOON_S * (ALIKE - 0.1), c=SOON_S)
    assert min(firsts(made, [A, B, C], 300).values()) > 60


def test_the_fastest_of_many_is_not_taken_by_everybody() -> None:
    made = loads(a=SOON_S, b=2 * SOON_S, c=4 * SOON_S)
    shares = firsts(made, [A, B, C], 300)
    assert shares["a"] > shares["b"] > 60  # where a is not drawn
    assert shares["c"] < 10


def test_the_unknown_is_tried_first_and_once() -> None:
    made = loads(a=SOON_S, b=SOON_S)
    assert firsts(made, [A, B, C], 1) == {"c": 1}
    made.took(C, SIZE, LATE_S)
    assert firsts(made, [A, B, C], 20)["c"] == 0


def test_reads_of_all_sizes_are_compared() -> None:
    made = WorkerLoads(Random(SEED))
    for _ in range(20):
        made.took(A, 64 << 20, 0.06)  # 1 GB/s
        made.took(B, 4096, 3 * NOMINAL_S)
    assert firsts(made, [A, B], 50) == {"a": 50}
    made.took(B, 4096, NOMINAL_S / 2)
    for _ in range(20):
        made.took(B, 64 << 20, 0.02)
    assert firsts(made, [A, B], 50) == {"b": 50}


def test_a_worker_s_disk_and_memory_are_measured_apart() -> None:
    made = loads(a=SOON_S, b=LATE_S)
    made.took(ref("a", "nvme"), SIZE, 1.0)
    made.took(ref("b", "nvme"), SIZE, SOON_S)
    assert firsts(made, [A, B], 20) == {"a": 20}
    assert firsts(made, [ref("a", "nvme"), ref("b", "nvme")], 20) == {"b": 20}


@pytest.mark.parametrize("failures", [1, 1000])
def test_failures_count_as_a_stall_and_no_more(failures: int) -> None:
    made = loads(a=SOON_S, b=SOON_S)
    for _ in range(failures):
        made.failed(A)
    for _ in range(40):
        made.took(A, SIZE, SOON_S)
    assert min(firsts(made, [A, B], 200).values()) > 50


def test_what_is_remembered_is_bounded() -> None:
    made = loads(a=SOON_S, b=LATE_S)
    for i in range(WORKERS_MAX - 1):
        made.took(ref(f"w{i}"), SIZE, SOON_S)
    assert set(made.order([A, B])) == {0, 1}
    assert len(made._slowness) <= WORKERS_MAX  # noqa: SLF001 -- the bound is the test
