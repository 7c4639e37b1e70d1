"""A file's buffer on its way to its name stayed for good where it could not be deleted at once: a coordinator that went
away while a file was closed made the mount fail the close, and forget the buffer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import smb
from smb.files.namespace import NameTree
from tests.conftest import Connect


def test_what_could_not_be_deleted_is_deleted_later(monkeypatch: pytest.MonkeyPatch, connect: Connect) -> None:
    """The coordinator is away from the rename on; the tree is closed once it is back."""

    def away(*_: object, **__: object) -> None:
        raise smb.UnavailableError("the coordinator is away")

    client = connect()
    tree = NameTree(client)
    file = tree.open("file", os.O_RDWR | os.O_CREAT)
    file.write(0, np.frombuffer(b"bytes", np.uint8))
    with monkeypatch.context() as patched:
        patched.setattr(client, "delete", away)
        patched.setattr("smb.files.making.rename_file", away)
        with pytest.raises(OSError, match="away"):
            file.flush()
    assert [info.name for info in client.list()]
    tree.end_hidden()
    assert not [info.name for info in client.list()]


def test_what_was_written_in_place_is_closed_without_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    """Each close asked for all names, for the time of the change alone, and held up all other files meanwhile."""

    def away(*_: object, **__: object) -> None:
        raise smb.UnavailableError("the coordinator is away")

    client = connect()
    client.create("w", 10, "uint8").fill(1)
    tree = NameTree(client)
    before = tree.status("w").modified
    file = tree.open("w", os.O_RDWR)
    file.write(3, np.array([7], np.uint8))
    with monkeypatch.context() as patched:
        patched.setattr(tree._catalogue, "listing", away)
        file.close()
    assert tree.status("w").modified > before
    assert client.open("w").read(3, 1)[0] == 7


@pytest.mark.parametrize(
    ("call", "fresh_s"),
    [
        ("remove", 0.0),
        ("remove", 60.0),
        ("make_folder", 0.0),
        ("hide", 0.0),
        ("set_modified", 0.0),
        ("write", 0.0),
        ("truncate", 0.0),
    ],
)
def test_the_coordinator_is_waited_for_where_no_other_file_waits(
    monkeypatch: pytest.MonkeyPatch, connect: Connect, call: str, fresh_s: float
) -> None:
    """Calls asked it under the lock of all files, so that all others waited, too; and a file that is open lost its name
    where hiding it failed.
    """
    held: list[bool] = []
    client = connect()
    client.create("w", 10, "uint8").fill(1)
    tree = NameTree(client)
    file = tree.open("w", os.O_RDWR)
    node: Any = tree._nodes["w"]
    locks: tuple[Any, ...] = tree._lock, node.lock

    def away(*_: object, **__: object) -> None:
        held.append(any(lock._is_owned() for lock in locks))
        raise smb.UnavailableError("the coordinator is away")

    calls: dict[str, Callable[[], object]] = {
        "remove": lambda: tree.remove("w"),
        "make_folder": lambda: tree.make_folder("folder"),
        "hide": lambda: tree.hide("w", "alias"),
        "set_modified": lambda: tree.set_modified("w", 1),
        "write": lambda: file.write(10, np.zeros(1, np.uint8)),
        "truncate": lambda: file.truncate(20),
    }
    with monkeypatch.context() as patched:
        patched.setattr("smb.files.catalogue.FRESH_S", fresh_s)
        patched.setattr("smb.files.catalogue._SERVERS_FRESH_S", 0.0)
        for name in ("list", "servers"):
            patched.setattr(client, name, away)
        with pytest.raises(OSError, match="away"):
            calls[call]()
    assert held == [False]
    assert tree._nodes == {"w": node}
    calls[call]()
    file.close()
