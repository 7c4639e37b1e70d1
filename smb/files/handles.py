"""Open files: a file's content, which all handles of a path share, and one handle of it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from smb.errors import Error
from smb.files.attributes import NONE, Attributes
from smb.files.contents import FrozenFile, Live, Octets
from smb.files.error_codes import as_os_errors, os_error, refuse
from smb.files.staged_file import StagedFile

if TYPE_CHECKING:
    from smb.files.namespace import NameTree


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The result of stat. `modified` is the time, in ns since 1970, of the last change by this process, else the one
    that was set, else of the creation. `changed` is that of the last change of bytes or attributes.
    """

    nbytes: int
    modified: int
    directory: bool = False
    version: int | None = None
    attributes: Attributes = NONE
    changed: int = 0

    @property
    def link(self) -> bool:
        """True for a symbolic link: `nbytes` is then the length of its target."""
        return self.attributes.link


class FileNode:
    """An open file, or a staged file that is not a buffer yet. All handles of one path share it."""

    def __init__(
        self,
        path: str,
        content: Live | StagedFile,
        modified: int,
        attributes: Attributes = NONE,
    ) -> None:
        self.path = path
        self.content = content
        self.modified = modified
        self.attributes = attributes  # of a file that is in the cluster: as stored there
        self.stored = attributes  # what the cluster had when this process last read or stored them
        self.since = 0  # time of its last change before it was opened; 0 for a new file
        self.stale = False  # the time of change that is stored in the cluster was set before the last write
        self.written = 0  # time of the last write, 0 if there was none since it was opened
        self.changed = False  # a staged file that is not yet in the cluster
        self.made = 0  # the id of the buffer that was to get this path last
        self.exclusive = False  # made with O_EXCL, and not yet in the cluster: another client's file of its path stays
        self.handles = 0
        self.removed = False  # no path leads to it any more
        self.unwritten = range(0)  # bytes of a staged file whose write found no room, and that were not written since
        self.displaced = ""  # the private name of its buffer, after another file took its place
        self.base_bytes = 0  # size of the file that the staged file replaces: up to this size no more room is needed
        self.lock = threading.RLock()

    def touch(self, now: int) -> None:
        """Note a change of the bytes: a time that was set before is over."""
        self.modified = now
        if self.attributes.modified is not None:
            self.stale = True
            self.attributes = replace(self.attributes, modified=None)

    def describe(self, attributes: Attributes, *, stored: bool = False) -> None:
        """Note attributes that were set; with `stored`, also in the cluster."""
        if stored:
            self.stored = attributes
        if attributes.modified is not None:
            self.modified = attributes.modified
            self.stale = False
        self.attributes = attributes

    def note_unwritten(self, start: int, stop: int) -> None:
        """Note that a write of these bytes into the staged file found no room, so the file is incomplete."""
        left = self.unwritten
        self.unwritten = range(min(left.start, start), max(left.stop, stop)) if left else range(start, stop)

    def note_written(self, start: int, stop: int) -> None:
        """Forget the bytes of `note_unwritten` once a write covers all of them."""
        left = self.unwritten
        if left and start <= left.start and left.stop <= stop:
            self.unwritten = range(0)


def status_of(node: FileNode) -> FileStatus:
    """Return the status of an open file."""
    changed = max(node.since, node.modified if node.written else 0, node.attributes.changed or 0) or node.modified
    return FileStatus(node.content.nbytes, node.modified, attributes=node.attributes, changed=changed)


class OpenFile:
    """One opening of a file. Thread-safe. Made by NameTree.open; the owner closes it."""

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
        """Its present path; None after it was removed."""
        if self._node is None:
            return self._path
        return None if self._node.removed else self._node.path

    @property
    def modified(self) -> int:
        """The time of its last change, ns since 1970."""
        return self._node.modified if self._node is not None else time.time_ns()

    @property
    def changeable(self) -> bool:
        """True if other openings of the same path may read different data, so that the kernel must not cache it."""
        return self._frozen is not None and not self._frozen.by_version

    def read_into(self, offset: int, out: Octets) -> int:
        """Fill `out` with the bytes from `offset` on; return how many there were. ESTALE once the buffer is gone."""
        if not self.readable:
            raise refuse(errno.EBADF, "the file is open for writing only")
        while True:
            content = self._frozen or cast(FileNode, self._node).content
            try:
                return content.read_into(offset, out)
            except Error as error:  # a context manager would be slower, and this path must be fast
                if self._content is content:
                    raise os_error(error, gone=errno.ESTALE) from error

    def reopen(self) -> OpenFile:
        """Close it, and open for reading what its path leads to now. After ENOENT it stays open."""
        file = self._tree.open(self._path, os.O_RDONLY)  # before the old one is closed, which knows what is outdated
        self.close()
        return file

    def write(self, offset: int, data: Octets) -> int:
        """Write bytes at `offset`, or with O_APPEND at the end; return the end of the written range."""
        if self._node is None or not self.writable:
            raise refuse(errno.EBADF, "the file is open for reading only")
        try:
            if data.size:
                start = self._node.content.nbytes if self._append else offset
                self._tree.writer.ask_for_room(self._node, start + data.size)
            with self._node.lock:
                if self._append:
                    offset = self._node.content.nbytes
                if data.size:
                    self._tree.writer.write(self._node, offset, data)
                return offset + data.size
        except Error as error:
            raise os_error(error, gone=errno.ESTALE) from error

    def status(self) -> FileStatus:
        """Return the status of the opened file, also after it lost its name."""
        if self._node is not None:
            return status_of(self._node)
        return FileStatus(self.nbytes, self.modified)

    def describe(self, change: Callable[[Attributes], Attributes]) -> None:
        """Change its attributes, as NameTree.describe does; after it lost its name, for this opening alone."""
        if self._node is not None and self._node.removed:
            self._node.describe(change(self._node.attributes))
        else:
            self._tree.describe(self._path if self._node is None else self._node.path, change)

    def truncate(self, nbytes: int) -> None:
        if self._node is None or not self.writable:
            raise refuse(errno.EBADF, "the file is open for reading only")
        with self._errors():
            self._tree.writer.truncate(self._node, nbytes)

    def flush(self) -> None:
        """Make written data part of the cluster: after the return, other clients read it."""
        if self._node is not None and self.writable:
            with self._errors():
                self._tree.writer.commit(self._node)

    def discard(self) -> None:
        """Give up a staged file: the former file stays."""
        if self._node is not None:
            self._tree.discard_node(self._node)

    def close(self) -> None:
        """Close this handle. Call flush() before, which reports errors. A second call does nothing."""
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
