"""smb.open_file: a buffer as a Python file object."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import smb.client
from smb.client import Client
from smb.errors import InvalidArgumentError
from smb.files.contents import Octets
from smb.files.error_codes import refuse
from smb.files.handles import OpenFile
from smb.files.namespace import NameTree

SCHEME = "softmem://"
_OPENINGS_MAX = 5  # attempts for a path that is replaced again and again before any of it is read
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

Result = TypeVar("Result")


def open_file(name: str, mode: str = "r", *, client: Client | None = None) -> BufferFile:
    """Open a buffer as a binary file, unbuffered: an io.RawIOBase.

    ```python
    with smb.open_file("notes", "w", client=client) as file:
        file.write(b"hello")
    ```

    `name` is a buffer's name, or NAME.npy, NAME.safetensors or NAME@VERSION (docs/files.md), or a URL
    softmem://HOST:PORT/NAME. `mode` is as in the built-in open(): r, r+, w, w+, x, x+, a, a+, with or without b.
    Without a `client` one is made, for the URL's cluster or $SMB_COORDINATOR, and closed with the file.

    Reads, and writes within the existing size, go directly between the caller's memory and the servers, and are done
    when they return. read() and readinto() return all that was asked for unless the file ends. A new file, or one that
    grows or shrinks, becomes a buffer at flush() or close(), all at once. Opening a buffer with versions=2 for reading
    reads the version published at that time, for good.

    Another file may replace this one while it is open, by a rename, or by a delete and a create. A read returns data of
    one of the two, never a mix. With mode r the first read opens the path again and reads the new file, if the caller
    has neither read a byte nor asked for the size before. After that reads and writes raise OSError ESTALE, also if the
    buffer was deleted: open the path again. A renamed buffer, and a version, can be read on.

    Thread-safe, except for the position. Raises OSError: FileNotFoundError, FileExistsError, ENOSPC, ESTALE.
    """
    flags = _FLAGS.get(
        "".join(sorted(mode.replace("b", "", 1), key="rwxa+".index)) if set(mode) <= set("rwxab+") else ""
    )
    if flags is None:
        raise InvalidArgumentError(f"open_file {name!r}: mode must be one of {', '.join(_FLAGS)}, not {mode!r}")
    address, path = split_url(name)
    own = None
    if client is None:
        own = client = smb.client.connect(address)
    elif address is not None and address != client.address:
        raise InvalidArgumentError(
            f"open_file {name!r}: the client is connected to {client.address}, another cluster; pass the client or the "
            "URL's address, not both"
        )
    try:
        tree = NameTree(client, make_folders=True)
        return BufferFile(tree.open(tree.follow(path), flags), name, mode, own, append=bool(flags & os.O_APPEND))
    except BaseException:
        if own is not None:
            own.close()
        raise


def split_url(name: str) -> tuple[str | None, str]:
    """Return ("host:port" or None, path) of softmem://HOST:PORT/PATH, softmem://PATH or PATH.

    A first part with a colon is an address. A path whose first part has a colon is written softmem:///PATH, or without
    the scheme. Some libraries (datasets) add the scheme to a path without its address.
    """
    if not name.startswith(SCHEME):
        return None, name.strip("/")
    address, _, path = name[len(SCHEME) :].partition("/")
    if address and ":" not in address:
        return None, name[len(SCHEME) :].strip("/")
    return address or None, path.strip("/")


class BufferFile(io.RawIOBase):
    """An open file over a buffer. Made by open_file; thread-safe except for its position."""

    def __init__(self, file: OpenFile, name: str, mode: str, client: Client | None, *, append: bool) -> None:
        super().__init__()
        self.name = name
        self.mode = mode
        self._file = file
        self._client = client
        self._position = file.nbytes if append else 0
        # True if the caller knows anything of this file's content; opening it for writing counts as that. While it is
        # False, `_first` is held by the first read, which may open another file, and by a question for the size.
        self._known = file.writable
        self._first = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The file's present size."""
        if not self._known:
            with self._first:
                self._known = True
        return self._file.nbytes

    def readable(self) -> bool:
        """See io.IOBase."""
        return self._file.readable

    def writable(self) -> bool:
        """See io.IOBase."""
        return self._file.writable

    def seekable(self) -> bool:
        """See io.IOBase."""
        return True

    def tell(self) -> int:
        """See io.IOBase."""
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See io.IOBase."""
        self._check_open()
        base = self.nbytes if whence == os.SEEK_END else self._position if whence == os.SEEK_CUR else 0
        if whence not in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END) or base + offset < 0:
            raise refuse(errno.EINVAL, f"seek({offset}, {whence}) of {self.name!r}")
        self._position = base + offset
        return self._position

    def readinto(self, out: Any) -> int:
        """Fill `out`, contiguous and writable, from the position on; return the bytes read. Without a copy."""
        count = self.pread_into(out, self._position)
        self._position += count
        return count

    def readall(self) -> bytes:
        """See io.RawIOBase. Makes one call to the servers."""
        data = self._read(self._rest)
        self._position += len(data)
        return data

    def _rest(self, file: OpenFile) -> bytes:
        data = bytearray(max(0, file.nbytes - self._position))
        return bytes(memoryview(data)[: file.read_into(self._position, _octets(data))])

    def pread_into(self, out: Any, offset: int) -> int:
        """Like readinto, from an offset; the position stays. Several threads may call it at once."""
        octets = _octets(out)
        return self._read(lambda file: file.read_into(offset, octets))

    def _read(self, read: Callable[[OpenFile], Result]) -> Result:
        """Return the result of `read` on the file, or on the file that the path leads to now.

        The latter is used if the opened file is gone and the caller knows nothing of it yet.
        """
        self._check_open()
        if not self._file.readable:
            raise io.UnsupportedOperation(f"{self.name!r} is open for writing only")
        if not self._known:
            with self._first:
                if not self._known:
                    return self._first_read(read)
        return read(self._file)

    def _first_read(self, read: Callable[[OpenFile], Result]) -> Result:
        for opening in range(1, _OPENINGS_MAX + 1):
            try:
                result = read(self._file)
                break
            except OSError as error:
                if error.errno != errno.ESTALE or opening == _OPENINGS_MAX:
                    raise
                try:
                    self._file = self._file.reopen()
                except FileNotFoundError:
                    raise error from error.__cause__  # the file was deleted, and not replaced
        self._known = True
        return result

    def write(self, data: Any) -> int:
        """Write all of the bytes at the position; return how many."""
        self._check_open()
        if not self._file.writable:
            raise io.UnsupportedOperation(f"{self.name!r} is open for reading only")
        octets = _octets(data)
        self._position = self._file.write(self._position, octets)
        return octets.size

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size, by default to the position; return it."""
        self._check_open()
        if not self._file.writable:
            raise io.UnsupportedOperation(f"{self.name!r} is open for reading only")
        size = self._position if size is None else size
        self._file.truncate(size)
        return size

    def flush(self) -> None:
        """Make a new or grown file part of the cluster. Writes within the existing size need no flush."""
        if not self.closed:
            self._file.flush()

    def close(self) -> None:
        """Flush and close. If the flush fails, the file is closed all the same, and the staged file is dropped."""
        if self.closed:
            return
        try:
            super().close()
        finally:
            try:
                self._file.close()
            finally:
                if self._client is not None:
                    self._client.close()

    def discard(self) -> None:
        """Close without turning a staged file into a buffer."""
        if not self.closed:
            self._file.discard()
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name!r} is closed")


def _octets(data: Any) -> Octets:
    try:
        return np.frombuffer(data, np.uint8)
    except ValueError:
        if memoryview(data).nbytes:
            raise
        return np.empty(0, np.uint8)  # numpy makes no array of empty memory
