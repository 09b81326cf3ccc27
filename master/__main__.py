"""The program `kvharbor-master`: options, configuration, and how errors end it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from kvstore.config import ClusterConfig, Sources, read_file
from kvstore.errors import InvariantBroken, KVStoreError
from kvstore.exit_codes import ExitCode, exit_code_of
from kvstore.origin import require_one_origin

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM: Final = "kvharbor-master"
SECTIONS: Final = ("cluster", "master", "worker")
"""What a file that all programs share may hold; a master reads the first two."""


def main() -> None:
    """Run a master; ends the process."""
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
    from master.config import MasterConfig
    from master.program import serve

    given = _parser().parse_args(arguments)
    file = Path(given.config) if given.config else None
    tables = read_file(file, SECTIONS) if file else {}
    sources = Sources(file, tables, os.environ, vars(given))
    cluster = sources.section(ClusterConfig, "cluster")
    config = sources.section(MasterConfig, "master")
    uvloop.run(serve(config, cluster))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description="Knows where every page is.")
    parser.add_argument("--config", metavar="FILE", help="TOML file: [cluster] and [master]")
    parser.add_argument("--data-dir", metavar="DIR", help="metadata and announcement")
    parser.add_argument("--listen", metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument("--unix", metavar="PATH", help="Unix socket for clients of this host")
    parser.add_argument("--admin", metavar="HOST:PORT", help="HTTP pages, or off")
    parser.add_argument("--cluster-name", metavar="NAME", help="name of the cluster")
    parser.add_argument("--secret-file", metavar="FILE", help="file with the cluster secret")
    return parser


if __name__ == "__main__":
    main()
