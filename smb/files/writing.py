"""Writes into open files, and makes staged files buffers.

FileWriter belongs to one NameTree. Its methods take the file's lock. The tree's lock comes before that one, so nothing
here may take it: a path that is hidden is not ended here.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import replace

from smb.buffer import Buffer
from smb.client import Client
from smb.errors import Error, NotFoundError
from smb.files.attributes import decode, merged
from smb.files.catalogue import Catalogue
from smb.files.contents import FrozenFile, Live, Octets
from smb.files.error_codes import refuse
from smb.files.handles import FileNode
from smb.files.hidden_files import HiddenFiles
from smb.files.making import Maker, copy_all, draw
from smb.files.paths import ShownPaths
from smb.files.staged_file import StagedFile

RECENT_S = 0.05  # how old a listing may be that says what a file is to replace: its path was usually just looked up
_log = logging.getLogger("smb")


class FileWriter:
    """`modified` are the times of change by buffer id, `staged_files` is the directory of staged files."""

    def __init__(
        self, client: Client, catalogue: Catalogue, paths: ShownPaths, hidden: HiddenFiles, maker: Maker,
        modified: MutableMapping[int, int], staged_files: str | None,
    ) -> None:  # fmt: skip
        self._client = client
        self._catalogue = catalogue
        self._paths = paths
        self._hidden = hidden
        self._maker = maker
        self._modified = modified
        self._staged_files = staged_files

    def staged(self) -> StagedFile:
        """Return a new, empty staged file."""
        return StagedFile(self._staged_files)

    def ask_for_room(self, node: FileNode, nbytes: int) -> None:
        """Ask the coordinator for free space before a file grows.

        Done before the file's lock is taken, since holders of the tree's lock may wait for that.
        """
        if nbytes > max(node.base_bytes, node.content.nbytes):
            self._catalogue.has_room(nbytes)

    def write(self, node: FileNode, offset: int, data: Octets) -> None:
        """Write into a file, which grows if necessary."""
        with node.lock:
            end = offset + data.size
            if isinstance(node.content, Live) and end > node.content.nbytes:
                self.detach(node, node.content)
            try:
                if isinstance(node.content, StagedFile):
                    if end > node.content.nbytes:
                        self._check_room(node, end)
                    node.changed = True
                node.content.write(offset, data)
            except OSError:
                if isinstance(node.content, StagedFile):
                    node.note_unwritten(offset, end)
                raise
            node.note_written(offset, end)
            node.written = time.time_ns()
            node.touch(node.written)

    def truncate(self, node: FileNode, nbytes: int) -> None:
        """Set a file's size. One of another size than its buffer becomes a staged file."""
        self.ask_for_room(node, nbytes)
        with node.lock:
            if nbytes == node.content.nbytes:
                return
            if isinstance(node.content, Live):
                staged = self.staged()
                draw(node.content, staged, nbytes)
                node.content = staged
            try:
                self._check_room(node, nbytes)
                node.content.truncate(nbytes)
            except OSError:
                node.note_unwritten(node.content.nbytes, nbytes)
                raise
            node.unwritten = range(0)
            node.changed = True
            node.touch(time.time_ns())

    def commit(self, node: FileNode, *, empty: bool = False) -> None:
        """Turn a staged file into a buffer: write into the buffer of its name if that has the same size, else replace
        it.

        An empty file becomes a buffer only with `empty`: a shell closes copies of its descriptor before a program
        writes to it. One that was made with O_EXCL becomes one at once, so that close() can say that another client has
        made a file of its path meanwhile: EEXIST.
        """
        # After an attempt whose outcome is unknown, the listing has to show whether the file is there.
        asked_anew = node.exclusive and node.made
        with self._catalogue.call(0.0 if asked_anew else RECENT_S), node.lock:
            staged = node.content
            if node.stale and isinstance(staged, Live) and not node.removed:
                self._store_time(node, staged)
            if not node.changed or node.removed or not isinstance(staged, StagedFile):
                return
            if not (staged.nbytes or empty or node.exclusive):
                return
            if node.unwritten:
                raise refuse(errno.ENOSPC, f"{node.path!r} is incomplete: some of the written data found no room")
            # Ending a hidden file takes the tree's lock, which comes before the node's.
            found = self._paths.look(node.path) if node.path not in self._hidden else None
            exclusive = node.exclusive and node.path not in self._hidden
            if exclusive and found is not None:
                if found.info.id != node.made:  # else it is this one, and the answer was lost
                    raise refuse(errno.EEXIST, f"another client has made {node.path!r} since it was opened")
                exclusive = False
            live = None
            if found is not None:
                buffer: Buffer | None = None
                with suppress(NotFoundError):  # another client has deleted it since the listing
                    buffer = self._catalogue.open(found.shown.name)
                found = self._paths.look(node.path)  # with the attributes that others have set until now
                if found is not None and buffer is not None and buffer.info.id == found.info.id:
                    live = Live(buffer, found.view) if found.view.nbytes == staged.nbytes else None
            attributes = node.attributes
            if found is not None:
                there = decode(found.info.file_attributes)
                changed = max(there.changed or 0, attributes.changed or 0) or None
                kept = merged(there, node.stored, attributes)
                attributes = replace(kept, modified=attributes.modified, changed=changed, link=False)
            if live is None or not staged.nbytes or not live.takes(staged):
                attributes = replace(attributes, changed=None)  # the creation is later
                text = attributes.encode()  # may raise: before the buffer is made
                spec = self._maker.spec(node.path, staged)
                buffer = self._maker.filled(staged, spec, found.info if found is not None else None)
                if node.removed:  # in the meantime
                    self._client.delete(buffer.name, missing_ok=True)
                    return
                node.made = buffer.info.id
                live = self._maker.named(buffer, spec, found, None, text, replace=not exclusive)
            else:
                assert found is not None, "live is what was found"
                if live.buffer.versions == 1 and attributes.modified is None:  # others see no other time of this change
                    attributes = replace(attributes, modified=node.modified)
                text = attributes.encode()  # may raise: before the bytes change
                if live.buffer.versions == 1:
                    copy_all(staged, live)
                else:
                    live.publish(staged)
                self._maker.describe(found, text)
            node.attributes = node.stored = attributes
            if live.buffer.versions == 1:
                node.content = live
            node.changed = node.stale = node.exclusive = False
            node.since = round(1e9 * live.buffer.info.created)
            node.base_bytes = live.nbytes
            if node.attributes.modified is None:
                self._modified[live.buffer.info.id] = node.modified

    def _store_time(self, node: FileNode, live: Live) -> None:
        """Store the time of writes in place, for a file whose time was set before: others would go on to see that."""
        node.stale = False
        try:
            kept = self._catalogue.attributes_now(live.buffer)
            node.attributes = node.stored = replace(kept, modified=node.modified)
            self._maker.describe_buffer(live.buffer, node.attributes.encode())
        except (Error, OSError) as error:  # the bytes are there in any case
            _log.warning("the time of change of %s was not stored: %s", node.path, error)

    def detach(self, node: FileNode, source: Live | FrozenFile) -> None:
        """Make a file a staged file with the bytes of its source."""
        staged = self.staged()
        draw(source, staged, source.nbytes)
        node.content = staged

    def _check_room(self, node: FileNode, nbytes: int) -> None:
        if nbytes > node.base_bytes and not self._catalogue.has_room(nbytes):
            raise refuse(errno.ENOSPC, f"{node.path!r}: the memory servers have no room for {nbytes} bytes")
