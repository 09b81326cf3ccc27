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
LAYERS: Final = {"smollm": 30, "tiny": 4, "tiny-2": 4}
"""Of each model that workers load: into as many groups a prompt's hand-over can be cut."""
MODELS: Final = tuple(LAYERS)


class Serving(msgspec.Struct, frozen=True):
    """What is to serve a model, and where its gateway listens."""

    prefills: int
    decodes: int
    model: str
    listen: str
    secret_file: Path | None
    switch_roles: bool = False
    layer_groups: int = 1

    def workers(self) -> list[tuple[str, str]]:
        """Name and role of each inference worker."""
        each = (("prefill", self.prefills), ("decode", self.decodes))
        return [(f"{role}-{i}", role) for role, count in each for i in range(1, count + 1)]

    def worker_options(self, name: str, role: str, places: Places, master: str) -> list[str]:
        """Options of one inference worker."""
        own = [f"--role={role}", f"--name={name}", f"--model={self.model}", "--threads=1"]
        own.append(f"--layer-groups={self.layer_groups}")
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
    layer_groups: int = 1,
) -> Serving | None:
    """What `--pd` asks for, None where it was not given. BadValue naming the option."""
    if shape is None:
        if switch_roles:
            raise BadValue("--switch-roles", True, "beside --pd only")
        if layer_groups != 1:
            raise BadValue("--layer-groups", layer_groups, "beside --pd only")
        return None
    found = SHAPE.fullmatch(shape)
    if found is None:
        raise BadValue("--pd", shape, "so many prefill and decode workers, as in 1p2d")
    if model not in MODELS:
        raise BadValue("--model", model, f"one of {', '.join(MODELS)}")
    layers = LAYERS[model]
    if not 1 <= layer_groups <= layers:
        raise BadValue("--layer-groups", layer_groups, f"1 to {layers}, the layers of {model}")
    prefills, decodes = map(int, found.groups())
    return Serving(prefills, decodes, model, listen, secret_file, switch_roles, layer_groups)
