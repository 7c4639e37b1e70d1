"""Open files: a file's content, which all handles of a path share, and one handle of it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from smb.errors import Error
from smb.files.contents import FrozenFile, Live, Octets
from smb.files.error_codes import as_os_errors, os_error, refuse
from smb.files.staged_file import StagedFile

if TYPE_CHECKING:
    from smb.files.namespace import NameTree


class FileNode:
    """A file that is open, or a staged file that is not a buffer yet. All handles of one path share it."""

    def __init__(self, path: str, content: Live | StagedFile, modified: int) -> None:
        self.path = path
        self.content = content
        self.modified = modified
        self.written = 0  # when, 0: not since it was opened
        self.changed = False  # a staged file that is not in the cluster
        self.handles = 0
        self.removed = False  # no path leads to it any more
        self.unwritten = range(0)  # bytes of a staged file whose write found no room, and that were not written since
        self.displaced = ""  # the name that its buffer has since
        self.base_bytes = 0  # of the file that the staged file replaces: it needs no more room than that
        self.lock = threading.RLock()

    def note_unwritten(self, start: int, stop: int) -> None:
        """Remember that a write of these bytes into the staged file found no room: the file is not whole."""
        left = self.unwritten
        self.unwritten = range(min(left.start, start), max(left.stop, stop)) if left else range(start, stop)

    def note_written(self, start: int, stop: int) -> None:
        """Forget what `note_unwritten` was told, once a write covers all of it."""
        left = self.unwritten
        if left and start <= left.start and left.stop <= stop:
            self.unwritten = range(0)


class OpenFile:
    """One opening of a file. Thread-safe. Made by Tree.open; close it."""

    def __init__(self, tree: NameTree, node: FileNode | None, frozen: FrozenFile | None, flags: int, path: str) -> None:
        self._tree = tree
        self._path = path
        self._node = node
        self._frozen = frozen
        self._append = bool(flags & os.O_APPEND)
        self._closed = False
        self.readable = flags & os.O_ACCMODE != os.O_WRONLY
        self.writable = flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def nbytes(self) -> int:
        return self._content.nbytes

    @property
    def path(self) -> str | None:
        """Where it is found now; None once it was removed."""
        if self._node is None:
            return self._path
        return None if self._node.removed else self._node.path

    @property
    def modified(self) -> int:
        """When it was changed last, ns since 1970."""
        return self._node.modified if self._node is not None else time.time_ns()

    @property
    def changeable(self) -> bool:
        """Whether what it reads may differ from what another opening of the same path reads: not to be cached."""
        return self._frozen is not None and not self._frozen.by_version

    def read_into(self, offset: int, out: Octets) -> int:
        """Fill `out` with the bytes from `offset` on; return how many there were. ESTALE once the buffer is gone."""
        if not self.readable:
            raise refuse(errno.EBADF, "the file is open for writing alone")
        while True:
            content = self._frozen or cast(FileNode, self._node).content
            try:
                return content.read_into(offset, out)
            except Error as error:  # no context manager: this is the path that must be fast
                if self._content is content:
                    raise os_error(error, gone=errno.ESTALE) from error

    def reopen(self) -> OpenFile:
        """Close it, and return what its path leads to now, opened for reading. ENOENT, and then it stays open."""
        file = self._tree.open(self._path, os.O_RDONLY)  # before the end of the old one, which knows what is outdated
        self.close()
        return file

    def write(self, offset: int, data: Octets) -> int:
        """Write bytes at `offset`, or with O_APPEND at the end; return where they end."""
        if self._node is None or not self.writable:
            raise refuse(errno.EBADF, "the file is open for reading alone")
        try:
            if data.size:
                start = self._node.content.nbytes if self._append else offset
                self._tree.ask_for_room(self._node, start + data.size)
            with self._node.lock:
                if self._append:
                    offset = self._node.content.nbytes
                if data.size:
                    self._tree.write_node(self._node, offset, data)
                return offset + data.size
        except Error as error:
            raise os_error(error, gone=errno.ESTALE) from error

    def truncate(self, nbytes: int) -> None:
        if self._node is None or not self.writable:
            raise refuse(errno.EBADF, "the file is open for reading alone")
        with self._errors():
            self._tree.truncate_node(self._node, nbytes)

    def flush(self) -> None:
        """Make what was written the cluster's: when this returns, others read it."""
        if self._node is not None and self.writable:
            with self._errors():
                self._tree.commit(self._node)

    def discard(self) -> None:
        """Give up a staged file: what was there before stays."""
        if self._node is not None:
            self._tree.discard_node(self._node)

    def close(self) -> None:
        """Give it back. Call flush() before, which tells whether it worked. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            if self._node is not None:
                self._tree.close_node(self._node)

    @property
    def _content(self) -> Live | StagedFile | FrozenFile:
        if self._frozen is not None:
            return self._frozen
        assert self._node is not None
        return self._node.content

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with as_os_errors(gone=errno.ESTALE):
            yield
