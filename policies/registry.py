"""Policies by name, per kind. A new one is its file, one line here, and its test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.errors import ConfigError
from policies.eviction.aged_frequency import AgedFrequency
from policies.placement.most_free import MostFree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from policies.placement.protocol import PlacementPolicy

T = TypeVar("T")

EVICTION: Final[dict[str, Callable[[], AgedFrequency]]] = {"lrfu": AgedFrequency}
PLACEMENT: Final[dict[str, Callable[[], PlacementPolicy]]] = {"most_free": MostFree}


def eviction(name: str) -> AgedFrequency:
    """A new eviction policy; ConfigError, naming the known ones, when there is none of this name.

    It has state of its own: one pool, one policy.
    """
    return _known("eviction", EVICTION, name)()


def placement(name: str) -> PlacementPolicy:
    """A placement policy; ConfigError, naming the known ones, when there is none of this name."""
    return _known("placement", PLACEMENT, name)()


def _known(kind: str, table: Mapping[str, Callable[[], T]], name: str) -> Callable[[], T]:
    made = table.get(name)
    if made is None:
        raise ConfigError(f"{kind}: got {name!r}, want one of {sorted(table)}")
    return made
