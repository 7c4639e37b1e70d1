"""Stores in which the coordinator's records outlive it: named texts, changed together or not at all.

The interface is one that a key-value service offers too, and is asynchronous for that reason. SQLite answers in place,
within microseconds, because it writes to the kernel's cache only, which survives kill -9 of the coordinator. It does
not wait for the disk, which takes milliseconds, so a power failure of this host loses the last changes, in their
order. The coordinator treats such a store as one that was restored from a backup (steps/interrupted.py, lineage.py).
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

from smb.daemon.failpoint import failpoint
from smb.daemon.own_files import keep_to_ourselves, take_directory
from smb.errors import Error, InvalidArgumentError, OutOfMemoryError, UnavailableError

FILE_NAME = "coordinator.sqlite"
# Disk space that is reserved for deletions and other changes that make room, and for what must be stored before a
# client can ask for them. SQLite writes it to its log first, which grows to 4 MiB before it is used again from its
# beginning.
RESERVE_NAME = "coordinator.reserve"
RESERVE_BYTES = 8 << 20
_BESIDE = ("-wal", "-shm", "-journal")  # suffixes of SQLite's other files
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
SCHEMA_VERSION = 1
SEQUENCE = "lineage/sequence"  # the key of the last change's number, which is part of most changes
MIGRATION = "migration"  # the key of a note that these records must not be served: they were moved, or are incomplete

_log = logging.getLogger("coordinator")


class StoreError(Error):
    """The store is damaged, has another format, or cannot be written; the message says which. Nothing was changed."""


class StoreFullError(StoreError, OutOfMemoryError):
    """The store is full. Clients see the same error as for memory servers without room."""


class DeposedError(UnavailableError):
    """Another coordinator leads, or may lead: this one cannot change anything, and its state may be out of date."""


class Store(Protocol):
    """Texts by key. Only one coordinator at a time has it open."""

    @property
    def changes_max(self) -> int | None:
        """How many texts one change may have; None: unlimited."""

    async def load(self) -> dict[str, str]:
        """Return all texts by key."""

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        """Store each text under its key, and remove the keys with None: all of it or, raising StoreError, nothing.

        An `urgent` change may use the reserve of disk space.
        """

    def free_bytes(self) -> int | None:
        """Return the free bytes for more texts; None if unknown. For any thread."""

    async def close(self) -> None:
        """Release the store for the next coordinator."""


def open_store(where: str) -> Store:
    """Open the SQLite store in the directory `where`, which is made if needed. (`etcd` opens stores in etcd.)

    Raises InvalidArgumentError for an unknown kind of store. Raises UnavailableError if another coordinator has the
    store open, if it belongs to another user, or if other users may write to it or have put files there. Raises
    StoreError if the store cannot be made or was written in another format version.
    """
    if "://" in where:
        raise InvalidArgumentError(f"--state must be a directory or etcd://HOST:PORT,.../PREFIX, not {where}")
    return SqliteStore(Path(where))


class SqliteStore:
    """A Store in one SQLite file in a directory."""

    changes_max = None

    def __init__(self, directory: Path) -> None:
        """Make or open the file and lock it. Raises as `open_store` does."""
        self._path = directory / FILE_NAME
        self._reserve = directory / RESERVE_NAME
        try:
            take_directory(directory, "--state")
            with suppress(FileExistsError):
                os.close(os.open(self._path, _NEW_FILE, 0o600))
            # The files contain secrets, such as the root of all tokens, and SQLite trusts the files beside its own.
            for beside in (*(self._path.with_name(FILE_NAME + end) for end in ("", *_BESIDE)), self._reserve):
                keep_to_ourselves(beside)
            # timeout 0: waiting would not make another coordinator go away.
            self._connection = sqlite3.connect(self._path, timeout=0.0, isolation_level=None)
        except UnavailableError:  # its message is complete
            raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot make {self._path}: {error}") from None
        try:
            self._prepare()
            self._file = self._found()
            reserved = self._has_reserve()
        except BaseException:
            self._connection.close()
            raise
        if not reserved:
            _log.warning(
                "%s: the disk is full: no buffer can be created, and perhaps none deleted; make room on it", self._path
            )

    async def load(self) -> dict[str, str]:
        """Return all texts by key. Raises StoreError if the file is damaged."""
        try:
            with closing(self._connection.execute("SELECT key, text FROM records")) as rows:
                return dict(rows.fetchall())
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot read {self._path}: {error}; restore it from a backup, or see what can be read with: "
                f"sqlite3 {self._path} .recover"
            ) from error

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        self._check_there()
        if not urgent and not self._has_reserve():
            raise StoreFullError(
                f"cannot write {self._path}: its disk is full, and the reserve is for deletions; nothing was changed. "
                f"Make room on that disk"
            )
        try:
            try:
                self._write(changes)
            except sqlite3.OperationalError as error:
                if not urgent or "full" not in str(error) or not self._reserve.exists():
                    raise
                self._reserve.unlink()
                _log.warning(
                    "%s: the disk is full, and its reserve is in use now: no buffer can be created; make room on it",
                    self._path,
                )
                self._write(changes)
        except (OSError, sqlite3.Error) as error:  # OSError comes from the reserve
            full = isinstance(error, sqlite3.OperationalError) and "full" in str(error)
            kind = StoreFullError if full else StoreError
            raise kind(f"cannot write {self._path}: {error}; nothing was changed") from error

    def free_bytes(self) -> int | None:
        """Return the free bytes of the disk, without the reserve. For any thread."""
        try:
            space = os.statvfs(self._path.parent)
        except OSError:
            return None
        return space.f_bavail * space.f_frsize

    def _found(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_dev, found.st_ino

    def _check_there(self) -> None:
        """Raise StoreError if the open file was moved or removed: SQLite would go on writing to it, and the next
        coordinator would not find these changes.
        """
        try:
            there = self._found() == self._file
        except OSError:
            there = False
        if not there:
            raise StoreError(
                f"cannot write {self._path}: the file was removed or replaced while this coordinator runs; nothing was "
                f"changed. Put it back, or a copy of it, and restart the coordinator"
            )

    def _has_reserve(self) -> bool:
        """Return whether the reserve exists, making it if the disk has room. Raises StoreError if the disk is
        broken."""
        try:
            if self._reserve.exists():
                return True
            try:
                with os.fdopen(os.open(self._reserve, _NEW_FILE, 0o600), "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            except OSError as error:
                self._reserve.unlink(missing_ok=True)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                return False
        except OSError as error:
            raise StoreError(f"cannot use {self._reserve}: {error}; nothing was changed") from error
        return True

    def _write(self, changes: Mapping[str, str | None]) -> None:
        put = [(key, text) for key, text in changes.items() if text is not None]
        take = [(key,) for key, text in changes.items() if text is None]
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

    async def close(self) -> None:
        self._connection.close()

    def _prepare(self) -> None:
        try:
            # EXCLUSIVE before WAL: then the file stays locked until we close it or the process ends.
            self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("BEGIN EXCLUSIVE")
            self._connection.execute("CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, text TEXT NOT NULL)")
            self._connection.execute("COMMIT")
            self._check_schema_version()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UnavailableError(f"{self._path} is in use by another coordinator; stop it first") from None
            raise StoreError(f"cannot use {self._path}: {error}") from None
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{self._path} is not the store of a coordinator: {error}; give another directory as --state"
            ) from None

    def _check_schema_version(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} has format version {version}, but this coordinator uses version {SCHEMA_VERSION}; start "
                f"the release that wrote it, or give another --state"
            )
