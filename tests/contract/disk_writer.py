"""Fills and frees an NVMe segment until it is killed. A program of a test, not a test."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from kvstore.clock import SystemClock
from kvstore.codec import Codec
from tests.unit.nvme_parts import CLUSTER, NAME, part, stretch
from tests.unit.worker_scripts import GEOMETRY, PAGE
from workers.tiers.nvme import open_nvme


def main() -> None:
    """Write four pages, free them, and so on around the segment; say when it has begun."""
    segment, _ = open_nvme(
        Path(sys.argv[1]), CLUSTER, NAME, GEOMETRY, codec=Codec.NONE, clock=SystemClock()
    )
    for turn in count():
        offset = turn * 4 * PAGE % GEOMETRY.payload_bytes
        segment.write_free([stretch(offset, 4)], PAGE)
        numbers = (turn * 4 + i for i in range(4))
        segment.write([part(n % 250, offset + i * PAGE) for i, n in enumerate(numbers)])
        if turn == 20:
            sys.stdout.write("begun\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
