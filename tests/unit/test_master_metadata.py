"""Which store a configuration names, and whose keys are known."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import master
from kvstore.config import ClusterConfig
from kvstore.coordination.etcd import EtcdStore
from kvstore.coordination.etcd_config import EtcdConfig
from kvstore.coordination.sqlite import SqliteStore
from kvstore.errors import ConfigError
from master.metadata import ETCD, FAMILIES, SQLITE, metadata_store

FOLDER = Path("/nowhere")


def test_each_kind_has_its_store() -> None:
    cluster, etcd = ClusterConfig(), EtcdConfig()
    assert isinstance(metadata_store(SQLITE, FOLDER, cluster, etcd), SqliteStore)
    assert isinstance(metadata_store(ETCD, FOLDER, cluster, etcd), EtcdStore)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvstore.coordination.etcd")
    monkeypatch.delitem(sys.modules, "kvstore.coordination.etcd_calls")
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(ConfigError, match="package aetcd: pip install"):
        metadata_store(ETCD, FOLDER, ClusterConfig(), EtcdConfig())


def test_every_family_of_keys_is_known() -> None:
    sources = Path(master.__file__).parent.rglob("*.py")
    named = re.compile(r'^[A-Z_]+: Final = "([a-z]+/)"$', re.MULTILINE)
    found = {family for source in sources for family in named.findall(source.read_text())}
    assert found
    assert found <= set(FAMILIES)
