"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore import limits
from kvstore.cli.operator import Operator
from kvstore.config import ENVIRONMENT_PREFIX, ClusterConfig, Sources, read_file
from kvstore.errors import BadValue
from kvstore.startup import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

_ID: Final = re.compile(r"[0-9a-fA-F]{64}")
MASTER: Final = f"127.0.0.1:{limits.MASTER_PORT}"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line instead of text.")]
Cluster = Annotated[str, typer.Option(help="Refuse any other cluster.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of metadata, logs and sockets.",
        show_default="$KVHARBOR_HOME, else ~/.local/share/kvharbor",
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        help="A device whose memory to lend, and how much; may be repeated.",
        metavar="DEVICE:SIZE",
    ),
]
Master = Annotated[
    str,
    typer.Option(
        help="The master's host:port or unix:/path; of several, with commas between, who leads.",
        envvar="KVHARBOR_MASTER",
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(help="File with the cluster secret.", envvar="KVHARBOR_CLUSTER_SECRET_FILE"),
]


def cluster_section(config: Path | None, secret_file: Path | None) -> ClusterConfig:
    """What file, environment and option say of the cluster."""
    tables = read_file(config, SECTIONS) if config else {}
    options = {"secret_file": str(secret_file) if secret_file else None}
    return Sources(config, tables, os.environ, options).section(ClusterConfig, "cluster")


def key_alone(config: Path | None, section: str, key: str, option: str | None = None) -> Sources:
    """What file, environment and option say of one key of a section that is another program's."""
    tables = read_file(config, SECTIONS) if config else {}
    table = {name: value for name, value in tables.get(section, {}).items() if name == key}
    variable = f"{ENVIRONMENT_PREFIX}{section}_{key}".upper()
    environment = {name: value for name, value in os.environ.items() if name == variable}
    return Sources(config, {section: table}, environment, {key: option})


def hex_id(field: str, text: str) -> bytes:
    """The 32 bytes that somebody wrote as hex digits; BadValue otherwise."""
    if not _ID.fullmatch(text):
        raise BadValue(field, text, "64 hex digits")
    return bytes.fromhex(text)


def hex_ids(field: str, texts: Iterable[str]) -> bytes:
    """Several of them, packed."""
    return b"".join(hex_id(field, each) for each in texts)


def operator(master: str, cluster: str, secret_file: Path | None) -> Operator:
    """An operator's connection to a master."""
    return Operator(master, cluster_section(None, secret_file).secret(), cluster)


def confirm(question: str) -> None:
    """End the command unless whoever is at the terminal wants that; BadValue where nobody is."""
    if not sys.stdin.isatty():
        raise BadValue("--yes", False, "it, where nobody can be asked")
    typer.confirm(question, abort=True, err=True)


def refuse_early_options(context: typer.Context) -> None:
    """BadValue for an option of a connection before the sub-command, which has its own.

    It would go to another pool than the one that is named here.
    """
    for option in ("master", "cluster", "secret_file"):
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            named = f"--{option.replace('_', '-')}"
            want = f"it after {context.invoked_subcommand}"
            raise BadValue(named, str(context.params[option]), want)
