"""What buffers there are, as a directory sees them: asked of the coordinator, and kept for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from smb.buffer import Buffer
from smb.client import Client
from smb.files.names import Form, is_private
from smb.files.views import View, forms_of, may_be_empty, view_of
from smb.info import BufferInfo

FRESH_S = 1.0  # how long other clients' buffers may go unseen, and gone ones be shown; what is opened is asked for anew
# What is not there, and what a directory has, is asked for anew, unless that would keep the coordinator busy.
_CHEAP_S = 0.05
_MISSES_COST = 10
_SERVERS_FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Listing:
    """All buffers by name, and every directory on the way to one."""

    infos: Mapping[str, BufferInfo] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()

    @classmethod
    def of(cls, infos: Mapping[str, BufferInfo]) -> Listing:
        """Return the listing of these."""
        folders: set[str] = set()
        for name in infos:
            folder = "" if is_private(name) else name.rpartition("/")[0]
            while folder and folder not in folders:
                folders.add(folder)
                folder = folder.rpartition("/")[0]
        return cls(infos, frozenset(folders))


class Catalogue:
    """A client's view of names. Thread-safe; no lock is held while the coordinator is asked."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._listing = Listing()
        self._read_at = float("-inf")
        self._cost = 0.0
        self._changes = 0
        self._buffers: dict[int, Buffer] = {}  # one handle for each buffer: its ways to the servers are found once
        self._space: tuple[float, int, int] = (float("-inf"), 0, 0)

    def listing(self, *, missed: bool = False) -> Listing:
        """Return what there is, up to FRESH_S old. With `missed`, now: something is wanted that the last one
        did not have.
        """
        with self._lock:
            age = time.monotonic() - self._read_at
            missed_s = 0.0 if self._cost < _CHEAP_S else min(FRESH_S, _MISSES_COST * self._cost)
            if age < (missed_s if missed else FRESH_S):
                return self._listing
            before = self._changes
        begun = time.monotonic()
        infos = {info.name: info for info in self._client.list()}
        listing = Listing.of(infos)
        with self._lock:
            if before == self._changes:  # else it may lack what was done here meanwhile
                self._listing, self._read_at = listing, begun
                self._cost = time.monotonic() - begun
                known = {info.id for info in infos.values()}
                self._buffers = {number: buffer for number, buffer in self._buffers.items() if number in known}
        return listing

    def add(self, buffer: Buffer) -> None:
        """Take note of a buffer that was made here."""
        with self._lock:
            self._buffers[buffer.info.id] = buffer
            self._show({**self._listing.infos, buffer.name: buffer.info})

    def remove(self, name: str) -> None:
        """Take note of a buffer that was deleted here."""
        with self._lock:
            self._show({key: info for key, info in self._listing.infos.items() if key != name})

    def rename(self, names: Mapping[str, str]) -> None:
        """Take note of buffers that were renamed here: old name to new one. Later ones win."""
        with self._lock:
            before = self._listing.infos
            infos = {key: info for key, info in before.items() if key not in names}
            for name, new_name in names.items():
                if name in before:
                    infos[new_name] = replace(before[name], name=new_name)
            self._show(infos)

    def open(self, name: str) -> Buffer:
        """Return the buffer of that name as the coordinator has it now. Raises NotFoundError."""
        buffer = self._client.open(name)
        with self._lock:
            known = self._buffers.get(buffer.info.id)
            if known is not None and known.name == name:
                return known
            self._buffers[buffer.info.id] = buffer
            listed = self._listing.infos.get(name)
            if listed is None or listed.id != buffer.info.id:
                self._show({**self._listing.infos, name: buffer.info})
        return buffer

    def known(self, info: BufferInfo) -> Buffer:
        """Return a handle of a buffer that was listed. Raises NotFoundError."""
        with self._lock:
            buffer = self._buffers.get(info.id)
        return buffer if buffer is not None else self.open(info.name)

    def forms(self, info: BufferInfo) -> tuple[Form, ...]:
        """Return the forms in which a buffer is shown. Raises NotFoundError."""
        table = self.known(info).table if len(info.shape) == 1 else None
        return forms_of(info.dtype, info.shape, table or None)

    def view(self, info: BufferInfo, form: Form) -> View | None:
        """Return a buffer's bytes in a form; None where it has none. Raises NotFoundError."""
        if form is not Form.SAFETENSORS and not may_be_empty(info.dtype, info.shape):
            return view_of(form, info.dtype, info.shape, None, {})
        buffer = self.known(info)
        return view_of(form, info.dtype, info.shape, buffer.table, buffer.metadata)

    def space(self) -> tuple[int, int]:
        """Return (capacity, free) of all memory servers that live, in bytes."""
        read_at, capacity, free = self._space
        if time.monotonic() - read_at > _SERVERS_FRESH_S:
            alive = [server for server in self._client.servers() if server.alive]
            capacity, free = sum(server.capacity for server in alive), sum(server.free for server in alive)
            self._space = time.monotonic(), capacity, free
        return capacity, free

    def _show(self, infos: Mapping[str, BufferInfo]) -> None:
        self._changes += 1
        self._listing = Listing.of(infos)
        self._space = (float("-inf"), 0, 0)
