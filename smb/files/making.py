"""Makes buffers from files: as a whole under a private name, which is then renamed to the path in one step. Also
decides which path a file has.

A Maker belongs to one NameTree, and shares its directories and times of change. It takes no lock: a caller that changes
the target of a path holds the tree's lock (namespace.py).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np

from smb.buffer import Buffer
from smb.buffer_info import BufferInfo
from smb.client import Client
from smb.errors import Error, NotFoundError, OutOfMemoryError
from smb.files import formats
from smb.files.catalogue import Catalogue, Listing
from smb.files.contents import FrozenFile, Live, Octets, Reads
from smb.files.error_codes import refuse
from smb.files.formats import FileSpec, FileView, header_bytes, plain_spec, spec_of
from smb.files.handles import FileNode
from smb.files.names import Form, ShownBuffer, is_long, listed_as, name_of, path_of
from smb.files.staged_file import StagedFile
from smb.files.temporary_names import create, private_name
from smb.spi import note_name, rename_file

_COPY_BYTES = 8 << 20
_log = logging.getLogger("smb")


@dataclass(frozen=True, slots=True)
class FoundForm:
    """The target of a path: one form of a buffer."""

    shown: ShownBuffer
    info: BufferInfo
    view: FileView


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of a file's bytes in the buffer that its new path requires, made as `name`. `state` is the file's at that
    time.
    """

    buffer: Buffer
    name: str
    spec: FileSpec
    state: tuple[int, int]


class Maker:
    """Makes buffers from files; see the module. `replicas` is the number of copies of new files."""

    def __init__(
        self, client: Client, catalogue: Catalogue, folders: set[str], modified: dict[int, int], replicas: int
    ) -> None:
        self._client = client
        self._catalogue = catalogue
        self._folders = folders
        self._modified = modified
        self._replicas = replicas
        self._dropped: list[str] = []  # private names of buffers that still have to be deleted

    def listed(self, path: str, info: BufferInfo, buffers: Container[str], folders: Container[str]) -> str:
        """Return the one path under which a buffer is listed."""
        try:
            forms = self._catalogue.forms(info)
        except Error as error:  # deleted in the meantime, or its server is away: list the name anyway
            _log.debug("%s", error)
            forms = (Form.RAW,)
        return listed_as(path, forms, buffers, folders)

    def is_listed(self, found: FoundForm, path: str) -> bool:
        """Return True if that is the path under which it is listed."""
        listing = self._catalogue.listing()
        return self.listed(found.shown.name, found.info, listing.infos, self._folders_of(listing)) == path

    def _folders_of(self, listing: Listing) -> Container[str]:
        return self._folders.union(listing.folders.copy())

    def spec(self, path: str, source: Reads) -> FileSpec:
        """Return the buffer that a file becomes by its path; a buffer of bytes if another file is in the way of a typed
        one.
        """
        spec = spec_of(path, _head(source, header_bytes(_head(source, 16))), source.nbytes)
        if spec.name != path and not self.is_free(spec.name, path):
            spec = plain_spec(path, source.nbytes)
        return formats.named(spec)

    def is_free(self, target: str, path: str) -> bool:
        """Return True if the buffer `target`, listed as `path`, takes the place of that file only."""
        if target == path:
            return True
        listing = self._catalogue.missed(target)
        info = listing.infos.get(target)
        return info is None or self.listed(target, info, listing.infos, self._folders_of(listing)) == path

    def filled(self, source: Reads, spec: FileSpec, before: BufferInfo | None = None) -> Buffer:
        """Make a buffer that has all of a file, under a private name.

        It has as many copies as the file had before, or as the file whose place it takes; a new file has `replicas`
        copies.
        """
        name = private_name(name_of(spec.name))
        replaced = self._catalogue.listing().infos.get(spec.name)
        kept = [info.replicas for info in (before, replaced) if info is not None]
        self.drop()
        try:
            buffer = create(self._client, name, spec, max(kept, default=self._replicas))
            copy_all(source, Live(buffer, spec.view))
        except BaseException:
            self.drop(name)
            raise
        return buffer

    def drop(self, *names: str) -> None:
        """Delete buffers with private names.

        While the coordinator is away this is postponed until the next file is made or the tree is closed.
        """
        self._dropped += names
        while self._dropped:
            try:
                name = self._dropped.pop()
            except IndexError:  # another thread has taken the name
                return
            try:
                self._client.delete(name, missing_ok=True)
            except Error as error:
                _log.debug("not deleted yet: %s", error)
                self._dropped.append(name)
                return

    def named(
        self, buffer: Buffer, spec: FileSpec, there: FoundForm | None, victim: FileNode | None, attributes: bytes,
        *, replace: bool = True,
    ) -> Live:  # fmt: skip
        """Give a buffer its final name, and its file's attributes. This does not open it under that name, which may be
        another client's by then. Without `replace` raises AlreadyExistsError if the name is taken.
        """
        name = buffer.name
        try:
            self.put(name, spec.name, there, victim, attributes or None, replace=replace)
        except BaseException:
            self.drop(name)
            raise
        note_name(buffer, name_of(spec.name))
        self._catalogue.add(spec.name, buffer, attributes)
        return Live(buffer, spec.view)

    def linked(self, buffer: Buffer, spec: FileSpec, attributes: bytes) -> None:
        """Give a symbolic link's buffer its name. Raises AlreadyExistsError; EOPNOTSUPP if the coordinator is older."""
        try:
            stored = rename_file(self._client, (buffer.name, 0), name_of(spec.name), attributes=attributes)
        except BaseException:
            self.drop(buffer.name)
            raise
        note_name(buffer, name_of(spec.name))
        if not stored:
            self._client.delete(buffer, missing_ok=True)
            raise older()
        self._catalogue.add(spec.name, buffer, attributes)

    def describe(self, found: FoundForm, attributes: bytes, *, unchanged: bool = False) -> bool:
        """Store a file's attributes; return False if the coordinator is older. Raises NotFoundError if another client
        has replaced it, and with `unchanged` AlreadyExistsError if another client has set some meanwhile.
        """
        before = found.info.file_attributes
        if attributes == before:
            return True
        return self._describe(
            found.info.name, found.info.id, found.shown.name, attributes, before if unchanged else None
        )

    def describe_buffer(self, buffer: Buffer, attributes: bytes) -> None:
        """Store the attributes of an open file, wherever it is now."""
        self._describe(buffer.name, buffer.info.id, path_of(buffer.name), attributes)

    def _describe(self, name: str, buffer_id: int, path: str, attributes: bytes, before: bytes | None = None) -> bool:
        stored = rename_file(self._client, (name, buffer_id), name, attributes=attributes, before=before)
        if stored:
            self._catalogue.describe(path, buffer_id, attributes)
        return stored

    def take_away(self, found: FoundForm, node: FileNode | None, *, whichever: bool = False) -> None:
        """Delete a file's buffer, or give it a private name if somebody here has it open. Raises NotFoundError.

        With `whichever`, this also takes a buffer that another client has put at that name since.
        """
        buffer = found.info.name if whichever else found.info
        try:
            if is_open(node):
                node.displaced = private_name(found.info.name)
                self._client.rename(buffer, node.displaced)
            else:
                self._client.delete(buffer)
        except NotFoundError:
            self._catalogue.remove(found.shown.name)  # the next look asks the coordinator
            raise
        self._catalogue.remove(found.shown.name)
        self._modified.pop(found.info.id, None)

    def put(
        self, name: str, target: str, there: FoundForm | None, victim: FileNode | None, attributes: bytes | None = None,
        *, replace: bool = True,
    ) -> None:  # fmt: skip
        """Give a buffer its path, in place of the file that is there, and attributes.

        This is one step, unless that file belongs to a buffer with another path. None: the buffer keeps what it has.
        """

        def rename(displaced: str = "") -> None:
            rename_file(
                self._client, (name, 0), name_of(target), replace=replace, displaced_name=displaced,
                attributes=attributes,
            )  # fmt: skip

        if there is not None and there.shown.name != target:
            replaced = there.shown.version is None and self.is_listed(there, there.shown.path)
            rename()
            if replaced:
                with suppress(NotFoundError):  # another client has taken it away
                    self.take_away(there, victim)
            return
        if is_open(victim):
            victim.displaced = private_name(name_of(target))
            rename(victim.displaced)
        else:
            rename()
        if there is not None:
            self._modified.pop(there.info.id, None)

    def new_spec(self, found: FoundForm, target: str, new_path: str) -> FileSpec | None:
        """Return the buffer to make from a file for its new path; None if its present buffer is renamed to `target`.

        The buffer is made again in three cases: the new path makes it an array or tensors; the name is too long for a
        rename; another file there would lose its own form.
        """
        is_bytes = found.shown.form is Form.RAW and self._catalogue.forms(found.info) == (Form.RAW,)
        must = is_long(name_of(target)) or not self.is_free(target, new_path)
        if not must and not (is_bytes and new_path.endswith((Form.NPY.value, Form.SAFETENSORS.value))):
            return None
        if found.info.versions > 1:
            if must:
                raise refuse(errno.ENAMETOOLONG, f"{new_path!r} is too long to rename a buffer with versions; copy it")
            return None
        spec = self.spec(new_path, Live(self._catalogue.open(found.shown.name), found.view))
        return spec if must or spec.name != new_path else None

    def state(self, found: FoundForm, node: FileNode | None) -> tuple[int, int]:
        """Return a value that changes when a file is replaced, or written to through this process."""
        modified = self._modified.get(found.info.id, 0)
        return found.info.id, max(modified, node.written if node is not None else 0)

    def made_anew(
        self, found: FoundForm, node: FileNode | None, spec: FileSpec, copied: Copied | None, there: FoundForm | None,
        victim: FileNode | None,
    ) -> Live | None:  # fmt: skip
        """Make a file's buffer again for its new path, and remove the old one.

        The new path changes in one step, the old one in a second step. Returns None without room for two buffers.
        """
        source, opened = found.info, self._catalogue.open(found.shown.name)
        kept = self._catalogue.attributes(found.shown.name, opened)  # with what others set until now
        if kept.modified is None:  # the new buffer has another time of creation
            kept = replace(kept, modified=self._modified.get(source.id) or round(1e9 * source.created))
        attributes = kept.encode()
        if copied is not None and (copied.spec, copied.state) == (spec, self.state(found, node)):
            buffer = copied.buffer
        else:
            if copied is not None:
                self._client.delete(copied.name, missing_ok=True)
            source = replace(source, id=opened.info.id)  # by now it may be another buffer
            try:
                buffer = self.filled(Live(opened, found.view), spec, found.info)
            except OutOfMemoryError as error:
                _log.warning("%s cannot be copied for its new name: %s", found.shown.path, error)
                return None
        live = self.named(buffer, spec, there, victim, attributes)
        self._client.delete(source, missing_ok=True)
        self._catalogue.remove(found.shown.name)
        return live


def older() -> OSError:
    """Return the error for attributes that an older coordinator does not store."""
    return refuse(
        errno.EOPNOTSUPP, "the coordinator is of an older release, which stores no attributes of files; upgrade it"
    )


def is_open(node: FileNode | None) -> TypeGuard[FileNode]:
    """Return True if somebody has a buffer's own bytes open."""
    return node is not None and bool(node.handles) and isinstance(node.content, Live)


def _head(source: Reads, nbytes: int) -> bytes:
    """Return a file's first bytes, fewer if it is shorter."""
    out = np.empty(min(nbytes, source.nbytes), np.uint8)
    source.read_into(0, out)
    return out.tobytes()


def copy_all(source: Reads, live: Live) -> None:
    """Write a whole file into a buffer that accepts it."""
    for offset, data in source.blocks() if isinstance(source, StagedFile) else _blocks(source, source.nbytes):
        live.write(offset, data)


def draw(source: Live | FrozenFile, staged: StagedFile, nbytes: int) -> None:
    """Copy a file's first bytes into an empty staged file."""
    for offset, data in _blocks(source, min(nbytes, source.nbytes)):
        staged.write(offset, data)


def _blocks(source: Reads, nbytes: int) -> Iterator[tuple[int, Octets]]:
    """Yield a file's first bytes as (offset, bytes); each block is valid until the next one."""
    block = np.empty(min(_COPY_BYTES, nbytes), np.uint8)
    for offset in range(0, nbytes, _COPY_BYTES):
        part = block[: min(_COPY_BYTES, nbytes - offset)]
        source.read_into(offset, part)
        yield offset, part
