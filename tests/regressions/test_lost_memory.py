"""A server that came back without its memory once made clients say that the buffer "was deleted", which it was not."""

from __future__ import annotations

import time

import pytest

import smb
from tests.support.commands import run_here
from tests.support.transports import EACH_WAY, SLOWNESS


@pytest.mark.parametrize("transport", EACH_WAY)
def test_lost_memory_is_not_called_deletion(transport: str) -> None:
    """UnavailableError names the server and says that the memory is lost; NotFoundError comes only after a delete."""
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, timeout=2 * SLOWNESS) as owner,
        smb.connect(cluster.address, transport=transport, timeout=1000.0) as client,
    ):
        owner.create("weights", (1000,))
        cluster.servers[0].kill()
        for path in cluster.memory_directory.glob("*.segment"):
            path.unlink()
        cluster.servers[0].start()
        with pytest.raises(smb.UnavailableError, match=r"server-0.*memory was lost"):
            client.open("weights").read()
        buffer = client.open("weights")
        owner.delete("weights")
        with pytest.raises(smb.NotFoundError, match="was deleted"):
            buffer.read()


def test_all_tools_say_of_lost_memory_that_it_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`smb stat` says it of each segment, and `smb top` names the buffers to delete; a lock, a version, and a read say
    it once, and none says that the buffer was deleted. None waits until its timeout, which is longer than this test's.
    """

    def run(*arguments: str) -> str:
        return "".join(run_here(capsys, *arguments, "-c", cluster.address)[1:])

    monkeypatch.setenv("COLUMNS", "1000")
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, timeout=1000.0) as client,
    ):
        client.create("weights", (1000,))
        client.create("other", (1000,))
        assert "alive" in run("stat", "weights")
        cluster.servers[0].kill()
        for path in cluster.memory_directory.glob("*.segment"):
            path.unlink()
        cluster.servers[0].start()
        end = time.monotonic() + 60
        while "memory was lost" not in run("stat", "weights"):
            assert time.monotonic() < end
        shown = run("stat", "weights")
        assert "  lost  " in shown
        assert "alive" not in shown
        assert "published" not in shown
        shown = run("top", "--once")
        assert 'create them again: buffer "other", buffer "weights"' in shown
        for call in (
            lambda: client.open("weights").lock().acquire(),
            lambda: client.open("weights").version,
            lambda: client.open("weights").read(),
        ):
            with pytest.raises(smb.UnavailableError, match="no such segment; its memory was lost") as caught:
                call()
            assert str(caught.value).count("no such segment") == 1, caught.value
            assert str(caught.value).count("weights") == 1, caught.value
        buffer = client.open("weights")
        client.delete("weights")
        with pytest.raises(smb.NotFoundError, match="was deleted"):
            buffer.lock().acquire()
