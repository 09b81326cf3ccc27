"""Inference workers and a gateway beside a standalone pool: which processes, with what options.

Knows the programs by their modules' names alone; who starts and watches them is
kvstore.cli.standalone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.announcement import Announcement
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.cli.places import Places

GATEWAY: Final = "gateway"
GATEWAY_MODULE: Final = "workers.gateway"
WORKER_MODULE: Final = "workers.serve"
SHAPE: Final = re.compile(r"([1-9]\d?)p([1-9]\d?)d", re.ASCII)
MODELS: Final = ("smollm", "tiny", "tiny-2")


class Serving(msgspec.Struct, frozen=True):
    """What is to serve a model, and where its gateway listens."""

    prefills: int
    decodes: int
    model: str
    listen: str
    secret_file: Path | None
    switch_roles: bool = False

    def workers(self) -> list[tuple[str, str]]:
        """Name and role of each inference worker."""
        each = (("prefill", self.prefills), ("decode", self.decodes))
        return [(f"{role}-{i}", role) for role, count in each for i in range(1, count + 1)]

    def worker_options(self, name: str, role: str, places: Places, master: str) -> list[str]:
        """Options of one inference worker."""
        own = [f"--role={role}", f"--name={name}", f"--model={self.model}", "--threads=1"]
        switches = ["--switch-roles"] if self.switch_roles else []
        return [*own, *switches, *self._shared(places, master)]

    def gateway_options(self, workers: Sequence[str], places: Places, master: str) -> list[str]:
        """Options of the gateway; `workers` are addresses."""
        named = [f"--worker={where}" for where in workers]
        return [f"--listen={self.listen}", *named, *self._shared(places, master)]

    def _shared(self, places: Places, master: str) -> list[str]:
        secret = [] if self.secret_file is None else [f"--secret-file={self.secret_file}"]
        data_dir = f"--data-dir={places.data_dir}"
        return [f"--master={master}", data_dir, *secret]


class Served(msgspec.Struct, frozen=True):
    """What serves a model now."""

    model: str
    gateway: Announcement
    workers: list[Announcement]


def parse_serving(
    shape: str | None,
    model: str,
    listen: str,
    secret_file: Path | None,
    *,
    switch_roles: bool = False,
) -> Serving | None:
    """What `--pd` asks for, None where it was not given. BadValue naming the option."""
    if shape is None:
        if switch_roles:
            raise BadValue("--switch-roles", True, "beside --pd only")
        return None
    found = SHAPE.fullmatch(shape)
    if found is None:
        raise BadValue("--pd", shape, "so many prefill and decode workers, as in 1p2d")
    if model not in MODELS:
        raise BadValue("--model", model, f"one of {', '.join(MODELS)}")
    prefills, decodes = found.groups()
    return Serving(int(prefills), int(decodes), model, listen, secret_file, switch_roles)
