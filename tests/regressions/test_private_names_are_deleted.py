"""A file's buffer on its way to its name stayed for good where it could not be deleted at once: a coordinator that went
away while a file was closed made the mount fail the close, and forget the buffer.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import smb
from smb.files.namespace import Tree


def test_what_could_not_be_deleted_is_deleted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is away from the rename on; the tree is closed once it is back."""

    def away(*_: object, **__: object) -> None:
        raise smb.UnavailableError("the coordinator is away")

    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address) as client,
    ):
        tree = Tree(client)
        file = tree.open("file", os.O_RDWR | os.O_CREAT)
        file.write(0, np.frombuffer(b"bytes", np.uint8))
        with monkeypatch.context() as patched:
            for name in ("rename", "displace", "delete"):
                patched.setattr(client, name, away)
            with pytest.raises(OSError, match="away"):
                file.flush()
        assert [info.name for info in client.list()]
        tree.end_hidden()
        assert not [info.name for info in client.list()]


def test_what_was_written_in_place_is_closed_without_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each close asked for all names, for the time of the change alone, and held up all other files meanwhile."""

    def away(*_: object, **__: object) -> None:
        raise smb.UnavailableError("the coordinator is away")

    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address) as client,
    ):
        client.create("w", 10, "uint8").fill(1)
        tree = Tree(client)
        before = tree.status("w").modified
        file = tree.open("w", os.O_RDWR)
        file.write(3, np.array([7], np.uint8))
        with monkeypatch.context() as patched:
            patched.setattr(tree._catalogue, "listing", away)
            file.close()
        assert tree.status("w").modified > before
        assert client.open("w").read(3, 1)[0] == 7
