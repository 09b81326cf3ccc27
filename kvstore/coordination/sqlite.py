"""The embedded MetadataStore: one SQLite file, the default for standalone pools.

Owns the file's layout and its thread: SQLite blocks, the master's loop may not. WAL with
synchronous=FULL makes each transaction durable before `write` returns; a kill at any moment
leaves the old or the new values. A campaign always wins, and ends the term of whoever else has the
file open: who shares a folder is kept apart before that. Must not know what the values mean.
"""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore import errors
from kvstore.coordination.metadata_store import EPOCH_MAX, Term, require_writable
from kvstore.ids import Epoch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore.coordination.metadata_store import Candidate, Entry

Result = TypeVar("Result")

APPLICATION_ID: Final = 0x4B564831  # "KVH1", in the header of the file
SCHEMA_VERSION: Final = 1
REMEDY: Final = (
    "; restore it, or start without it (a standalone pool: `kvharbor wipe`, or `kvharbor up "
    "--fresh`)"
)
BUSY_TIMEOUT_S: Final = 2.0
PAGE_ENTRIES: Final = 256
NO_TERM: Final = Epoch(0)

_SCHEMA: Final = f"""
PRAGMA journal_mode = WAL;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
BEGIN;
CREATE TABLE leadership (id INTEGER PRIMARY KEY CHECK (id = 1), cluster TEXT, epoch INTEGER);
CREATE TABLE entries (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value BLOB NOT NULL);
COMMIT;
"""


class SqliteStore:
    """The metadata of one cluster in the file at `path`, made on first use."""

    def __init__(self, path: Path, cluster: str) -> None:
        """Name the file and the cluster whose metadata it holds; nothing is opened yet."""
        self._path = path
        self._cluster = cluster
        self._epoch = NO_TERM
        self._database: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metadata")

    async def open(self) -> None:
        """As the port says. ConfigError names the file when it is damaged or another's."""
        assert self._database is None, "a store is opened once"
        await self._in_thread(self._open)

    async def campaign(self, candidate: Candidate) -> Term:
        """As the port says; the file is no place to look up leaders, so `candidate` is not kept."""
        self._epoch = await self._in_thread(lambda: self._raise_epoch(candidate.above))
        return Term(self._epoch, math.inf)

    async def renew(self) -> None:
        """As the port says."""
        await self._in_thread(lambda: self._require_term(self._opened()))

    async def load(self, prefix: str) -> AsyncIterator[list[Entry]]:
        """As the port says; read whole before the first page, so that all are of one moment."""
        entries = await self._in_thread(lambda: self._load(prefix))
        for start in range(0, len(entries), PAGE_ENTRIES):
            yield entries[start : start + PAGE_ENTRIES]

    async def write(self, puts: Sequence[Entry], deletes: Sequence[str]) -> None:
        """As the port says."""
        require_writable(puts, deletes)
        await self._in_thread(lambda: self._write(puts, deletes))

    async def resign(self) -> None:
        """As the port says."""
        self._epoch = NO_TERM

    async def close(self) -> None:
        """As the port says."""
        database, self._database = self._database, None
        if database is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, database.close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        def guarded() -> Result:
            with self._typed_errors():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._typed(error) from error
        except OSError as error:
            raise errors.ConfigError(f"metadata file {self._path}: {error.strerror}") from error

    def _typed(self, error: sqlite3.Error) -> errors.KVStoreError:
        text = f"metadata file {self._path}: {error}"
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:  # the low byte is the primary code
            case sqlite3.SQLITE_FULL:
                return errors.OutOfSpace(text)
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED | sqlite3.SQLITE_IOERR:
                return errors.Unavailable(text)
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return errors.ConfigError(f"{text}: it is damaged{REMEDY}")
            case _:
                return errors.ConfigError(text)

    def _open(self) -> None:
        if not self._path.exists():
            _create(self._path, self._cluster)
        database = _connect(self._path)
        try:
            self._check(database)
        except BaseException:
            database.close()
            raise
        self._database = database

    def _raise_epoch(self, above: Epoch) -> Epoch:
        with _transaction(self._opened()) as database:
            epoch = Epoch(max(_epoch(database), above) + 1)
            assert epoch <= EPOCH_MAX, epoch
            database.execute("UPDATE leadership SET epoch = ?", (epoch,))
        # Into the main file: losing the -wal file must not bring an old epoch back.
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return epoch

    def _require_term(self, database: sqlite3.Connection) -> None:
        raised = _epoch(database)
        if self._epoch == NO_TERM:
            raise errors.StaleEpoch("this master is in no term")
        if raised != self._epoch:  # I10
            raise errors.StaleEpoch(f"epoch {self._epoch} was followed by epoch {raised}")

    def _check(self, database: sqlite3.Connection) -> None:
        found = _pragma(database, "application_id"), _pragma(database, "user_version")
        if found != (APPLICATION_ID, SCHEMA_VERSION):
            raise errors.ConfigError(
                f"metadata file {self._path}: not a kvharbor metadata file of version "
                f"{SCHEMA_VERSION} (application id {found[0]}, version {found[1]})"
            )
        verdict = _pragma(database, "quick_check")
        if verdict != "ok":
            raise errors.ConfigError(
                f"metadata file {self._path}: it is damaged: {verdict}{REMEDY}"
            )
        (cluster,) = database.execute("SELECT cluster FROM leadership").fetchone()
        if cluster != self._cluster:
            raise errors.ConfigError(
                f"metadata file {self._path}: holds cluster {cluster!r}, not {self._cluster!r}"
            )

    def _load(self, prefix: str) -> list[Entry]:
        # Keys are ordered by code point, so those with the prefix are one range that starts at it.
        rows = self._opened().execute(
            "SELECT key, value FROM entries WHERE key >= ? AND substr(key, 1, ?) = ? ORDER BY key",
            (prefix, len(prefix), prefix),
        )
        return [(str(key), bytes(value)) for key, value in rows]

    def _write(self, puts: Sequence[Entry], deletes: Sequence[str]) -> None:
        with _transaction(self._opened()) as database:
            self._require_term(database)
            database.executemany("DELETE FROM entries WHERE key = ?", ((key,) for key in deletes))
            database.executemany(
                "INSERT INTO entries (key, value) VALUES (?, ?)"
                " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                puts,
            )

    def _opened(self) -> sqlite3.Connection:
        assert self._database is not None, "open the store first"
        return self._database


def _create(path: Path, cluster: str) -> None:
    """Make the file whole under another name first: an empty file at `path` is then damage."""
    fresh = path.with_name(f"{path.name}.new")
    for left in (fresh, *(path.with_name(f"{fresh.name}-{part}") for part in ("wal", "shm"))):
        left.unlink(missing_ok=True)
    # The values let nobody read pages, but they name models and tenants.
    os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    with closing(_connect(fresh)) as database:
        database.executescript(_SCHEMA)
        database.execute("INSERT INTO leadership VALUES (1, ?, 0)", (cluster,))
    fresh.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode that may be used, and closed, by the store's own thread."""
    database = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode=rw",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        database.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error:
        database.close()
        raise
    return database


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A transaction that owns the write lock from its start, so that what it reads stays true."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        # SQLite itself rolls back after some errors (a full disk), and then has none open.
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _epoch(database: sqlite3.Connection) -> int:
    (epoch,) = database.execute("SELECT epoch FROM leadership").fetchone()
    return int(epoch)


def _pragma(database: sqlite3.Connection, name: str) -> str | int:
    (value,) = database.execute(f"PRAGMA {name}").fetchone()
    assert isinstance(value, str | int), value
    return value
