"""A server that came back without its memory once made clients say that the buffer "was deleted", which it was not."""

from __future__ import annotations

import pytest

import smb
from tests.support.transports import EACH_WAY, SLOWNESS


@pytest.mark.parametrize("transport", EACH_WAY)
def test_lost_memory_is_not_called_deletion(transport: str) -> None:
    """UnavailableError names the server and says that the memory is lost; NotFoundError comes only after a delete."""
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, timeout=2 * SLOWNESS) as owner,
        smb.connect(cluster.address, transport=transport, timeout=2 * SLOWNESS) as client,
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
