"""NVMe segments on the file systems of this machine: direct or not, killed, too small."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.codec import Codec
from kvstore.errors import OutOfSpace, SegmentInUse
from kvstore.segment import check_geometry
from tests.unit.nvme_parts import (
    CLUSTER,
    NAME,
    OK,
    compressible,
    outcomes,
    part,
    parts_at,
    read_back,
    require_never_wrong,
    stretch,
)
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE, key
from tests.unit.worker_segments import memory_folder
from workers.tiers.nvme import open_nvme

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.segment import Geometry
    from workers.record_table import Found
    from workers.tiers.nvme import NvmeSegment

MIB = 1 << 20
OFFSETS = (0, PAGE, 2 * PAGE, 5 * PAGE, CHUNK, 3 * CHUNK)


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A place on the file system of temporary files, and one on that of shared memory."""
    if request.param == "disk":
        yield tmp_path / "segment"
    else:
        with memory_folder() as folder:
            yield folder / "segment"


def opened(
    path: Path, geometry: Geometry = GEOMETRY, codec: Codec | None = Codec.NONE
) -> tuple[NvmeSegment, Found]:
    return open_nvme(path, CLUSTER, NAME, geometry, codec=codec, clock=SystemClock())


def test_parts_come_back_and_survive_a_restart(path: Path) -> None:
    segment, _ = opened(path)
    parts = parts_at(*OFFSETS)
    assert outcomes(segment.write(parts)) == [OK] * 6
    assert read_back(segment, parts) == [OK] * 6
    segment.write_removed([stretch(0)], PAGE)
    segment.write_free([stretch(PAGE)], PAGE)
    segment.close()
    again, found = opened(path)
    assert again.incarnation == segment.incarnation + 1
    assert sorted(record.offset for record in found.adopted) == sorted(OFFSETS[2:])
    assert (found.removed, found.damaged) == (1, 0)
    assert read_back(again, parts[2:]) == [OK] * 4
    again.close()


@pytest.mark.parametrize("codec", [*Codec, None])
def test_large_parts_by_every_codec(path: Path, codec: Codec | None) -> None:
    geometry = check_geometry(16 * MIB, 4 * MIB)
    segment, _ = opened(path, geometry, codec)
    size = 700 * 1024 + 4  # no whole blocks
    room = segment.geometry.chunk_slots(part(1, 0, data=bytes(size)).record.size_class)
    parts = [
        part(i, geometry.chunk_bytes * (i // room) + i % room * 704 * 1024,
             data=compressible(key(i), size))
        for i in range(6)
    ]  # fmt: skip
    assert outcomes(segment.write(parts)) == [OK] * 6
    assert read_back(segment, parts) == [OK] * 6
    segment.close()


def test_a_second_owner_is_refused(path: Path) -> None:
    segment, _ = opened(path)
    with pytest.raises(SegmentInUse):
        opened(path)
    segment.close()


def test_too_large_a_segment_is_refused_with_both_numbers(path: Path) -> None:
    with pytest.raises(OutOfSpace, match=r"has \d+ bytes free, the segment needs \d+"):
        opened(path, check_geometry(1 << 50))
    assert not path.exists()


def test_a_kill_in_the_middle_of_writes_leaves_right_parts(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    program = [sys.executable, "-m", "tests.contract.disk_writer", str(path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        writer.kill()
    segment, found = opened(path)
    right = require_never_wrong(segment, found)
    # A kill takes nothing that was written: at most one batch is unfinished, or its records torn.
    assert right == {record.offset for record in found.adopted}
    assert len(right) >= GEOMETRY.payload_bytes // PAGE - 4
    assert found.damaged + found.unfinished <= 4
    segment.close()
