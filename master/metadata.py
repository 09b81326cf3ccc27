"""The metadata store that a master was configured for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.coordination.sqlite import SqliteStore
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.config import ClusterConfig
    from kvstore.coordination.etcd_config import EtcdConfig
    from kvstore.coordination.metadata_store import MetadataStore

SQLITE: Final = "sqlite"
ETCD: Final = "etcd"
KINDS: Final = (SQLITE, ETCD)
METADATA_FILE: Final = "metadata.db"
FAMILIES: Final = (
    "aside/",
    "clock",
    "namespaces/",
    "pins/",
    "policies/",
    "relocations/",
    "segments/",
    "stripes/",
    "tombstones/",
    "workers/",
    "write-budget",
)
"""How all keys of a master begin; in a place that others reach, the rest is somebody else's."""


def metadata_store(
    kind: str, folder: Path, cluster: ClusterConfig, etcd: EtcdConfig
) -> MetadataStore:
    """A store that was not opened. ConfigError where etcd is wanted and its client is missing.

    A secret that cannot be read is a ConfigError, too.
    """
    if kind == SQLITE:
        return SqliteStore(folder / METADATA_FILE, cluster.name)
    assert kind == ETCD, kind
    try:
        from kvstore.coordination.etcd import EtcdStore  # only here: it loads gRPC
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metadata in etcd needs the package {error.name}: pip install 'kvharbor[etcd]'"
        ) from error
    return EtcdStore(etcd, cluster.name, cluster.secret(), FAMILIES)
