"""What a user tells any engine's connector of the pool: where it is, and as whom to speak to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvstore import limits
from kvstore.client.connected import DEFAULT_MASTERS, DEFAULT_TRANSPORTS
from kvstore.client.store import KVStore
from kvstore.config import read_secret
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it has defaults; connectors add their own."""

    masters: str = DEFAULT_MASTERS
    """Addresses of masters, with commas between."""
    tenant: str = "default"
    secret_file: str = ""
    host: str = ""
    """Name of this machine, as its pool workers have it; empty for the system's."""
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    timeout_s: float = 1.0
    """Of a call to the pool, beside the time that its bytes take."""


S = TypeVar("S", bound=PoolSettings)


def read_settings(kind: type[S], given: Mapping[str, object], where: str) -> S:
    """The settings of that kind; BadValue names the one that is wrong, as one of `where`."""
    try:
        settings = msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise BadValue(where, str(error), f"some of {known}") from error
    if not 0 < settings.timeout_s <= limits.CALL_TIMEOUT_MAX_S:
        want = f"more than 0, up to {limits.CALL_TIMEOUT_MAX_S}"
        raise BadValue(f"{where}.timeout_s", settings.timeout_s, want)
    return settings


def connect(settings: PoolSettings, name: str) -> KVStore:
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
