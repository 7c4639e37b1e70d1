"""Random operations on a file and on a plain one beside it, as fsx does: after each both have the same bytes.

Several processes take turns on the same two files: `python -m tests.support.fsx FILE MODEL OPERATIONS SEED [fixed]`.
With "fixed" the size stays (the file is a typed buffer). Each prints what it did, or what came before a difference.
"""

from __future__ import annotations

import collections
import fcntl
import mmap
import os
import random
import sys
from collections.abc import Collection
from pathlib import Path

SIZE_MAX = 200_000


def _write_all(fd: int, data: bytes, offset: int) -> int:
    """Write the rest of what a write left over, as programs do: where a server is away a mount may take a part."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
    return done


class DifferenceError(AssertionError):
    """The file is not what the model is."""


class Tester:
    """One process's part of it."""

    def __init__(self, file: Path, model: Path, seed: int, *, fixed: bool) -> None:
        self.file, self.model, self.fixed = file, model, fixed
        self.random = random.Random(seed)
        self.log: collections.deque[str] = collections.deque(maxlen=20)
        self.counts: collections.Counter[str] = collections.Counter()
        self.doing = ""
        with self.turns().open("w") as turn:  # else another one may replace both between the two
            fcntl.flock(turn, fcntl.LOCK_EX)
            self.fds = [os.open(path, os.O_RDWR | os.O_CREAT) for path in (file, model)]

    def turns(self) -> Path:
        """The file that is locked by whose turn it is."""
        return self.model.with_suffix(".turn")

    def run(self, operations: int, without: Collection[str] = ()) -> None:
        names = ["read", "read", "write", "write", "reopen", "mapped_read", "mapped_write", "sync", "stat"]
        names += [] if self.fixed else ["truncate", "append", "replace"]
        with self.turns().open("w") as turn:
            names = [name for name in names if name not in without]
            for _ in range(operations):
                self.doing = name = self.random.choice(names)
                fcntl.flock(turn, fcntl.LOCK_EX)
                self.size = os.fstat(self.fds[1]).st_size
                self.counts[name] += 1
                getattr(self, name)()
                fcntl.flock(turn, fcntl.LOCK_UN)

    def check(self, what: str, ours: object, model: object) -> None:
        self.log.append(what)
        if ours != model:
            where = ""
            if isinstance(ours, bytes) and isinstance(model, bytes):
                first = next((i for i, (a, b) in enumerate(zip(ours, model, strict=False)) if a != b), None)
                where = f" lengths {len(ours)} and {len(model)}, first at {first}"
                ours = model = "..."
            raise DifferenceError(f"{what}: {ours!r}, the model {model!r}{where}; before: {' | '.join(self.log)}")

    def place(self) -> tuple[int, int]:
        offset = self.random.randrange(self.size) if self.size else 0
        longest = self.size - offset if self.fixed else SIZE_MAX - offset
        return offset, max(1, min(longest, self.random.choice([1, 7, 100, 4096, 5000, 70_000])))

    def bytes(self, length: int) -> bytes:
        return self.random.randbytes(length)

    def read(self) -> None:
        offset, length = self.place()
        self.check(f"read {length} at {offset}", *(os.pread(fd, length, offset) for fd in self.fds))

    def write(self) -> None:
        offset, length = self.place()
        if not self.fixed and self.random.random() < 0.1:
            offset = min(SIZE_MAX - length, self.size + self.random.randrange(5000))  # leaves a hole
        data = self.bytes(length)
        self.check(f"write {length} at {offset}", *(_write_all(fd, data, offset) for fd in self.fds))

    def append(self) -> None:
        data = self.bytes(min(self.random.randrange(1, 3000), SIZE_MAX))
        if self.size + len(data) > SIZE_MAX:
            return
        for path in (self.file, self.model):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(fd, data)
            os.close(fd)
        self.check(f"append {len(data)}", os.fstat(self.fds[0]).st_size, os.fstat(self.fds[1]).st_size)

    def truncate(self) -> None:
        size = self.random.choice([0, self.size, self.random.randrange(SIZE_MAX)])
        for fd in self.fds:
            os.ftruncate(fd, size)
        self.check(f"truncate {size}", os.fstat(self.fds[0]).st_size, size)

    def replace(self) -> None:
        """A new file in the place of the old one, by rename."""
        data = self.bytes(self.random.randrange(1, 20_000))
        for path in (self.file, self.model):
            new = path.with_name(path.name + ".new")
            new.write_bytes(data)
            new.rename(path)
        self.reopen()
        self.check("replace", self.file.stat().st_size, len(data))

    def reopen(self) -> None:
        for index, path in enumerate((self.file, self.model)):
            before, self.fds[index] = self.fds[index], os.open(path, os.O_RDWR)
            os.close(before)
        self.whole("reopen")

    def whole(self, what: str) -> None:
        self.check(what, *(os.pread(fd, SIZE_MAX + 1, 0) for fd in self.fds))

    def mapped_read(self) -> None:
        if self.size == 0:
            return
        got = []
        for fd in self.fds:
            with mmap.mmap(fd, self.size, prot=mmap.PROT_READ) as memory:
                got.append(memory[:])
        self.check("mapped read", *got)

    def mapped_write(self) -> None:
        if self.size == 0:
            return
        offset, length = self.place()
        data = self.bytes(min(length, self.size - offset))
        for fd in self.fds:
            with mmap.mmap(fd, self.size) as memory:
                memory[offset : offset + len(data)] = data
                memory.flush()
        self.check(f"mapped write {len(data)} at {offset}", 0, 0)

    def sync(self) -> None:
        os.fsync(self.fds[0])
        self.whole("sync")

    def stat(self) -> None:
        self.check("stat", self.file.stat().st_size, self.model.stat().st_size)


def main() -> None:
    file, model, operations, seed, *rest = sys.argv[1:]
    tester = Tester(Path(file), Path(model), int(seed), fixed=rest == ["fixed"])
    tester.run(int(operations))
    print(f"{sum(tester.counts.values())} operations, 0 differences: {dict(sorted(tester.counts.items()))}")


if __name__ == "__main__":
    main()
