"""What a small file costs, in calls of the coordinator: each is a round trip, and the coordinator has one processor."""

from __future__ import annotations

import errno
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import smb
from smb.files.attributes import Attributes
from smb.files.handles import OpenFile
from smb.files.namespace import NameTree
from smb.rpc.coordinator_client import Coordinator
from smb.spi import rename_file
from tests.conftest import Connect

FILES = 20
DATA = np.zeros(4096, np.uint8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls of this process to the coordinator, by method."""
    counted: Counter[str] = Counter()
    call = Coordinator._call

    def count(self: Coordinator, method: str, *arguments: Any, **options: Any) -> Any:
        counted[method] += method not in ("RenewSession", "ListServers")  # by time, not by file
        return call(self, method, *arguments, **options)

    monkeypatch.setattr(Coordinator, "_call", count)
    return counted


def _made(tree: NameTree, path: str, **attributes: int) -> None:
    """Make a file as the kernel asks for it: look, create, write, close, look."""
    with pytest.raises(FileNotFoundError):
        tree.status(path)
    file = tree.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, Attributes(**attributes))
    file.write(0, DATA)
    file.flush()
    file.close()
    assert tree.status(path).nbytes == DATA.size


def _wrote(tree: NameTree, path: str, data: bytes, flags: int) -> OpenFile:
    file = tree.open(path, os.O_CREAT | os.O_WRONLY | flags)
    if data:
        file.write(0, np.frombuffer(data, np.uint8))
    return file


def _bytes(tree: NameTree, path: str) -> bytes:
    file = tree.open(path, os.O_RDONLY)
    out = np.empty(tree.status(path).nbytes, np.uint8)
    assert file.read_into(0, out) == out.size
    file.close()
    return out.tobytes()


def test_calls_of_a_small_file(connect: Connect, calls: Counter[str]) -> None:
    """Made: it is looked for, made and named, with its attributes. Read: opened. Its attributes set: stored. Removed:
    deleted. Beyond these, a listing a second."""
    tree = NameTree(connect())
    tree.make_folder("d")

    def cost(of_each: dict[str, int]) -> None:
        listed = calls.pop("ListBuffers", 0) - FILES * of_each.pop("ListBuffers", 0)
        assert {name: count for name, count in calls.items() if count} == {
            name: count * FILES for name, count in of_each.items()
        }
        assert 0 <= listed <= FILES // 2, "listings"
        calls.clear()

    calls.clear()
    for number in range(FILES):
        _made(tree, f"d/f{number}", mode=0o600)
    cost({"ListBuffers": 1, "CreateBuffer": 1, "RenameBuffer": 1})
    for number in range(FILES):
        file = tree.open(f"d/f{number}", os.O_RDONLY)
        assert file.read_into(0, np.empty(4096, np.uint8)) == 4096
        file.close()
    cost({"OpenBuffer": 1})
    for number in range(FILES):
        tree.describe(f"d/f{number}", lambda kept: replace(kept, modified=5))
    cost({"RenameBuffer": 1})
    for number in range(FILES):
        assert tree.status(f"d/f{number}").attributes.mode == 0o600
        tree.remove(f"d/f{number}")
    cost({"DeleteBuffer": 1})


def test_a_directory_is_looked_for_once(connect: Connect, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, just before it asks for one; one that another client has made is EEXIST."""
    monkeypatch.setattr("smb.files.namespace.RECENT_S", 60.0)
    monkeypatch.setattr("smb.files.catalogue.FRESH_S", 60.0)
    tree = NameTree(connect())
    assert tree.list("") == []
    calls.clear()
    with pytest.raises(FileNotFoundError):
        tree.status("d")
    tree.make_folder("d")
    assert calls == {"ListBuffers": 1}
    connect().create("e/w", 10)
    assert tree.status("e").directory
    with pytest.raises(FileExistsError):
        tree.make_folder("e")


def test_attributes_of_a_file_that_another_client_replaced(connect: Connect) -> None:
    """They are set on the new one, beside what that client has set; and ENOENT says that it is gone."""
    tree, other = NameTree(connect()), NameTree(connect())
    for path in ("f", "g"):
        file = _wrote(tree, path, b"old", 0)
        file.flush()
        file.close()
        assert tree.status(path).attributes.mode is None
    for path in ("f", "g"):
        other.remove(path)
    file = _wrote(other, "f", b"new", 0)
    file.describe(lambda kept: replace(kept, accessed=7))
    file.flush()
    file.close()
    tree.describe("f", lambda kept: replace(kept, mode=0o600))
    with pytest.raises(FileNotFoundError):
        tree.describe("g", lambda kept: replace(kept, mode=0o600))
    found = NameTree(connect()).status("f")
    assert (found.nbytes, found.attributes.mode, found.attributes.accessed) == (3, 0o600, 7)
    assert _bytes(tree, "f") == b"new"


def test_of_two_mounts_one_makes_a_file_with_o_excl(connect: Connect) -> None:
    """The coordinator decides as it is closed: the other one gets EEXIST, and the file stays. A file opened without
    O_EXCL takes its place."""
    for first, second in ((b"one", b"the other"), (b"", b"x"), (b"y", b""), (b"", b"")):
        ours, theirs = NameTree(connect()), NameTree(connect())
        late, later = (_wrote(tree, "lock", data, os.O_EXCL) for tree, data in ((ours, first), (theirs, second)))
        late.flush()
        for _ in range(2):  # a program may try again
            with pytest.raises(FileExistsError):
                later.flush()
        late.close()
        with suppress(FileExistsError):  # an empty one is tried once more
            later.close()
        assert _bytes(theirs, "lock") == first
        again = ours.open("lock", os.O_RDWR)
        again.write(0, np.frombuffer(b"again", np.uint8))
        again.flush()
        again.close()
        assert _bytes(ours, "lock") == b"again"
        third, fourth = (_wrote(tree, "free", data, 0) for tree, data in ((ours, first), (theirs, second)))
        for file in (third, fourth):
            file.flush()
            file.close()
        assert _bytes(ours, "free") == second
        for path in ("lock", "free"):
            ours.remove(path)
        assert connect().list() == []


def test_a_file_with_o_excl_whose_answer_was_lost_is_ours(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its name, so the next close succeeds."""
    tree = NameTree(connect())
    file = _wrote(tree, "lock", b"ours", os.O_EXCL)

    def lost(*arguments: Any, **options: Any) -> bool:
        rename_file(*arguments, **options)
        raise smb.UnavailableError("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr("smb.files.making.rename_file", lost)
        with pytest.raises(OSError, match="lost"):
            file.flush()
    file.flush()
    file.close()
    assert _bytes(tree, "lock") == b"ours"
    assert [info.name for info in connect().list()] == ["lock"]


def test_an_attribute_that_another_client_has_removed_may_be_made(connect: Connect) -> None:
    """Though the listing has it: what is there now decides."""
    tree, other = NameTree(connect()), NameTree(connect())
    _made(tree, "f")

    def make(kept: Attributes) -> Attributes:
        if kept.mode is not None:
            raise OSError(errno.EEXIST, "it exists")
        return replace(kept, mode=0o600)

    tree.describe("f", make)
    assert tree.status("f").attributes.mode == 0o600
    other.describe("f", lambda kept: replace(kept, mode=None))
    tree.describe("f", make)
    with pytest.raises(FileExistsError):
        tree.describe("f", make)


def test_what_another_client_has_just_made_is_found(connect: Connect) -> None:
    """At once, by its name in any form and by its directory, although a listing is younger: it is looked for."""
    tree, other = NameTree(connect()), connect()
    for number in range(FILES):
        assert tree.list("") is not None
        with pytest.raises(FileNotFoundError):
            tree.status(f"d{number}/w.npy")
        other.create(f"d{number}/w", 10)
        assert tree.status(f"d{number}").directory
        assert tree.status(f"d{number}/w.npy").nbytes > 40
        other.delete(f"d{number}/w")


def test_what_is_looked_for_below_a_long_path(connect: Connect) -> None:
    """No name of a buffer begins with it, so the coordinator cannot be asked for it alone."""
    tree, other = NameTree(connect(), make_folders=True), NameTree(connect(), make_folders=True)
    folder = "/".join(["d" * 200] * 3)
    with pytest.raises(FileNotFoundError):
        tree.status(f"{folder}/w")
    _made(other, f"{folder}/w")
    assert tree.status(folder).directory
    assert tree.status(f"{folder}/w").nbytes == DATA.size


def test_an_older_coordinator_lists_everything(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know the question for single names, and its first page answers it."""
    tree, other = NameTree(connect()), connect()
    monkeypatch.setattr("smb.files.catalogue.look_up", lambda *_: None)
    assert tree.list("") == []
    other.create("d/w", 10)
    assert tree.status("d").directory
    assert tree.status("d/w").nbytes == 40
    with pytest.raises(smb.NotFoundError):
        other.open("d/v")
