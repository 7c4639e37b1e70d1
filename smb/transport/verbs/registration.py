"""The client's memory for RDMA: registered arrays, and blocks to stage all other memory.

An array that owns its memory is registered when it is used for the second time, until it is collected. Registering pins
pages, which pays off only for memory that is used repeatedly. A registration is never looked up by address alone:
memory that was freed and mapped again has the old address, but the card would go on using the old pages. So each
registration belongs to an object that is alive, owns the memory, and still has it at that address. All other memory is
copied through blocks that are registered once. The total of registered memory is limited; past the limit, arrays are
staged.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import threading
import weakref
from typing import Any

import numpy as np

from smb.errors import TransportError
from smb.transport.verbs.queue_pair import BlockPool, Domain, Region

WORTH_BYTES = 64 << 10  # smaller arrays are copied: docs/decisions.md, 0012
REGISTERED_BYTES_MAX = 4 << 30
BLOCK_BYTES = 1 << 20  # SMB_CHUNK_BYTES_MAX: a frame's payload fits
_BLOCKS = 16

_log = logging.getLogger("smb")


class _Entry:
    """Registered memory. It belongs to `owner` as long as that lives; owner is None for memory made here."""

    __slots__ = ("__weakref__", "address", "end", "owner", "region")

    def __init__(self, region: Region, owner: weakref.ref[Any] | None) -> None:
        self.region: Region | None = region
        self.address = region.address
        self.end = region.address + region.nbytes
        self.owner = owner

    def is_there(self) -> bool:
        """Return True if the owner still has the memory, at the same address."""
        if self.region is None:
            return False
        if self.owner is None:
            return True
        owner = self.owner()
        return owner is not None and _address(owner) == self.address and owner.nbytes == self.end - self.address


class _EmptyMemory:
    """Memory of `empty`: numpy arrays keep this object alive, and with it the registration."""

    def __init__(self, mapping: mmap.mmap, address: int, nbytes: int) -> None:
        self._mapping = mapping
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


class ClientMemory:
    """All memory of a client, in one protection domain: no peer may access it. Thread-safe, except for blocks."""

    def __init__(self, domain: Domain, registered_bytes_max: int = REGISTERED_BYTES_MAX) -> None:
        """Raises TransportError."""
        self.domain = domain
        self.block_bytes = BLOCK_BYTES
        self.registered_bytes = 0
        self._most = registered_bytes_max
        self._lock = threading.Lock()
        self._addresses: list[int] = []
        self._entries: list[_Entry] = []
        self._seen: dict[int, weakref.ref[Any]] = {}  # by id: used once
        self._known: dict[int, _Entry] = {}  # by id: registered
        self._pool: BlockPool | None = None
        self._taken: dict[object, set[int]] = {}
        self._closed = False

    # ---- called by the client's threads

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array of zeros in registered memory. Raises TransportError."""
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Shared, so that a fork does not give the parent other pages at its next write than those that the card uses,
        # as kernels before 5.12 do with private memory.
        mapping = mmap.mmap(-1, whole, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        view = np.frombuffer(mapping, np.uint8)
        address = _address(view)
        del view
        with self._lock:
            if self._closed:
                raise TransportError("the client is closed")
            entry = _Entry(self.domain.register(address, whole), None)
            self._insert(entry)
        held = _EmptyMemory(mapping, address, whole)
        weakref.finalize(held, self._forget, entry, 0).atexit = False
        return np.asarray(held)[: nbytes if 0 not in shape else 0].view(dtype).reshape(shape)

    def note(self, array: Any) -> None:
        """Register an array that is about to be read from or written to, if that pays off."""
        owner = array
        while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
            owner = owner.base
        if not isinstance(owner, np.ndarray) or owner.base is not None or owner.nbytes < WORTH_BYTES:
            return
        if not owner.flags.owndata or self._closed:
            return
        known = self._known.get(id(owner))
        if known is not None and known.is_there():
            return
        with self._lock:
            if not self._closed:
                self._register(owner, known)

    def _register(self, owner: np.ndarray[Any, Any], known: _Entry | None) -> None:
        key = id(owner)
        if known is not None:  # the array was resized
            self._forget(known, key)
        elif key not in self._seen:
            self._seen[key] = weakref.ref(owner, lambda _: self._seen.pop(key, None))
            return
        if self.registered_bytes + owner.nbytes > self._most:
            return
        try:
            region = self.domain.register(_address(owner), owner.nbytes)
        except TransportError as error:
            _log.warning("%s; the array is copied instead", error)
            self._most = self.registered_bytes  # do not try again for each array
            return
        entry = _Entry(region, None)
        # Called when the owner is collected, before its memory is freed. This takes no lock, since it may run at any
        # time.
        entry.owner = weakref.ref(owner, lambda _: self._forget(entry, key))
        self._known[key] = entry
        self._insert(entry)

    def _insert(self, entry: _Entry) -> None:
        live = [(a, e) for a, e in zip(self._addresses, self._entries, strict=True) if e.region is not None]
        at = bisect.bisect([a for a, _ in live], entry.address)
        live.insert(at, (entry.address, entry))
        # Each assignment is atomic, addresses last: a reader without the lock checks what it finds.
        self._entries = [e for _, e in live]
        self._addresses = [a for a, _ in live]
        self.registered_bytes += entry.end - entry.address

    def _forget(self, entry: _Entry, key: int) -> None:
        region, entry.region = entry.region, None
        if region is None:
            return
        self.registered_bytes -= entry.end - entry.address
        if key:
            self._known.pop(key, None)
            self._seen.pop(key, None)
        if not self._closed:
            region.close()

    # ---- called by the progress thread

    def key_of(self, address: int, nbytes: int) -> int | None:
        """Return the local key for that memory, None if it is not registered."""
        entries = self._entries
        at = bisect.bisect(self._addresses, address) - 1
        if not 0 <= at < len(entries):
            return None
        entry = entries[at]
        if not (entry.address <= address and address + nbytes <= entry.end) or not entry.is_there():
            return None
        region = entry.region
        return region.local_key if region is not None else None

    @property
    def block_key(self) -> int:
        return self._blocks().region.local_key

    def take_block(self, taker: object) -> int | None:
        """Return the address of a block to stage data in, None if all are in use. Raises TransportError."""
        pool = self._blocks()
        if len(pool) == 0:
            return None
        address = pool.take()
        self._taken.setdefault(taker, set()).add(address)
        return address

    def give_block(self, taker: object, address: int) -> None:
        self._taken[taker].discard(address)
        self._blocks().give(address)

    def give_back(self, taker: object) -> None:
        """Take back all blocks of a user that has no work left."""
        for address in self._taken.pop(taker, set()):
            self._blocks().give(address)

    def _blocks(self) -> BlockPool:
        if self._pool is None:
            self._pool = BlockPool(self.domain, BLOCK_BYTES, _BLOCKS)
        return self._pool

    def close(self) -> None:
        """Free the memory after the last queue pair of the domain was closed. Arrays of `empty` go on as plain
        memory.
        """
        with self._lock:
            self._closed = True
            for entry in self._entries:
                region, entry.region = entry.region, None
                if region is not None:
                    region.close()
            if self._pool is not None:
                self._pool.close()
        self.domain.close()


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
