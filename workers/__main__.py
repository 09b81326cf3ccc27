"""The program `kvharbor-worker`: options, configuration, and how errors end it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.config import ClusterConfig, Sources, read_file
from kvstore.errors import InvariantBroken, KVStoreError
from kvstore.exit_codes import ExitCode, exit_code_of
from kvstore.origin import require_one_origin

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM: Final = "kvharbor-worker"
SECTIONS: Final = ("cluster", "master", "worker")
"""What a file that all programs share may hold; a worker reads the first and the last."""
FLAGS: Final = (
    ("--master", "HOST:PORT[,...]", "where masters listen"),
    ("--worker-id", "NAME", "names the worker and its segments"),
    ("--dram", "SIZE", "memory to lend, e.g. 4GiB"),
    ("--chunk", "SIZE", "size of a chunk, which no part may exceed"),
    ("--segment-dir", "DIR", "folder of a memory file system, e.g. /dev/shm"),
    ("--transports", "NAME[,...]", "ways to offer: shm, tcp, mooncake"),
    ("--huge-pages", "BOOL", "true: ask for huge pages"),
    ("--data-dir", "DIR", "Unix socket and announcement"),
    ("--unix", "PATH", "Unix socket for clients of this host"),
    ("--listen", "HOST:PORT", "for clients elsewhere; port 0 takes a free one"),
    ("--advertise", "HOST:PORT[,...]", "where other hosts reach that"),
    ("--admin", "HOST:PORT", "HTTP pages, or off"),
    ("--host", "NAME", "which machine this is"),
    ("--cluster-name", "NAME", "name of the cluster"),
    ("--secret-file", "FILE", "file with the cluster secret"),
)


def main() -> None:
    """Run a worker; ends the process."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        require_one_origin()
        _run(sys.argv[1:])
    except InvariantBroken:
        traceback.print_exc()
        sys.exit(ExitCode.INTERNAL)
    except KVStoreError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        sys.exit(exit_code_of(error))
    except Exception:  # a bug of ours, which must not look like a wrong option
        traceback.print_exc()
        sys.exit(ExitCode.INTERNAL)


def _run(arguments: Sequence[str]) -> None:
    # Only now, since these import packages of ours by name.
    from workers.config import WorkerConfig
    from workers.program import serve

    given = _parser().parse_args(arguments)
    file = Path(given.config) if given.config else None
    tables = read_file(file, SECTIONS) if file else {}
    sources = Sources(file, tables, os.environ, vars(given))
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
