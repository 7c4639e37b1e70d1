"""A file of unknown size, kept on this host until it becomes a buffer.

Its beginning lies in memory of this process: huge pages are allocated faster than pages of a file, and are passed to
the engine directly. Bytes beyond the limit of one staged file, or of all together, lie in an unnamed temporary file.
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

MEMORY_BYTES_MAX = 1 << 30  # for all staged files of this process
_STEP_BYTES = 16 << 20
_HUGE_BYTES = 2 << 20  # the first bytes use small pages: most files are small
_KEPT_BYTES = 256 << 20
_KEPT_S = 10.0
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # linux/mman.h; Python 3.10 does not have it


class _Region:
    """Address space for the memory of one staged file; zeros until it is written."""

    def __init__(self) -> None:
        """Raises OSError if this process may map no more."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE  # pages are allocated at the first write
        self._map = mmap.mmap(-1, MEMORY_BYTES_MAX, flags=flags)
        with contextlib.suppress(AttributeError, OSError):  # the kernel or the C library does not support huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE, _HUGE_BYTES)
        self.kept = False  # used by an earlier staged file: its pages exist already
        self.octets: Octets = np.frombuffer(self._map, np.uint8)

    def clear(self, first: int, last: int) -> None:
        """Set these bytes to zero again, and release the pages that they fill."""
        page = min(last, -(-first // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.octets[first:page] = 0
        if page < last:
            self._map.madvise(mmap.MADV_DONTNEED, page, last - page)


class _Regions:
    """The memory of all staged files of this process, up to MEMORY_BYTES_MAX. Thread-safe.

    The pages of the last staged file are kept for the next one for a moment, zeroed. So if files follow each other, the
    kernel need not allocate them again.
    """

    def __init__(self) -> None:
        self._taken = 0
        self.forked()

    def forked(self) -> None:
        """Reset the state in a child of fork: the thread that would drop kept memory does not exist there, and the lock
        may be held by a thread that does not exist either.
        """
        # Reentrant: a staged file may be collected anywhere, also inside these methods.
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
        """Return a region of zeros; None if no more can be mapped."""
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
        """Take back the memory of a staged file that is done."""
        with self._changed:
            self._taken -= claimed
        if region is not None and (region.kept or used > _HUGE_BYTES):
            with contextlib.suppress(RuntimeError):  # no more threads can be started: the region is not kept
                threading.Thread(target=self._keep, args=(region, used), name="smb-staged", daemon=True).start()

    def _keep(self, region: _Region, used: int) -> None:
        if used > _KEPT_BYTES:
            region.clear(_KEPT_BYTES, used)
        region.octets[: min(used, _KEPT_BYTES)] = 0
        region.kept = True
        with self._changed:
            self._kept = region
            self._keepings += 1
            ours = self._keepings  # the same region may be used and kept again before this callback runs
            self._changed.notify_all()  # wakes the thread that keeps the former region
            self._changed.wait_for(lambda: self._kept is None or self._keepings != ours, _KEPT_S)
            if self._keepings == ours:
                self._kept = None


_regions = _Regions()


os.register_at_fork(after_in_child=lambda: _regions.forked())


class _StagedMemory:
    """The part of a staged file that lies in memory: its first `nbytes`, as far as claimed."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.used = 0  # the first byte that was never written
        self._full = False
        self._region: _Region | None = None

    @property
    def octets(self) -> Octets:
        assert self._region is not None, "grow comes first"
        return self._region.octets

    def grow(self, nbytes: int) -> None:
        """Extend to `nbytes`, or to as many as are available."""
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
    """The staged file. A write past its end extends it. Its user serializes writes with all other calls."""

    def __init__(self, directory: str | None) -> None:
        """`directory` is for temporary files, by default the system's."""
        self.nbytes = 0
        self._directory = directory
        self._memory = _StagedMemory()
        # The finalizer does not run at the exit of the process, which releases everything.
        weakref.finalize(self, self._memory.end).atexit = False
        self._fd = -1  # the file for bytes that have no room in memory, which begin at its offset 0

    def read_into(self, offset: int, out: Octets) -> int:
        length = max(0, min(out.size, self.nbytes - offset))
        inside = max(0, min(length, self._memory.nbytes - offset))
        if inside:
            out[:inside] = self._memory.octets[offset : offset + inside]
        done = inside
        while done < length:
            count = os.preadv(self._fd, [out[done:length].data], offset + done - self._memory.nbytes)
            if count == 0:  # the file was truncated in the meantime
                return done
            done += count
        return length

    def write(self, offset: int, data: Octets) -> None:
        """Replace bytes; the file grows as needed, with zeros in gaps. OSError ENOSPC."""
        end = offset + data.size
        if end > self.nbytes:
            self._extend(end)
        inside = max(0, min(data.size, self._memory.nbytes - offset))
        if inside:
            # stored before the copy, which may be interrupted
            self._memory.used = max(self._memory.used, offset + inside)
            self._memory.octets[offset : offset + inside] = data[:inside]
        done = inside
        try:
            while done < data.size:
                done += os.pwrite(self._fd, data.data[done:], offset + done - self._memory.nbytes)
        except OSError:  # bytes that were written past the end would later show up in a hole
            before, self.nbytes = self.nbytes, max(self.nbytes, end)
            self.truncate(before)
            raise
        self.nbytes = max(self.nbytes, end)

    def truncate(self, nbytes: int) -> None:
        """Shorten the file, or extend it with zeros."""
        if nbytes > self.nbytes:
            self._extend(nbytes)
        else:
            self._memory.clear(nbytes, self.nbytes)
        if self._fd >= 0:
            os.ftruncate(self._fd, max(0, nbytes - self._memory.nbytes))
        self.nbytes = nbytes

    def head(self, nbytes: int) -> bytes:
        """Return its first bytes, fewer if it is shorter."""
        out = np.empty(min(nbytes, self.nbytes), np.uint8)
        self.read_into(0, out)
        return out.tobytes()

    def blocks(self) -> Iterator[tuple[int, Octets]]:
        """Yield all of it as (offset, read-only bytes). The file must not shrink while they are used."""
        inside = min(self.nbytes, self._memory.nbytes)
        if inside > 0:
            yield 0, self._memory.octets[:inside]
        if self.nbytes > inside:
            # map the pages at once, instead of one fault for every few pages
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            rest = mmap.mmap(self._fd, self.nbytes - inside, flags=flags, prot=mmap.PROT_READ)
            yield inside, np.frombuffer(rest, np.uint8)

    def _extend(self, nbytes: int) -> None:
        if self._fd < 0:
            self._memory.grow(nbytes)
        if nbytes > self._memory.nbytes and self._fd < 0:
            self._fd, path = tempfile.mkstemp(prefix="smb-staged-", dir=self._directory)
            # Closed when nobody holds it any more: a read by another thread must not use the number after it belongs to
            # another file.
            weakref.finalize(self, os.close, self._fd)
            Path(path).unlink()
