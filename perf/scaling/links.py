"""Bare sockets over the links: the payload that TCP carries there, with nothing of ours in between.

`python -m perf.scaling.links serve ADDRESS` takes and gives bytes; `... move` takes requests a line (JSON) on stdin, as
perf/scaling/worker.py does:

    {"do": "move", "addresses": [...], "operation": "write", "nbytes": N, "start": T}
        from time.monotonic() T on, N bytes over each link at once -> seconds of each, until the other side had them all
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PORT = 7100
PIECE_BYTES = 256 << 10
_PLAN = struct.Struct("<BQ")
_WRITE, _READ = range(2)


def serve(address: str) -> None:
    """Serve each connection in a thread of its own, for good; says "ready" first."""
    with socket.create_server((address, PORT)) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve_connection, args=(connection,), daemon=True).start()


def _serve_connection(connection: socket.socket) -> None:
    with connection:
        mode, nbytes = _PLAN.unpack(connection.recv(_PLAN.size, socket.MSG_WAITALL))
        if mode == _READ:
            _send(connection, nbytes)
        else:
            _receive(connection, nbytes)
            connection.sendall(b"\1")


def _send(connection: socket.socket, nbytes: int) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    for at in range(0, nbytes, PIECE_BYTES):
        connection.sendall(piece[: nbytes - at])


def _receive(connection: socket.socket, nbytes: int) -> None:
    piece = bytearray(PIECE_BYTES)
    while nbytes > 0:
        count = connection.recv_into(piece, min(nbytes, PIECE_BYTES))
        if count == 0:
            raise ConnectionError("the other side ended")
        nbytes -= count


def _move(address: str, operation: str, nbytes: int, start: float) -> float:
    with socket.create_connection((address, PORT)) as connection:
        time.sleep(max(0.0, start - time.monotonic()))
        began = time.monotonic()
        connection.sendall(_PLAN.pack(_READ if operation == "read" else _WRITE, nbytes))
        if operation == "read":
            _receive(connection, nbytes)
        else:
            _send(connection, nbytes)
            connection.recv(1)
        return time.monotonic() - began


def main() -> None:
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    for line in sys.stdin:
        request = json.loads(line)
        addresses = request["addresses"]
        rest = request["operation"], request["nbytes"], request["start"]
        with ThreadPoolExecutor(len(addresses)) as threads:
            seconds = list(threads.map(lambda address, rest=rest: _move(address, *rest), addresses))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
