"""The metadata file under kills, damage, strangers' files, locks and a full disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.coordination import sqlite
from kvstore.coordination.metadata_store import Candidate
from kvstore.coordination.sqlite import SqliteStore
from kvstore.errors import ConfigError, KVStoreError, OutOfSpace, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAIRS = 50

# Writes generation after generation of the same pairs, and says after each that it is durable.
WRITER = f"""
import asyncio, sys
from pathlib import Path
from kvstore.coordination.metadata_store import Candidate
from kvstore.coordination.sqlite import SqliteStore

async def life() -> None:
    store = SqliteStore(Path(sys.argv[1]), "c")
    await store.open()
    print("epoch", (await store.campaign(Candidate("m", ()))).epoch, flush=True)
    for number in range(1_000_000):
        value = str(number).encode()
        await store.write([(f"k/{{each}}", value * 100) for each in range({PAIRS})], [])
        print(number, flush=True)

asyncio.run(life())
"""


async def won(store: SqliteStore) -> int:
    """Open it and win a campaign; returns the epoch."""
    await store.open()
    return (await store.campaign(Candidate("m", ()))).epoch


async def loaded(store: SqliteStore) -> list[tuple[str, bytes]]:
    return [entry async for page in store.load("") for entry in page]


def open_once(path: Path, cluster: str = "c") -> tuple[int, list[tuple[str, bytes]]]:
    """Open, win, load everything, close; returns the epoch and the entries."""

    async def life() -> tuple[int, list[tuple[str, bytes]]]:
        store = SqliteStore(path, cluster)
        try:
            return await won(store), await loaded(store)
        finally:
            await store.close()

    return asyncio.run(life())


def write_once(path: Path, *entries: tuple[str, bytes]) -> None:
    async def life() -> None:
        store = SqliteStore(path, "c")
        try:
            await won(store)
            await store.write(entries, [])
        finally:
            await store.close()

    asyncio.run(life())


def refusal(path: Path) -> str:
    """The text of the ConfigError that opening gives."""
    with pytest.raises(ConfigError) as caught:
        open_once(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A metadata file with one entry, at epoch 1."""
    path = tmp_path / "metadata.db"
    write_once(path, ("k", b"v"))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("acknowledged", [0, 1, 7, 23])
def test_a_kill_in_mid_write_leaves_old_or_new(tmp_path: Path, acknowledged: int) -> None:
    path = tmp_path / "metadata.db"
    command = [sys.executable, "-P", "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "epoch 1\n"
        for _ in range(acknowledged):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        last = [line for line in writer.stdout.read().splitlines() if line] or [
            str(acknowledged - 1)
        ]
    epoch, entries = open_once(path)
    assert epoch == 2
    values = {value for _, value in entries}
    durable = int(last[-1])
    if durable < 0 and not entries:
        return
    assert len(entries) == PAIRS
    assert len(values) == 1, "a torn write"
    assert values <= {str(number).encode() * 100 for number in (durable, durable + 1)}


def test_the_file_is_its_owners(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_header_is_named(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"not sqlite at all")
    assert "it is damaged; restore it, or start without" in refusal(path)


def test_damage_inside_is_named(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    assert "it is damaged" in refusal(path)
    assert "`kvharbor wipe`" in refusal(path)


@pytest.mark.parametrize("length", [0, 1, 100, 4095, 4096, 5000])
def test_a_cut_file_is_no_fresh_start(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)
    refusal(path)


def test_a_strangers_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")
        database.commit()
    assert "not a kvharbor metadata file of version 1" in refusal(path)


def test_another_version_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 2")
    assert "not a kvharbor metadata file of version 1" in refusal(path)


def test_a_folder_in_the_files_place_is_named(tmp_path: Path) -> None:
    refusal(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "No such file or directory" in refusal(tmp_path / "absent" / "metadata.db")


def test_a_half_made_file_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "metadata.db.new").write_bytes(b"the maker was killed here")
    assert open_once(tmp_path / "metadata.db") == (1, [])
    assert not (tmp_path / "metadata.db.new").exists()


def test_losing_the_log_brings_no_old_epoch_back(path: Path) -> None:
    copy = path.with_name("copy.db")

    async def opened_and_copied() -> int:
        store = SqliteStore(path, "c")
        epoch = await won(store)
        shutil.copy(path, copy)  # as a kill would leave it, and without the -wal file
        await store.close()
        return epoch

    epoch = asyncio.run(opened_and_copied())
    assert open_once(copy)[0] == epoch + 1


@pytest.fixture
def locked(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file with its write lock held elsewhere, and nobody patient."""
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield path


def test_a_locked_file_is_unavailable(locked: Path) -> None:
    with pytest.raises(Unavailable, match="locked"):
        open_once(locked)


def test_a_full_disk_keeps_what_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def small(path: str, *, timeout: float, isolation_level: None, **others: bool) -> object:
        database = connect(path, timeout, isolation_level=isolation_level, **others)
        database.execute("PRAGMA max_page_count = 16")
        return database

    monkeypatch.setattr(sqlite3, "connect", small)

    async def life() -> list[tuple[str, bytes]]:
        store = SqliteStore(path, "c")
        try:
            await won(store)
            with pytest.raises(OutOfSpace, match="full"):
                await store.write([("k", b"new"), ("big", bytes(100_000))], [])
            await store.write([("small", b"fits")], [])
            return await loaded(store)
        finally:
            await store.close()

    assert asyncio.run(life()) == [("k", b"v"), ("small", b"fits")]


def test_every_refusal_is_one_of_ours(path: Path) -> None:
    path.write_bytes(os.urandom(8192))
    with pytest.raises(KVStoreError):
        open_once(path)
