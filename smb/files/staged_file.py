"""A file whose size is not known yet, on this host until it becomes a buffer.

Its beginning lies in memory of this process: huge pages are made faster than those of a file, and are given to the
engine as they are. Bytes beyond the limit of one staged file, or of all together, lie in a temporary file without a
name.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from smb.files.contents import Octets

MEMORY_BYTES_MAX = 1 << 30  # of all staged files of this process
_STEP_BYTES = 16 << 20
_HUGE_BYTES = 2 << 20  # the first of them in small pages: most files are small
_KEPT_BYTES = 256 << 20
_KEPT_S = 10.0
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # linux/mman.h; Python 3.10 does not name it


class _Region:
    """Addresses for all that a staged file may have in memory, zeros as far as nobody wrote."""

    def __init__(self) -> None:
        """Raises OSError if this process may have no more of them."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE  # memory comes with the first write
        self._map = mmap.mmap(-1, MEMORY_BYTES_MAX, flags=flags)
        with contextlib.suppress(AttributeError, OSError):  # a kernel without them, or a C library
            self._map.madvise(mmap.MADV_HUGEPAGE, _HUGE_BYTES)
        self.kept = False  # for some staged file before: it has pages, wherever its next one writes
        self.octets: Octets = np.frombuffer(self._map, np.uint8)

    def clear(self, first: int, last: int) -> None:
        """Make these bytes zeros again, and give back the pages that they fill."""
        page = min(last, -(-first // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.octets[first:page] = 0
        if page < last:
            self._map.madvise(mmap.MADV_DONTNEED, page, last - page)


class _Regions:
    """Memory of all staged files of this process, up to MEMORY_BYTES_MAX. Thread-safe.

    The pages of the last one are kept for the next, zeroed, for a moment: where files follow each other, the kernel
    need not make them anew.
    """

    def __init__(self) -> None:
        self._taken = 0
        self.forked()

    def forked(self) -> None:
        """Begin in a new process: the thread that would forget what is kept is not there, nor who has the lock."""
        # Reentrant: a staged file may end wherever the interpreter collects garbage, also in here.
        self._changed = threading.Condition(threading.RLock())
        self._kept: _Region | None = None
        self._keepings = 0

    def claim(self, nbytes: int) -> bool:
        """Count so many bytes for a staged file, if they are left."""
        with self._changed:
            fits = self._taken + nbytes <= MEMORY_BYTES_MAX
            self._taken += nbytes if fits else 0
            return fits

    def region(self) -> _Region | None:
        """Return one of zeros; None if there can't be any more."""
        with self._changed:
            kept, self._kept = self._kept, None
            self._changed.notify_all()
        if kept is not None:
            return kept
        try:
            return _Region()
        except (OSError, ValueError):
            return None

    def give_back(self, region: _Region | None, claimed: int, used: int) -> None:
        """Take back what a staged file had; it is done with it."""
        with self._changed:
            self._taken -= claimed
        if region is not None and (region.kept or used > _HUGE_BYTES):
            with contextlib.suppress(RuntimeError):  # no more threads: then it is not kept
                threading.Thread(target=self._keep, args=(region, used), name="smb-staged", daemon=True).start()

    def _keep(self, region: _Region, used: int) -> None:
        if used > _KEPT_BYTES:
            region.clear(_KEPT_BYTES, used)
        region.octets[: min(used, _KEPT_BYTES)] = 0
        region.kept = True
        with self._changed:
            self._kept = region
            self._keepings += 1
            ours = self._keepings  # the same region may be taken and left again before our callback
            self._changed.notify_all()  # who keeps the one before it
            self._changed.wait_for(lambda: self._kept is None or self._keepings != ours, _KEPT_S)
            if self._keepings == ours:
                self._kept = None


_regions = _Regions()


os.register_at_fork(after_in_child=lambda: _regions.forked())


class _Memory:
    """The part of a staged file that lies in memory: its first `nbytes`, all that was claimed."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.used = 0  # no byte from here on was ever written
        self._full = False
        self._region: _Region | None = None

    @property
    def octets(self) -> Octets:
        assert self._region is not None, "grow comes first"
        return self._region.octets

    def grow(self, nbytes: int) -> None:
        """Have `nbytes`, or as many as there are."""
        if self.nbytes < nbytes and self._region is None and not self._full:
            self._region = _regions.region()
            self._full = self._region is None
        while self.nbytes < nbytes and not self._full:
            self._full = not _regions.claim(_STEP_BYTES)
            self.nbytes += 0 if self._full else _STEP_BYTES

    def clear(self, first: int, last: int) -> None:
        if self._region is not None and first < min(last, self.nbytes):
            self._region.clear(first, min(last, self.nbytes))

    def end(self) -> None:
        region, self._region = self._region, None
        _regions.give_back(region, self.nbytes, self.used)


class StagedFile:
    """The file. A write at its end makes it longer; its user keeps writes apart from each other and from the rest."""

    def __init__(self, directory: str | None) -> None:
        """`directory` is where temporary files lie, by default the system's place for them."""
        self.nbytes = 0
        self._directory = directory
        self._memory = _Memory()
        # Not at the process's end, which gives all of it back.
        weakref.finalize(self, self._memory.end).atexit = False
        self._fd = -1  # of what has no room in memory, from its own byte 0 on

    def read_into(self, offset: int, out: Octets) -> int:
        length = max(0, min(out.size, self.nbytes - offset))
        inside = max(0, min(length, self._memory.nbytes - offset))
        if inside:
            out[:inside] = self._memory.octets[offset : offset + inside]
        done = inside
        while done < length:
            count = os.preadv(self._fd, [out[done:length].data], offset + done - self._memory.nbytes)
            if count == 0:  # cut meanwhile
                return done
            done += count
        return length

    def write(self, offset: int, data: Octets) -> None:
        """Replace bytes; the file grows as needed, with zeros where nothing was written. OSError ENOSPC."""
        end = offset + data.size
        if end > self.nbytes:
            self._extend(end)
        inside = max(0, min(data.size, self._memory.nbytes - offset))
        if inside:
            self._memory.used = max(self._memory.used, offset + inside)  # before: it may be interrupted
            self._memory.octets[offset : offset + inside] = data[:inside]
        done = inside
        try:
            while done < data.size:
                done += os.pwrite(self._fd, data.data[done:], offset + done - self._memory.nbytes)
        except OSError:  # what did find room beyond the end would show in a hole, later
            before, self.nbytes = self.nbytes, max(self.nbytes, end)
            self.truncate(before)
            raise
        self.nbytes = max(self.nbytes, end)

    def truncate(self, nbytes: int) -> None:
        """Cut it, or let it grow with zeros."""
        if nbytes > self.nbytes:
            self._extend(nbytes)
        else:
            self._memory.clear(nbytes, self.nbytes)
        if self._fd >= 0:
            os.ftruncate(self._fd, max(0, nbytes - self._memory.nbytes))
        self.nbytes = nbytes

    def head(self, nbytes: int) -> bytes:
        """Return its first bytes, fewer where it has no more."""
        out = np.empty(min(nbytes, self.nbytes), np.uint8)
        self.read_into(0, out)
        return out.tobytes()

    def blocks(self) -> Iterator[tuple[int, Octets]]:
        """Give all of it as (offset, bytes not to be written to). It must not shrink while they are used."""
        inside = min(self.nbytes, self._memory.nbytes)
        if inside > 0:
            yield 0, self._memory.octets[:inside]
        if self.nbytes > inside:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # at once, instead of at a fault for every few pages
            rest = mmap.mmap(self._fd, self.nbytes - inside, flags=flags, prot=mmap.PROT_READ)
            yield inside, np.frombuffer(rest, np.uint8)

    def _extend(self, nbytes: int) -> None:
        if self._fd < 0:
            self._memory.grow(nbytes)
        if nbytes > self._memory.nbytes and self._fd < 0:
            self._fd, path = tempfile.mkstemp(prefix="smb-staged-", dir=self._directory)
            # When nobody holds it any more: a read by another thread must not find the number with another file.
            weakref.finalize(self, os.close, self._fd)
            Path(path).unlink()
