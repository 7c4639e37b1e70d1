"""smb.files.staged_file: a file on this host, in memory as far as there is some for it."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from smb.files import staged_file as module
from smb.files.staged_file import StagedFile
from tests.api.test_fork import in_child
from tests.fault.long import seed
from tests.support.daemons import wait_for

PAGE = 4096


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty pages for all staged files, claimed five at a time; the first two are small pages, and so no kept ones."""
    monkeypatch.setattr(module, "MEMORY_BYTES_MAX", 40 * PAGE)
    monkeypatch.setattr(module, "_STEP_BYTES", 5 * PAGE)
    monkeypatch.setattr(module, "_HUGE_BYTES", 2 * PAGE)
    monkeypatch.setattr(module, "_KEPT_BYTES", 7 * PAGE)
    monkeypatch.setattr(module, "_regions", module._Regions())


def content(staged: StagedFile) -> bytes:
    out = np.full(staged.nbytes + 10, 255, np.uint8)
    assert staged.read_into(0, out) == staged.nbytes
    blocks = list(staged.blocks())
    assert [at for at, _ in blocks] == list(np.cumsum([0, *(block.size for _, block in blocks)])[: len(blocks)])
    assert b"".join(block.tobytes() for _, block in blocks) == out[: staged.nbytes].tobytes()
    return out[: staged.nbytes].tobytes()


def change(staged: StagedFile, model: bytearray, rng: random.Random, most: int) -> None:
    """One write, with or without a hole before it, or one truncation."""
    if rng.random() < 0.25:
        nbytes = rng.choice([0, rng.randrange(most), max(0, len(model) - rng.randrange(3 * PAGE))])
        staged.truncate(nbytes)
        del model[nbytes:]
        model.extend(bytes(nbytes - len(model)))
        return
    offset = rng.randrange(min(most, len(model) + 2 * PAGE))
    data = rng.randbytes(rng.choice([1, 100, PAGE, 3 * PAGE + 1]))
    staged.write(offset, np.frombuffer(data, np.uint8))
    model.extend(bytes(max(0, offset - len(model))))
    model[offset : offset + len(data)] = data


def test_as_a_plain_file(tmp_path: Path) -> None:
    """StagedFiles that share their memory, come and go, grow past it, are cut and grow again: each has the bytes that a
    plain file would have, zeros where nothing was written, whatever was in that memory before.
    """
    rng = random.Random(seed())
    staged_files: list[tuple[StagedFile, bytearray]] = []
    in_files = False
    for _ in range(600):
        if not staged_files or (len(staged_files) < 3 and rng.random() < 0.1):
            staged_files.append((StagedFile(str(tmp_path)), bytearray()))
        if rng.random() < 0.05:
            staged_files.pop(rng.randrange(len(staged_files)))
            continue
        staged, model = rng.choice(staged_files)
        change(staged, model, rng, 60 * PAGE)
        in_files |= staged._fd >= 0
        assert content(staged) == bytes(model)
    assert in_files
    assert list(tmp_path.iterdir()) == []


def test_memory_is_kept_for_the_next(tmp_path: Path) -> None:
    """A staged file that ends leaves its memory, zeroed, to the next; what is left when all have ended is nobody's."""
    first = StagedFile(str(tmp_path))
    first.write(0, np.full(30 * PAGE, 7, np.uint8))
    address = next(first.blocks())[1].ctypes.data
    del first
    gc.collect()
    wait_for(lambda: module._regions._kept is not None, "region of the first staged file")
    assert module._regions._taken == 0
    second = StagedFile(str(tmp_path))
    second.truncate(30 * PAGE)
    assert next(second.blocks())[1].ctypes.data == address
    assert content(second) == bytes(30 * PAGE)


def end_one(directory: Path, pages: int) -> None:
    """Write a staged file and give it up."""
    StagedFile(str(directory)).write(0, np.ones(pages * PAGE, np.uint8))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "smb-staged"]


def test_one_thread_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many staged files end within the time for which memory is kept, one thread waits for its end; then
    there is none, and nothing is kept.
    """
    monkeypatch.setattr(module, "_KEPT_S", 1e6)
    for _ in range(20):
        end_one(tmp_path, 3)
        wait_for(lambda: module._regions._kept is not None, "region of the staged file")
    wait_for(lambda: len(threads()) <= 1, "end of the threads of earlier staged files")
    monkeypatch.setattr(module, "_KEPT_S", 0.01)
    end_one(tmp_path, 3)
    wait_for(lambda: module._regions._kept is None and not threads(), "end of the keeping")


def test_a_small_draft_between_large_ones(tmp_path: Path) -> None:
    """It has the kept memory too, and leaves it, zeroed, to the next one."""
    end_one(tmp_path, 30)
    kept = wait_for(lambda: module._regions._kept, "region of the large staged file")
    end_one(tmp_path, 1)
    assert wait_for(lambda: module._regions._kept, "region of the small staged file") is kept
    assert not kept.octets.any()


def test_ends_wherever_garbage_is_collected(tmp_path: Path) -> None:
    """A staged file in a circle of references ends within another's claim of memory, in the same thread: both go on."""

    def collect_inside() -> None:
        circle: list[object] = [StagedFile(str(tmp_path))]
        circle.append(circle)
        with module._regions._changed:
            del circle
            gc.collect()

    thread = threading.Thread(target=collect_inside, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_after_fork(tmp_path: Path) -> None:
    """A child has staged files of its own although a thread of its parent was about to count memory. What the parent
    keeps, for a while, is not kept by the child, which nobody would tell when that is over.
    """
    end_one(tmp_path, 30)
    wait_for(lambda: module._regions._kept is not None, "region of the staged file")
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with module._regions._changed:
            held.set()
            forked.wait(30)

    def check() -> None:
        assert module._regions._kept is None
        staged = StagedFile(str(tmp_path))
        staged.write(0, np.ones(3 * PAGE, np.uint8))
        assert content(staged) == b"\1" * 3 * PAGE

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert in_child(check) == 0
    finally:
        forked.set()
        thread.join()


def test_without_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel that has none a staged file lies in memory all the same."""

    class Map(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(22, "Invalid argument")
            super().madvise(option, *place)

    monkeypatch.setattr(module.mmap, "mmap", Map)
    staged = StagedFile(str(tmp_path))
    staged.write(0, np.ones(3 * PAGE, np.uint8))
    assert staged._memory.nbytes >= 3 * PAGE


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What of a failed write found room, in memory or on disk, is not seen when the staged file is longer than that."""
    staged = StagedFile(str(tmp_path))
    staged.write(0, np.ones(10, np.uint8))

    def write(fd: int, data: bytes, offset: int) -> int:
        if offset > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data[:100])

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "pwrite", write)
        with pytest.raises(OSError, match="No space"):
            staged.write(0, np.full(50 * PAGE, 2, np.uint8))
    assert content(staged) == b"\2" * 10
    staged.truncate(60 * PAGE)
    assert content(staged) == b"\2" * 10 + bytes(60 * PAGE - 10)


def test_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process may have no more addresses, all of it lies in the file."""

    def refuse() -> None:
        raise OSError("no addresses")

    monkeypatch.setattr(module, "_Region", refuse)
    staged = StagedFile(str(tmp_path))
    staged.write(PAGE, np.ones(10, np.uint8))
    assert content(staged) == bytes(PAGE) + b"\1" * 10
    assert staged.head(5) == bytes(5)
