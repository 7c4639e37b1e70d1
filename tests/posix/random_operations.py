"""Random operations on one file, beside the same bytes in memory: what fsx does, by os, mmap and fallocate."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path
from random import Random

LENGTH_MAX = 300_000


def run(path: Path, rng: Random, operations: int) -> None:
    """Make that many operations, and compare the whole file at times. AssertionError with the last operations."""
    wanted, done = bytearray(), list[str]()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        for number in range(operations):
            at, length = rng.randrange(LENGTH_MAX), 1 + rng.randrange(1 + rng.choice((10, 5000, 70_000)))
            match rng.choice(
                ("read", "read", "write", "write", "map", "map write", "truncate", "punch", "sync", "open")
            ):
                case "read":
                    what = f"read {at} {length}"
                    assert os.pread(fd, length, at) == wanted[at : at + length], [*done, what]
                case "write":
                    what, data = f"write {at} {length}", rng.randbytes(length)
                    assert os.pwrite(fd, data, at) == length
                    wanted.extend(bytes(max(0, at - len(wanted))))
                    wanted[at : at + length] = data
                case "map" if wanted:
                    what = f"map {len(wanted)}"
                    with mmap.mmap(fd, len(wanted), prot=mmap.PROT_READ) as mapped:
                        assert mapped[at : at + length] == wanted[at : at + length], [*done, what]
                case "map write" if len(wanted) > at:
                    data = rng.randbytes(min(length, len(wanted) - at))
                    what = f"write {at} {len(data)} by a map of {len(wanted)}"
                    with mmap.mmap(fd, len(wanted)) as mapped:
                        mapped[at : at + len(data)] = data
                        mapped.flush()
                    wanted[at : at + len(data)] = data
                case "truncate":
                    what = f"truncate {at}"
                    os.ftruncate(fd, at)
                    wanted = wanted[:at] + bytes(max(0, at - len(wanted)))
                case "punch" if len(wanted) > at:
                    what, length = f"punch {at} {length}", min(length, len(wanted) - at)
                    command = ["fallocate", "--punch-hole", "--offset", str(at), "--length", str(length), str(path)]
                    subprocess.run(command, check=True)
                    wanted[at : at + length] = bytes(length)
                case "sync":
                    what = "fsync"
                    os.fsync(fd)
                case _:
                    what = "close and open"
                    os.close(fd)
                    fd = os.open(path, os.O_RDWR)
            done = [*done[-9:], what]
            assert os.fstat(fd).st_size == len(wanted), done
            if number % 50 == 0:
                assert path.read_bytes() == wanted, done
    finally:
        os.close(fd)
    assert path.read_bytes() == wanted, done
