"""Section [worker] of the configuration: what a worker lends, where it listens, whom it serves."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path
from typing import Final

import msgspec

from kvstore import limits
from kvstore.codec import Codec
from kvstore.config import default_data_dir
from kvstore.config_values import DeviceSpace, DiskSpace, SizeBytes, SizeBytesOrZero
from kvstore.errors import BadValue
from kvstore.rpc.address import AnyAddress, TcpAddress, socket_path
from kvstore.rpc.identity import this_host
from kvstore.segment import Geometry, check_geometry

WORKER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
"""Short enough that a segment's name, which begins with it, is one that a master takes."""
LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""As a kernel lets a host be called."""
DEVICE: Final = re.compile(r"cpu|cuda:[0-9]{1,3}")
TRANSPORTS: Final = ("shm", "tcp", "mooncake")
WILDCARDS: Final = ("0.0.0.0", "::")
AUTO: Final = "auto"
CODECS: Final = {codec.name.lower().replace("_", "-"): codec for codec in Codec}
DISKS_MAX: Final = 64
PATH_DIGITS: Final = 8


def _data_dir() -> Path:
    return default_data_dir(os.environ)


class WorkerConfig(msgspec.Struct, frozen=True):
    """Everything that one worker process is told."""

    master: tuple[AnyAddress, ...] = (TcpAddress("127.0.0.1", limits.MASTER_PORT),)
    """Where masters listen, host:port or unix:/path; whichever leads is used."""
    id: str = msgspec.field(default_factory=socket.gethostname)
    """Names the worker and its segments; the same after a restart."""
    data_dir: Path = msgspec.field(default_factory=_data_dir)
    """Holds the Unix socket and the announcement."""
    unix: Path = Path("worker.sock")
    """The Unix socket for clients of this host, below the data folder unless it begins with a
    slash."""
    listen: TcpAddress = TcpAddress("127.0.0.1", limits.WORKER_PORT)
    advertise: tuple[TcpAddress, ...] = ()
    """Under which addresses other hosts reach `listen`, best first; itself by default."""
    admin: TcpAddress | None = TcpAddress("127.0.0.1", limits.WORKER_ADMIN_PORT)
    """Serves /health, /status and /metrics over HTTP, without authentication."""
    host: str = msgspec.field(default_factory=this_host)
    """Which machine this is: replicas of a page go to different ones."""
    rack: str = ""
    zone: str = ""
    """Where that stands, as far as known: replicas go to different zones, and to different racks in
    them, if they can."""
    dram: SizeBytes = SizeBytes(1024 * limits.MIB)
    """Memory to lend; rounded down to whole chunks."""
    chunk: SizeBytes = SizeBytes(limits.CHUNK_BYTES)
    """Size of a chunk, a power of two; no part can be larger."""
    segment_dir: Path = Path("/dev/shm")
    """A folder of a memory file system."""
    huge_pages: bool = False
    hbm: tuple[DeviceSpace, ...] = ()
    """Devices whose memory to lend above that, a segment on each: cuda:0, ...; cpu stands in for
    one. Sizes as for `dram`. Its pages do not survive a restart. Four chunks of host memory beside
    `dram` are pinned for each: one must hold the largest part, to hash it. The transport mooncake
    takes two more, once."""
    nvme: tuple[DiskSpace, ...] = ()
    """Folders of disks to lend below the memory, a segment in each; sizes as for `dram`."""
    nvme_codec: str = AUTO
    """How parts lie there: none, lz4, zstd, lz4-planes, zstd-planes; auto measures each
    namespace."""
    staging: SizeBytes = SizeBytes(256 * limits.MIB)
    """Memory, beside `dram`, through which readers of this host see pages of disks."""
    mover_threads: int = 2
    """How many moves between memory and disks go on at once."""
    copy_threads: int = 2
    """How many copies from other workers go on at once."""
    scrub_bytes_per_s: SizeBytesOrZero = SizeBytesOrZero(limits.SCRUB_BYTES_PER_S)
    """How much of each segment is verified unasked; 0 for nothing."""
    transports: tuple[str, ...] = ("shm", "tcp")
    """Which ways to this worker are offered: shm, tcp, mooncake (the transfer engine)."""
    mooncake_protocol: str = "tcp"
    """What the transfer engine moves bytes by: tcp, rdma, ..."""
    mooncake_device: str = ""
    """Its network device; empty lets it choose."""

    def __post_init__(self) -> None:
        """Raise BadValue where values cannot work, alone or together."""
        if not WORKER_ID.fullmatch(self.id):
            raise BadValue("id", self.id, "at most 50 of A-Z, a-z, 0-9, . _ -")
        for field, label in (("host", self.host), ("rack", self.rack), ("zone", self.zone)):
            if label and not LABEL.fullmatch(label):
                raise BadValue(field, label, "at most 64 of A-Z, a-z, 0-9, . _ -")
        self.unix_path()
        if not self.master:
            raise BadValue("master", self.master, "at least one address")
        if self.listen.host in WILDCARDS and not self.advertise:
            want = "set beside a listen address of all interfaces"
            raise BadValue("advertise", self.advertise, want)
        if not set(self.transports) <= set(TRANSPORTS) or "tcp" not in self.transports:
            raise BadValue("transports", self.transports, "tcp and any of shm, mooncake")
        if self.copy_threads < 1:
            raise BadValue("copy_threads", self.copy_threads, "at least 1")
        if self.dram < self.chunk:
            raise BadValue("dram", self.dram, f"at least one chunk of {self.chunk} bytes")
        self.geometry()
        self._check_devices()
        self._check_disks()

    def _check_devices(self) -> None:
        devices = [each.device for each in self.hbm]
        for space in self.hbm:
            if not DEVICE.fullmatch(space.device):
                raise BadValue("hbm", space.device, "devices such as cuda:0, or cpu")
            if space.size < self.chunk:
                want = f"at least one chunk of {self.chunk} bytes"
                raise BadValue("hbm", f"{space.device}:{space.size}", want)
            if devices.count(space.device) > 1:
                raise BadValue("hbm", space.device, "each device once")

    def _check_disks(self) -> None:
        if self.nvme_codec not in (AUTO, *CODECS):
            raise BadValue("nvme_codec", self.nvme_codec, f"one of {', '.join((AUTO, *CODECS))}")
        if self.mover_threads < 1:
            raise BadValue("mover_threads", self.mover_threads, "at least 1")
        if len(self.nvme) > DISKS_MAX:
            raise BadValue("nvme", len(self.nvme), f"at most {DISKS_MAX} folders")
        folders = [each.path.absolute() for each in self.nvme]
        for disk in self.nvme:
            if disk.size < self.chunk:
                want = f"at least one chunk of {self.chunk} bytes"
                raise BadValue("nvme", f"{disk.path}:{disk.size}", want)
            if folders.count(disk.path.absolute()) > 1:
                raise BadValue("nvme", str(disk.path), "each folder once")
        if self.nvme and self.staging < self.chunk:
            raise BadValue("staging", self.staging, f"at least one chunk of {self.chunk} bytes")

    def geometry(self) -> Geometry:
        """The sizes of the DRAM segment; BadValue for a chunk that cannot be."""
        return self.rounded(self.dram)

    def unix_path(self) -> Path:
        """Where the Unix socket is; BadValue where none can be."""
        return socket_path("unix", self.data_dir, self.unix)

    def segment_path(self, cluster: str) -> Path:
        """The DRAM segment's file."""
        return self.segment_dir / f"kvharbor-{cluster}-{self.segment_id()}"

    def segment_id(self) -> str:
        """The DRAM segment's name, unique in the cluster by the worker's."""
        return f"{self.id}-dram0"

    def rounded(self, size: int) -> Geometry:
        """The sizes of a segment of that many bytes, or a little less."""
        return check_geometry(size // self.chunk * self.chunk, self.chunk)

    def device_segment_id(self, space: DeviceSpace) -> str:
        """The name of the segment on a device."""
        return f"{self.id}-hbm-{space.device.replace(':', '')}"

    def disk_segment_id(self, disk: DiskSpace) -> str:
        """The name of the segment in a disk's folder, whichever place that has in the list."""
        digest = hashlib.sha256(os.fsencode(disk.path.absolute())).hexdigest()
        return f"{self.id}-nvme-{digest[:PATH_DIGITS]}"

    def codec(self) -> Codec | None:
        """How parts lie on disks; None where each namespace is measured."""
        return CODECS.get(self.nvme_codec)
