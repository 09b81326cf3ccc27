"""Folders, lock and wipe of a standalone pool, in a temporary folder instead of /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore import folder_lock
from kvstore.cli import places
from kvstore.config import default_data_dir
from kvstore.errors import ConfigError, SegmentInUse


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> places.Places:
    """Prepared places of a pool."""
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", shared)
    monkeypatch.setattr(folder_lock, "PATIENCE_S", 0.0)
    found = places.places_of(tmp_path / "data")
    places.prepare(found)
    return found


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, "~/.local/share/kvharbor"),
        ({"XDG_DATA_HOME": "/x"}, "/x/kvharbor"),
        ({"KVHARBOR_HOME": "/h", "XDG_DATA_HOME": "/x"}, "/h"),
        ({"KVHARBOR_HOME": "~/k"}, "~/k"),
        ({"KVHARBOR_HOME": ""}, "~/.local/share/kvharbor"),
    ],
)
def test_the_default_data_folder(environment: dict[str, str], want: str) -> None:
    assert default_data_dir(environment) == Path(want).expanduser()


def test_each_data_folder_has_its_segments(pool: places.Places, tmp_path: Path) -> None:
    assert places.places_of(pool.data_dir) == pool
    assert places.places_of(tmp_path / "other").segment_dir != pool.segment_dir
    (tmp_path / "link").symlink_to(pool.data_dir)
    assert places.places_of(tmp_path / "link") == pool


def test_the_folders_are_their_users(pool: places.Places) -> None:
    for folder in (pool.data_dir, pool.segment_dir):
        assert folder.stat().st_mode & 0o777 == 0o700
    places.prepare(pool)


def test_a_strangers_segment_folder_is_refused(pool: places.Places) -> None:
    pool.segment_dir.chmod(0o777)
    with pytest.raises(ConfigError, match=r"with mode 0700, found drwxrwxrwx of user"):
        places.prepare(pool)
    with pytest.raises(ConfigError, match="mode 0700"):
        places.wipe(pool)


def test_a_link_in_the_segment_folders_place_is_refused(
    pool: places.Places, tmp_path: Path
) -> None:
    pool.segment_dir.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    pool.segment_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="mode 0700, found lrwx"):
        places.prepare(pool)


def test_a_file_in_a_folders_place_is_named(pool: places.Places) -> None:
    pool.data_dir.rmdir()
    pool.data_dir.touch()
    with pytest.raises(ConfigError, match=f"folder {pool.data_dir}: cannot be made"):
        places.prepare(pool)


def test_one_pool_runs_from_a_data_folder(pool: places.Places) -> None:
    held = places.lock(pool)
    with pytest.raises(SegmentInUse, match=f"a pool runs from it \\(process {os.getpid()}\\)"):
        places.lock(pool)
    os.close(held)
    os.close(places.lock(pool))


def test_the_lock_lives_as_long_as_any_copy(pool: places.Places) -> None:
    held = places.lock(pool)
    inherited = os.dup(held)
    os.close(held)
    with pytest.raises(SegmentInUse):
        places.lock(pool)
    os.close(inherited)
    os.close(places.lock(pool))


def fill(pool: places.Places) -> None:
    (pool.segment_dir / "standalone-dram.seg").write_bytes(bytes(1 << 16))
    (pool.segment_dir / "deeper").mkdir()
    (pool.segment_dir / "deeper" / "file").write_bytes(b"x")
    for name in ("metadata.db", "metadata.db-wal", "master.json", "worker.log", "mine.txt"):
        (pool.data_dir / name).write_text("x")


def test_wipe_removes_what_is_the_pools(pool: places.Places) -> None:
    fill(pool)
    assert places.wipe(pool) >= 1 << 16
    assert not pool.segment_dir.exists()
    assert [path.name for path in pool.data_dir.iterdir()] == ["mine.txt"]
    assert places.wipe(pool) == 0


def test_segments_stay_while_the_epoch_rises(pool: places.Places) -> None:
    fill(pool)
    for epoch in (1, 2, 5):
        assert places.forget_strange_segments(pool, epoch) == 0
    assert (pool.segment_dir / "standalone-dram.seg").exists()


@pytest.mark.parametrize("epoch", [1, 4, 5])
def test_segments_go_when_the_metadata_began_anew(pool: places.Places, epoch: int) -> None:
    fill(pool)
    places.forget_strange_segments(pool, 5)
    assert places.forget_strange_segments(pool, epoch) >= 1 << 16
    assert [path.name for path in pool.segment_dir.iterdir()] == ["epoch"]
    assert places.forget_strange_segments(pool, epoch + 1) == 0


def test_a_damaged_epoch_file_discards_nothing(pool: places.Places) -> None:
    (pool.segment_dir / "epoch").write_text("")
    fill(pool)
    assert places.forget_strange_segments(pool, 1) == 0


@pytest.fixture
def disk(pool: places.Places, tmp_path: Path) -> Path:
    """The pool's folder on a disk, with a segment in it."""
    (tmp_path / "disk").mkdir()
    folder = pool.disk_folder(tmp_path / "disk")
    places.prepare_disks(pool, [folder])
    (folder / "segment").write_bytes(bytes(1 << 16))
    return folder


def test_a_pool_has_a_folder_of_its_own_on_each_disk(
    pool: places.Places, disk: Path, tmp_path: Path
) -> None:
    assert disk.stat().st_mode & 0o777 == 0o700
    other = places.places_of(tmp_path / "other").disk_folder(tmp_path / "disk")
    assert (other.parent, other == disk) == (disk.parent, False)
    places.prepare_disks(pool, [disk])
    assert pool.disk_folders() == [disk]


def test_a_wipe_clears_every_disk_that_the_pool_was_ever_given(
    pool: places.Places, disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "next").mkdir()
    places.prepare_disks(pool, [pool.disk_folder(tmp_path / "next")])
    assert pool.disk_folders() == [disk, pool.disk_folder(tmp_path / "next")]
    assert places.wipe(pool) >= 1 << 16
    assert not list((tmp_path / "disk").iterdir()) + list((tmp_path / "next").iterdir())
    assert not list(pool.data_dir.iterdir())


def test_a_disk_that_is_away_is_remembered(pool: places.Places, disk: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").rename(tmp_path / "away")
    places.prepare_disks(pool, [])
    assert places.wipe_segments(pool) == 0
    (tmp_path / "away").rename(tmp_path / "disk")
    assert places.wipe_segments(pool) >= 1 << 16
    assert not disk.exists()


@pytest.mark.parametrize("how", ["another's", "a link", "a stranger's name"])
def test_nothing_is_removed_where_a_folder_is_not_ours(
    pool: places.Places, disk: Path, tmp_path: Path, how: str
) -> None:
    if how == "another's":
        disk.chmod(0o755)
    elif how == "a link":
        disk.rename(tmp_path / "kept")
        disk.symlink_to(tmp_path / "kept")
    else:
        (tmp_path / "kept").mkdir(mode=0o700)
        pool.disk_list.write_text(f"{tmp_path}/kept\n")
        assert places.wipe_segments(pool) == 0
        assert (tmp_path / "kept").exists()
        return
    fill(pool)
    with pytest.raises(ConfigError, match="mode 0700"):
        places.wipe(pool)
    assert (disk / "segment").exists()
    assert (pool.segment_dir / "standalone-dram.seg").exists()


def test_a_disk_outlives_memory_and_is_judged_by_its_own_epoch(
    pool: places.Places, disk: Path
) -> None:
    places.forget_strange_segments(pool, 5, [disk])
    places.wipe_segments(places.Places(pool.data_dir / "none", pool.segment_dir))  # as a boot does
    places.prepare(pool)
    assert places.forget_strange_segments(pool, 6, [disk]) == 0
    assert (disk / "segment").exists()
    places.wipe_segments(places.Places(pool.data_dir / "none", pool.segment_dir))
    places.prepare(pool)
    assert places.forget_strange_segments(pool, 1, [disk]) >= 1 << 16
    assert [path.name for path in disk.iterdir()] == ["epoch"]


def test_a_disk_whose_folder_is_not_there_is_named(pool: places.Places, tmp_path: Path) -> None:
    folder = pool.disk_folder(tmp_path / "nowhere")
    want = (
        f"folder {folder}: cannot be made: No such .*: make {tmp_path}/nowhere, or mount its disk"
    )
    with pytest.raises(ConfigError, match=want):
        places.prepare_disks(pool, [folder])
