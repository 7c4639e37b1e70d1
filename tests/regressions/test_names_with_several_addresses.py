"""A host's name with several addresses, of which some do not answer: each is tried."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import smb
import smb.config.host_address
import smb.transport.connector
from smb.config.host_address import addresses_of, bindable
from smb.daemon.process import Pages, check_listen
from tests.support.daemons import Daemons, running_daemons

NOWHERE = "192.0.2.1"  # for documentation: nobody has it


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


def _named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Have every memory server's name stand for these addresses, in this process; return those that were asked for."""
    asked: list[str] = []

    def found(host: str, port: int, *_: object) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, (each, port)) for each in addresses]

    monkeypatch.setattr(smb.transport.connector, "addresses_of", found)
    return asked


def test_the_second_address_answers(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client reaches the server at whichever of its name's addresses it is, connects again there after a restart, and
    is not taken in by another server at one of them.
    """
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    port = server.address.rpartition(":")[2]
    other = daemons.memory_server(coordinator.address, "b", "--listen", f"127.0.0.2:{port}", "--advertise", "127.0.0.2")
    assert other.address
    asked = _named(monkeypatch, "::1", "127.0.0.2", "127.0.0.1")
    with smb.connect(coordinator.address, transport="tcp") as client:
        buffer = client.create("w", 10, servers=["a"])
        buffer.write(np.ones(10, np.float32))
        with buffer.lock(timeout=5):
            assert buffer.read().sum() == 10
        assert asked
        server.kill()
        again = daemons.memory_server(coordinator.address, "a", "--listen", f"127.0.0.1:{port}")
        assert again.address
        assert buffer.read().sum() == 10


def test_an_address_that_is_silent(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes connections and never answers has a part of the time alone."""
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    port = int(server.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.2", port)), smb.connect(coordinator.address, transport="tcp") as client:
        _named(monkeypatch, "127.0.0.2", "127.0.0.1")
        buffer = client.create("w", 10)
        buffer.write(np.ones(10, np.float32))
        assert buffer.read().sum() == 10


def test_none_answers(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the error names the server and the address that was given."""
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    address = server.address
    _named(monkeypatch, "::1", "127.0.0.3")
    with (
        smb.connect(coordinator.address, transport="tcp", timeout=1) as client,
        pytest.raises(smb.UnavailableError, match=rf"memory server a at {address} can't be reached"),
    ):
        client.create("w", 10).fill(1)


def test_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon listens on the first of its name's addresses that is this host's."""

    def resolved(*found: str) -> Callable[..., Any]:
        return lambda _host, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(smb.config.host_address.socket, "getaddrinfo", resolved(NOWHERE, "127.0.0.1", "127.0.0.1"))
    assert addresses_of("storage-1", 5) == [(socket.AF_INET, (NOWHERE, 5)), (socket.AF_INET, ("127.0.0.1", 5))]
    assert bindable("storage-1", 0) == (socket.AF_INET, "127.0.0.1")
    assert check_listen("storage-1:0") == ("storage-1", 0)
    with closing(Pages("storage-1:0", CollectorRegistry(), lambda: {"ok": True})) as pages:
        assert pages.address.startswith("storage-1:")
    monkeypatch.setattr(smb.config.host_address.socket, "getaddrinfo", resolved(NOWHERE))
    with pytest.raises(smb.UnavailableError, match="cannot listen on storage-1:0: Cannot assign requested address"):
        check_listen("storage-1:0")
