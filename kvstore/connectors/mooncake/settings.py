"""What `setup` is told, in either form, and what of it a pool of ours has a use for.

Pure, but for the environment that is handed in. Mooncake's own settings of memory, devices and
metadata servers have no meaning here: workers lend memory, and the master keeps the metadata.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue
from kvstore.namespace import opaque

if TYPE_CHECKING:
    from collections.abc import Mapping

MASTER: Final = "KVHARBOR_MASTER"
SECRET_FILE: Final = "KVHARBOR_CLUSTER_SECRET_FILE"
NAMESPACE: Final = "KVHARBOR_MOONCAKE_NAMESPACE"
DEFAULT_NAMESPACE: Final = "mooncake"
POSITIONAL: Final = (
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
    "engine",
    "enable_ssd_offload",
    "ssd_offload_path",
    "tenant_id",
    "enable_client_http_server",
    "client_http_port",
)
"""Arguments of the long form, in order; the first seven have no default."""
REQUIRED: Final = 7


class Settings(msgspec.Struct, frozen=True):
    """How to reach the pool, and which objects are meant."""

    masters: str
    hostname: str
    tenant: str
    namespace: str
    secret_file: str = ""

    def secret(self) -> bytes | None:
        """The cluster's secret, if a file was named. OSError where it cannot be read."""
        return Path(self.secret_file).read_bytes().strip() if self.secret_file else None


def settings_of(
    args: tuple[object, ...], kwargs: Mapping[str, object], environment: Mapping[str, str]
) -> Settings:
    """Take either form of `setup`. TypeError for arguments of neither, BadValue for values."""
    given = _given(args, kwargs)
    masters = environment.get(MASTER) or str(given.get("master_server_addr") or "")
    if not masters or "://" in masters:
        raise BadValue(
            "master_server_addr", masters, f"host:port of kvharbor's, here or in {MASTER}"
        )
    hostname = str(given.get("local_hostname") or "")
    if not hostname:
        raise BadValue("local_hostname", hostname, "a name")
    tenant = str(given.get("tenant_id") or "default")
    name = environment.get(NAMESPACE) or DEFAULT_NAMESPACE
    opaque(tenant, name)  # refuses what is no name
    return Settings(masters, hostname, tenant, name, environment.get(SECRET_FILE, ""))


def _given(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """Values by the names of the long form."""
    if len(args) == 1 and not kwargs and isinstance(args[0], dict):
        return args[0]
    if not args and set(kwargs) == {"config"} and isinstance(kwargs["config"], dict):
        return kwargs["config"]
    given = dict(zip(POSITIONAL, args, strict=False)) | dict(kwargs)
    unknown = set(given) - set(POSITIONAL)
    missing = [name for name in POSITIONAL[:REQUIRED] if name not in given]
    if len(args) > len(POSITIONAL) or unknown or missing:
        raise TypeError(f"setup(): incompatible arguments; missing {missing}, unknown {unknown}")
    return given
