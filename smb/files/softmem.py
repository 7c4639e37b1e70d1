"""The fsspec filesystem `softmem`: pandas, zarr, torch and datasets read and write buffers by a URL, without a mount.

softmem://HOST:PORT/NAME, or softmem://NAME with $SMB_COORDINATOR or the option `coordinator`. Registered as an entry
point of fsspec.
"""

# fsspec says what arguments there are.
# ruff: noqa: ARG002

from __future__ import annotations

import errno
import io
import os
import secrets
import threading
import weakref
from datetime import datetime, timezone
from typing import Any

from fsspec import AbstractFileSystem

import smb.client
from smb.files.error_codes import refuse
from smb.files.namespace import Tree
from smb.files.open_file import SCHEME, BufferFile, split_url

_BUFFER_BYTES = 1 << 20  # of a file object; larger reads and writes go straight to the servers
_FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


class SoftmemFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """Buffers as fsspec's files. A file appears, whole, when it is closed; directories are made as they are needed.

    `coordinator` is "host:port", by default $SMB_COORDINATOR or the URL's; `timeout` in seconds bounds each call.
    Thread-safe; in a child of fork it connects anew. Raises OSError, as files do.
    """

    protocol = "softmem"
    root_marker = ""

    def __init__(self, coordinator: str | None = None, timeout: float = 60.0, **options: Any) -> None:
        super().__init__(coordinator=coordinator, timeout=timeout, **options)
        self._coordinator = coordinator
        self._timeout = timeout
        self._lock = threading.Lock()
        self._tree: Tree | None = None
        self._pid = 0

    @property
    def tree(self) -> Tree:
        """The files of the cluster; connects at first use in a process."""
        with self._lock:
            if self._tree is None or self._pid != os.getpid():
                client = smb.client.connect(self._coordinator, timeout=self._timeout)
                weakref.finalize(self, client.close)
                self._tree, self._pid = Tree(client, make_folders=True), os.getpid()
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

    # ---- what there is

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """See fsspec: name, size in bytes, type, mtime in seconds."""
        path = self._strip_protocol(path)
        status = self.tree.status(path)
        return _entry(path, status.directory, status.nbytes, status.modified)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """See fsspec."""
        path = self._strip_protocol(path)
        if not self.tree.status(path).directory:
            return [self.info(path)] if detail else [path]
        names = [f"{path}/{name}" if path else name for name, _ in self.tree.list(path)]
        return [self.info(name) for name in names] if detail else names

    def modified(self, path: str) -> datetime:
        """See fsspec."""
        return datetime.fromtimestamp(self.info(path)["mtime"], timezone.utc)

    def created(self, path: str) -> datetime:
        """See fsspec."""
        buffer, _ = self.tree.buffer(self._strip_protocol(path))
        return datetime.fromtimestamp(buffer.info.created, timezone.utc)

    # ---- changes of names

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """See fsspec."""
        self.tree.make_folder(self._strip_protocol(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """See fsspec."""
        try:
            self.mkdir(path)
        except FileExistsError:
            if not exist_ok or not self.isdir(path):
                raise

    def rmdir(self, path: str) -> None:
        """See fsspec."""
        self.tree.remove_folder(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        """See fsspec."""
        self.tree.remove(self._strip_protocol(path))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """See fsspec."""
        for one in path if isinstance(path, list) else [path]:
            for name in reversed(self.expand_path(one, recursive=recursive, maxdepth=maxdepth)):
                if not self.tree.status(name).directory:
                    self.tree.remove(name)
                elif recursive:
                    self.tree.remove_folder(name)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **_: Any) -> None:
        """See fsspec; in one step, directories too."""
        self.tree.rename(self._strip_protocol(path1), self._strip_protocol(path2))

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """See fsspec."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1) as source, self.open(path2, "wb") as sink:
            while piece := source.read(_BUFFER_BYTES):
                sink.write(piece)

    # ---- bytes

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True, **_: Any
    ) -> io.BufferedIOBase:
        flags = _FLAGS.get("r+b" if mode == "rb+" else mode)
        if flags is None:
            raise refuse(errno.EINVAL, f"open {path!r}: there is no mode {mode!r}; there are {', '.join(_FLAGS)}")
        path = self._strip_protocol(path)
        name = path if autocommit else f"{path}.{secrets.token_hex(4)}.part"
        raw = BufferFile(self.tree.open(name, flags), name, mode, None, append=mode == "ab")
        size = block_size if isinstance(block_size, int) and block_size > 0 else _BUFFER_BYTES
        if mode == "rb":
            return io.BufferedReader(raw, size)
        if flags & os.O_ACCMODE == os.O_RDWR:
            return io.BufferedRandom(raw, size)
        return _Written(raw, size, self.tree, name, path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """See fsspec; one call to the servers."""
        with BufferFile(
            self.tree.open(self._strip_protocol(path), os.O_RDONLY), path, "rb", None, append=False
        ) as file:
            if start is None and end is None:
                return file.readall()
            first, last, _step = slice(start, end).indices(file.nbytes)
            file.seek(first)
            data = bytearray(max(0, last - first))
            file.readinto(data)
            return bytes(data)


class _Written(io.BufferedWriter):
    """A new file. In a transaction of fsspec it gets its name when that ends."""

    def __init__(self, raw: BufferFile, size: int, tree: Tree, name: str, path: str) -> None:
        super().__init__(raw, size)
        self._tree = tree
        self._names = name, path

    def commit(self) -> None:
        """Give it its name."""
        self._tree.rename(*self._names)

    def discard(self) -> None:
        """Delete it."""
        self._tree.remove(self._names[0])


def _entry(path: str, directory: bool, nbytes: int, modified: int) -> dict[str, Any]:
    kind = "directory" if directory else "file"
    return {"name": path, "size": nbytes, "type": kind, "mtime": modified / 1e9}
