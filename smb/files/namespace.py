"""The files of a cluster for one process: names and open files. Everything that shows buffers as files is a thin layer
on this module.

A new file, or one whose size changes, is a staged file on this host until flush() or close(). Then it becomes a buffer
as a whole, under its name in one step. All other writes have reached the servers when they return. Paths have no
leading slash; "" is the root. Methods raise OSError, with smb's message.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import numpy as np

from smb.buffer import Buffer
from smb.client import Client
from smb.errors import Error, PermissionDeniedError
from smb.files.attributes import NONE, Attributes, FileKind
from smb.files.catalogue import Catalogue
from smb.files.contents import Frozen, FrozenFile, Live
from smb.files.describing import Describer, changed
from smb.files.error_codes import as_os_errors, refuse
from smb.files.folders import OwnFolders
from smb.files.formats import named, plain_spec
from smb.files.generations import LATEST, MODEL, Generations, Place
from smb.files.handles import FileNode, FileStatus, OpenFile, status_of
from smb.files.hidden_files import HiddenFiles
from smb.files.making import Copied, FoundForm, Maker
from smb.files.names import (
    PRIVATE,
    Form,
    ShownBuffer,
    entries,
    is_long,
    is_private,
    meanings,
    name_of,
    parent_of,
)
from smb.files.paths import TARGET_BYTES_MAX, ShownPaths, is_link, published
from smb.files.staged_file import StagedFile
from smb.files.temporary_names import left_by_dead
from smb.files.writing import RECENT_S, FileWriter

_log = logging.getLogger("smb")


class NameTree:
    """The files of a client's cluster. Thread-safe.

    `staged_files` is a directory of this host for files that are being made. With make_folders, opening a new file
    makes its parent directories. `replicas` is the number of copies of new files.
    """

    def __init__(
        self, client: Client, staged_files: str | None = None, *, make_folders: bool = False, replicas: int = 1
    ) -> None:
        self.client = client
        self._make_folders = make_folders
        self._catalogue = Catalogue(client)
        self._lock = threading.RLock()
        self._nodes: dict[str, FileNode] = {}
        self._folders = OwnFolders()
        self._modified: dict[int, int] = {}  # by buffer id: the name may be another buffer's by now
        self._maker = Maker(client, self._catalogue, self._folders.paths, self._modified, replicas)
        self._frozen: weakref.WeakValueDictionary[tuple[int, int], Frozen] = weakref.WeakValueDictionary()
        self._generations = Generations(client, self._catalogue, self._frozen)
        self._paths = ShownPaths(self._catalogue, self._generations, self._folders)
        self._hidden = HiddenFiles(self._lock, self._catalogue, self._paths, self._maker, self._folders)
        self._describer = Describer(self._catalogue, self._maker, self._modified, self._found)
        self.writer = FileWriter(
            client, self._catalogue, self._paths, self._hidden, self._maker, self._modified, staged_files
        )

    # ---- looking

    def status(self, path: str) -> FileStatus:
        """Return the status of a path. ENOENT."""
        with self._call():
            node = self._nodes.get(path)
            if node is not None:
                return status_of(node)
            alias = self._hidden.status(path)
            if alias is not None:
                return alias
            place = self._generations.at(path)
            if place is not None and place.generation:
                return self._status_of(place)
            if self._paths.is_folder(path):
                kept = self._folders.attributes(path)
                return FileStatus(0, kept.modified or 0, directory=True, attributes=kept, changed=kept.modified or 0)
            self._folders.forget_attributes(path)  # another client may have removed it
            found = self._paths.look(path)
            # hidden files stay hidden here: one may be about to be replaced
            if found is None or found.info.id in self._hidden.ids():
                raise self._none(path)
            return self._describer.status(found)

    def _status_of(self, place: Place) -> FileStatus:
        number = self._generations.number(place)
        created = round(1e9 * place.info.created)
        if not place.file:
            return FileStatus(0, created, directory=True, version=number)
        view = self._generations.model(place) if place.file == MODEL else None
        if view is not None:
            return FileStatus(view.nbytes, created, version=number)
        beside = self.status(place.beside)
        if beside.directory:
            raise self._none(f"{place.state}/{place.generation}/{place.file}")
        return replace(beside, version=number)

    def link(self, path: str) -> str | None:
        """Return the target of a symbolic link, or the generation to which STATE/latest leads; None for any other path.

        ENOENT before the first generation.
        """
        with self._call():
            return self._paths.link(path)

    def follow(self, path: str) -> str:
        """Return the path to which the symbolic links in a path lead, for callers without a kernel between.

        ELOOP; ENOENT for a link out of the cluster's files.
        """
        with self._call():
            return self._paths.follow(path)

    def list(self, path: str) -> builtins.list[tuple[str, FileKind]]:
        """Return (name, kind) of all entries of a directory, sorted. ENOENT, ENOTDIR."""
        with self._call():
            place = self._generations.at(path)
            if place is not None and place.generation:
                return self._list_generation(place)
            if not self._paths.is_folder(path):
                raise refuse(errno.ENOTDIR, path) if self._find(path) else refuse(errno.ENOENT, path)
            # Before the catalogue: a staged file that becomes a buffer at this moment is then in one of the two.
            with self._lock:
                nodes = [node for node in self._nodes.values() if not node.removed]
                staged_files = [node.path for node in nodes if isinstance(node.content, StagedFile)]
                own, hidden = set(self._folders.paths), self._hidden.ids()
            listing = self._catalogue.listing(missed=True)
            infos = listing.infos.copy()
            folders, buffers = entries(path, infos)
            folders |= entries(path, (folder + "/" for folder in own))[0]
            start = path + "/" if path else ""
            own.update(listing.folders.copy())
            shown = dict.fromkeys(folders, FileKind.FOLDER)
            for last in buffers:
                info = infos[start + last]
                if info.id in hidden:
                    continue
                if self._generations.is_state(info):
                    shown[last] = FileKind.FOLDER
                kind = FileKind.LINK if is_link(info) else FileKind.FILE
                shown[self._maker.listed(start + last, info, infos, own)[len(start) :]] = kind
            for staged in staged_files:
                if parent_of(staged) == path:
                    shown.setdefault(staged.rpartition("/")[2], FileKind.FILE)
            numbers = [] if place is None else self._generations.numbers(place)
            for number in numbers:
                shown.setdefault(str(number), FileKind.FOLDER)
            if numbers:
                shown.setdefault(LATEST, FileKind.LINK)
            return sorted(shown.items(), key=lambda entry: entry[0])

    def _list_generation(self, place: Place) -> builtins.list[tuple[str, FileKind]]:
        if place.file:
            raise refuse(errno.ENOTDIR, place.file)
        self._generations.number(place)
        names = {name for name, kind in self.list(place.state) if kind is FileKind.FILE}
        if self._generations.model(place) is not None:
            names.add(MODEL)
        return [(name, FileKind.FILE) for name in sorted(names)]

    def buffer(self, path: str) -> tuple[Buffer, ShownBuffer]:
        """Return the buffer that a path shows, and in which form. ENOENT; EISDIR; ENODATA for a file that is not a
        buffer yet.
        """
        with self._call():
            node = self._nodes.get(path)
            if node is not None and isinstance(node.content, StagedFile) and not self._find(path):
                raise refuse(errno.ENODATA, f"{path!r} becomes a buffer only when it is closed")
            if self._paths.is_folder(path):
                raise refuse(errno.EISDIR, path)
            place = self._generations.at(path)
            if place is not None and place.file == MODEL and self._generations.model(place) is not None:
                shown = ShownBuffer(place.state, Form.SAFETENSORS, self._generations.number(place))
                return self._catalogue.known(place.info), shown
            found = self._found(path if place is None else place.beside)
            return self._catalogue.known(found.info), found.shown

    def space(self) -> tuple[int, int, int]:
        """Return (capacity, free) of the cluster in bytes, and the number of its buffers."""
        with self._call():
            return *self._catalogue.space(), len(self._catalogue.listing(missed=True).infos)

    # ---- opening

    def open(self, path: str, flags: int, attributes: Attributes = NONE) -> OpenFile:
        """Open a file as open(2) does, with its flags. ENOENT, EEXIST, EISDIR, ENOTDIR, EACCES. A new file gets
        `attributes`.

        ESTALE if the path led to a file that is hidden now: the caller looks the path up again.
        """
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        # A caller that makes a file has usually just seen that there is none; the name is decided when it is closed.
        with self._call(RECENT_S if flags & os.O_CREAT else 0.0):
            place = self._generations.at(path)
            if place is not None and place.generation:
                return self._open_generation(place, path, flags)
            if not flags & os.O_CREAT and (self._hidden.status(path) is not None or self._hidden.hides(path)):
                raise refuse(errno.ESTALE, path)
            if self._paths.is_folder(path):
                new = flags & os.O_CREAT and flags & os.O_EXCL
                raise refuse(errno.EEXIST if new else errno.EISDIR, path)
            found = self._find(path)
            if found is not None and (found.info.versions > 1 or found.shown.version is not None):
                if flags & os.O_CREAT and flags & os.O_EXCL:
                    raise refuse(errno.EEXIST, path)
                if not writes:
                    return OpenFile(self, None, self._frozen_file(found), flags, path)
                if found.shown.version is not None:
                    raise refuse(errno.EACCES, f"{path!r} is a published version, which cannot be changed")
            with self._lock:
                node = self._opened(path, flags, attributes, truncate=bool(writes and flags & os.O_TRUNC))
                node.handles += 1
                return OpenFile(self, node, None, flags, path)

    def _open_generation(self, place: Place, path: str, flags: int) -> OpenFile:
        new = flags & os.O_CREAT and flags & os.O_EXCL
        if not place.file and self._generations.is_folder(path):
            raise refuse(errno.EEXIST if new else errno.EISDIR, path)
        if flags & os.O_CREAT or flags & os.O_ACCMODE != os.O_RDONLY:
            raise published(path)
        if not place.file:
            raise self._none(path)
        if place.file == MODEL and self._generations.model(place) is not None:
            number, frozen = self._generations.open(place)
            return OpenFile(self, None, frozen, flags, f"{place.state}/{number}/{MODEL}")
        self._status_of(place)
        return self.open(place.beside, flags)

    def _opened(self, path: str, flags: int, attributes: Attributes, *, truncate: bool) -> FileNode:
        node = self._nodes.get(path)
        known = node.content if node is not None and not node.removed else None
        if isinstance(known, Live) and not self._is_current(path, known.buffer.info.id):
            self._orphan(path)  # another process deleted or replaced it; the caller means the new one
            node = None
        found = self._find(path) if node is None else None
        if flags & os.O_CREAT and flags & os.O_EXCL and (node or found):
            raise refuse(errno.EEXIST, path)
        if node is None and found is None and not flags & os.O_CREAT:
            raise self._none(path)
        if node is None:
            node = self._nodes[path] = self._node(path, found, truncate)
            if found is None:
                node.attributes = attributes
                node.exclusive = bool(flags & os.O_CREAT and flags & os.O_EXCL)
                self._folders.touch(path)
        elif truncate:
            self.writer.truncate(node, 0)
        return node

    def _is_current(self, path: str, buffer_id: int) -> bool:
        found = self._find(path)
        return (
            found is not None and found.info.id == buffer_id and self._catalogue.is_current(found.shown.name, buffer_id)
        )

    def _node(self, path: str, found: FoundForm | None, truncate: bool) -> FileNode:
        now = time.time_ns()
        if found is None:
            self._check_new(path)
            node = FileNode(path, self.writer.staged(), now)
            node.changed = True
            return node
        buffer = self._catalogue.open(found.shown.name)
        view = self._catalogue.view(buffer.info, found.shown.form)
        if view is None:
            raise refuse(errno.ENOENT, path)
        attributes = self._catalogue.attributes(found.shown.name, buffer)
        modified = self._describer.modified(buffer.info, attributes)
        node = FileNode(path, Live(buffer, view), modified, attributes)
        node.base_bytes = view.nbytes
        node.since = max(round(1e9 * buffer.info.created), self._modified.get(buffer.info.id, 0))
        if truncate:
            node.content, node.changed = self.writer.staged(), True
            node.touch(now)
        elif buffer.versions > 1:
            self.writer.detach(node, FrozenFile(Frozen(buffer, None, or_zeros=True), view))
        return node

    def _check_new(self, path: str) -> None:
        self._paths.refuse_generation(path)
        parent = parent_of(path)
        if self._make_folders:
            while parent and not self._find(parent):
                parent = parent_of(parent)
        if not self._paths.is_folder(parent):
            raise refuse(errno.ENOTDIR if parent and self._find(parent) else errno.ENOENT, path)
        if is_private(path):
            raise refuse(errno.EPERM, f"{PRIVATE} is reserved for files that are being made")
        name_of(path)
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise refuse(errno.EINVAL, f"{path!r}: no part of a path may be empty, '.' or '..'")
        infos = self._catalogue.listing().infos
        for shown in meanings(path):
            if shown.version is not None and shown.name in infos and infos[shown.name].versions > 1:
                raise refuse(
                    errno.EACCES, f"{path!r} means version {shown.version} of {shown.name!r} and cannot be written"
                )

    def _frozen_file(self, found: FoundForm) -> FrozenFile:
        buffer = self._catalogue.open(found.shown.name)
        if buffer.versions == 1:
            raise refuse(errno.ENOENT, f"buffer {buffer.name!r} keeps no versions: it was created with versions=1")
        # Use the buffer that was opened: another client may have put it there since the listing.
        view = self._catalogue.view(buffer.info, found.shown.form)
        if view is None:
            raise refuse(errno.ENOENT, found.shown.path)
        wanted = buffer.version if found.shown.version is None else found.shown.version
        frozen = self._frozen.get((buffer.info.id, wanted))
        if frozen is None:
            frozen = Frozen(buffer, found.shown.version)
            frozen = self._frozen.setdefault((buffer.info.id, frozen.version), frozen)
        return FrozenFile(frozen, view, by_version=found.shown.version is not None)

    # ---- names

    def make_folder(self, path: str, attributes: Attributes = NONE) -> None:
        """Make a directory. Only this process knows it until it has a file. EEXIST, ENOENT."""
        with self._call(RECENT_S), self._asked(path):  # the kernel has usually just looked for it
            found = self._find(path)
            if (
                path in self._nodes
                or self._paths.is_folder(path)
                or (found is not None and self._maker.is_listed(found, path))
            ):
                raise refuse(errno.EEXIST, path)
            self._check_new(path)
            self._folders.add(path)
            self._folders.describe(path, replace(attributes, modified=time.time_ns()))
            self._folders.touch(path)

    def make_link(self, path: str, target: str, attributes: Attributes = NONE) -> None:
        """Make a symbolic link, in one step for the whole cluster. EEXIST, ENOENT; ENAMETOOLONG for a long target."""
        data = np.frombuffer(os.fsencode(target), np.uint8)
        if not 0 < data.size <= TARGET_BYTES_MAX:
            raise refuse(
                errno.ENAMETOOLONG if data.size else errno.ENOENT,
                f"the target of a symbolic link must have 1 to {TARGET_BYTES_MAX} bytes, not {data.size}",
            )
        with self._call(RECENT_S):  # whether the name is taken decides the coordinator
            with self._asked(path):
                if path in self._nodes or self._paths.is_folder(path) or self._find(path) is not None:
                    raise refuse(errno.EEXIST, path)
                self._check_new(path)
            staged = self.writer.staged()
            staged.write(0, data)
            spec = named(plain_spec(path, staged.nbytes))
            buffer = self._maker.filled(staged, spec)
            self._maker.linked(buffer, spec, replace(attributes, link=True).encode())
            with self._lock:
                self._folders.touch(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty directory. ENOENT, ENOTDIR, ENOTEMPTY."""
        with self._call(), self._lock:
            if not path or self._generations.at(path) is not None or self.list(path):
                raise refuse(errno.ENOTEMPTY, path)
            self._hidden.end_below(path)
            self._folders.remove(path)
            self._folders.touch(path)
            self._keep_folder(path)

    def remove(self, path: str) -> None:
        """Delete a file and its buffer, in whichever form the path shows it. ENOENT, EISDIR, EACCES.

        Handles of this process work until they are closed; other processes get ESTALE.
        """
        with self._call():
            if self._paths.is_folder(path):
                raise refuse(errno.EISDIR, path)
            self._paths.refuse_published(path)
            if path not in self._nodes and path not in self._hidden:
                found = self._removable(path)
                if found is None:
                    raise refuse(errno.ENOENT, path)
                self._maker.take_away(found, None, whichever=True)
                with self._lock:
                    self._folders.touch(path)
                    self._keep_folder(path)
                return
            self._catalogue.listing(anew=True)  # a coordinator that is away is waited for before the lock is taken
            with self._lock:
                self._remove(path)

    def _removable(self, path: str) -> FoundForm | None:
        found = self._find(path)
        if found is not None and found.shown.version is not None:
            raise refuse(errno.EACCES, f"{path!r} is one version of a buffer; delete the buffer instead")
        return found

    def _remove(self, path: str) -> None:
        node = self._nodes.get(path)
        with nullcontext() if node is None else node.lock:  # the file may be about to become a buffer
            found = self._removable(path)
            if node is None and found is None:
                raise refuse(errno.ENOENT, path)
            if found is not None:
                self._maker.take_away(found, node, whichever=True)
            self._orphan(path)
        self._folders.touch(path)
        self._keep_folder(path)

    def hide(self, path: str, alias: str) -> None:
        """Hide a file that is open, for libfuse: processes that have it open know it as `alias` from now on.

        libfuse does this when an open file is removed, and when another file is about to be renamed to its path. For
        the cluster the latter must be one step, so the hidden file is kept for a moment.
        """
        with self._call():
            status = self.status(path)
            with self._asked(path):
                self._hide(path, alias, status)

    def _hide(self, path: str, alias: str, status: FileStatus) -> None:
        node = self._nodes.pop(path, None)
        with nullcontext() if node is None else node.lock:  # as in _remove
            found = self._find(path)
            if found is not None:
                self._hidden.hide(path, node, found.info.id)
            if node is not None:
                node.removed = True
                node.path = alias
                self._nodes[alias] = node
        self._hidden.note_alias(alias, status if node is None else None)
        self._folders.touch(path)
        self._keep_folder(path)

    def forget(self, alias: str) -> None:
        """Forget a hidden file: the last process that had it open has closed it."""
        self._hidden.forget(alias)

    def end_hidden(self) -> None:
        """Remove all hidden files from the cluster, and private buffers: called before this process ends."""
        self._hidden.end_below("")
        self._maker.drop()

    def rename(self, path: str, new_path: str, *, replace: bool = True) -> None:
        """Rename a file or directory in one step for the whole cluster; with `replace`, a file of the new name is
        deleted in it.

        Open handles of this process keep reading the old file. EXDEV between different forms.
        """
        with self._call():
            self._paths.refuse_published(path, new_path)
            copied = self._copied(path, new_path)
            try:
                self._rename(path, new_path, replace, copied)
            finally:
                if copied is not None:
                    # the buffer usually has its new name; otherwise sweep() of the next mount finds it
                    with suppress(Error):
                        self.client.delete(copied.name, missing_ok=True)

    def _rename(self, path: str, new_path: str, replace: bool, copied: Copied | None) -> None:
        with self._lock:
            if path == new_path:
                self.status(path)
                return
            victim = self._hidden.take_back(new_path) if new_path in self._hidden else self._nodes.get(new_path)
            node = self._nodes.get(path)
            if node is not None:
                self.writer.commit(node, empty=True)
            found = self._find(path)
            self._folders.touch(path)
            self._folders.touch(new_path)
            if node is None and (found is None or self._paths.is_folder(path)):
                self._rename_folder(path, new_path)
                return
            there = self._find(new_path)
            if not replace and (there is not None or new_path in self._nodes):
                raise refuse(errno.EEXIST, new_path)
            if self._paths.is_folder(new_path):
                raise refuse(errno.EISDIR, new_path)
            if there is None and new_path not in self._nodes:
                self._check_new(new_path)
            self._rename_file(self._found(path), node, new_path, there, victim, copied)
            self._orphan(new_path)
            if node is not None:
                del self._nodes[path]
                node.path = new_path
                self._nodes[new_path] = node
            self._keep_folder(path)

    def _rename_file(
        self, found: FoundForm, node: FileNode | None, new_path: str, there: FoundForm | None, victim: FileNode | None,
        copied: Copied | None,
    ) -> None:  # fmt: skip
        form, old = found.shown.form, found.shown.name
        if found.shown.version is not None or not new_path.endswith(form.value):
            raise refuse(
                errno.EXDEV, f"{found.shown.path!r} and {new_path!r} have different forms; copy the file instead"
            )
        target = new_path[: len(new_path) - len(form.value)]
        modified = self._modified.get(found.info.id)
        buffer_id = found.info.id  # id of the buffer that has the new path at the end
        spec = self._maker.new_spec(found, target, new_path)
        if spec is not None:
            with nullcontext() if node is None else node.lock:
                live = self._maker.made_anew(found, node, spec, copied, there, victim)
                if live is not None and node is not None:
                    node.content = live
            if live is None and (is_long(name_of(target)) or not self._maker.is_free(target, new_path)):
                raise refuse(
                    errno.ENOSPC, f"{new_path!r}: the memory servers have no room for the copy that this name needs"
                )
            if live is None:
                spec = None
            else:
                buffer_id = live.buffer.info.id
        if spec is None:
            self._maker.put(found.info.name, target, there, victim)
            self._catalogue.rename({old: (target, found.info)})
        self._modified.pop(found.info.id, None)
        if modified is not None:
            self._modified[buffer_id] = modified

    def _copied(self, path: str, new_path: str) -> Copied | None:
        """Make the copy of a file that its rename needs, while other names stay usable.

        Returns None if no copy is needed, or if somebody is writing to the file.
        """
        with self._lock:
            found, node = (self._paths.look(path) if path not in self._hidden else None), self._nodes.get(path)
            if (
                found is None
                or self._paths.is_folder(path)
                or (node is not None and not isinstance(node.content, Live))
            ):
                return None
            form, state = found.shown.form, self._maker.state(found, node)
            if found.shown.version is not None or not new_path.endswith(form.value):
                return None
        try:
            spec = self._maker.new_spec(found, new_path[: len(new_path) - len(form.value)], new_path)
            if spec is None:
                return None
            source = Live(self._catalogue.open(found.shown.name), found.view)
            made = self._maker.filled(source, spec, found.info)
            return Copied(made, made.name, spec, state)
        except (Error, OSError) as error:  # the rename meets the same error, or does without the copy
            _log.debug("%s", error)
            return None

    def _rename_folder(self, path: str, new_path: str) -> None:
        if not self._paths.is_folder(path):
            raise refuse(errno.ENOENT, path)
        if new_path.startswith(path + "/"):
            raise refuse(errno.EINVAL, f"{new_path!r} is inside {path!r}")
        if self._paths.is_folder(new_path):
            self.remove_folder(new_path)
        elif self._find(new_path):
            raise refuse(errno.ENOTDIR, new_path)
        infos = self._catalogue.listing(missed=True).infos.copy()
        moved = {old: (new_path + old[len(path) :], infos[old]) for old in infos if old.startswith(path + "/")}
        if any(is_long(info.name) or is_long(name_of(new)) for new, info in moved.values()):
            raise refuse(
                errno.EXDEV,
                f"{path!r} contains, or would contain, paths that are too long for buffer names; copy it instead",
            )
        if moved:
            self.client.rename_folder(name_of(path), name_of(new_path))
            self._catalogue.rename(moved)
        for node_path in [known for known in self._nodes if known.startswith(path + "/")]:
            node = self._nodes.pop(node_path)
            node.path = new_path + node_path[len(path) :]
            self._nodes[node.path] = node
        self._folders.rename(path, new_path)
        self._keep_folder(path)

    def set_modified(self, path: str, modified: int) -> None:
        """Set a time of change (ns since 1970). ENOENT."""
        self.describe(path, lambda kept: replace(kept, modified=modified))

    def describe(self, path: str, change: Callable[[Attributes], Attributes]) -> None:
        """Change the attributes of a file, for the whole cluster, or those of a directory, for this process.

        Those of a staged file become known with its bytes. ENOENT, EACCES, ENOSPC; EOPNOTSUPP at an older coordinator.
        """
        with self._call():
            self._paths.refuse_generation(path)
            with self._lock:
                node = self._nodes.get(path)
                if node is None and self._paths.is_folder(path):
                    self._folders.describe(path, changed(self._folders.attributes(path), change))
                    return
            self._describer.describe(path, node, change)

    def truncate(self, path: str, nbytes: int) -> None:
        """Set a file's size. A file of a different size than before becomes a buffer of bytes."""
        file = self.open(path, os.O_RDWR)
        try:
            file.truncate(nbytes)
            file.flush()
        finally:
            file.close()

    def sweep(self) -> None:
        """Delete what killed processes of this host left half done, as far as this client may."""
        with self._call(), suppress(PermissionDeniedError):
            for path, info in self._catalogue.listing(missed=True).infos.copy().items():
                if left_by_dead(info.name):
                    self.client.delete(info.name, missing_ok=True)
                    self._catalogue.remove(path)

    # ---- for OpenFile

    def discard_node(self, node: FileNode) -> None:
        """Drop a staged file that is not in the cluster."""
        with self._lock, node.lock:
            if node.changed:
                self._nodes.pop(node.path, None)
                node.removed = True

    def close_node(self, node: FileNode) -> None:
        """Close one handle. A staged file that could not become a buffer is dropped with the last handle."""
        with self._call(), self._lock:
            node.handles -= 1
            if node.handles:
                return
            try:
                if node.content.nbytes == 0 and not node.unwritten:
                    self.writer.commit(node, empty=True)
                elif node.changed and not node.removed:
                    _log.error("%s: not all of it reached the cluster; what was there before still is", node.path)
            finally:
                if self._nodes.get(node.path) is node:
                    del self._nodes[node.path]
                if node.written and not node.removed and node.path not in self._hidden:
                    self._note_modified(node)
                displaced, node.displaced = node.displaced, ""
                if displaced:
                    self._maker.drop(displaced)

    def _note_modified(self, node: FileNode) -> None:
        """Store the time of a write. For a write in place no request is made: the coordinator may be away, and all
        other calls wait meanwhile.
        """
        if isinstance(node.content, Live):
            self._modified[node.content.buffer.info.id] = node.modified
        elif (found := self._find(node.path)) is not None:
            self._modified[found.info.id] = node.modified

    # ---- inside

    @contextmanager
    def _call(self, recent_s: float = 0.0) -> Iterator[None]:
        """Translate errors; and ask the coordinator for names once in a call, see Catalogue.call."""
        with as_os_errors(), self._catalogue.call(recent_s):
            yield

    @contextmanager
    def _asked(self, path: str) -> Iterator[None]:
        """Hold the lock, after a request to the coordinator.

        So the wait for a coordinator that is away happens before the lock is taken, when it delays no other file.
        Everything is looked up again under the lock, usually in the same listing.
        """
        self._paths.look(path)
        with self._lock:
            yield

    def _find(self, path: str) -> FoundForm | None:
        """Return what a path shows, after a hidden file there was removed."""
        self._hidden.end(path)
        return self._paths.look(path)

    def _found(self, path: str) -> FoundForm:
        found = self._find(path)
        if found is None:
            raise self._none(path)
        return found

    def _none(self, path: str) -> OSError:
        """Return the error for a missing path.

        The kernel also asks about an alias (hide) for a process that found the file before it lost its path, when no
        process has it open any more. At ESTALE the kernel looks up what the path leads to now.
        """
        if self._hidden.was_alias(path):
            return refuse(errno.ESTALE, f"{path!r} does not exist")
        return self._paths.missing(path)

    def _orphan(self, path: str) -> None:
        node = self._nodes.pop(path, None)
        if node is not None:
            node.removed = True

    def _keep_folder(self, path: str) -> None:
        self._folders.keep_above(path, self._catalogue.listing().folders)
