"""A TCP proxy that breaks what passes: between a client and a memory server, aimed at single frames, by a seeded plan.

It knows the 64-byte header, so it can cut a frame at a byte, swallow it, send it twice, or hold it back. Its actions
are counted by name. A spoilt frame loses its magic number: a protocol without checksums can't tell a changed offset
from a meant one, and TCP's own checksum is what keeps those away. One bit of any frame is flipped for clients with
checksums.
"""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemons import keep_port, running_daemons
from tests.support.raw import HEADER, Opcode

_PAYLOAD = struct.Struct("<I")
_PAYLOAD_AT = 52
_HELD_BACK_S = 0.002


@dataclass(frozen=True, slots=True)
class Fault:
    """Decide about a frame. `at`: the byte at which it is cut."""

    name: str
    at: int = 0


REQUEST_FAULTS = ("cut request", "drop request", "double request", "hold request", "spoil request")
REPLY_FAULTS = ("cut reply", "hold reply")
FLIPS = ("flip request", "flip reply")
Plan = Callable[[bool, bytes], "Fault | None"]  # (is it a reply, header)


class CutError(Exception):
    """This connection is over."""


class RandomPlan:
    """A fault for about one operation in `every`, which is a request and a reply; never for HELLO. From a seed."""

    def __init__(self, seed: int, every: float) -> None:
        self._random = random.Random(seed)
        self._every = every
        self._lock = threading.Lock()
        self.quiet = False

    def __call__(self, reply: bool, header: bytes) -> Fault | None:
        with self._lock:
            if self.quiet or header[3] == Opcode.HELLO or self._random.random() * 2 * self._every >= 1:
                return None
            name = self._random.choice(REPLY_FAULTS if reply else REQUEST_FAULTS)
            return Fault(name, self._random.randrange(HEADER.size + 1))


class Proxy:
    """Listens at `port`, passes on to the port `upstream` on this host. `close` it."""

    def __init__(self, upstream: int, plan: Plan) -> None:
        self.plan = plan
        self.upstream = upstream
        self.fired: collections.Counter[str] = collections.Counter()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End every connection, and take no more."""
        _shut(self._listener)  # closing alone leaves a waiting accept(), which would take one more
        self._listener.close()
        with self._lock:
            left = list(self._sockets)
        for one in left:
            _shut(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            server = socket.create_connection(("127.0.0.1", self.upstream), 5)
            with server:
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    one.settimeout(None)
                with self._lock:
                    self._sockets |= {client, server}
                doubled: collections.Counter[bytes] = collections.Counter()
                back = threading.Thread(target=self._pass, args=(server, client, True, doubled), daemon=True)
                back.start()
                self._pass(client, server, False, doubled)
                back.join()
                with self._lock:
                    self._sockets -= {client, server}

    def _pass(
        self, source: socket.socket, sink: socket.socket, reply: bool, doubled: collections.Counter[bytes]
    ) -> None:
        try:
            for header, payload in _frames(source):
                sequence = header[24:32]
                if reply and doubled[sequence]:
                    doubled[sequence] -= 1
                    if doubled[sequence] == 0:
                        continue  # the answer to the second of the two
                self._forward(sink, header, payload, self.plan(reply, header), doubled)
        except (OSError, CutError):
            pass
        finally:
            _shut(source)
            _shut(sink)

    def _forward(
        self,
        sink: socket.socket,
        header: bytes,
        payload: bytes,
        fault: Fault | None,
        doubled: collections.Counter[bytes],
    ) -> None:
        frame = header + payload
        if fault is None:
            sink.sendall(frame)
            return
        self.fired[fault.name] += 1
        match fault.name:
            case "cut request" | "cut reply":
                sink.sendall(frame[: min(fault.at, len(frame) - 1)])
                raise CutError
            case "drop request":
                raise CutError
            case "spoil request":
                sink.sendall(b"XX" + frame[2:])
                raise CutError
            case "double request":
                doubled[header[24:32]] = 2
                sink.sendall(frame + frame)
            case "flip request" | "flip reply":
                flipped = bytearray(frame)
                flipped[fault.at // 8 % len(frame)] ^= 1 << fault.at % 8
                sink.sendall(flipped)
            case "hold request" | "hold reply":
                time.sleep(_HELD_BACK_S)
                sink.sendall(frame)
            case _:
                raise AssertionError(fault.name)


@contextlib.contextmanager
def behind_a_proxy(directory: Path, plan: Plan, *options: str) -> Iterator[tuple[str, Proxy]]:
    """A cluster of one server, with those options, that says its address is the proxy's."""
    with keep_port() as kept:
        port = int(kept.getsockname()[1])
        proxy = Proxy(port, plan)
        try:
            with running_daemons(directory) as daemons:
                address = daemons.coordinator().address
                where = ("--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{proxy.port}")
                server = daemons.memory_server(address, "a", *where, *options)
                assert server.address == f"127.0.0.1:{proxy.port}"
                yield address, proxy
        finally:
            proxy.close()


def _frames(source: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    while True:
        header = _receive(source, HEADER.size)
        if not header:
            return
        (length,) = _PAYLOAD.unpack_from(header, _PAYLOAD_AT)
        payload = _receive(source, length)
        if len(payload) < length:
            return
        yield header, payload


def _receive(source: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = source.recv(count - len(received))
        if not part:
            return b""
        received += part
    return bytes(received)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
