"""How fast do pages go to a disk and back, beside plain sequential I/O on the same disk?

A segment file and a plain file of the same size lie in one directory. In turns, batches of pages
are written to the segment (verified, records before and after, O_DIRECT) and read back (verified),
and the same bytes are moved by 1 MiB calls in order, by as many threads. Then the same with noise
of 16-bit floats and each codec, where seconds go to the codec and bytes are saved.
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import (
    KIB,
    MIB,
    Case,
    Report,
    Sample,
    Series,
    arguments,
    interleave,
    size_name,
)
from benchmarks.regions import Region
from kvstore.clock import SystemClock
from kvstore.codec import Codec
from kvstore.ids import ROOT_PARENT, Generation, Incarnation, PageKey, SegmentId
from kvstore.page import payload_checksum
from kvstore.record import Record, RecordState
from kvstore.segment import check_geometry, size_class_of
from kvstore.wire.messages.common import Outcome
from workers.tiers.disk import LocalDisk, read_whole, write_whole
from workers.tiers.io_threads import IoThreads
from workers.tiers.nvme import THREADS, open_nvme
from workers.tiers.part_io import Extent, PartToRead, PartToWrite

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from workers.tiers.disk import Channel
    from workers.tiers.nvme import NvmeSegment
    from workers.tiers.part_io import PartRead, PartWritten

BATCH_BYTES: Final = 32 * MIB
PAGE_BYTES: Final = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
CODEC_PAGE_BYTES: Final = 1 * MIB
CODEC_BATCHES: Final = 16
PUT_TARGET: Final = 0.7
GET_TARGET: Final = 0.8
"""Of plain I/O, for pages of 1 MiB and more: the rest is checksums and records."""


class Plain:
    """A file of the segment's size, moved in order by 1 MiB calls."""

    def __init__(self, folder: Path, size_bytes: int, memory: Region) -> None:
        """Make it and write it once, so that no block is a first one."""
        self._file = LocalDisk().create(folder)
        self._file.allocate(0, size_bytes)
        self._channel: Channel = self._file.direct() or self._file.cached
        self._threads = IoThreads(THREADS, "plain")
        self._size_bytes = size_bytes
        self._memory = memory
        for turn in range(size_bytes // BATCH_BYTES):
            self.write(turn)

    def write(self, turn: int) -> Sample:
        """One batch."""
        return self._move(write_whole, turn)

    def read(self, turn: int) -> Sample:
        """The same."""
        return self._move(read_whole, turn)

    def _move(self, move: Callable[..., None], turn: int) -> Sample:
        start = turn * BATCH_BYTES % self._size_bytes
        jobs = [
            partial(move, self._channel, [self._memory.view[at : at + MIB]], start + at)
            for at in range(0, BATCH_BYTES, MIB)
        ]
        started, cpu = time.perf_counter(), time.process_time()
        self._threads.run(jobs)
        return Sample(time.perf_counter() - started, BATCH_BYTES, time.process_time() - cpu)

    def close(self) -> None:
        """Give the space back."""
        self._threads.close()
        self._file.close()


class Pages:
    """Batches of pages of one size for a segment, used as a ring."""

    def __init__(self, segment: NvmeSegment, page_bytes: int, source: Region) -> None:
        """Hash the source once: the checksum is the writer's."""
        self._segment = segment
        self._page_bytes = page_bytes
        self._into = Region(BATCH_BYTES)
        self._views = [
            source.view[at : at + page_bytes] for at in range(0, BATCH_BYTES, page_bytes)
        ]
        self._keys = [PageKey(i.to_bytes(32, "little")) for i in range(len(self._views))]
        self._checksums = [
            payload_checksum(view, key, 0)
            for view, key in zip(self._views, self._keys, strict=True)
        ]

    def put(self, turn: int) -> Sample:
        """Write one batch."""
        parts = [
            PartToWrite(record, view)
            for record, view in zip(self._records(turn), self._views, strict=True)
        ]
        started, cpu = time.perf_counter(), time.process_time()
        found = self._segment.write(parts)
        sample = Sample(time.perf_counter() - started, BATCH_BYTES, time.process_time() - cpu)
        _require_ok(found)
        return sample

    def get(self, turn: int) -> Sample:
        """Read what the same turn has put."""
        size = self._page_bytes
        parts = [
            PartToRead(
                Extent(record.offset, record.size_class), record.key, 0, record.generation,
                self._into.view[i * size : (i + 1) * size],
            )
            for i, record in enumerate(self._records(turn))
        ]  # fmt: skip
        started, cpu = time.perf_counter(), time.process_time()
        found = self._segment.read(parts)
        sample = Sample(time.perf_counter() - started, BATCH_BYTES, time.process_time() - cpu)
        _require_ok(found)
        return sample

    def _records(self, turn: int) -> list[Record]:
        size, room = self._page_bytes, self._segment.geometry.payload_bytes
        start = turn * BATCH_BYTES % room
        return [
            Record(
                RecordState.FREE, key, 0, Generation(turn + 1), Incarnation(0), size, checksum,
                start + i * size, size_class_of(size), 1, ROOT_PARENT, 64,
            )
            for i, (key, checksum) in enumerate(zip(self._keys, self._checksums, strict=True))
        ]  # fmt: skip


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", _options)
    report = Report("NVMe put and get, beside plain sequential I/O", options)
    rounds = 8 if options.quick else options.rounds
    size_bytes = (512 if options.quick else 2048) * MIB
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=options.directory)))
        random_bytes = Region(BATCH_BYTES, seed=1)
        plain = Plain(folder, size_bytes, random_bytes)
        undo.callback(plain.close)
        segment = _opened(folder / "segment", size_bytes, Codec.NONE)
        undo.callback(segment.close)
        report.parameters(
            directory=str(options.directory),
            direct="yes" if segment.is_direct else "no",
            threads=THREADS,
            batch=size_name(BATCH_BYTES),
            file=size_name(size_bytes),
            rounds=rounds,
        )
        _sizes(report, plain, segment, random_bytes, rounds)
        _codecs(report, folder, min(rounds, CODEC_BATCHES - 1))
    return report.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=24, help="of each case (8 if --quick)")
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/tmp"), help="on the disk to measure"
    )


def _opened(path: Path, size_bytes: int, codec: Codec) -> NvmeSegment:
    segment, _ = open_nvme(
        path, "benchmark", SegmentId("w-nvme0"),
        check_geometry(size_bytes), codec=codec, clock=SystemClock(),
    )  # fmt: skip
    return segment


def _sizes(report: Report, plain: Plain, segment: NvmeSegment, source: Region, rounds: int) -> None:
    """Pages of each size; the segment is written once before anything counts."""
    pages = {size: Pages(segment, size, source) for size in PAGE_BYTES}
    for turn in range(segment.geometry.payload_bytes // BATCH_BYTES):
        pages[MIB].put(turn)
    rows: list[dict[str, str | int | float]] = []
    for size, each in pages.items():
        put = interleave([Case("plain", plain.write), Case("segment", each.put)], rounds)
        got = interleave([Case("plain", plain.read), Case("segment", each.get)], rounds)
        for op, series, target in (("put", put, PUT_TARGET), ("get", got, GET_TARGET)):
            rows += _rows(op, size_name(size), series)
            value = series["segment"].speedup_over(series["plain"])
            name = f"{op}/{size_name(size)}/plain"
            if size >= MIB:
                report.at_least(name, value, target)
            else:
                report.reported(name, value)
    report.table("Pages as they are", rows)


def _codecs(report: Report, folder: Path, rounds: int) -> None:
    """Noise of 16-bit floats by each codec; GB/s are of the pages' own bytes."""
    source = Region(BATCH_BYTES)
    _fill_bf16(source.view)
    rows: list[dict[str, str | int | float]] = []
    for codec in Codec:
        path = folder / codec.name
        segment = _opened(path, CODEC_BATCHES * BATCH_BYTES, codec)
        pages = Pages(segment, CODEC_PAGE_BYTES, source)
        put = interleave([Case("segment", pages.put)], rounds)["segment"]
        got = interleave([Case("segment", pages.get)], rounds)["segment"]
        counts = segment.counts
        rows.append(
            {
                "codec": codec.name.lower(),
                "put GB/s": put.gb_per_s,
                "get GB/s": got.gb_per_s,
                "put cpu s/GB": put.cpu_s_per_gb,
                "get cpu s/GB": got.cpu_s_per_gb,
                "stored/payload": counts.bytes_written / counts.payload_bytes_written,
            }
        )
        segment.close()
        path.unlink()
    report.table("Noise of 16-bit floats, 1 MiB pages", rows)


def _rows(op: str, size: str, series: dict[str, Series]) -> list[dict[str, str | int | float]]:
    return [
        {
            "page": size,
            "op": op,
            "who": name,
            "GB/s": each.gb_per_s,
            "cpu s/GB": each.cpu_s_per_gb,
        }
        for name, each in series.items()
    ]


def _fill_bf16(view: memoryview) -> None:
    """Normal noise as 16-bit floats, a million of them again and again from other places."""
    draw = random.Random(2)
    floats = struct.pack(f"<{MIB}f", *(draw.gauss(0, 1) for _ in range(MIB)))
    halves = bytearray(2 * MIB)
    halves[0::2], halves[1::2] = floats[2::4], floats[3::4]
    for number, at in enumerate(range(0, len(view), len(halves))):
        turned = halves[number * 4098 :] + halves[: number * 4098]
        view[at : at + len(halves)] = turned[: len(view) - at]


def _require_ok(found: Sequence[PartRead | PartWritten]) -> None:
    bad = [each.outcome.name for each in found if each.outcome is not Outcome.OK]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(found)} pages failed: {bad[0]}")


if __name__ == "__main__":
    sys.exit(main())
