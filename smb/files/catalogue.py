"""The list of buffers as directories: requested from the coordinator, and cached for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from smb.buffer import Buffer
from smb.buffer_info import BufferInfo
from smb.client import Client
from smb.config.limits import NAME_CHARACTERS_MAX
from smb.errors import Error, NotFoundError
from smb.files.attributes import Attributes, decode
from smb.files.formats import FileView, forms_of, may_be_empty, path_in, view_of
from smb.files.names import Form, escaped, is_long, is_private, meanings, name_of, path_of
from smb.spi import look_up

FRESH_S = 1.0  # how long new buffers of other clients may stay unseen, and deleted ones be listed; open() always asks
# Missing names and directory listings are requested again, unless that would keep the coordinator busy.
_CHEAP_S = 0.05
_MISSES_COST = 10
_ASKED_KEPT = 64
_SERVERS_FRESH_S = 1.0
_ROOM_FRESH_S = 10.0  # for a file that takes a small part of what was free
_SMALL_PART = 64


@dataclass(frozen=True, slots=True)
class Listing:
    """All buffers by path, and every directory above a buffer, with the number of buffers below it.

    A Catalogue changes its latest listing in place while others look things up. To go through one, take a copy first:
    dict(listing.infos) is one step.
    """

    infos: dict[str, BufferInfo] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, infos: Mapping[str, BufferInfo]) -> Listing:
        listing = cls()
        listing.change(infos)
        return listing

    def change(self, change: Mapping[str, BufferInfo | None]) -> None:
        """Apply changes of some paths: a buffer, or None for a path that is gone. Held by its Catalogue's lock."""
        for path, info in change.items():
            step = (info is not None) - (path in self.infos)
            if info is None:
                self.infos.pop(path, None)
            else:
                self.infos[path] = info
            folder = "" if is_private(path) or not step else path.rpartition("/")[0]
            while folder:
                below = self.folders.get(folder, 0) + step
                if below:
                    self.folders[folder] = below
                else:
                    del self.folders[folder]
                folder = folder.rpartition("/")[0]


class Catalogue:
    """A client's view of buffers by their paths. Thread-safe; no lock is held while the coordinator is asked.

    A change made here (add, remove, rename) is in every later listing, also in one that was requested before the
    change.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._listing = Listing()
        self._read_at = float("-inf")
        self._cost = 0.0
        # for each listing in progress: the changes since it was requested
        self._pending: list[list[dict[str, BufferInfo | None]]] = []
        # one handle for each buffer, so that its paths to the servers are found once
        self._buffers: dict[int, Buffer] = {}
        self._space: tuple[float, int, int] = (float("-inf"), 0, 0)
        self._asked: dict[str, float] = {}  # when the coordinator was last asked for single paths; the latest ones
        self._call = threading.local()  # `begun`: since when a listing counts as requested by this thread's call
        self._changed = False  # buffers were made or removed since `_space` was read

    @contextmanager
    def call(self, recent_s: float = 0.0) -> Iterator[None]:
        """Let all misses in this block, and in blocks within it, share one listing, which is up to `recent_s` old."""
        outermost = getattr(self._call, "begun", None) is None
        if outermost:
            self._call.begun = time.monotonic() - recent_s
        try:
            yield
        finally:
            if outermost:
                self._call.begun = None

    def listing(self, *, missed: bool = False, anew: bool = False) -> Listing:
        """Return the listing, at most FRESH_S old. With `missed`, because the last one lacked a wanted path, it is
        requested again unless that would be too often, and with `anew` in any case.
        """
        begun = getattr(self._call, "begun", None)
        with self._lock:
            age = time.monotonic() - self._read_at
            if missed and not anew and begun is not None and self._read_at >= begun and age < FRESH_S:
                return self._listing  # it was requested by this very call
            missed_s = 0.0 if self._cost < _CHEAP_S else min(FRESH_S, _MISSES_COST * self._cost)
            if not anew and age < (missed_s if missed else FRESH_S):
                return self._listing
            changes: list[dict[str, BufferInfo | None]] = []
            self._pending.append(changes)
            begun = time.monotonic()
        try:
            infos = {self._path(info): info for info in self._client.list()}
        except BaseException:
            with self._lock:
                self._end(changes)
            raise
        with self._lock:
            self._end(changes)
            if begun < self._read_at:
                return self._listing
            listing = Listing.of(infos)
            for change in changes:
                listing.change(change)
            self._listing, self._read_at = listing, begun
            self._cost = time.monotonic() - begun
            known = {info.id for info in listing.infos.values()}
            self._buffers = {number: buffer for number, buffer in self._buffers.items() if number in known}
            return self._listing

    def missed(self, path: str) -> Listing:
        """Return the listing after the coordinator was asked for this path, which the last one lacked.

        In one call of this thread (see `call`) it is asked once for a path.
        """
        folder = escaped(path)
        if (
            len(folder) >= NAME_CHARACTERS_MAX
        ):  # the names of buffers below it are digests, of which only a listing tells
            return self.listing(missed=True)
        begun = getattr(self._call, "begun", None)
        with self._lock:
            asked_at = max(self._read_at, self._asked.get(path, float("-inf")))
            if begun is not None and asked_at >= begun and time.monotonic() - asked_at < FRESH_S:
                return self._listing
            changes: list[dict[str, BufferInfo | None]] = []
            self._pending.append(changes)
            begun = time.monotonic()
        names = {name_of(shown.name): shown.name for shown in meanings(path)}
        try:
            found = look_up(self._client, list(names), folder)
        except BaseException:
            with self._lock:
                self._end(changes)
            raise
        if found is None:
            with self._lock:
                self._end(changes)
            return self.listing(missed=True)
        seen = {self._path(info): info for info in found}
        with self._lock:
            self._end(changes)
            self._asked[path] = begun
            while len(self._asked) > _ASKED_KEPT:
                del self._asked[next(iter(self._asked))]
            self._apply({**dict.fromkeys(names.values()), **seen})
            for change in changes:
                self._listing.change(change)
            return self._listing

    def _end(self, changes: list[dict[str, BufferInfo | None]]) -> None:
        # identity, not equality: two of them may be equal
        self._pending = [others for others in self._pending if others is not changes]

    def _path(self, info: BufferInfo) -> str:
        """Return the path of a listed buffer. If its name is a digest, its metadata has the path."""
        if not is_long(info.name):
            return path_of(info.name)
        try:
            path = path_in(self.known(info).metadata)
            return path if path is not None and name_of(path) == info.name else info.name
        except (Error, OSError):  # the buffer is gone by now, or another program created it
            return info.name

    def add(self, path: str, buffer: Buffer, attributes: bytes) -> None:
        """Note a buffer that was created here, with its file's attributes."""
        with self._lock:
            self._buffers[buffer.info.id] = buffer
            self._show({path: replace(buffer.info, name=name_of(path), file_attributes=attributes)})

    def describe(self, path: str, buffer_id: int, attributes: bytes) -> None:
        """Note attributes that were stored here."""
        with self._lock:
            info = self._listing.infos.get(path)
            if info is not None and info.id == buffer_id:
                self._show({path: replace(info, file_attributes=attributes)})

    def remove(self, path: str) -> None:
        """Note a buffer that was deleted here."""
        with self._lock:
            self._show({path: None})

    def rename(self, infos: Mapping[str, tuple[str, BufferInfo]]) -> None:
        """Note buffers that were renamed here: by old path, the new path and the description."""
        with self._lock:
            self._show(dict.fromkeys(infos))
            self._show({path: replace(info, name=name_of(path)) for path, info in infos.values()})

    def open(self, path: str) -> Buffer:
        """Return the buffer that the coordinator has at that path now.

        Raises NotFoundError. The listing lacks the buffer then, too, since the kernel looks again.
        """
        name = name_of(path)
        try:
            buffer = self._client.open(name)
        except NotFoundError:
            self.remove(path)
            raise
        with self._lock:
            listed = self._listing.infos.get(path)
            seen = None if listed is None else (listed.id, listed.file_attributes)
            if seen != (buffer.info.id, buffer.info.file_attributes):
                self._show({path: buffer.info})
            known = self._buffers.get(buffer.info.id)
            if known is not None and known.name == name:
                return known
            self._buffers[buffer.info.id] = buffer
        return buffer

    def attributes(self, path: str, buffer: Buffer) -> Attributes:
        """Return the attributes of a file's buffer, as last seen."""
        info = self._listing.infos.get(path)
        return decode((info if info is not None and info.id == buffer.info.id else buffer.info).file_attributes)

    def attributes_now(self, buffer: Buffer) -> Attributes:
        """Return the attributes of a file's buffer that the coordinator has now. Raises NotFoundError."""
        found = self._client.open(buffer.name)
        if found.info.id != buffer.info.id:
            raise NotFoundError(f"{buffer.name!r} is another buffer by now")
        return decode(found.info.file_attributes)

    def is_current(self, path: str, buffer_id: int) -> bool:
        """Return True if the buffer at that path is still this one."""
        try:
            return self.open(path).info.id == buffer_id
        except NotFoundError:
            return False

    def known(self, info: BufferInfo) -> Buffer:
        """Return a handle of a listed buffer. Raises NotFoundError."""
        with self._lock:
            known = self._buffers.get(info.id)
        if known is not None:
            return known
        buffer = self._client.open(info.name)
        with self._lock:
            return self._buffers.setdefault(buffer.info.id, buffer)

    def forms(self, info: BufferInfo) -> tuple[Form, ...]:
        """Return the forms in which a buffer is shown. Raises NotFoundError."""
        if info.unknown_dtype:
            return (Form.RAW,)  # reading it fails, as this release cannot open it
        table = self.known(info).table if len(info.shape) == 1 else None
        return forms_of(info.dtype, info.shape, table or None)

    def view(self, info: BufferInfo, form: Form) -> FileView | None:
        """Return a buffer's bytes in a form; None if the buffer does not have that form. Raises NotFoundError."""
        if form is not Form.SAFETENSORS and not may_be_empty(info.dtype, info.shape):
            return view_of(form, info.dtype, info.shape, None, {})
        buffer = self.known(info)
        return view_of(form, info.dtype, info.shape, buffer.table, buffer.metadata)

    def space(self) -> tuple[int, int]:
        """Return (capacity, free) of all memory servers that may be alive, in bytes.

        A server that the coordinator has not heard of yet, e.g. after the coordinator's restart, counts with its last
        known numbers.
        """
        read_at, capacity, free = self._space
        if self._changed or time.monotonic() - read_at > _SERVERS_FRESH_S:
            self._changed = False
            may_live = [server for server in self._client.servers() if server.may_live]
            capacity = sum(server.capacity for server in may_live)
            free = sum(server.free for server in may_live if not server.draining)
            self._space = time.monotonic(), capacity, free
        return capacity, free

    def has_room(self, nbytes: int) -> bool:
        """Return True if there is room for so many bytes. Asks for a small file only now and then."""
        read_at, _, free = self._space
        if time.monotonic() - read_at < _ROOM_FRESH_S and nbytes * _SMALL_PART < free:
            return True
        return nbytes <= self.space()[1]

    def _show(self, change: dict[str, BufferInfo | None]) -> None:
        self._apply(change)
        self._changed = True

    def _apply(self, change: dict[str, BufferInfo | None]) -> None:
        for changes in self._pending:
            changes.append(change)
        self._listing.change(change)
