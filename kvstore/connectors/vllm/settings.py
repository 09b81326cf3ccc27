"""What a user tells the connector: `kv_connector_extra_config` in vLLM's `kv_transfer_config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.connected import DEFAULT_MASTERS, DEFAULT_TRANSPORTS
from kvstore.client.store import KVStore
from kvstore.config import read_secret
from kvstore.connectors.engine_lookups import DEADLINE_S
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping

WHERE: Final = "kv_connector_extra_config"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it has defaults."""

    masters: str = DEFAULT_MASTERS
    """Addresses of masters, with commas between."""
    tenant: str = "default"
    secret_file: str = ""
    host: str = ""
    """Name of this machine, as its pool workers have it; empty for the system's."""
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    description_file: str = ""
    """Where to write what this engine's KV is called, for `kvharbor doctor engine`."""
    revision: str = ""
    """Names the model's weights; empty for a digest of them, about a second a gigabyte."""
    timeout_s: float = 1.0
    """Of a call to the pool, beside the time that its bytes take."""
    lookup_deadline_s: float = DEADLINE_S
    """A request is held back so long for the pool's answer; then it is computed without."""
    save_buffer_bytes: int = 256 * limits.MIB
    """Memory for blocks on their way to the pool, of each rank; what finds none is not saved."""


def settings_of(extra: Mapping[str, object]) -> Settings:
    """The settings; BadValue names the one that is wrong."""
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise BadValue(WHERE, str(error), f"some of {known}") from error
    if not 0 < settings.timeout_s <= limits.CALL_TIMEOUT_MAX_S:
        want = f"more than 0, up to {limits.CALL_TIMEOUT_MAX_S}"
        raise BadValue(f"{WHERE}.timeout_s", settings.timeout_s, want)
    if not 0 <= settings.lookup_deadline_s <= settings.timeout_s:
        want = f"0 to timeout_s, {settings.timeout_s}"
        raise BadValue(f"{WHERE}.lookup_deadline_s", settings.lookup_deadline_s, want)
    if settings.save_buffer_bytes < 0:
        raise BadValue(f"{WHERE}.save_buffer_bytes", settings.save_buffer_bytes, "0 or more bytes")
    return settings


def connect(settings: Settings, name: str) -> KVStore:
    """A store of the pool that the settings name; KVStoreError where it cannot be reached."""
    secret = read_secret(Path(settings.secret_file)) if settings.secret_file else None
    return KVStore.connect(
        settings.masters,
        tenant=settings.tenant,
        secret=secret,
        name=name,
        host=settings.host or None,
        transports=settings.transports,
        timeout_s=settings.timeout_s,
    )
