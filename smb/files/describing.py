"""Attributes and times of files that are in the cluster.

Describer belongs to one NameTree. It takes the file's lock. The tree's is taken only where `find` ends a hidden file,
and a path that is hidden has no open file.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from dataclasses import replace

from smb.buffer_info import BufferInfo
from smb.errors import AlreadyExistsError, NotFoundError
from smb.files.attributes import Attributes, decode
from smb.files.catalogue import Catalogue
from smb.files.error_codes import refuse
from smb.files.handles import FileNode, FileStatus
from smb.files.making import FoundForm, Maker, older
from smb.files.paths import is_link


class Describer:
    """`modified` are the times of change by buffer id, `find` returns what a path shows or raises ENOENT."""

    def __init__(
        self, catalogue: Catalogue, maker: Maker, modified: MutableMapping[int, int], find: Callable[[str], FoundForm]
    ) -> None:
        self._catalogue = catalogue
        self._maker = maker
        self._modified = modified
        self._find = find
        self._describing = threading.Lock()  # held while a file's attributes are read, changed and stored

    def status(self, found: FoundForm) -> FileStatus:
        """Return the status of a file that this process does not have open."""
        info = found.info
        attributes, created = decode(info.file_attributes), round(1e9 * info.created)
        modified = self.modified(info, attributes)
        changed = max(created, self._modified.get(info.id, 0), attributes.changed or 0)
        if attributes.link and not is_link(info):
            attributes = replace(attributes, link=False)
        return FileStatus(
            found.view.nbytes, modified, version=found.shown.version, attributes=attributes, changed=changed
        )

    def modified(self, info: BufferInfo, attributes: Attributes) -> int:
        """Return the time of its last change: by this process, else the one that was set, else of the creation."""
        return self._modified.get(info.id) or _or(attributes.modified, round(1e9 * info.created))

    def describe(self, path: str, node: FileNode | None, change: Callable[[Attributes], Attributes]) -> None:
        """Change the attributes of a file, which may be open as `node`. Those of a staged file become known with its
        bytes. ENOENT, EACCES; EOPNOTSUPP at an older coordinator.
        """
        with self._describing, nullcontext() if node is None else node.lock:
            if node is not None and (node.changed or node.removed):
                node.describe(changed(node.attributes, change))
                return
            found = self._find(path)
            if found.shown.version is not None:
                raise refuse(errno.EACCES, f"{path!r} is one version of a buffer: set the attributes of the buffer")
            listed = True  # as the listing has it; the coordinator refuses a change of what is not there any more
            while True:
                kept = decode(found.info.file_attributes)
                if node is not None and node.stale:
                    kept = replace(kept, modified=node.modified)
                try:
                    attributes = changed(kept, change)
                except OSError:  # it refuses what is there, e.g. a name that exists; others may have removed that
                    if not listed:
                        raise
                else:
                    try:
                        if not self._maker.describe(found, attributes.encode(), unchanged=True):
                            raise older()
                        break
                    except AlreadyExistsError:  # others set some meanwhile: these stay, too
                        pass
                    except NotFoundError:  # others replaced it since the listing
                        if not listed:
                            raise
                listed = False
                self._catalogue.open(found.shown.name)  # from here on the listing has what others set until now
                found = self._find(path)
            if attributes.modified != kept.modified:
                self._modified.pop(found.info.id, None)
            if node is not None:
                node.describe(attributes, stored=True)


def changed(kept: Attributes, change: Callable[[Attributes], Attributes]) -> Attributes:
    """Return the attributes after a change, with its time. ENOSPC for too many."""
    wanted = replace(change(kept), changed=time.time_ns())
    wanted.check()  # here, since closing a staged file that has too many would lose its bytes
    return wanted


def _or(value: int | None, usual: int) -> int:
    return usual if value is None else value
