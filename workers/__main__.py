"""The program `kvharbor-worker`: its options and configuration."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Final

from kvstore.config import ClusterConfig
from kvstore.startup import run_server, sources_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM: Final = "kvharbor-worker"
FLAGS: Final = (
    ("--master", "HOST:PORT[,...]", "where masters listen; or unix:/path"),
    ("--worker-id", "NAME", "names the worker and its segments"),
    ("--dram", "SIZE", "memory to lend, e.g. 4GiB"),
    ("--hbm", "DEVICE:SIZE[,...]", "memory of devices to lend, e.g. cuda:0:64GiB; gone at the end"),
    ("--nvme", "DIR:SIZE[,...]", "folders of disks to lend below the memory"),
    ("--nvme-codec", "NAME", "how parts lie there: none, lz4, zstd, lz4-planes, zstd-planes, auto"),
    ("--staging", "SIZE", "memory through which readers of this host see pages of disks"),
    ("--mover-threads", "COUNT", "moves between memory and disks at once"),
    ("--scrub-bytes-per-s", "SIZE", "of each segment, verified unasked; 0 for nothing"),
    ("--chunk", "SIZE", "size of a chunk, which no part may exceed"),
    ("--segment-dir", "DIR", "folder of a memory file system, e.g. /dev/shm"),
    ("--transports", "NAME[,...]", "ways to offer: shm, tcp, mooncake"),
    ("--huge-pages", "BOOL", "true: ask for huge pages"),
    ("--data-dir", "DIR", "Unix socket and announcement"),
    ("--unix", "PATH", "Unix socket for clients of this host"),
    ("--listen", "HOST:PORT", "for clients elsewhere; port 0 takes a free one"),
    ("--advertise", "HOST:PORT[,...]", "where other hosts reach that"),
    ("--admin", "HOST:PORT", "HTTP pages, or off"),
    ("--host", "NAME", "which machine this is: replicas of a page go to different ones"),
    ("--rack", "NAME", "where that stands: replicas of a page go to different ones if they can"),
    ("--zone", "NAME", "the same, above racks"),
    ("--cluster-name", "NAME", "name of the cluster"),
    ("--secret-file", "FILE", "file with the cluster secret"),
)


def main() -> None:
    """Run a worker; ends the process."""
    run_server(PROGRAM, _run)


def _run(arguments: Sequence[str]) -> None:
    # Only now, since these import packages of ours by name.
    from workers.config import WorkerConfig
    from workers.program import serve

    given = _parser().parse_args(arguments)
    sources = sources_of(given)
    cluster = sources.section(ClusterConfig, "cluster")
    config = sources.section(WorkerConfig, "worker")
    asyncio.run(serve(config, cluster))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description="Lends memory to hold pages.")
    parser.add_argument("--config", metavar="FILE", help="TOML file: [cluster] and [worker]")
    for name, value, text in FLAGS:
        parser.add_argument(name, metavar=value, help=text)
    return parser


if __name__ == "__main__":
    main()
