"""The physical limits: one pass of the processor over shared memory, or a bare socket that moves the same bytes."""

from __future__ import annotations

import mmap
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from smb.daemon.launch import python_c
from smb.errors import Error
from smb.tools.bench import peer

Contenders = dict[str, Callable[[], object]]
Array = NDArray[np.float32]


# (operation, private array, stack that closes what is opened) -> calls for one round; empty if nothing is comparable.
Limit = Callable[[str, Array, ExitStack], Contenders]


def no_limit(*_: object) -> Contenders:
    """Return no limit: for servers on other hosts, whose memory and network this process cannot measure alone."""
    return {}


def memory_limit(operation: str, array: Array, _stack: ExitStack) -> Contenders:
    """Return one copy between the array and a tmpfs file, or one in-place addition there; nothing for fetch_add."""
    shared = _shared_array(array.size)
    calls: dict[str, Contenders] = {
        "write": {"memcpy": lambda: np.copyto(shared, array)},
        "read": {"memcpy": lambda: np.copyto(array, shared)},
        "accumulate": {"numpy add": lambda: np.add(shared, array, out=shared)},
    }
    return calls.get(operation, {})


class SocketLimit:
    """A blocking TCP socket on loopback to the peer process at this address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def __call__(self, operation: str, array: Array, stack: ExitStack) -> Contenders:
        """Return one round with the peer. For accumulate, return two: one adds when all bytes have arrived, one adds
        piece by piece.
        """
        if operation == "read":
            return {"bare socket": self._pending(array, stack)}
        if operation != "accumulate":  # for fetch_add too: 8 bytes there, an answer back
            return {"bare socket": self._telling(peer.WRITE, array, stack)}
        calls: Contenders = {"bare socket, add": self._telling(peer.ADD_WHOLE, array, stack)}
        if array.nbytes > peer.BLOCK_BYTES:
            calls["bare socket, add pieces"] = self._telling(peer.ADD_BLOCKS, array, stack)
        return calls

    def _connect(self, mode: int, nbytes: int, stack: ExitStack) -> socket.socket:
        connection = stack.enter_context(socket.create_connection(self._address))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(peer.COMMAND.pack(mode, nbytes))
        return connection

    def _telling(self, mode: int, array: Array, stack: ExitStack) -> Callable[[], object]:
        connection, answer = self._connect(mode, array.nbytes, stack), memoryview(bytearray(1))

        def one_round() -> None:
            connection.sendall(array.data)
            _expect(peer.receive_into(connection, answer))

        return one_round

    def _pending(self, array: Array, stack: ExitStack) -> Callable[[], object]:
        connection, view = self._connect(peer.READ, array.nbytes, stack), array.data.cast("B")

        def one_round() -> None:
            connection.sendall(b"\1")
            _expect(peer.receive_into(connection, view))

        return one_round


@contextmanager
def socket_limit() -> Iterator[SocketLimit]:
    """Start the peer process, which ends with the context."""
    with subprocess.Popen(  # noqa: S603 - our own interpreter and module
        python_c("from smb.tools.bench.peer import main; main()"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline()
            _expect(bool(port))
            yield SocketLimit(("127.0.0.1", int(port)))
        finally:
            process.stdin.close()


def _expect(answered: bool) -> None:
    if not answered:
        raise Error("the benchmark's peer process (smb.tools.bench.peer) ended early; its error is above")


def _shared_array(count: int) -> Array:
    """Return float32 ones, shape (count,), in an unnamed tmpfs file."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(count * 4)
        array: Array = np.frombuffer(mmap.mmap(file.fileno(), count * 4), dtype=np.float32)
    array.fill(1.0)
    return array
