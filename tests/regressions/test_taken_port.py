"""A daemon of LocalCluster that was killed could not start again: meanwhile the system had given its port to another
process, for a server or for a connection going out."""

from __future__ import annotations

import errno
import socket

import pytest

import smb
from smb.config.parse import parse_address


def test_ports_of_a_killed_daemon_are_kept_for_it() -> None:
    """Nobody else can have them until it runs again, on the same ones; once the cluster has stopped they are free."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
        daemons = [cluster.coordinator, cluster.servers[0]]
        places = [place for daemon in daemons for place in (daemon.address, daemon.metrics)]
        assert len(set(places)) == 4
        for daemon in daemons:
            daemon.kill()
        for place in places:
            with socket.socket() as other, pytest.raises(OSError, match="in use") as refused:
                other.bind(parse_address(place))
            assert refused.value.errno == errno.EADDRINUSE
        for daemon in daemons:
            daemon.start()
        assert [place for daemon in daemons for place in (daemon.address, daemon.metrics)] == places
    for place in places:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past what the daemons' connections left
            other.bind(parse_address(place))
