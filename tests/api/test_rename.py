"""Buffers get other names: in one step, and whoever has one open goes on."""

from __future__ import annotations

import numpy as np
import pytest

import smb
from tests.conftest import Connect


def test_an_open_buffer_follows_its_name(client: smb.Client, connect: Connect, cluster: smb.LocalCluster) -> None:
    """Handles that were opened before go on, over a restart of all servers too; the old name is gone."""
    buffer = client.create("a/x", 1000, metadata={"k": 1})
    buffer.write(np.arange(1000, dtype=np.float32))
    theirs = connect("tcp").open("a/x")
    client.rename("a/x", "b/y")
    with pytest.raises(smb.NotFoundError):
        client.open("a/x")
    assert client.open("b/y").metadata == {"k": 1}
    for server in cluster.servers:
        server.kill()
        server.start()
    for handle in (buffer, theirs):
        handle.accumulate(np.ones(1000, np.float32))
    assert np.array_equal(client.open("b/y").read(), np.arange(1000, dtype=np.float32) + 2)


def test_a_rename_replaces(client: smb.Client) -> None:
    """With replace the other buffer goes in the same step, or is kept under a third name; without, nothing changes."""
    old, new = client.create("old", 10), client.create("new", 10)
    new.fill(1)
    with pytest.raises(smb.AlreadyExistsError):
        client.rename("new", "old")
    client.displace("new", "old", "kept")
    assert (client.open("old").read() == 1).all()
    assert (old.read() == 0).all()
    client.rename("old", "kept", replace=True)
    with pytest.raises(smb.NotFoundError):
        old.read()
    assert [info.name for info in client.list()] == ["kept"]
    for name, new_name in (("nobody", "x"), ("kept", "a b"), ("kept", "x//y")):
        with pytest.raises((smb.NotFoundError, smb.InvalidArgumentError)):
            client.rename(name, new_name)


def test_by_its_handle_a_buffer_is_meant_and_no_other_of_its_name(client: smb.Client, connect: Connect) -> None:
    """A delete and a rename by a Buffer, or by what list() has told, leave what has its name now."""
    mine = client.create("w", 10)
    (listed,) = client.list()
    connect().rename("w", "kept")
    other = connect().create("w", 10)
    for meant in (mine, listed):
        with pytest.raises(smb.NotFoundError, match=r'"w" is another buffer now: .* renamed or deleted'):
            client.delete(meant)
        with pytest.raises(smb.NotFoundError, match=r'rename of "w" to "v": "w" is another buffer now'):
            client.rename(meant, "v")
        client.delete(meant, missing_ok=True)
    assert [info.name for info in client.list()] == ["kept", "w"]
    theirs = connect().open("w")
    client.rename(other, "v")
    assert other.name == "v"
    client.create("twin", like=other)
    with pytest.raises(smb.NotFoundError, match='no buffer "w"'):
        client.delete(theirs)
    client.displace(other, "twin", "w")
    client.delete("w")
    client.delete(other)
    client.delete(client.open("kept").info)
    assert client.list() == []
    with pytest.raises(smb.NotFoundError, match='delete: no buffer "v"'):
        client.delete("v")
    with pytest.raises(smb.InvalidArgumentError, match="a name must be a str"):
        client.delete(7)  # type: ignore[arg-type]


def test_a_folder_is_renamed_as_a_whole(client: smb.Client) -> None:
    """All that is in it, or nothing: not where something is there already."""
    for name in ("run/1/w", "run/1/m", "run/10/w", "done/z"):
        client.create(name, 10)
    client.rename_folder("run/1", "last")
    assert [info.name for info in client.list()] == ["done/z", "last/m", "last/w", "run/10/w"]
    for folder, new_folder in (("run", "done"), ("nobody", "x"), ("run", "run/inside")):
        with pytest.raises(smb.Error):
            client.rename_folder(folder, new_folder)
    assert [info.name for info in client.list()] == ["done/z", "last/m", "last/w", "run/10/w"]
