"""The files of a cluster, for one process: names and what is open. All that shows buffers as files is thin on this.

A new file, or one whose size changes, is a draft on this host until flush() or close(); then it becomes a buffer as a
whole, under its name in one step. All other writes are at the servers when they return. Paths have no leading slash; ""
is the root. Methods raise OSError, with smb's message.

Locks: Tree._lock (names), then a node's, then the catalogue's. None is held while bytes are read; a node's is while
they are written, and a name's change waits for the draft that it moves.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from smb.buffer import Buffer
from smb.client import Client
from smb.coordinator.records import Kind
from smb.coordinator.request import check_name
from smb.errors import Error, NotFoundError, PermissionDeniedError
from smb.files.catalogue import Catalogue
from smb.files.codes import as_os_errors, refuse
from smb.files.contents import Frozen, FrozenFile, Live, Octets
from smb.files.draft import Draft
from smb.files.handles import Node, OpenFile
from smb.files.names import PRIVATE, Form, Shown, entries, files_of, is_private, meanings, parent_of
from smb.files.private import create, left_by_dead, private_name
from smb.files.views import View, header_bytes, plan_of
from smb.info import BufferInfo

_COPY_BYTES = 8 << 20
_HIDDEN_S = 1.0
_ALIASES_KEPT = 1000
_log = logging.getLogger("smb")


@dataclass(frozen=True, slots=True)
class Status:
    """What stat says. `modified` is ns since 1970, of what was done through this process; else when it was created."""

    nbytes: int
    modified: int
    directory: bool = False
    version: int | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    shown: Shown
    info: BufferInfo
    view: View


class _Hidden:
    """A path that hide() took away, and the cluster still has: until `timer` calls `end`, or the name is needed. What
    another process puts there meanwhile has another `buffer_id`.
    """

    def __init__(self, node: Node | None, buffer_id: int, end: Callable[[_Hidden], None]) -> None:
        self.node = node
        self.buffer_id = buffer_id
        self.timer = threading.Timer(_HIDDEN_S, end, (self,))
        self.timer.daemon = True
        self.timer.start()


class Tree:
    """The files of a client's cluster. Thread-safe.

    `drafts` is a directory of this host for files that are being made. With make_folders a new file makes the
    directories that it is in.
    """

    def __init__(self, client: Client, drafts: str | None = None, *, make_folders: bool = False) -> None:
        self.client = client
        self._make_folders = make_folders
        self._drafts = drafts
        self._catalogue = Catalogue(client)
        self._lock = threading.RLock()
        self._nodes: dict[str, Node] = {}
        self._folders: set[str] = set()  # made with mkdir, or left empty: no buffer is below them
        self._modified: dict[str, int] = {}
        self._hidden: dict[str, _Hidden] = {}
        self._aliases: dict[str, Status] = {}
        self._latest_aliases: deque[str] = deque(maxlen=_ALIASES_KEPT)
        self._frozen: weakref.WeakValueDictionary[tuple[int, int], Frozen] = weakref.WeakValueDictionary()

    # ---- looking

    def status(self, path: str) -> Status:
        """Return what is at a path. ENOENT."""
        with as_os_errors():
            node = self._nodes.get(path)
            if node is not None:
                return Status(node.content.nbytes, node.modified)
            if path in self._aliases:
                return self._aliases[path]
            if self._is_folder(path):
                return Status(0, 0, directory=True)
            if path in self._hidden:  # and stays hidden: the name may be about to be another file's
                raise refuse(errno.ENOENT, path)
            found = self._found(path)
            modified = self._modified.get(found.shown.name, round(1e9 * found.info.created))
            return Status(found.view.nbytes, modified, version=found.shown.version)

    def list(self, path: str) -> builtins.list[tuple[str, bool]]:
        """Return (name, whether it is a directory) of all in a directory, sorted. ENOENT, ENOTDIR."""
        with as_os_errors():
            if not self._is_folder(path):
                raise refuse(errno.ENOTDIR, path) if self._find(path) else refuse(errno.ENOENT, path)
            infos = self._catalogue.listing(missed=True).infos
            folders, buffers = entries(path, infos)
            folders |= entries(path, (folder + "/" for folder in self._folders))[0]
            start = path + "/" if path else ""
            shown: dict[str, bool] = dict.fromkeys(folders, True)
            for last in buffers:
                for file in self._files(infos[start + last], last, last in folders):
                    shown[file] = False
            with self._lock:
                nodes = [node for node in self._nodes.values() if not node.removed]
                drafts = [node.path for node in nodes if isinstance(node.content, Draft)]
                hidden = builtins.list(self._hidden)
            for draft in drafts:
                if parent_of(draft) == path:
                    shown.setdefault(draft.rpartition("/")[2], False)
            for gone in hidden:
                if parent_of(gone) == path:
                    shown.pop(gone.rpartition("/")[2], None)
            return sorted(shown.items())

    def buffer(self, path: str) -> tuple[Buffer, Shown]:
        """Return the buffer that a path shows, and how. ENOENT; EISDIR; ENODATA for a file that is none yet."""
        with as_os_errors():
            node = self._nodes.get(path)
            if node is not None and isinstance(node.content, Draft) and not self._find(path):
                raise refuse(errno.ENODATA, f"{path!r} becomes a buffer when it is closed")
            if self._is_folder(path):
                raise refuse(errno.EISDIR, path)
            found = self._found(path)
            return self._catalogue.known(found.info), found.shown

    def space(self) -> tuple[int, int]:
        """Return (capacity, free) of the cluster in bytes."""
        with as_os_errors():
            return self._catalogue.space()

    # ---- opening

    def open(self, path: str, flags: int) -> OpenFile:
        """Open a file as open(2) does, with its flags. ENOENT, EEXIST, EISDIR, ENOTDIR, EACCES. ESTALE where the path
        led to a file that was hidden since: what is there instead is found by looking anew.
        """
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        with as_os_errors():
            if not flags & os.O_CREAT and (path in self._hidden or path in self._aliases):
                raise refuse(errno.ESTALE, path)
            if self._is_folder(path):
                raise refuse(errno.EISDIR, path)
            found = self._find(path)
            if found is not None and (found.info.versions > 1 or found.shown.version is not None):
                if flags & os.O_CREAT and flags & os.O_EXCL:
                    raise refuse(errno.EEXIST, path)
                if not writes:
                    return OpenFile(self, None, self._frozen_file(found), flags, path)
                if found.shown.version is not None:
                    raise refuse(errno.EACCES, f"{path!r} is a published version, which never changes")
            with self._lock:
                node = self._opened(path, flags, truncate=bool(writes and flags & os.O_TRUNC))
                node.handles += 1
                return OpenFile(self, node, None, flags, path)

    def _opened(self, path: str, flags: int, *, truncate: bool) -> Node:
        node = self._nodes.get(path)
        known = node.content if node is not None and not node.removed else None
        if isinstance(known, Live) and not self._is_current(known.buffer.name, known.buffer.info.id):
            self._orphan(path)  # another process deleted or replaced it: this is about the new one
            node = None
        found = self._find(path) if node is None else None
        if flags & os.O_CREAT and flags & os.O_EXCL and (node or found):
            raise refuse(errno.EEXIST, path)
        if node is None and found is None and not flags & os.O_CREAT:
            raise self._none(path)
        if node is None:
            node = self._nodes[path] = self._node(path, found, truncate)
        elif truncate:
            self.truncate_node(node, 0)
        return node

    def _is_current(self, name: str, buffer_id: int) -> bool:
        """Whether the buffer of that name is, by now, that one."""
        try:
            return self._catalogue.open(name).info.id == buffer_id
        except NotFoundError:
            self._catalogue.remove(name)
            return False

    def _node(self, path: str, found: _Found | None, truncate: bool) -> Node:
        now = time.time_ns()
        if found is None:
            self._check_new(path)
            node = Node(path, Draft(self._drafts), now)
            node.changed = True
            return node
        buffer = self._catalogue.open(found.shown.name)
        view = self._catalogue.view(buffer.info, found.shown.form)
        if view is None:
            raise refuse(errno.ENOENT, path)
        modified = self._modified.get(found.shown.name, round(1e9 * buffer.info.created))
        node = Node(path, Live(buffer, view), modified)
        node.base_bytes = view.nbytes
        if truncate:
            node.content, node.changed, node.modified = Draft(self._drafts), True, now
        elif buffer.versions > 1:
            self._detach(node, FrozenFile(Frozen(buffer, None), view))
        return node

    def _check_new(self, path: str) -> None:
        parent = parent_of(path)
        if self._make_folders:
            while parent and not self._find(parent):
                parent = parent_of(parent)
        if not self._is_folder(parent):
            raise refuse(errno.ENOTDIR if parent and self._find(parent) else errno.ENOENT, path)
        if is_private(path):
            raise refuse(errno.EPERM, f"{PRIVATE} is where files are on their way")
        if len(path) > 255:
            raise refuse(errno.ENAMETOOLONG, path)
        check_name(Kind.BUFFER, path)

    def _frozen_file(self, found: _Found) -> FrozenFile:
        buffer = self._catalogue.open(found.shown.name)
        if buffer.versions == 1:
            raise refuse(errno.ENOENT, f"buffer {buffer.name!r} keeps no versions: it was created with versions=1")
        wanted = buffer.version if found.shown.version is None else found.shown.version
        frozen = self._frozen.get((buffer.info.id, wanted))
        if frozen is None:
            frozen = Frozen(buffer, found.shown.version)
            frozen = self._frozen.setdefault((buffer.info.id, frozen.version), frozen)
        return FrozenFile(frozen, found.view)

    # ---- names

    def make_folder(self, path: str) -> None:
        """Make a directory. It is in this process alone until there is something in it. EEXIST, ENOENT."""
        with as_os_errors(), self._lock:
            if path in self._nodes or self._is_folder(path) or self._find(path):
                raise refuse(errno.EEXIST, path)
            self._check_new(path)
            self._folders.add(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty directory. ENOENT, ENOTDIR, ENOTEMPTY."""
        with as_os_errors(), self._lock:
            if not path or self.list(path):
                raise refuse(errno.ENOTEMPTY, path)
            self._folders.discard(path)

    def remove(self, path: str) -> None:
        """Delete a file, and with it the buffer, whichever form of it the path is. Whoever has it open here goes on
        until it is closed; other processes get ESTALE. ENOENT, EISDIR, EACCES.
        """
        with as_os_errors(), self._lock:
            if self._is_folder(path):
                raise refuse(errno.EISDIR, path)
            node, found = self._nodes.get(path), self._find(path)
            if node is None and found is None:
                raise refuse(errno.ENOENT, path)
            if found is not None and found.shown.version is not None:
                raise refuse(errno.EACCES, f"{path!r} is a version of a buffer; delete the buffer")
            if found is not None:
                self._take_away(found.shown.name, node)
            self._keep_folder(path)
            self._orphan(path)

    def hide(self, path: str, alias: str) -> None:
        """Take away a file that is open, for libfuse: from here on those who have it open know it as `alias`.

        libfuse does so where a file is removed, and where another one is about to be renamed to its path: that must be
        one step for the cluster, so what is here waits a moment for it.
        """
        with as_os_errors(), self._lock:
            status = self.status(path)
            node = self._nodes.pop(path, None)
            found = self._find(path)
            if found is not None:
                self._hidden[path] = _Hidden(node, found.info.id, lambda hidden: self._end_hidden(path, hidden))
            self._latest_aliases.append(alias)
            if node is not None:
                node.removed = True
                node.path = alias
                self._nodes[alias] = node
            else:
                self._aliases[alias] = status
            self._keep_folder(path)

    def forget(self, alias: str) -> None:
        """The last one who had a hidden file open is gone."""
        with self._lock:
            self._aliases.pop(alias, None)

    def end_hidden(self) -> None:
        """Take all hidden files' names away in the cluster: before this process ends."""
        for path, hidden in builtins.list(self._hidden.items()):
            self._end_hidden(path, hidden)

    def _end_hidden(self, path: str, hidden: _Hidden) -> None:
        with self._lock:
            if self._hidden.get(path) is not hidden:
                return  # it is over, and the path may be hidden anew: for something else
            self._unhide(path)
            try:
                found = self._find(path)
                if found is not None and self._is_current(found.shown.name, hidden.buffer_id):
                    self._take_away(found.shown.name, hidden.node)
            except Error as error:
                _log.error("%s was not removed: %s", path, error)

    def _unhide(self, path: str) -> Node | None:
        hidden = self._hidden.pop(path)
        hidden.timer.cancel()
        return hidden.node

    def _take_away(self, name: str, node: Node | None) -> None:
        if node is not None and node.handles and isinstance(node.content, Live):
            node.displaced = private_name(name)
            self.client.rename(name, node.displaced)
        else:
            self.client.delete(name)
        self._catalogue.remove(name)
        self._modified.pop(name, None)

    def rename(self, path: str, new_path: str, *, replace: bool = True) -> None:
        """Give a file or directory another name, in one step for the whole cluster; a file of the new name goes away in
        it, with replace. Whoever has that one open here goes on reading it. EXDEV from one form to another.
        """
        with as_os_errors(), self._lock:
            if path == new_path:
                self.status(path)
                return
            victim = self._unhide(new_path) if new_path in self._hidden else self._nodes.get(new_path)
            node = self._nodes.get(path)
            if node is not None:
                self.commit(node, empty=True)
            found = self._find(path)
            if node is None and (found is None or self._is_folder(path)):
                self._rename_folder(path, new_path)
                return
            there = self._nodes.get(new_path) is not None or self._find(new_path) is not None
            if there and not replace:
                raise refuse(errno.EEXIST, new_path)
            if self._is_folder(new_path):
                raise refuse(errno.EISDIR, new_path)
            if not there:
                self._check_new(new_path)
            self._rename_buffer(self._found(path), path, new_path, victim)
            self._orphan(new_path)
            if node is not None:
                del self._nodes[path]
                node.path = new_path
                self._nodes[new_path] = node
            self._keep_folder(path)

    def _rename_buffer(self, found: _Found, path: str, new_path: str, victim: Node | None) -> None:
        form, name = found.shown.form, found.shown.name
        if found.shown.version is not None or not new_path.endswith(form.value):
            raise refuse(errno.EXDEV, f"{path!r} shows a buffer in another way than {new_path!r} would; copy it")
        new_name = new_path[: len(new_path) - len(form.value)]
        if victim is not None and victim.handles and isinstance(victim.content, Live):
            victim.displaced = private_name(new_name)
            self.client.displace(name, new_name, victim.displaced)
        else:
            self.client.rename(name, new_name, replace=True)
        self._catalogue.rename({name: new_name})
        self._modified[new_name] = self._modified.pop(name, time.time_ns())

    def _rename_folder(self, path: str, new_path: str) -> None:
        if not self._is_folder(path):
            raise refuse(errno.ENOENT, path)
        if new_path.startswith(path + "/"):
            raise refuse(errno.EINVAL, f"{new_path!r} is inside {path!r}")
        if self._is_folder(new_path):
            self.remove_folder(new_path)
        elif self._find(new_path):
            raise refuse(errno.ENOTDIR, new_path)
        infos = self._catalogue.listing(missed=True).infos
        moved = {name: new_path + name[len(path) :] for name in infos if name.startswith(path + "/")}
        if moved:
            self.client.rename_folder(path, new_path)
            self._catalogue.rename(moved)
        for node_path in [known for known in self._nodes if known.startswith(path + "/")]:
            node = self._nodes.pop(node_path)
            node.path = new_path + node_path[len(path) :]
            self._nodes[node.path] = node
        inside = {folder for folder in self._folders if folder == path or folder.startswith(path + "/")}
        self._folders -= inside
        self._folders |= {new_path + folder[len(path) :] for folder in inside} | {new_path}
        self._keep_folder(path)

    def set_modified(self, path: str, modified: int) -> None:
        """Note a time of change (ns since 1970), in this process alone. ENOENT."""
        with as_os_errors(), self._lock:
            node = self._nodes.get(path)
            if node is not None:
                node.modified = modified
            found = self._find(path)
            if found is not None:
                self._modified[found.shown.name] = modified

    def truncate(self, path: str, nbytes: int) -> None:
        """Set a file's size. A file of another size than before becomes one of bytes."""
        file = self.open(path, os.O_RDWR)
        try:
            file.truncate(nbytes)
            file.flush()
        finally:
            file.close()

    def sweep(self) -> None:
        """Delete what processes of this host left half done when they were killed, as far as we may."""
        with as_os_errors(), suppress(PermissionDeniedError):
            for name in builtins.list(self._catalogue.listing(missed=True).infos):
                if left_by_dead(name):
                    self.client.delete(name, missing_ok=True)
                    self._catalogue.remove(name)

    # ---- for OpenFile

    def write_node(self, node: Node, offset: int, data: Octets) -> None:
        """Write into a file that may have to grow for it."""
        with node.lock:
            end = offset + data.size
            if isinstance(node.content, Live) and end > node.content.nbytes:
                self._detach(node, node.content)
            if isinstance(node.content, Draft):
                if end > node.content.nbytes:
                    self._check_room(node, end)
                node.changed = True
            try:
                node.content.write(offset, data)
            except OSError:
                node.short |= isinstance(node.content, Draft)
                raise
            node.modified = node.written = time.time_ns()

    def truncate_node(self, node: Node, nbytes: int) -> None:
        """Set a file's size."""
        with node.lock:
            if nbytes == node.content.nbytes:
                return
            if isinstance(node.content, Live):
                draft = Draft(self._drafts)
                _draw(node.content, draft, nbytes)
                node.content = draft
            self._check_room(node, nbytes)
            node.content.truncate(nbytes)
            node.short = False
            node.changed = True
            node.modified = time.time_ns()

    def commit(self, node: Node, *, empty: bool = False) -> None:
        """Make a draft a buffer: that of its name where it has the same size, else a new one in its place. One
        without a byte only if `empty`: a shell closes copies of its descriptor before a program writes to it.
        """
        with node.lock:
            draft = node.content
            if not node.changed or node.removed or not isinstance(draft, Draft) or not (draft.nbytes or empty):
                return
            if node.short:
                raise refuse(errno.ENOSPC, f"{node.path!r}: not all that was written to it found room")
            # To end what is hidden takes the lock that comes before the node's.
            found = self._find(node.path) if node.path not in self._hidden else None
            live = None
            if found is not None and found.view.nbytes == draft.nbytes:
                live = Live(self._catalogue.open(found.shown.name), found.view)
            if live is None or not draft.nbytes or not live.takes(draft):
                live = self._made(node, draft)
                if live is None:
                    return
            elif live.buffer.versions == 1:
                _copy(draft, live)
            else:
                live.publish(draft)
            if live.buffer.versions == 1:
                node.content = live
            node.changed = False
            node.base_bytes = live.nbytes
            self._modified[live.buffer.name] = node.modified

    def _made(self, node: Node, draft: Draft) -> Live | None:
        """Make a buffer with all its bytes in it, and only then give it its name. None: it was removed meanwhile."""
        path = node.path
        plan = plan_of(path, draft.head(header_bytes(draft.head(16))), draft.nbytes)
        name = private_name(plan.name)
        buffer = create(self.client, name, plan)
        try:
            _copy(draft, Live(buffer, plan.view))
            if node.removed:
                self.client.delete(name, missing_ok=True)
                return None
            self.client.rename(name, plan.name, replace=True)
        except BaseException:
            self.client.delete(name, missing_ok=True)
            raise
        buffer = self.client.open(plan.name)
        self._catalogue.add(buffer)
        if plan.name != path and path in self._catalogue.listing().infos:
            self.client.delete(path, missing_ok=True)  # it was bytes so far, and would hide what it is now
            self._catalogue.remove(path)
        return Live(buffer, plan.view)

    def discard_node(self, node: Node) -> None:
        """Forget a draft that is not in the cluster."""
        with self._lock, node.lock:
            if node.changed:
                self._nodes.pop(node.path, None)
                node.removed = True

    def close_node(self, node: Node) -> None:
        """One handle less. A draft that could not become a buffer is given up with the last one."""
        with as_os_errors(), self._lock:
            node.handles -= 1
            if node.handles:
                return
            try:
                if node.content.nbytes == 0 and not node.short:
                    self.commit(node, empty=True)
                elif node.changed and not node.removed:
                    _log.error("%s: not all of it reached the cluster; what was there before is there", node.path)
            finally:
                if self._nodes.get(node.path) is node:
                    del self._nodes[node.path]
                alive = node.written and not node.removed and node.path not in self._hidden
                found = self._find(node.path) if alive else None
                if found is not None:
                    self._modified[found.shown.name] = node.modified
                displaced, node.displaced = node.displaced, ""
                if displaced:
                    self.client.delete(displaced, missing_ok=True)

    def _detach(self, node: Node, source: Live | FrozenFile) -> None:
        draft = Draft(self._drafts)
        _draw(source, draft, source.nbytes)
        node.content = draft

    def _check_room(self, node: Node, nbytes: int) -> None:
        if nbytes > node.base_bytes and nbytes > self._catalogue.space()[1]:
            node.short = True
            raise refuse(errno.ENOSPC, f"{node.path!r}: the memory servers have no room for {nbytes} bytes")

    # ---- inside

    def _find(self, path: str) -> _Found | None:
        if not path or is_private(path):
            return None
        if path in self._hidden:
            self._end_hidden(path, self._hidden[path])
        shown = meanings(path)
        for missed in (False, True):
            infos = self._catalogue.listing(missed=missed).infos
            for one in shown:
                info = infos.get(one.name)
                if info is None or (one.version is not None and info.versions == 1):
                    continue
                view = self._catalogue.view(info, one.form)
                if view is not None:
                    return _Found(one, info, view)
        return None

    def _found(self, path: str) -> _Found:
        found = self._find(path)
        if found is None:
            raise self._none(path)
        return found

    def _none(self, path: str) -> OSError:
        """There is none. Of an alias (hide) the kernel asks, for somebody who found the file before it lost its path,
        and nobody has it open any more: at ESTALE the kernel looks what the path leads to now.
        """
        return refuse(errno.ESTALE if path in self._latest_aliases else errno.ENOENT, f"there is no {path!r}")

    def _is_folder(self, path: str) -> bool:
        if not path or path in self._folders:
            return True
        return path in self._catalogue.listing().folders or path in self._catalogue.listing(missed=True).folders

    def _files(self, info: BufferInfo, last: str, is_also_directory: bool) -> builtins.list[str]:
        try:
            forms = self._catalogue.forms(info)
            version = self._catalogue.known(info).version if info.versions > 1 else None
        except Error as error:  # deleted meanwhile, or its server is away: the name is shown all the same
            _log.debug("%s", error)
            forms, version = (Form.RAW,), None
        return files_of(last, forms, version or None, is_also_directory=is_also_directory)

    def _orphan(self, path: str) -> None:
        node = self._nodes.pop(path, None)
        if node is not None:
            node.removed = True

    def _keep_folder(self, path: str) -> None:
        """A directory does not go away with the last file in it: whoever removes a tree removes it next."""
        parent = parent_of(path)
        if parent and parent not in self._catalogue.listing().folders:
            self._folders.add(parent)


def _copy(draft: Draft, live: Live) -> None:
    """Write all of a draft into a buffer that takes it."""
    for offset, data in draft.pieces():
        live.write(offset, data)


def _draw(source: Live | FrozenFile, draft: Draft, nbytes: int) -> None:
    """Copy a file's first bytes into an empty draft."""
    total = min(nbytes, source.nbytes)
    piece = np.empty(min(_COPY_BYTES, total), np.uint8)
    for offset in range(0, total, _COPY_BYTES):
        part = piece[: min(_COPY_BYTES, total - offset)]
        source.read_into(offset, part)
        draft.write(offset, part)
