"""The disks of a standalone pool, from whichever source names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cli.disks import given_disks
from kvstore.cli.places import places_of
from kvstore.errors import ConfigError

GIB = 1 << 30


def given(config: Path | None, *options: str) -> list[tuple[str, int]]:
    places = places_of(Path("/data"))
    found = given_disks(config, options, places)
    assert all(disk.path.name == places.segment_dir.name for disk in found)
    return [(str(disk.path.parent), disk.size) for disk in found]


def test_a_pool_may_have_none() -> None:
    assert given(None) == []


def test_the_strongest_source_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pool.toml"
    file.write_text('[worker]\ndram = "1GiB"\nnvme = [{path = "/mnt/file", size = "1GiB"}]\n')
    assert given(file) == [("/mnt/file", GIB)]
    monkeypatch.setenv("KVHARBOR_WORKER_NVME", "/mnt/environment:2GiB")
    assert given(file) == [("/mnt/environment", 2 * GIB)]
    found = given(file, "/mnt/option:3GiB", "/mnt/other:4GiB")
    assert found == [("/mnt/option", 3 * GIB), ("/mnt/other", 4 * GIB)]


def test_a_bad_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"option --nvme: got '/mnt', want a folder and a size"):
        given(None, "/mnt")
