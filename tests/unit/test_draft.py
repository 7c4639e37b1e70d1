"""smb.files.draft: a file on this host, in memory as far as there is some for it."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import numpy as np
import pytest

from smb.files import draft as module
from smb.files.draft import Draft
from tests.fault.long import seed
from tests.support.daemons import wait_for

PAGE = 4096


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty pages for all drafts, claimed five at a time; the first two are small pages, and so no kept ones."""
    monkeypatch.setattr(module, "MEMORY_BYTES_MAX", 40 * PAGE)
    monkeypatch.setattr(module, "_STEP_BYTES", 5 * PAGE)
    monkeypatch.setattr(module, "_HUGE_BYTES", 2 * PAGE)
    monkeypatch.setattr(module, "_KEPT_BYTES", 7 * PAGE)
    monkeypatch.setattr(module, "_regions", module._Regions())


def content(draft: Draft) -> bytes:
    out = np.full(draft.nbytes + 10, 255, np.uint8)
    assert draft.read_into(0, out) == draft.nbytes
    pieces = list(draft.pieces())
    assert [at for at, _ in pieces] == list(np.cumsum([0, *(piece.size for _, piece in pieces)])[: len(pieces)])
    assert b"".join(piece.tobytes() for _, piece in pieces) == out[: draft.nbytes].tobytes()
    return out[: draft.nbytes].tobytes()


def change(draft: Draft, model: bytearray, rng: random.Random, most: int) -> None:
    """One write, with or without a hole before it, or one truncation."""
    if rng.random() < 0.25:
        nbytes = rng.choice([0, rng.randrange(most), max(0, len(model) - rng.randrange(3 * PAGE))])
        draft.truncate(nbytes)
        del model[nbytes:]
        model.extend(bytes(nbytes - len(model)))
        return
    offset = rng.randrange(min(most, len(model) + 2 * PAGE))
    data = rng.randbytes(rng.choice([1, 100, PAGE, 3 * PAGE + 1]))
    draft.write(offset, np.frombuffer(data, np.uint8))
    model.extend(bytes(max(0, offset - len(model))))
    model[offset : offset + len(data)] = data


def test_as_a_plain_file(tmp_path: Path) -> None:
    """Drafts that share their memory, come and go, grow past it, are cut and grow again: each has the bytes that a
    plain file would have, zeros where nothing was written, whatever was in that memory before.
    """
    rng = random.Random(seed())
    drafts: list[tuple[Draft, bytearray]] = []
    in_files = False
    for _ in range(600):
        if not drafts or (len(drafts) < 3 and rng.random() < 0.1):
            drafts.append((Draft(str(tmp_path)), bytearray()))
        if rng.random() < 0.05:
            drafts.pop(rng.randrange(len(drafts)))
            continue
        draft, model = rng.choice(drafts)
        change(draft, model, rng, 60 * PAGE)
        in_files |= draft._fd >= 0
        assert content(draft) == bytes(model)
    assert in_files
    assert list(tmp_path.iterdir()) == []


def test_memory_is_kept_for_the_next(tmp_path: Path) -> None:
    """A draft that ends leaves its memory, zeroed, to the next one; what is left when all have ended is nobody's."""
    first = Draft(str(tmp_path))
    first.write(0, np.full(30 * PAGE, 7, np.uint8))
    address = next(first.pieces())[1].ctypes.data
    del first
    gc.collect()
    wait_for(lambda: module._regions._kept is not None, "region of the first draft")
    assert module._regions._taken == 0
    second = Draft(str(tmp_path))
    second.truncate(30 * PAGE)
    assert next(second.pieces())[1].ctypes.data == address
    assert content(second) == bytes(30 * PAGE)


def test_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process may have no more addresses, all of it lies in the file."""

    def refuse() -> None:
        raise OSError("no addresses")

    monkeypatch.setattr(module, "_Region", refuse)
    draft = Draft(str(tmp_path))
    draft.write(PAGE, np.ones(10, np.uint8))
    assert content(draft) == bytes(PAGE) + b"\1" * 10
    assert draft.head(5) == bytes(5)
