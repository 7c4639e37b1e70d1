"""The other end of a bare socket: the fastest that two processes can be over TCP without this project's code.

main() prints its port and serves until stdin closes.

A connection begins with its purpose (PLAN: mode, bytes). After that, each round consists of the bytes and a 1-byte
answer (for a read, a 1-byte question and the bytes).
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

COMMAND = struct.Struct("<BQ")
WRITE, READ, ADD_WHOLE, ADD_BLOCKS = range(4)
BLOCK_BYTES = 256 * 1024
_BYTE = b"\1"


def receive_into(connection: socket.socket, view: memoryview) -> bool:
    """Fill `view` from the connection; False if the connection ended early."""
    received = 0
    while received < len(view):
        count = connection.recv_into(view[received:])
        if count == 0:
            return False
        received += count
    return True


def serve(listener: socket.socket) -> None:
    """Serve every connection on a thread of its own, for ever."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_connection, args=(connection,), daemon=True).start()


def _serve_connection(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        command = bytearray(COMMAND.size)
        if receive_into(connection, memoryview(command)):
            _answer(connection, *COMMAND.unpack(command))


def _answer(connection: socket.socket, mode: int, nbytes: int) -> None:
    # Ones, not zeros: all pages that were never written would be one and the same page.
    target: NDArray[np.float32] = np.ones(nbytes // 4, dtype=np.float32)
    if mode == READ:
        question = memoryview(bytearray(1))
        while receive_into(connection, question):
            connection.sendall(target.data)
        return
    rounds: dict[int, Callable[[], bool]] = {
        WRITE: lambda: receive_into(connection, target.data.cast("B")),
        ADD_WHOLE: _adder(connection, target, nbytes),
        ADD_BLOCKS: _adder(connection, target, BLOCK_BYTES),
    }
    while rounds[mode]():
        connection.sendall(_BYTE)


def _adder(connection: socket.socket, target: NDArray[np.float32], block_bytes: int) -> Callable[[], bool]:
    block_count = max(1, block_bytes // 4)
    received = np.ones(min(block_count, len(target)), dtype=np.float32)

    def one_round() -> bool:
        for start in range(0, len(target), block_count):
            part = target[start : start + block_count]
            source = received[: len(part)]
            if not receive_into(connection, source.data.cast("B")):
                return False
            np.add(part, source, out=part)
        return True

    return one_round


def main() -> None:
    """Print the port on stdout, then serve until stdin closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    sys.stdin.read()
