"""The disks that a standalone pool is given: by option, environment or file, as for any setting.

Whoever starts the pool must know them all, because each gets a folder of the pool's own and is
cleared by a wipe. Must not know what lies in a segment.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from kvstore.config import DiskSpace, Sources, read_file
from kvstore.startup import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.cli.places import Places

KEY: Final = "nvme"
VARIABLE: Final = "KVHARBOR_WORKER_NVME"
Disks = Annotated[
    list[str] | None,
    typer.Option(
        help="A folder of a disk to lend below the memory, and how much; may be repeated.",
        metavar="DIR:SIZE",
    ),
]


class _Given(msgspec.Struct, frozen=True):
    """The one key of section [worker] that is read here."""

    nvme: tuple[DiskSpace, ...] = ()


def given_disks(
    config: Path | None, options: Sequence[str], places: Places
) -> tuple[DiskSpace, ...]:
    """The pool's own folders on the disks that it is given. ConfigError for a bad value."""
    tables = read_file(config, SECTIONS) if config else {}
    worker = {key: value for key, value in tables.get("worker", {}).items() if key == KEY}
    environment = {key: value for key, value in os.environ.items() if key == VARIABLE}
    option = {KEY: ",".join(options) or None}
    found = Sources(config, {"worker": worker}, environment, option).section(_Given, "worker")
    return tuple(DiskSpace(places.disk_folder(disk.path), disk.size) for disk in found.nvme)
