"""Where the coordinator's records outlive it: named texts, changed together or not at all.

The interface is what a key-value service offers too, and asynchronous for that reason; SQLite answers in place, within
microseconds, because it writes to the kernel's cache only: that survives kill -9 of the coordinator. It does not wait
for the disk: what a power failure loses here, it has lost on the memory servers of this host as well.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Protocol

from smb.errors import Error, InvalidArgumentError, UnavailableError
from smb.failpoint import failpoint

FILE_NAME = "coordinator.sqlite"
SCHEMA_VERSION = 1


class StoreError(Error):
    """The store is not what it should be, or cannot be written; the message names it. Nothing was changed."""


class Store(Protocol):
    """Texts by key. One coordinator at a time has it."""

    async def load(self) -> dict[str, str]:
        """Return everything, by key."""

    async def change(self, changes: Mapping[str, str | None]) -> None:
        """Put each text under its key, take away the keys with None: all of it or, raising StoreError, nothing."""

    async def close(self) -> None:
        """Let the next coordinator have it."""


def open_store(where: str) -> Store:
    """Open the store at `where`: a directory, made if need be, for SQLite.

    Raises InvalidArgumentError for a kind of store that is not there, UnavailableError where another coordinator has
    it, StoreError where it cannot be made or was written by another version.
    """
    if where.startswith("etcd://"):
        raise InvalidArgumentError(f"--state {where}: a store in etcd is not there yet; give a directory")
    if "://" in where:
        raise InvalidArgumentError(f"--state {where}: no such kind of store; give a directory")
    return SqliteStore(Path(where))


class SqliteStore:
    """A Store in one file of SQLite, in a directory."""

    def __init__(self, directory: Path) -> None:
        """Make or open the file and keep it for ourselves. Raises as `open_store` does."""
        self._path = directory / FILE_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Secrets are in it, the root of all tokens among them.
            self._path.touch(mode=0o600, exist_ok=True)
            self._path.chmod(0o600)
            # timeout 0: another coordinator will not go away while we wait.
            self._connection = sqlite3.connect(self._path, timeout=0.0, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot make {self._path}: {error}") from None
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    async def load(self) -> dict[str, str]:
        """Return everything, by key."""
        with closing(self._connection.execute("SELECT key, text FROM records")) as rows:
            return dict(rows.fetchall())

    async def change(self, changes: Mapping[str, str | None]) -> None:
        """Put each text under its key, take away the keys with None: all of it or, raising StoreError, nothing."""
        put = [(key, text) for key, text in changes.items() if text is not None]
        take = [(key,) for key, text in changes.items() if text is None]
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._connection.executemany("INSERT OR REPLACE INTO records (key, text) VALUES (?, ?)", put)
                self._connection.executemany("DELETE FROM records WHERE key = ?", take)
                failpoint("coordinator.store.written")
                self._connection.execute("COMMIT")
                failpoint("coordinator.store.committed")
            except sqlite3.Error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"cannot write {self._path}: {error}; nothing was changed") from error

    async def close(self) -> None:
        """Let the next coordinator have it."""
        self._connection.close()

    def _prepare(self) -> None:
        try:
            # EXCLUSIVE before WAL: the file's lock is then held until we close it or die.
            self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("BEGIN EXCLUSIVE")
            self._connection.execute("CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, text TEXT NOT NULL)")
            self._connection.execute("COMMIT")
            self._check_version()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UnavailableError(f"{self._path} is in use by another coordinator; stop it first") from None
            raise StoreError(f"cannot use {self._path}: {error}") from None
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path} is no store of a coordinator: {error}") from None

    def _check_version(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise StoreError(f"{self._path} has version {version}, this coordinator writes version {SCHEMA_VERSION}")
