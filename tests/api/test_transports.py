"""Which way leads to which segment, and what happens where there is none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.support.transports import FAR

PAGE = 4096


@contextmanager
def hidden_socket(client: smb.Client, server: str) -> Iterator[None]:
    """Take a server's Unix socket away, as if it ran on another host."""
    buffer = client.create("probe", 1, servers=[server])
    socket = Path(buffer.layout.segments[0].unix_path)
    client.delete("probe")
    aside = socket.with_suffix(".aside")
    socket.rename(aside)
    try:
        yield
    finally:
        aside.rename(socket)


def test_one_buffer_over_two_transports(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Segments with a reachable socket are mapped, the others are not, in one call; the log line says both."""
    names = ["server-0", "server-1", "server-2"]
    size = 200 * PAGE + 5
    values = (np.arange(size) % 251).astype(np.uint8)
    with hidden_socket(connect(), "server-1"), caplog.at_level(logging.INFO, "smb"):
        mixed = connect().create("w", size, "uint8", stripe=PAGE, servers=names)
        other = connect().create("v", like="w")
        mixed.write(values)
        assert mixed.transports == ("shm", FAR)
        other.write(values)
        np.testing.assert_array_equal(mixed.accumulate(values, fetch=True), 2 * values)
    log = [record.getMessage() for record in caplog.records if record.getMessage().startswith('buffer "w"')]
    assert len(log) == 1
    assert "shm to server-0, server-2: same host" in log[0]
    assert f"{FAR} to server-1: {'127.0.0.1:' if FAR == 'tcp' else 'by '}" in log[0]
    assert "no socket at " in log[0]
    np.testing.assert_array_equal(connect(FAR).open("w").read(), 2 * values)
    np.testing.assert_array_equal(connect("shm").open("w").read(), 2 * values)
    with pytest.raises(smb.TransportError, match=f"server-1 is reached over {FAR}"):
        mixed.view()


def test_combining_over_two_transports(connect: Connect) -> None:
    """accumulate_from works where a part of both buffers is mapped and a part is not."""
    client = connect()
    with hidden_socket(client, "server-0"):
        a = client.create("a", 50 * PAGE, "uint8", stripe=PAGE, servers=["server-0", "server-1"])
        b = client.create("b", like=a)
        a.fill(3)
        b.fill(4)
        a.accumulate_from(b, scale=2)
        assert a.transports == ("shm", FAR)
    assert (a.read() == 11).all()


def test_shm_alone_does_not_fall_back(connect: Connect) -> None:
    """With transport="shm" a server without a reachable socket is a TransportError that names it, why, and the way."""
    client = connect("shm")
    buffer = client.create("w", 10, servers=["server-1"])
    with (
        hidden_socket(client, "server-1"),
        pytest.raises(smb.TransportError, match=r"server-1 can't be reached over shm: no socket at .*transport='auto'"),
    ):
        buffer.read()
    assert not buffer.read().any()
