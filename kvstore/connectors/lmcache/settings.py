"""What a user tells LMCache's plug-ins: `adapter_params` of one, `extra_config` of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.connectors.pool_settings import PoolSettings, read_settings
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping

ENGINES: Final = ("0.5",)
"""Minor versions of LMCache with which the tests run."""
REVISION_LETTERS_MAX: Final = 256


class Settings(PoolSettings, frozen=True, kw_only=True):
    """All of it has defaults."""

    revision: str = ""
    """Names the models' weights and which fp8 their caches have, of which LMCache's keys say
    nothing, and its serde if it has one: caches that say otherwise share nothing."""
    capacity_bytes: int = 0
    """What LMCache evicts by, if it is told to; 0: the pool alone makes room."""


def settings_of(given: Mapping[str, object], where: str) -> Settings:
    """The settings; BadValue names the one that is wrong, as one of `where`."""
    settings = read_settings(Settings, given, where)
    if len(settings.revision) > REVISION_LETTERS_MAX:
        want = f"at most {REVISION_LETTERS_MAX} letters"
        raise BadValue(f"{where}.revision", len(settings.revision), want)
    if settings.capacity_bytes < 0:
        raise BadValue(f"{where}.capacity_bytes", settings.capacity_bytes, "0 or more bytes")
    return settings


def engine_of(version: str) -> str:
    """LMCache's minor version; BadValue for one whose interfaces nobody has tried."""
    minor = ".".join(version.split(".")[:2])
    if minor not in ENGINES:
        raise BadValue("lmcache", version, f"one of {', '.join(ENGINES)}")
    return minor
