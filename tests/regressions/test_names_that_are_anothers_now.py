"""A name is another client's from one moment to the next. What was made under a name, or listed by it, was looked up by
that name once more: the answer of restore and copy, the handle of a file, its size, its time, a snapshot's copy.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from smb import spi
from smb.files import catalogue, checksums, copying
from smb.files.attributes import FileKind
from smb.files.handles import OpenFile
from smb.files.namespace import NameTree
from smb.torch.training.admission import ModelAdmission
from smb.train.membership import Membership
from tests.conftest import Connect

_BLOCK = 1 << 16


class _CutError(Exception):
    """It stops a snapshot in the middle."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK_BYTES", _BLOCK)
    monkeypatch.setattr(checksums, "BLOCK_BYTES", _BLOCK)


def _replaced_after_the_rename(
    monkeypatch: pytest.MonkeyPatch, client: smb.Client, name: str, other: Callable[[], object]
) -> None:
    """Let another client be at work right after this one has given a buffer that name, as a file or otherwise."""
    rename, rename_file = client.rename, spi.rename_file

    def then_other(new: str) -> None:
        if new == name:
            monkeypatch.setattr(client, "rename", rename)
            monkeypatch.setattr("smb.files.making.rename_file", rename_file)
            other()

    def renamed(old: str, new: str, **options: bool) -> None:
        rename(old, new, **options)
        then_other(new)

    def renamed_file(whose: smb.Client, old: tuple[str, int], new: str, **options: Any) -> bool:
        stored = rename_file(whose, old, new, **options)
        if whose is client:
            then_other(new)
        return stored

    monkeypatch.setattr(client, "rename", renamed)
    monkeypatch.setattr("smb.files.making.rename_file", renamed_file)


def _put(tree: NameTree, path: str, data: bytes) -> None:
    file = tree.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    file.write(0, np.frombuffer(data, np.uint8))
    file.flush()
    file.close()


def _read(file: OpenFile) -> bytes:
    out = np.empty(file.nbytes, np.uint8)
    return out[: file.read_into(0, out)].tobytes()


@pytest.mark.parametrize("how", ["restored", "restored without a state", "copied by the servers", "copied from here"])
def test_the_answer_is_what_was_made(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """Another client replaces it right after its rename; the answer was that client's buffer."""
    client, other = connect(), connect()
    path = tmp_path / "w.npy"
    np.save(path, np.ones(8, np.float32))
    client.create("source", 8).fill(1)

    def replace() -> None:
        other.delete("w")
        other.create("w", (3, 3), "int32")

    _replaced_after_the_rename(monkeypatch, client, "w", replace)
    if how == "restored without a state":
        monkeypatch.setattr(checksums.io, "FileIO", _no_place)
    made = (
        copying.restore(client, path, "w") if how.startswith("restored")
        else copying.copy_buffer(client if how == "copied by the servers" else other, "source", client, "w")
    )  # fmt: skip
    assert (made.name, made.shape, made.dtype) == ("w", (8,), np.float32)
    with pytest.raises(smb.NotFoundError, match="'w'"):
        made.read()
    assert other.open("w").shape == (3, 3)


def _no_place(*_: object) -> None:
    raise PermissionError(13, "a directory that takes no files")


def test_what_was_made_goes_on_under_its_new_name(connect: Connect, tmp_path: Path) -> None:
    """The answers of restore and copy read and write what others find by the name."""
    client, other = connect(), connect()
    np.save(tmp_path / "w.npy", np.ones(8, np.float32))
    restored = copying.restore(client, tmp_path / "w.npy", "restored")
    copied = copying.copy_buffer(client, "restored", client, "copied")
    for made in (restored, copied):
        assert made.info.id == other.open(made.name).info.id
        made.write(np.full(8, 2, np.float32))
        assert (other.open(made.name).read() == 2).all()
    assert [info.name for info in client.list()] == ["copied", "restored"]


def test_a_file_that_was_made_is_not_anothers(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client replaces the file right after the fsync; the handle went on with that client's bytes."""
    client = connect()
    tree, others = NameTree(client), NameTree(connect())
    file = tree.open("f", os.O_RDWR | os.O_CREAT)
    file.write(0, np.frombuffer(b"A" * 100, np.uint8))
    _replaced_after_the_rename(monkeypatch, client, "f", lambda: _put(others, "f", b"B" * 1000))
    file.flush()
    with pytest.raises(OSError, match=r"deleted|replaced"):
        file.write(0, np.frombuffer(b"a" * 50, np.uint8))
    file.close()
    assert client.open("f").read().tobytes() == b"B" * 1000


def test_a_file_is_whole_where_another_was_put_since_it_was_listed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rewritten file has the size of the listing's, and another client has put a longer one there: the rewritten
    bytes went into its beginning.
    """
    client = connect()
    tree, others = NameTree(client), NameTree(connect())
    _put(tree, "f", b"o" * 100)
    monkeypatch.setattr(catalogue, "FRESH_S", 60.0)
    file = tree.open("f", os.O_WRONLY | os.O_TRUNC)
    file.write(0, np.frombuffer(b"A" * 100, np.uint8))
    _put(others, "f", b"B" * 1000)
    file.flush()
    file.close()
    assert client.open("f").read().tobytes() == b"A" * 100


def _ask_for_no_listing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRESH_S", "_MISSES_COST"):
        monkeypatch.setattr(catalogue, name, 1e9)
    monkeypatch.setattr(catalogue, "_CHEAP_S", 0.0)


def test_a_published_file_has_its_own_header(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client deletes a published buffer and makes one of another type: its bytes had the old one's header."""
    client, other = connect(), connect()
    other.create("v", 4, versions=2).publish(np.ones(4, np.float32))
    _ask_for_no_listing_anew(monkeypatch)
    tree = NameTree(client)
    assert tree.list("") == [("v.npy", FileKind.FILE)]
    other.delete("v")
    other.create("v", 6, "int32", versions=2).publish(np.arange(6, dtype=np.int32))
    file = tree.open("v.npy", os.O_RDONLY)
    found = np.load(io.BytesIO(_read(file)))
    file.close()
    assert found.dtype == np.int32
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_time_of_change_is_of_the_file_that_is_there(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client replaces a file by one of the same size: stat said that nothing had changed."""
    monkeypatch.setattr(catalogue, "FRESH_S", 0.0)
    client = connect()
    tree, others = NameTree(client), NameTree(connect())
    _put(tree, "f", b"1" * 100)
    tree.set_modified("f", 12345)
    tree.rename("f", "g")
    assert tree.status("g").modified == 12345, "a rename keeps it"
    _put(others, "g", b"2" * 101)
    others.rename("g", "h")
    _put(others, "g", b"2" * 100)
    assert tree.status("g").modified == round(1e9 * client.open("g").info.created)
    file = tree.open("g", os.O_RDONLY)
    assert file.modified == round(1e9 * client.open("g").info.created)
    file.close()


def test_times_of_files_that_were_replaced_are_forgotten(connect: Connect) -> None:
    """A file that is written again and again is one more buffer each time."""
    tree = NameTree(connect())
    for turn in range(1, 6):
        _put(tree, "f", b"1" * turn)
        _put(tree, "f.tmp", b"2" * turn)
        tree.rename("f.tmp", "g")
    assert len(tree._modified) == 2
    tree.remove("f")
    tree.remove("g")
    assert not tree._modified


def test_a_file_that_is_replaced_while_it_is_opened(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its size was asked for by its path, and was the new file's: of the old one only so much was restored."""
    path = tmp_path / "w.bin"
    path.write_bytes(b"1" * 1000)
    opened = Path.open

    def then_replace(self: Path, *arguments: Any, **options: Any) -> Any:
        file = opened(self, *arguments, **options)
        if self == path and arguments[:1] == ("rb",):
            (tmp_path / "new").write_bytes(b"2" * 100)
            (tmp_path / "new").replace(path)
        return file

    monkeypatch.setattr(Path, "open", then_replace)
    assert copying.restore(connect(), path, "w").read().tobytes() == b"1" * 1000


def _cut(done: int, _: int) -> None:
    if done >= _BLOCK:
        raise _CutError


def test_a_snapshot_goes_on_from_its_own_copy_alone(connect: Connect, tmp_path: Path) -> None:
    """Somebody deletes the copy of an interrupted one; the next made another by that name, and the file was of two
    moments, with checksums that were right.
    """
    client, path = connect(), tmp_path / "w.bin"
    buffer = client.create("w", 3 * _BLOCK // 4)
    buffer.fill(1)
    with pytest.raises(_CutError):
        copying.snapshot(client, "w", path, progress=_cut)
    [copy] = [info.name for info in client.list() if "snapshot" in info.name]
    client.delete(copy)
    buffer.fill(2)
    copying.snapshot(client, "w", path)
    assert np.unique(np.fromfile(path, np.float32)).tolist() == [2]
    assert [info.name for info in client.list()] == ["w"]


def test_hosts_have_snapshots_of_their_own(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another host takes one into the same path: it deleted the copy from which the first one was to go on."""
    client, link = connect(), tmp_path / "local"
    buffer = client.create("w", 3 * _BLOCK // 4)

    def on(host: str) -> Path:
        (tmp_path / host).mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / host)
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        return link / "w.bin"

    buffer.fill(1)
    path = on("a")
    with pytest.raises(_CutError):
        copying.snapshot(client, "w", path, progress=_cut)
    buffer.fill(2)
    copying.snapshot(client, "w", on("b"))
    copying.snapshot(client, "w", on("a"))
    assert np.unique(np.fromfile(tmp_path / "a/w.bin", np.float32)).tolist() == [1]
    assert np.unique(np.fromfile(tmp_path / "b/w.bin", np.float32)).tolist() == [2]
    assert [info.name for info in client.list()] == ["w"]


def test_hosts_have_restores_of_their_own(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another host began to restore the same path under that name: its buffer, half filled, was given the name."""
    client, other, link = connect(), connect(), tmp_path / "local"

    def on(host: str) -> Path:
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / host)
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        return link / "w.bin"

    def other_begins(done: int, nbytes: int) -> None:
        if done == nbytes:  # all but the name
            with pytest.raises(_CutError):
                copying.restore(other, on("b"), "w", progress=_cut)
            on("a")

    for host in "ab":
        (tmp_path / host).mkdir()
        np.ones(3 * _BLOCK // 4, np.float32).tofile(tmp_path / host / "w.bin")
    copying.restore(client, on("a"), "w", progress=other_begins)
    assert np.unique(client.open("w").read().view(np.float32)).tolist() == [1]
    copying.restore(other, on("b"), "w", replace=True)  # it goes on
    assert [info.name for info in client.list()] == ["w"]


def test_what_is_like_a_buffer_is_like_that_one(connect: Connect) -> None:
    """Another client has put a buffer of another form there: the new one was like that."""
    client, other = connect(), connect()
    model = client.create("w", 8, stripe="64KiB")
    other.delete("w")
    other.create("w", 8, stripe="4KiB")
    with pytest.raises(smb.NotFoundError, match='"w" is another buffer now'):
        client.create("twin", like=model)
    assert [info.name for info in client.list()] == ["w"]


def _before_a_delete_of(
    monkeypatch: pytest.MonkeyPatch, client: smb.Client, name: str, other: Callable[[], object]
) -> None:
    """Let another client be at work right before this one deletes what has that name."""
    delete = client.delete

    def other_first(asked: Any, **options: bool) -> None:
        if name == (asked if isinstance(asked, str) else asked.name):
            monkeypatch.setattr(client, "delete", delete)
            other()
        delete(asked, **options)

    monkeypatch.setattr(client, "delete", other_first)


def test_the_end_of_a_hidden_file_is_not_anothers(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removed file is somebody's still; another client puts one there just before its name is taken away."""
    client = connect()
    tree, others = NameTree(client), NameTree(connect())
    _put(tree, "f", b"1" * 100)
    tree.hide("f", ".alias")
    _before_a_delete_of(monkeypatch, client, "f", lambda: _put(others, "f", b"2" * 101))
    tree.end_hidden()
    assert client.open("f").read().tobytes() == b"2" * 101
    assert [info.name for info in client.list()] == ["f"]


def test_a_file_that_is_made_anew_leaves_anothers(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes become an array by their new name; another client puts a file at the old one before that is taken away."""
    client, octets = connect(), io.BytesIO()
    np.save(octets, np.arange(5))
    tree, others = NameTree(client), NameTree(connect())
    _put(tree, "f", octets.getvalue())
    _before_a_delete_of(monkeypatch, client, "f", lambda: _put(others, "f", b"2" * 101))
    tree.rename("f", "g.npy")
    assert client.open("f").read().tobytes() == b"2" * 101
    assert client.open("g").read().tolist() == [0, 1, 2, 3, 4]


def test_a_path_is_free_once_another_has_removed_a_hidden_file(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the listing still shows there is gone: a new file may be made."""
    client = connect()
    tree, others = NameTree(client), NameTree(connect())
    _put(tree, "f", b"1" * 100)
    tree.list("")
    _ask_for_no_listing_anew(monkeypatch)
    tree.hide("f", ".alias")
    others.remove("f")
    _put(tree, "f", b"2" * 50)
    assert client.open("f").read().tobytes() == b"2" * 50
    tree.end_hidden()


def test_a_file_that_is_made_anew_of_anothers_moves_that(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client has replaced it since it was listed: its file has the new path, and not the old one, too."""
    client, octets = connect(), [io.BytesIO(), io.BytesIO()]
    for number, each in enumerate(octets):
        np.save(each, np.full(5, number))
    tree, others = NameTree(client), NameTree(connect())
    _put(tree, "f", octets[0].getvalue())
    tree.list("")
    _ask_for_no_listing_anew(monkeypatch)
    monkeypatch.setattr(tree, "_copied", lambda *_: None)
    others.remove("f")
    _put(others, "f", octets[1].getvalue())
    tree.rename("f", "g.npy")
    assert [info.name for info in client.list()] == ["g"]
    assert client.open("g").read().tolist() == [1] * 5


def test_a_relay_that_fails_leaves_anothers(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """It deleted the mirrors that it had made by their names; another client had stopped them and made its own."""
    client, other = connect(), connect()
    client.create("w", 8, versions=2, servers=["server-0"]).publish(np.ones(8, np.float32))
    create = client._coordinator.create_buffer

    def then_other(*arguments: Any) -> Any:
        made = create(*arguments)
        monkeypatch.undo()
        other.stop_relays("w")
        other.relay("w", ["server-1"])
        return made

    monkeypatch.setattr(client._coordinator, "create_buffer", then_other)
    with pytest.raises(smb.Error, match="nobody"):
        client.relay("w", ["server-1", "nobody"])
    assert [mirror.server for mirror in client.open("w").info.mirrors] == ["server-1"]
    client.delete("w")


@pytest.mark.parametrize("how", ["made anew", "published"])
@pytest.mark.parametrize("deltas", [0, 4])
def test_a_publisher_that_fails_leaves_anothers(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, how: str, deltas: int
) -> None:
    """It deleted what it had made by its name; another had made it anew, or has published there since."""
    client, other = connect(), connect()
    state = {"w": torch.ones(8)}

    def fail(name: str, _: object) -> None:
        if how == "made anew":
            for info in other.list():
                other.delete(info)
        smb.torch.Publisher(other, name, state, deltas=deltas).publish()
        raise smb.OutOfMemoryError("no room for mirrors")

    monkeypatch.setattr(client, "relay", fail)
    with pytest.raises(smb.OutOfMemoryError, match="no room for mirrors"):
        smb.torch.Publisher(client, "policy", state, deltas=deltas, relays="auto")
    assert smb.torch.follow(other, "policy").state_dict()["w"].tolist() == [1] * 8
    for info in other.list():
        other.delete(info.name)


def test_a_publisher_that_fails_leaves_nothing_of_its_own(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else was there."""
    client = connect()

    def fail(*_: object) -> None:
        raise smb.OutOfMemoryError("no room for mirrors")

    monkeypatch.setattr(client, "relay", fail)
    with pytest.raises(smb.OutOfMemoryError, match="no room for mirrors"):
        smb.torch.Publisher(client, "policy", {"w": torch.ones(8)}, deltas=4, relays="auto")
    assert client.list() == []


def test_a_join_that_fails_leaves_anothers_statistics(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """It deleted the running statistics of its model by their name; another had made the training anew by then."""
    client, other = connect(), connect()
    made: list[object] = []

    def fail(self: Membership) -> None:
        raise smb.UnavailableError("no server answers")

    withdraw = ModelAdmission.withdraw

    def then_other(self: ModelAdmission) -> bool:
        gone = withdraw(self)
        other.delete("run/state")
        made.append(other.create("run/state", 3))
        return gone

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(Membership, "begin", fail)
    monkeypatch.setattr(ModelAdmission, "withdraw", then_other)
    with pytest.raises(smb.UnavailableError, match="no server answers"):
        smb.torch.join(model, optimizer, "run", scheme="bsp", client=client)
    assert made
    assert [info.name for info in client.list()] == ["run/state"]
    client.delete("run/state")
