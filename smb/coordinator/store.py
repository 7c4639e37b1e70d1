"""Stores in which the coordinator's records outlive it: named texts, changed together or not at all.

The interface is what a key-value service offers too, and asynchronous for that reason; SQLite answers in place, within
microseconds, because it writes to the kernel's cache only: that survives kill -9 of the coordinator. It does not wait
for the disk, which takes milliseconds, so a power failure of this host takes the last changes away, in their order. It
notices that the host was started anew since, and says that its end may be missing.
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

from smb.config.boot import boot_id
from smb.daemon.failpoint import failpoint
from smb.daemon.own_files import keep_to_ourselves, take_directory
from smb.errors import Error, InvalidArgumentError, OutOfMemoryError, UnavailableError

FILE_NAME = "coordinator.sqlite"
# Room of the disk that is kept for what makes room: deletions, and what must be stored so that these can be asked for.
# SQLite writes it to its log first, which grows to 4 MiB before it is used again from its beginning.
RESERVE_NAME = "coordinator.reserve"
RESERVE_BYTES = 8 << 20
_BESIDE = ("-wal", "-shm", "-journal")  # what SQLite has beside its file
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
SCHEMA_VERSION = 1
SEQUENCE = "lineage/sequence"  # the key of the number of the last change, which goes along with most changes
BOOT = "boot"  # the key of what names the boot of the host in which the last change was written
MIGRATION = "migration"  # the key of what says that these records are not to be served: they moved, or are half there

_log = logging.getLogger("coordinator")


class StoreError(Error):
    """The store is not what it should be, or cannot be written; the message names it. Nothing was changed."""


class StoreFullError(StoreError, OutOfMemoryError):
    """The store has no room for more. To its users that is what memory servers without room are."""


class DeposedError(UnavailableError):
    """Another coordinator leads, or may: this one can change nothing, and what it knows may be out of date."""


class Store(Protocol):
    """Texts by key. One coordinator at a time has it."""

    @property
    def changes_max(self) -> int | None:
        """How many texts one change may have; None: any number."""

    @property
    def may_lack_its_end(self) -> bool:
        """Whether changes from some moment on may be missing of what was loaded, though they were answered for."""

    async def load(self) -> dict[str, str]:
        """Return everything, by key."""

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        """Put each text under its key, take away the keys with None: all of it or, raising StoreError, nothing.

        An `urgent` change may use the last of the disk's room.
        """

    def free_bytes(self) -> int | None:
        """Return how much room there is for more; None if nobody knows. For any thread."""

    async def close(self) -> None:
        """Let the next coordinator have it."""


def open_store(where: str) -> Store:
    """Open the store at `where`: a directory, made if need be, for SQLite. (The store in etcd belongs to the leader.)

    Raises InvalidArgumentError for an unknown kind of store, UnavailableError if another coordinator has the store.
    UnavailableError too if it is another user's, if everybody may write in it, or if others have put something there.
    Raises StoreError if the store cannot be made or was written by another version.
    """
    if "://" in where:
        raise InvalidArgumentError(f"--state {where}: no such kind of store; give a directory, or etcd://...")
    return SqliteStore(Path(where))


class SqliteStore:
    """A Store in one file of SQLite, in a directory."""

    changes_max = None

    def __init__(self, directory: Path) -> None:
        """Make or open the file and keep it for ourselves. Raises as `open_store` does."""
        self._path = directory / FILE_NAME
        self._reserve = directory / RESERVE_NAME
        try:
            take_directory(directory, "--state")
            with suppress(FileExistsError):
                os.close(os.open(self._path, _NEW_FILE, 0o600))
            # Secrets are in it, the root of all tokens among them; and SQLite believes what lies beside it.
            for beside in (*(self._path.with_name(FILE_NAME + end) for end in ("", *_BESIDE)), self._reserve):
                keep_to_ourselves(beside)
            # timeout 0: another coordinator will not go away while we wait.
            self._connection = sqlite3.connect(self._path, timeout=0.0, isolation_level=None)
        except UnavailableError:  # says all by itself
            raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot make {self._path}: {error}") from None
        try:
            self._prepare()
            self._boot = boot_id()
            self._boot_written = ""  # until it is loaded
            self.may_lack_its_end = False
            self._file = self._found()
            reserved = self._has_reserve()
        except BaseException:
            self._connection.close()
            raise
        if not reserved:
            _log.warning("%s: the disk is full: buffers can be deleted, perhaps, but none can be made", self._path)

    async def load(self) -> dict[str, str]:
        """Return everything, by key. Raises StoreError for a file that is damaged."""
        try:
            with closing(self._connection.execute("SELECT key, text FROM records")) as rows:
                found = dict(rows.fetchall())
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot read {self._path}: {error}; put a copy of it back, or see what can be read with: "
                f"sqlite3 {self._path} .recover"
            ) from error
        self._boot_written = found.pop(BOOT, "")
        self.may_lack_its_end = self._boot_written not in ("", self._boot)
        return found

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        """Put each text under its key, take away the keys with None: all of it or, raising StoreError, nothing."""
        self._check_there()
        if not urgent and not self._has_reserve():
            raise StoreFullError(
                f"cannot write {self._path}: its disk is full, and what is left is for deletions; nothing was changed"
            )
        try:
            try:
                self._write(changes)
            except sqlite3.OperationalError as error:
                if not urgent or "full" not in str(error) or not self._reserve.exists():
                    raise
                self._reserve.unlink()
                _log.warning("%s: the disk is full; its reserve is in use now, and no buffer can be made", self._path)
                self._write(changes)
        except (OSError, sqlite3.Error) as error:  # OSError: of the reserve
            full = isinstance(error, sqlite3.OperationalError) and "full" in str(error)
            kind = StoreFullError if full else StoreError
            raise kind(f"cannot write {self._path}: {error}; nothing was changed") from error

    def free_bytes(self) -> int | None:
        """Return how much room the disk has beside the reserve. For any thread."""
        try:
            space = os.statvfs(self._path.parent)
        except OSError:
            return None
        return space.f_bavail * space.f_frsize

    def _found(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_dev, found.st_ino

    def _check_there(self) -> None:
        """Raise StoreError if the file that is open has not its path any more: SQLite would write to it all the same,
        and the next coordinator would know nothing of that.
        """
        try:
            there = self._found() == self._file
        except OSError:
            there = False
        if not there:
            raise StoreError(
                f"cannot write {self._path}: the file was removed or replaced while this coordinator runs; nothing was "
                f"changed. Put it back, or a copy of it, and start the coordinator again"
            )

    def _has_reserve(self) -> bool:
        """Make the reserve, if it is not there and the disk has room for it. Raises StoreError for a broken disk."""
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
        if self._boot_written != self._boot:  # with the first change: until then the end may still be missing
            put.append((BOOT, self._boot))
        take = [(key,) for key, text in changes.items() if text is None]
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany("INSERT OR REPLACE INTO records (key, text) VALUES (?, ?)", put)
            self._connection.executemany("DELETE FROM records WHERE key = ?", take)
            failpoint("coordinator.store.written")
            self._connection.execute("COMMIT")
            failpoint("coordinator.store.committed")
            self._boot_written = self._boot
        except sqlite3.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

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
            self._check_schema_version()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UnavailableError(f"{self._path} is in use by another coordinator; stop it first") from None
            raise StoreError(f"cannot use {self._path}: {error}") from None
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path} is no store of a coordinator: {error}") from None

    def _check_schema_version(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise StoreError(f"{self._path} has version {version}, this coordinator writes version {SCHEMA_VERSION}")
