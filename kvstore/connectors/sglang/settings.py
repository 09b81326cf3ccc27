"""What a user tells the backend, under `kvharbor` in SGLang's own configuration of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.connectors.pool_settings import PoolSettings, read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

WHERE: Final = "kvharbor"


class Settings(PoolSettings, frozen=True, kw_only=True):
    """All of it has defaults."""

    description_file: str = ""
    """Where to write what this engine's KV is called, for `kvharbor doctor engine`."""
    revision: str = ""
    """Names the model's weights; empty for a digest of them, about a second a gigabyte."""


def settings_of(given: Mapping[str, object]) -> Settings:
    """The settings; BadValue names the one that is wrong."""
    return read_settings(Settings, given, WHERE)
