"""A pass-through file system over a directory, by the same binding as smb mount: what FUSE from Python costs at least.

`python -m perf.pass_through DIRECTORY MOUNTPOINT`, in the foreground.
"""

# libfuse says what arguments there are.
# ruff: noqa: ARG002

from __future__ import annotations

import os
import sys
from typing import Any

import mfusepy

_STAT = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")


class PassThrough(mfusepy.Operations):  # type: ignore[misc] # mfusepy has no types
    use_ns = True

    def __init__(self, root: str) -> None:
        self.root = root

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        found = os.lstat(self.root + path)
        return {name: getattr(found, name) for name in _STAT}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self.root + path)]  # noqa: PTH208

    def open(self, path: str, flags: int) -> int:
        return os.open(self.root + path, flags)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self.root + path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: Any = None) -> int:
        os.truncate(self.root + path, length)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self.root + path)  # noqa: PTH108
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


if __name__ == "__main__":
    mfusepy.FUSE(
        PassThrough(sys.argv[1]), sys.argv[2], foreground=True, nothreads=False, attr_timeout=0.5, entry_timeout=0.5
    )
