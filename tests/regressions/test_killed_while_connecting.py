"""A server killed before it had accepted a local client's connection once counted as one that refuses that client."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from smb.engine import EngineClient
from smb.rpc.client_tokens import ClientTokens
from smb.transport.base import Deadline, NoAnswerError, SegmentLocation
from smb.transport.reconnect import Links
from smb.transport.shm import SharedMemory
from smb.transport.tls import ClientTls


def _nobody(*_: object) -> NoReturn:
    raise AssertionError("nobody is to be asked")


def test_a_connection_that_is_reset_may_come_back(tmp_path: Path) -> None:
    """The transport leads there, and the server is away: whoever waits for it goes on waiting."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def be_killed() -> None:
            accepted, _ = listener.accept()
            accepted.recv(1)  # the rest of HELLO is unread: the peer sees a reset
            accepted.close()

        thread = threading.Thread(target=be_killed)
        thread.start()
        client = EngineClient(12345)
        shm = SharedMemory(client, Links(client, lambda server: None, ClientTokens(_nobody), ClientTls(None)))
        with pytest.raises(NoAnswerError):
            shm.waits(SegmentLocation(1, "a", 8, "127.0.0.1:1", str(path), 5), Deadline(10))
        thread.join()
        shm.close()
        client.close()
