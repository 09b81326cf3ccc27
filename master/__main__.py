"""The program `kvharbor-master`: its options and configuration."""

from __future__ import annotations

import argparse
import gc
from typing import TYPE_CHECKING, Final

import uvloop

from kvstore.config import ClusterConfig
from kvstore.coordination.etcd_config import EtcdConfig
from kvstore.errors import ConfigError
from kvstore.startup import run_server, sources_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM: Final = "kvharbor-master"


def main() -> None:
    """Run a master; ends the process."""
    run_server(PROGRAM, _run)


def _run(arguments: Sequence[str]) -> None:
    # Only now, since these import packages of ours by name.
    from master.config import MasterConfig
    from master.metadata import ETCD
    from master.program import serve

    given = _parser().parse_args(arguments)
    sources = sources_of(given)
    cluster = sources.section(ClusterConfig, "cluster")
    config = sources.section(MasterConfig, "master")
    etcd = sources.section(EtcdConfig, "etcd")
    mention = sources.mention_of(EtcdConfig, "etcd")
    if config.metadata != ETCD and mention is not None:
        # Else a forgotten line would have it lead by itself, beside those that share etcd.
        raise ConfigError(f"{mention}: not for master.metadata = {config.metadata!r}, want 'etcd'")
    # What is loaded by now stays: else each full collection stops the loop for 20 ms (I27).
    gc.freeze()
    uvloop.run(serve(config, cluster, etcd))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Knows where every page is.",
        epilog="Whatever has no option is set in the file, or by the environment: "
        "KVHARBOR_MASTER_LEASE_TTL_S=5, KVHARBOR_ETCD_OWNED=true.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file: [cluster], [master], [etcd]")
    parser.add_argument("--data-dir", metavar="DIR", help="metadata and announcement")
    parser.add_argument("--listen", metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument("--advertise", metavar="HOST:PORT[,...]", help="where others reach that")
    parser.add_argument("--unix", metavar="PATH", help="Unix socket for this host, or off")
    parser.add_argument("--admin", metavar="HOST:PORT", help="HTTP pages, or off")
    parser.add_argument("--metadata", metavar="KIND", help="sqlite (alone), or etcd (shared)")
    parser.add_argument("--etcd-endpoints", metavar="HOST:PORT[,...]", help="where etcd is")
    parser.add_argument("--cluster-name", metavar="NAME", help="name of the cluster")
    parser.add_argument("--secret-file", metavar="FILE", help="file with the cluster secret")
    return parser


if __name__ == "__main__":
    main()
