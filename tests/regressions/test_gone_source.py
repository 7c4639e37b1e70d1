"""accumulate_from a deleted buffer once said that the other one's memory was lost, and to delete that one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import smb
from tests.support.transports import EACH_WAY, FAR, SLOWNESS


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2) as running:
        yield running


@pytest.mark.parametrize("transport", EACH_WAY)
def test_the_buffer_that_is_gone_is_the_one_named(cluster: smb.LocalCluster, transport: str) -> None:
    """NotFoundError names the source that was deleted, or made anew; the target keeps its values and goes on."""
    with smb.connect(cluster.address, transport=transport) as client:
        target = client.create("target", 5000, stripe=4096)
        source = client.create("source", like=target)
        target.fill(1)
        source.fill(2)
        target.accumulate_from(source)
        client.delete("source")
        with pytest.raises(smb.NotFoundError, match=r"^buffer 'source' was deleted$"):
            target.accumulate_from(source)
        client.create("source", like=target).fill(2)
        with pytest.raises(
            smb.NotFoundError, match="buffer 'source' was deleted and created again, or replaced; open it again"
        ):
            target.accumulate_from(source)
        target.accumulate_from(client.open("source"))
        assert (target.read() == 5).all()
        client.delete("target")
        with pytest.raises(smb.NotFoundError, match=r"^buffer 'target' was deleted$"):
            target.accumulate_from(client.open("source"))
        client.delete("source")


def test_lost_memory_of_one_of_two_condemns_neither(cluster: smb.LocalCluster) -> None:
    """Where a server came back without the source's memory, the error names both and tells how to find out which."""
    with smb.connect(cluster.address, transport=FAR, timeout=2 * SLOWNESS) as client:
        target = client.create("target", 100, servers=["server-0"])
        before = set(cluster.memory_directory.glob("*.segment"))
        source = client.create("source", like=target)
        (lost,) = set(cluster.memory_directory.glob("*.segment")) - before
        cluster.servers[0].kill()
        lost.unlink()
        cluster.servers[0].start()
        target.fill(1)
        # RDMA asks for the keys of each buffer anew before the call, so it knows which.
        known = FAR == "verbs"
        said = (
            "buffer 'source'.*memory was lost"
            if known
            else "memory of one of the call's buffers was lost: read each to see which"
        )
        with pytest.raises(smb.UnavailableError, match=said) as caught:
            target.accumulate_from(source)
        assert ("delete" in str(caught.value)) == known
        assert (target.read() == 1).all()
        with pytest.raises(smb.UnavailableError, match="memory was lost"):
            source.read()
