"""The fsspec filesystem `softmem`: pandas, zarr, torch and datasets read and write buffers by URL, without a mount.

The URL is softmem://HOST:PORT/NAME, or softmem://NAME with $SMB_COORDINATOR or the option `coordinator`. The filesystem
is registered as an entry point of fsspec.
"""

# fsspec dictates the arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import errno
import io
import os
import secrets
import threading
import time
import weakref
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, cast

from fsspec import AbstractFileSystem

import smb.client
from smb.files.error_codes import refuse
from smb.files.handles import FileStatus
from smb.files.namespace import NameTree
from smb.files.open_file import SCHEME, BufferFile, split_url

_BUFFER_BYTES = 1 << 20  # a file object's; larger reads and writes go straight to the servers
_NAME_MAX = 255  # characters in one part of a path
_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "x+": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}


class SoftmemFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """Buffers as fsspec's files. A file appears as a whole when it is closed; directories are made as needed.

    `coordinator` is "host:port", by default $SMB_COORDINATOR or the URL's; `timeout` in seconds bounds each call.
    Thread-safe; in a child of fork it connects again. Raises OSError, as files do.
    """

    protocol = "softmem"
    root_marker = ""

    def __init__(self, coordinator: str | None = None, timeout: float = 60.0, **options: Any) -> None:
        super().__init__(coordinator=coordinator, timeout=timeout, **options)
        self._coordinator = coordinator
        self._timeout = timeout
        self._lock = threading.Lock()
        self._tree: NameTree | None = None
        self._pid = 0

    @property
    def namespace(self) -> NameTree:
        """The files of the cluster; connects at the first use in a process. (fsspec has a method named `tree`.)"""
        with self._lock:
            if self._tree is None or self._pid != os.getpid():
                client = smb.client.connect(self._coordinator, timeout=self._timeout)
                weakref.finalize(self, client.close)
                self._tree, self._pid = NameTree(client, make_folders=True), os.getpid()
            return self._tree

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return split_url(os.fspath(path))[1]

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        address = split_url(path)[0]
        return {} if address is None else {"coordinator": address}

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path."""
        return f"{SCHEME}{self._coordinator or ''}/{self._strip_protocol(name)}"

    # ---- looking

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """See fsspec: name, size in bytes, type, mtime in seconds.

        A symbolic link has islink and destination, too. One that leads to a file has that file's type, size and time;
        any other one is of the type "other", so that nobody goes through it to a directory.
        """
        path = self._strip_protocol(path)
        try:
            status = self.namespace.status(path)
        except FileNotFoundError:
            status = self.namespace.status(self.namespace.follow(path))
        if not status.link:
            return _entry(path, "directory" if status.directory else "file", status)
        found = _entry(path, "other", status) | {"islink": True, "destination": self.namespace.link(path)}
        try:
            target = self.namespace.status(self.namespace.follow(path))
        except OSError:
            return found
        return found if target.directory else found | _entry(path, "file", target)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """See fsspec."""
        path = self._strip_protocol(path)
        if not self.namespace.status(path).directory:
            return [self.info(path)] if detail else [path]
        pending = {deferred.name for deferred in self._pending()}
        names = [f"{path}/{name}" if path else name for name, _ in self.namespace.list(path)]
        names = [name for name in names if name not in pending]
        return [self.info(name) for name in names] if detail else names

    def modified(self, path: str) -> datetime:
        """See fsspec."""
        return datetime.fromtimestamp(self.info(path)["mtime"], timezone.utc)

    def created(self, path: str) -> datetime:
        """See fsspec. For a directory, which has no time of creation, the time of its last change."""
        if self.isdir(path):
            return self.modified(path)
        buffer, _ = self.namespace.buffer(self._strip_protocol(path))
        return datetime.fromtimestamp(buffer.info.created, timezone.utc)

    # ---- changes of names

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """See fsspec."""
        path = self._strip_protocol(path)
        if not create_parents and not self.exists(self._parent(path)):
            raise refuse(errno.ENOENT, f"mkdir {path!r}: {self._parent(path)!r} does not exist")
        self.namespace.make_folder(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """See fsspec."""
        try:
            self.mkdir(path)
        except FileExistsError:
            if not exist_ok or not self.isdir(path):
                raise

    def rmdir(self, path: str) -> None:
        """See fsspec."""
        self.namespace.remove_folder(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        """See fsspec."""
        self.namespace.remove(self._strip_protocol(path))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """See fsspec. Raises IsADirectoryError for a directory without recursive=True, before anything is removed.

        As with local files, all entries below a directory are removed, whatever `maxdepth` is.
        """
        names = [
            name
            for one in (path if isinstance(path, list) else [path])
            for name in reversed(self.expand_path(one, recursive=recursive))
        ]
        folders = {name for name in names if self.namespace.status(name).directory}
        if folders and not recursive:
            raise refuse(errno.EISDIR, f"rm {min(folders)!r}: this is a directory; pass recursive=True")
        for name in names:
            if name in folders:
                self.namespace.remove_folder(name)
            else:
                self.namespace.remove(name)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **_: Any) -> None:
        """See fsspec. Renames in one step, directories too; moves into `path2` if that is a directory."""
        into = path2.endswith("/")
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if path1 != path2 and (into or self.isdir(path2)):
            path2 = f"{path2}/{path1.rpartition('/')[2]}".lstrip("/")
        try:
            self.namespace.rename(path1, path2)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # The new name needs another form, so copy the bytes, as between file systems.
            self.copy(path1, path2, recursive=True)
            self.rm(path1, recursive=True)

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """See fsspec."""
        path = self._strip_protocol(path)
        if not truncate and self.exists(path):
            self.namespace.set_modified(path, time.time_ns())
            return
        with self.open(path, "wb" if truncate else "ab", autocommit=True):
            pass

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """See fsspec."""
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        if path1 == path2:
            raise refuse(errno.EINVAL, f"copy {path1!r}: source and target are the same file")
        with self.open(path1) as source, self.open(path2, "wb") as sink:
            while block := source.read(_BUFFER_BYTES):
                sink.write(block)

    # ---- bytes

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True, **_: Any
    ) -> io.BufferedIOBase:
        plain = "".join(sorted(mode.replace("b", "", 1), key="rwxa+".find))
        flags = _FLAGS.get(plain) if set(mode) <= set("rwxab+") else None
        if flags is None:
            raise ValueError(f"open {path!r}: mode must be one of {', '.join(_FLAGS)}, with or without b, not {mode!r}")
        path = self.namespace.follow(self._strip_protocol(path))
        deferred = None
        if not autocommit and plain != "r":
            former = next((each for each in reversed(self._pending()) if each.path == path), None)
            deferred = _Deferred(self.namespace, path, plain, former)
            if plain == "r+":  # fsspec reports only new files to a transaction
                self.transaction.files.append(deferred)
            flags = deferred.flags
        name = path if deferred is None else deferred.name
        opened = self.namespace.open(name, flags)
        if plain == "r" and opened.path is not None:
            path = opened.path  # of the generation, if `path` is that of the latest one: it may be opened again
        raw = BufferFile(opened, name, mode, None, append=bool(flags & os.O_APPEND))
        size = block_size if isinstance(block_size, int) and block_size > 0 else _BUFFER_BYTES
        kind = {os.O_RDONLY: _Reader, os.O_WRONLY: _Writer, os.O_RDWR: _Random}[flags & os.O_ACCMODE]
        file: Any = kind(raw, size)
        file.of(self, path, deferred)
        return cast(io.BufferedIOBase, file)

    def _pending(self) -> list[_Deferred]:
        """Return the files of the present transaction, in the order of their opening."""
        files = self.transaction.files if self._intrans else ()
        found = (each if isinstance(each, _Deferred) else getattr(each, "_deferred", None) for each in files)
        return [each for each in found if isinstance(each, _Deferred)]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """See fsspec. Makes one call to the servers."""
        with BufferFile(
            self.namespace.open(self.namespace.follow(self._strip_protocol(path)), os.O_RDONLY),
            path,
            "rb",
            None,
            append=False,
        ) as file:
            if start is None and end is None:
                return file.readall()
            first, last, _step = slice(start, end).indices(file.nbytes)
            file.seek(first)
            data = bytearray(max(0, last - first))
            file.readinto(data)
            return bytes(data)


class _Deferred:
    """A file of a transaction: it is written under another name, and renamed when the transaction ends."""

    def __init__(self, tree: NameTree, path: str, mode: str, former: _Deferred | None = None) -> None:
        """Prepare the file for the mode, with its present bytes if the mode keeps them. Raises OSError as the mode
        requires.

        `former` is the same file as the transaction has left it so far.
        """
        self._tree = tree
        self.path = path
        self._new = mode.startswith("x")
        folder, _, last = path.rpartition("/")
        last = f"{last}.{secrets.token_hex(4)}.part"
        last = last if len(last) <= _NAME_MAX else f"{secrets.token_hex(8)}.part"
        self.name = f"{folder}/{last}".lstrip("/")
        self.flags = _FLAGS[mode]
        self.file: io.BufferedIOBase | None = None
        if former is not None and former.file is not None and not former.file.closed:
            former.file.flush()
        source = path if former is None else former.name
        try:
            there = not tree.status(source).directory
        except FileNotFoundError:
            if mode == "r+":
                raise
            return
        if not there:
            raise refuse(errno.EISDIR, path)
        if self._new:
            raise refuse(errno.EEXIST, path)
        if mode.startswith(("a", "r")):
            old = BufferFile(tree.open(source, os.O_RDONLY), source, "rb", None, append=False)
            new = BufferFile(tree.open(self.name, _FLAGS["x"]), self.name, "xb", None, append=False)
            with old, new:
                while block := old.read(_BUFFER_BYTES):
                    new.write(block)

    def commit(self) -> None:
        """Close the file and rename it. FileExistsError if it must be new and the name is taken by now."""
        if self.file is not None:
            self.file.close()
        self._tree.rename(self.name, self.path, replace=not self._new)

    def discard(self) -> None:
        if self.file is not None and not self.file.closed:
            self.file.close()
        with suppress(FileNotFoundError):
            self._tree.remove(self.name)


class _OfSoftmem:
    """What fsspec's files have in addition to io's."""

    fs: SoftmemFileSystem
    path: str
    raw: Any
    _deferred: _Deferred | None = None

    def of(self, fs: SoftmemFileSystem, path: str, deferred: _Deferred | None) -> None:
        """Store the filesystem, the path, and the work for the transaction's end."""
        self.fs, self.path, self._deferred = fs, path, deferred
        if deferred is not None:
            deferred.file = self  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """The file's present size in bytes, without the data in this object's buffer."""
        return int(self.raw.nbytes)

    def info(self) -> dict[str, Any]:
        """See SoftmemFileSystem.info, for this path."""
        return self.fs.info(self.path)

    def commit(self) -> None:
        """Called at the end of a transaction."""
        if self._deferred is not None:
            self._deferred.commit()

    def discard(self) -> None:
        """Called at the end of a transaction that failed."""
        if self._deferred is not None:
            self._deferred.discard()


class _Reader(_OfSoftmem, io.BufferedReader):
    def __reduce__(self) -> tuple[Any, ...]:
        """As in fsspec: another process continues reading at the same position."""
        return _reopened, (self.fs, self.path, self.tell())


class _Writer(_OfSoftmem, io.BufferedWriter):
    pass


class _Random(_OfSoftmem, io.BufferedRandom):
    pass


def _reopened(fs: SoftmemFileSystem, path: str, at: int) -> Any:
    file = fs.open(path)
    file.seek(at)
    return file


def _entry(path: str, kind: str, status: FileStatus) -> dict[str, Any]:
    return {"name": path, "size": status.nbytes, "type": kind, "mtime": status.modified / 1e9}
