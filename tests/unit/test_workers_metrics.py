"""What a worker counts of its tiers, and that monitoring sees each of it."""

from __future__ import annotations

from kvstore.replica import Tier
from kvstore.wire.messages.common import Outcome
from workers.metrics import (
    Counts,
    DiskLook,
    Look,
    ScrubLook,
    SegmentLook,
    StagingLook,
    exposition,
)

DISK = DiskLook("read_only", "EROFS", True, 3, 11, 1100, 2200, 13, 1300, {"stale": 5})


SCRUB = ScrubLook(3, 70, 8192, 2, 12.5)
NO_SCRUB = ScrubLook(0, 0, 0, 0, 0.0)


def look(moves: dict[str, int]) -> Look:
    return Look(
        "w", "c", 1, True, False, 0, 0, 0, 0, 0, 0, 0, {}, moves, {"ok": 6}, {"tcp": 700}, 800,
        (
            SegmentLook("m", "dram", 1, 64, 0, 1, 0, SCRUB),
            SegmentLook("n", "nvme", 1, 64, 0, 1, 0, NO_SCRUB, DISK),
        ),
        StagingLook(256, 7, 8, 9, 10),
    )  # fmt: skip


def test_moves_are_counted_by_way_and_only_where_pages_arrived() -> None:
    counts = Counts()
    counts.note_move(Tier.DRAM, Tier.NVME, bytes((0, 0, Outcome.TOO_BIG)))
    counts.note_move(Tier.DRAM, Tier.NVME, bytes(3))
    counts.note_move(Tier.NVME, Tier.DRAM, bytes((Outcome.CHECKSUM,)))
    assert counts.moves == {"dram-nvme": 5, "nvme-dram": 0}


def test_copies_are_counted_by_what_came_of_them_and_bytes_by_the_way_they_went() -> None:
    counts = Counts()
    counts.note_copy(bytes((0, 0, Outcome.SOURCE_LOST)))
    counts.note_copy(bytes(1))
    counts.note_copied_in("tcp", 100)
    counts.note_copied_in("shm", 10)
    counts.note_copied_in("tcp", 1)
    counts.note_sent(7, is_copied=True)
    counts.note_sent(5, is_copied=False)
    assert counts.copies == {"ok": 3, "source_lost": 1}
    assert counts.bytes_copied_in == {"tcp": 101, "shm": 10}
    assert (counts.bytes_sent, counts.bytes_copied_out) == (12, 7)
    lines = set(exposition(lambda: look({})).decode().splitlines())
    assert lines >= {
        'kvharbor_worker_copied_pages_total{outcome="ok"} 6.0',
        'kvharbor_worker_copied_in_bytes_total{transport="tcp"} 700.0',
        "kvharbor_worker_copied_out_bytes_total 800.0",
    }


def test_every_figure_of_a_disk_is_exposed() -> None:
    lines = set(exposition(lambda: look({"dram-nvme": 5})).decode().splitlines())
    assert lines >= {
        'kvharbor_worker_moved_pages_total{way="dram-nvme"} 5.0',
        'kvharbor_worker_disk_state{segment="n",state="serving"} 0.0',
        'kvharbor_worker_disk_state{segment="n",state="read_only"} 1.0',
        'kvharbor_worker_disk_state{segment="n",state="failed"} 0.0',
        'kvharbor_worker_disk_errors_total{segment="n"} 3.0',
        'kvharbor_worker_disk_parts_total{kind="written",segment="n"} 11.0',
        'kvharbor_worker_disk_parts_total{kind="read",segment="n"} 13.0',
        'kvharbor_worker_disk_bytes_total{kind="written",segment="n"} 1100.0',
        'kvharbor_worker_disk_bytes_total{kind="read",segment="n"} 1300.0',
        'kvharbor_worker_disk_payload_bytes_total{segment="n"} 2200.0',
        'kvharbor_worker_disk_misses_total{outcome="stale",segment="n"} 5.0',
        "kvharbor_worker_staging_capacity_bytes 256.0",
        'kvharbor_worker_staged_pages_total{result="loaded"} 7.0',
        'kvharbor_worker_staged_pages_total{result="found"} 8.0',
        'kvharbor_worker_staged_pages_total{result="busy"} 9.0',
        'kvharbor_worker_staged_pages_total{result="failed"} 10.0',
    }
    assert not any('segment="m"' in line for line in lines if "_disk_" in line)


def test_what_the_scrubber_does_is_exposed_by_segment() -> None:
    lines = set(exposition(lambda: look({})).decode().splitlines())
    assert lines >= {
        'kvharbor_worker_scrub_rounds_total{segment="m"} 3.0',
        'kvharbor_worker_scrub_extents_total{segment="m"} 70.0',
        'kvharbor_worker_scrub_bytes_total{segment="m"} 8192.0',
        'kvharbor_worker_scrub_damaged_total{segment="m"} 2.0',
        'kvharbor_worker_scrub_unverified_seconds{segment="m"} 12.5',
        'kvharbor_worker_scrub_damaged_total{segment="n"} 0.0',
    }
