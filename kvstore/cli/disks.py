"""The disks that a standalone pool is given: by option, environment or file, as for any setting.

Whoever starts the pool must know them all, because each gets a folder of the pool's own and is
cleared by a wipe. Must not know what lies in a segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvstore.cli.options import key_alone
from kvstore.config_values import DiskSpace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.cli.places import Places

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
    sources = key_alone(config, "worker", "nvme", ",".join(options) or None)
    found = sources.section(_Given, "worker")
    return tuple(DiskSpace(places.disk_folder(disk.path), disk.size) for disk in found.nvme)
