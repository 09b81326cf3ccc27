"""What a user tells the connector: `kv_connector_extra_config` in vLLM's `kv_transfer_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.connectors.engine_lookups import DEADLINE_S
from kvstore.connectors.pool_settings import PoolSettings, read_settings
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping

WHERE: Final = "kv_connector_extra_config"
LOAD_TOKENS_MIN: Final = 256
"""On accelerators. A step reads all weights however few tokens it computes, and a request has one
to compute in any case: up to the device's operations for each byte that it reads (A100: 150,
H100: 300) the others come at next to no time, while a load is a step of its own."""


class Settings(PoolSettings, frozen=True, kw_only=True):
    """All of it has defaults."""

    description_file: str = ""
    """Where to write what this engine's KV is called, for `kvharbor doctor engine`."""
    revision: str = ""
    """Names the model's weights; empty for a digest of them, about a second a gigabyte."""
    lookup_deadline_s: float = DEADLINE_S
    """A request is held back so long for the pool's answer; then it is computed without."""
    handover_deadline_s: float = 2.0
    """A request whose prompt another engine has computed is held back so long for its blocks."""
    load_tokens_min: int | None = None
    """A load that saves fewer tokens is not worth it: they are computed. None: see least_load."""
    save_buffer_bytes: int = 256 * limits.MIB
    """Memory for blocks on their way to the pool, of each rank; what finds none is not saved."""


def settings_of(extra: Mapping[str, object]) -> Settings:
    """The settings; BadValue names the one that is wrong."""
    settings = read_settings(Settings, extra, WHERE)
    if not 0 <= settings.lookup_deadline_s <= settings.timeout_s:
        want = f"0 to timeout_s, {settings.timeout_s}"
        raise BadValue(f"{WHERE}.lookup_deadline_s", settings.lookup_deadline_s, want)
    if not 0 <= settings.handover_deadline_s <= limits.CALL_TIMEOUT_MAX_S:
        want = f"0 to {limits.CALL_TIMEOUT_MAX_S}"
        raise BadValue(f"{WHERE}.handover_deadline_s", settings.handover_deadline_s, want)
    if (settings.load_tokens_min or 0) < 0:
        raise BadValue(f"{WHERE}.load_tokens_min", settings.load_tokens_min, "0 or more tokens")
    if settings.save_buffer_bytes < 0:
        raise BadValue(f"{WHERE}.save_buffer_bytes", settings.save_buffer_bytes, "0 or more bytes")
    return settings


def least_load(settings: Settings, device: str) -> int:
    """Tokens that are worth a load, on a device of this type of vLLM's.

    Processors compute for each token: there a block is loaded sooner, however small.
    """
    if settings.load_tokens_min is not None:
        return settings.load_tokens_min
    return 0 if device == "cpu" else LOAD_TOKENS_MIN
