"""The segments that one worker lends, opened at its start: devices, memory, and disks below it.

Owns what an operator is told of them. How each medium is owned and taken over is `workers.tiers`'.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.ids import SegmentId
from kvstore.transfer.device import CPU, open_device
from workers.extent_table import SegmentTable
from workers.staging import Staging
from workers.tiers.dram import DramSegment, nameless_dram, open_dram
from workers.tiers.hbm import HbmSegment
from workers.tiers.nvme import NvmeSegment, open_nvme

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AsyncExitStack

    from kvstore.clock import Clock
    from kvstore.config_values import DeviceSpace, DiskSpace
    from workers.config import WorkerConfig
    from workers.record_table import Found
    from workers.tiers.tier import Segment

LOG: Final = logging.getLogger(__name__)
CHUNKS_FEW: Final = 4
"""Below this many, two layouts in one pool may starve each other."""


class LentSegments(msgspec.Struct, frozen=True):
    """What is open, and what the state machine begins with."""

    devices: tuple[HbmSegment, ...]
    memory: DramSegment
    disks: tuple[NvmeSegment, ...]
    tables: tuple[SegmentTable, ...]

    @property
    def all(self) -> tuple[Segment, ...]:
        """Fastest first."""
        return (*self.devices, self.memory, *self.disks)

    @property
    def tiers(self) -> dict[str, str]:
        """Tier by segment."""
        return {segment.id: segment.tier for segment in self.all}


def open_segments(
    config: WorkerConfig, cluster: str, clock: Clock, undo: AsyncExitStack
) -> LentSegments:
    """Own and open everything that the configuration names; `undo` closes it.

    Raises as `open_dram`, `open_device`, `HbmSegment` and `open_nvme` do, with nothing left
    open but what `undo` has.
    """
    path, geometry = config.segment_path(cluster), config.geometry()
    name = SegmentId(config.segment_id())
    memory, found = open_dram(path, cluster, name, geometry, huge_pages=config.huge_pages)
    undo.callback(memory.close)
    table = SegmentTable(memory.id, memory.incarnation, geometry)
    tables, disks = [_filled(table, found, str(path))], []
    chunks = geometry.payload_bytes // geometry.chunk_bytes
    if chunks < CHUNKS_FEW:
        LOG.warning(
            "%d bytes are %d chunks of %d, and a chunk holds parts of one size: other sizes find "
            "no room beside them; lend %d bytes or more",
            geometry.payload_bytes, chunks, geometry.chunk_bytes,
            CHUNKS_FEW * geometry.chunk_bytes,
        )  # fmt: skip
    devices = [_open_device(config, each, undo) for each in config.hbm]
    _pin(memory, devices, undo)
    tables += [
        SegmentTable(each.id, each.incarnation, each.geometry, can_shrink=True) for each in devices
    ]
    for space in config.nvme:
        disk, table = _open_disk(config, space, cluster, clock)
        undo.callback(disk.close)
        disks.append(disk)
        tables.append(table)
    return LentSegments(tuple(devices), memory, tuple(disks), tuple(tables))


def open_staging(
    config: WorkerConfig,
    cluster: str,
    lent: LentSegments,
    tables: Mapping[str, SegmentTable],
    clock: Clock,
    undo: AsyncExitStack,
) -> Staging | None:
    """The memory through which readers of this host see pages of disks; None without disks."""
    if not lent.disks:
        return None
    name = SegmentId(f"{config.id}-staging")
    geometry = config.rounded(config.staging)
    memory = nameless_dram(config.segment_dir, cluster, name, geometry)
    undo.callback(memory.close)
    LOG.info("%d bytes of memory stage pages of disks", geometry.payload_bytes)
    return Staging(memory, {disk.id: disk for disk in lent.disks}, tables, clock)


def _open_device(config: WorkerConfig, space: DeviceSpace, undo: AsyncExitStack) -> HbmSegment:
    device = open_device(space.device)
    name, geometry = SegmentId(config.device_segment_id(space)), config.rounded(space.size)
    opened = HbmSegment(name, geometry, device)
    undo.callback(opened.close)
    LOG.info(
        "segment %s: %d bytes on %s, whose pages end with this process",
        name, geometry.payload_bytes, device.name,
    )  # fmt: skip
    if not device.is_read_only_enforced:
        LOG.warning("%s: that clients of this host only read is a convention", device.name)
    try:
        opened.chunks[0].export()
    except BadValue as error:
        LOG.warning(
            "%s: clients of this host cannot open its memory, and have pages sent: %s",
            device.name, error,
        )  # fmt: skip
    return opened


def _pin(memory: DramSegment, devices: list[HbmSegment], undo: AsyncExitStack) -> None:
    """Let devices copy fast to and from `memory`: one pins it for all."""
    for each in devices:
        if each.device.name != CPU:
            size = memory.geometry.payload_bytes
            undo.callback(each.device.pin(memory.payload_address, size))
            LOG.info("%d bytes of memory are pinned for %s", size, each.device.name)
            return


def _open_disk(
    config: WorkerConfig, space: DiskSpace, cluster: str, clock: Clock
) -> tuple[NvmeSegment, SegmentTable]:
    name, geometry = SegmentId(config.disk_segment_id(space)), config.rounded(space.size)
    path = space.path / f"kvharbor-{cluster}-{name}"
    disk, found = open_nvme(path, cluster, name, geometry, codec=config.codec(), clock=clock)
    table = SegmentTable(disk.id, disk.incarnation, geometry, holds_encoded=True)
    way = "by O_DIRECT" if disk.is_direct else "through the page cache"
    return disk, _filled(table, found, f"{path} {way}, codec {config.nvme_codec}")


def _filled(table: SegmentTable, found: Found, where: str) -> SegmentTable:
    """The table with what a former life has left."""
    table.adopt(found.adopted)
    LOG.info(
        "segment %s: %d bytes in %s; %d pages re-adopted, dropped: %d unfinished, %d removed, "
        "%d damaged", table.segment, table.geometry.payload_bytes, where, len(found.adopted),
        found.unfinished, found.removed, found.damaged,
    )  # fmt: skip
    return table
