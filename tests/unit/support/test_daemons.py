"""A test may start its daemons again where they were: nobody gets their ports while they are down."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.daemons import running_daemons


def test_the_ports_of_daemons_that_are_down_are_kept(tmp_path: Path) -> None:
    """The system gives them to nobody, and the daemons themselves get them again."""
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator()
        server = daemons.memory_server(coordinator.address, "a")
        addresses = coordinator.address, server.address
        # The server first: no closed connection must hold the coordinator's port.
        for daemon in (server, coordinator):
            daemon.kill()
        for address in addresses:
            with socket.socket() as other, pytest.raises(OSError, match="already in use"):
                other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        assert daemons.coordinator(listen=addresses[0]).address == addresses[0]
        assert daemons.memory_server(addresses[0], "a", "--listen", addresses[1]).address == addresses[1]
