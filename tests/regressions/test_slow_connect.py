"""An attempt to reach a daemon once had 0.1 s: over a long line, or on a busy machine, nobody ever got through."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from smb.config.parse import parse_address
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.records import ServerRecord
from smb.rpc.coordinator_client import Coordinator
from tests.support.daemons import running_daemons

ONE_WAY_S = 0.2


@contextlib.contextmanager
def long_line(upstream: tuple[str, int]) -> Iterator[str]:
    """Pass on to `upstream` what comes, every piece ONE_WAY_S late; yields the address of the near end."""
    opened: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(ONE_WAY_S)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(upstream)
                opened.extend((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for end in opened:
                end.close()


def test_the_coordinator_reaches_a_server_over_a_long_line(tmp_path: Path) -> None:
    """A round trip of 0.4 s, four times what an attempt had, delays a call and does not fail it."""

    async def end_sessions(record: ServerRecord) -> None:
        servers = MemoryServers()
        try:
            await servers.end_sessions(record, [1])
        finally:
            await servers.close()

    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator().address
        assert daemons.memory_server(coordinator, "a").address
        with contextlib.closing(Coordinator(coordinator)) as control:
            (server,) = control.list_servers(10.0)
        with long_line(parse_address(server.control_address)) as far:
            record = ServerRecord("a", 1, server.data_address, far, "", "", 0, 0, 0.0)
            with ThreadPoolExecutor(1) as thread:  # another test's browser may have left a loop running in this one
                thread.submit(asyncio.run, end_sessions(record)).result()
