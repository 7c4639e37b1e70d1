"""Namespaces have quotas in bytes and buffers; who is past one is told what is used and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import smb
from smb.config.quotas import Quota, parse_quotas
from tests.support.daemons import Daemons, running_daemons


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    """Daemons of this test."""
    with running_daemons(tmp_path) as running:
        yield running


def test_quotas_are_kept(daemons: Daemons) -> None:
    """In bytes and in number, each namespace by itself, creations like another's and locks too; what is deleted is free
    again, and what does not fit leaves nothing.
    """
    quotas = ("--quota", "team=1MiB,3", "--quota", "*=300KiB")
    coordinator = daemons.coordinator("127.0.0.1:0", None, *quotas)
    daemons.memory_server(coordinator.address, "server-0").address  # noqa: B018 - waits until it serves
    with smb.connect(coordinator.address) as client:
        first = client.create("team/first", (150_000,))
        with pytest.raises(
            smb.OutOfMemoryError, match=r'"team/second".*namespace "team" may take 1 MiB, and .*KiB are used'
        ):
            client.create("team/second", like=first)
        client.create("team/second", (4,))
        with client.lock("team/lock"):
            pass
        with pytest.raises(smb.OutOfMemoryError, match="may have 3 buffers, locks and barriers, and has 3 already"):
            client.create("team/third", (4,))
        assert client.create("team/second", (4,), exist_ok=True).size == 4
        for name in ("other/a", "third/a", "plain"):
            client.create(name, (50_000,))
        with pytest.raises(smb.OutOfMemoryError, match='namespace "other"'):
            client.create("other/b", (50_000,))
        with pytest.raises(smb.OutOfMemoryError, match="names without a namespace"):
            client.create("plain-too", (50_000,))
        client.delete("team/first")
        client.create("team/third", (150_000,))
        names = [buffer.name for buffer in client.list()]
    assert names == ["other/a", "plain", "team/second", "team/third", "third/a"]


def test_a_rename_is_of_its_new_namespace(daemons: Daemons) -> None:
    """What moves to a namespace, or is put aside there, counts there: no quota is passed by another name first. Within
    a namespace, and out of one, everything may be renamed.
    """
    coordinator = daemons.coordinator("127.0.0.1:0", None, "--quota", "team=1MiB,2", "--quota", "full=1MiB,0")
    daemons.memory_server(coordinator.address, "server-0").address  # noqa: B018 - waits until it serves
    with smb.connect(coordinator.address) as client:
        client.create("other/large", (200_000,))
        client.create("other/folder/a", (4,))
        client.create("team/first", (150_000,))
        for refused in (
            lambda: client.rename("other/large", "team/large"),
            lambda: client.rename_folder("other/folder", "full/folder"),
            lambda: client.displace("other/folder/a", "other/large", "team/aside"),
        ):
            with pytest.raises(smb.OutOfMemoryError, match=r'rename of "other/.*namespace "'):
                refused()
        assert [buffer.name for buffer in client.list()] == ["other/folder/a", "other/large", "team/first"]
        client.rename("team/first", "team/called")
        client.rename("other/large", "team/called", replace=True)  # what it replaces makes room
        client.rename("other/folder/a", "team/small")
        client.displace("team/called", "team/small", "team/aside")
        client.rename("team/small", "plain")
        assert [buffer.name for buffer in client.list()] == ["plain", "team/aside"]


def test_quotas_as_text() -> None:
    """What is no quota is refused by name."""
    assert parse_quotas(["a=1KiB", "*=0,5"]) == {"a": Quota(1024, None), "*": Quota(0, 5)}
    for text in ("a", "=1", "a=", "a=1KiB,x", "a=1KiB,-1", "a/b=1", "a=many"):
        with pytest.raises(smb.InvalidArgumentError):
            parse_quotas([text])
    with pytest.raises(smb.InvalidArgumentError, match="has a quota already"):
        parse_quotas(["a=1", "a=2"])
