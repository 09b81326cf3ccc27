"""Section [worker] of the configuration: what a worker lends, where it listens, whom it serves."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Final

import msgspec

from kvstore import limits
from kvstore.config import SizeBytes, default_data_dir
from kvstore.errors import BadValue
from kvstore.rpc.address import AnyAddress, TcpAddress, socket_path
from kvstore.segment import Geometry, check_geometry

WORKER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
TRANSPORTS: Final = ("shm", "tcp", "mooncake")
WILDCARDS: Final = ("0.0.0.0", "::")


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
    host: str = msgspec.field(default_factory=socket.gethostname)
    """Which machine this is: replicas of a page go to different ones."""
    dram: SizeBytes = SizeBytes(1024 * limits.MIB)
    """Memory to lend; rounded down to whole chunks."""
    chunk: SizeBytes = SizeBytes(limits.CHUNK_BYTES)
    """Size of a chunk, a power of two; no part can be larger."""
    segment_dir: Path = Path("/dev/shm")
    """A folder of a memory file system."""
    huge_pages: bool = False
    transports: tuple[str, ...] = ("shm", "tcp")
    """Which ways to this worker are offered: shm, tcp, mooncake (the transfer engine)."""
    mooncake_protocol: str = "tcp"
    """What the transfer engine moves bytes by: tcp, rdma, ..."""
    mooncake_device: str = ""
    """Its network device; empty lets it choose."""

    def __post_init__(self) -> None:
        """Raise BadValue where values cannot work, alone or together."""
        if not WORKER_ID.fullmatch(self.id):
            raise BadValue("id", self.id, "at most 63 of A-Z, a-z, 0-9, . _ -")
        self.unix_path()
        if not self.master:
            raise BadValue("master", self.master, "at least one address")
        if self.listen.host in WILDCARDS and not self.advertise:
            want = "set beside a listen address of all interfaces"
            raise BadValue("advertise", self.advertise, want)
        if not set(self.transports) <= set(TRANSPORTS) or "tcp" not in self.transports:
            raise BadValue("transports", self.transports, "tcp and any of shm, mooncake")
        if self.dram < self.chunk:
            raise BadValue("dram", self.dram, f"at least one chunk of {self.chunk} bytes")
        self.geometry()

    def geometry(self) -> Geometry:
        """The sizes of the DRAM segment; BadValue for a chunk that cannot be."""
        return check_geometry(self.dram // self.chunk * self.chunk, self.chunk)

    def unix_path(self) -> Path:
        """Where the Unix socket is; BadValue where none can be."""
        return socket_path("unix", self.data_dir, self.unix)

    def segment_path(self, cluster: str) -> Path:
        """The DRAM segment's file."""
        return self.segment_dir / f"kvharbor-{cluster}-{self.segment_id()}"

    def segment_id(self) -> str:
        """The DRAM segment's name, unique in the cluster by the worker's."""
        return f"{self.id}-dram0"
