"""All calls stood in one queue: behind eight thousand of a reader, the renewals of others' sessions took longer than
their time limit, and the sessions ended. Beyond a thousand in that queue, gRPC refused some; these were asked again at
once, so a burst went on as a storm.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio

from smb.daemon.process import GRPC_CALLS_PER_CONNECTION_MAX, grpc_server_options
from tests.support.daemons import wait_for

MORE = 100


class Standing(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Calls that stand until `go`, and those that arrived, by who called."""

    def __init__(self) -> None:
        self.go, self.arrived = threading.Event(), dict.fromkeys(("flood", "renewal"), 0)

    def service(self, details: Any) -> Any:
        who = details.method.strip("/").split("/")[0]
        self.arrived[who] += 1  # by one thread
        return grpc.unary_unary_rpc_method_handler(self._stand)

    def _stand(self, _request: bytes, _context: Any) -> bytes:
        self.go.wait(60)
        return b""


def test_one_connection_has_some_hundred_calls_at_the_server_and_others_get_through() -> None:
    standing = Standing()
    threads = ThreadPoolExecutor(GRPC_CALLS_PER_CONNECTION_MAX + 2 * MORE)
    server = grpc.server(threads, handlers=[standing], options=grpc_server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    apart = [("grpc.use_local_subchannel_pool", 1)]  # else the two share one connection
    try:
        with grpc.insecure_channel(address, apart) as flood, grpc.insecure_channel(address, apart) as other:
            grpc.channel_ready_future(flood).result(60)  # it has been told the bound
            flooding, renewing = (
                way.unary_unary(f"/{who}/x", None, None) for way, who in ((flood, "flood"), (other, "renewal"))
            )
            called = [flooding.future(b"") for _ in range(GRPC_CALLS_PER_CONNECTION_MAX + MORE)]
            wait_for(lambda: standing.arrived["flood"] >= GRPC_CALLS_PER_CONNECTION_MAX, "calls of one connection")
            renewal = renewing.future(b"")
            wait_for(lambda: standing.arrived["renewal"] == 1, "call of another connection")
            assert standing.arrived["flood"] == GRPC_CALLS_PER_CONNECTION_MAX
            for call in called[GRPC_CALLS_PER_CONNECTION_MAX:]:
                call.cancel()  # type: ignore[no-untyped-call]
            standing.go.set()
            assert renewal.result(60) == b""
    finally:
        standing.go.set()
        server.stop(0).wait()
        threads.shutdown()


DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, ACK, END_HEADERS = 1, 1, 4


class Caller:
    """A connection of HTTP/2 that makes calls, and knows when the server has seen them."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self.ended: Counter[int] = Counter()  # streams, by the type of the frame that ended them

    def close(self) -> None:
        self._socket.close()

    def call(self, count: int) -> None:
        """Make so many calls, and wait until the server has seen them all: it answers frames in their order."""
        # :method POST, :scheme http, :path /x/y, :authority a, content-type application/grpc, te trailers
        block = b"\x83\x86\x04\x04/x/y\x01\x01a\x0f\x10\x10application/grpc\x00\x02te\x08trailers"
        sent = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", _frame(SETTINGS, 0, 0), _frame(SETTINGS, ACK, 0)]
        for stream in range(1, 2 * count, 2):
            sent += [_frame(HEADERS, END_HEADERS, stream, block), _frame(DATA, END_STREAM, stream, bytes(5))]
        self._socket.sendall(b"".join([*sent, _frame(PING, 0, 0, bytes(8))]))
        while self._read() != (PING, ACK):
            pass

    def until_ended(self, count: int) -> None:
        """Wait until so many calls have ended."""
        while self.ended.total() < count:
            self._read()

    def _read(self) -> tuple[int, int]:
        """Return the next frame's type and flags."""
        length, kind, flags = struct.unpack(">IBB", b"\0" + self._bytes(5))
        self._bytes(4 + length)
        if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended[kind] += 1
        return kind, flags

    def _bytes(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._socket.recv(count - len(found))
            assert part, "the server closed the connection"
            found += part
        return found


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def test_a_burst_that_the_loop_has_not_taken_yet_is_not_refused() -> None:
    """Some of these calls were ended by the frame RST_STREAM, and a client that made one did not know its outcome."""
    calls, ports = GRPC_CALLS_PER_CONNECTION_MAX, list[int]()
    served, go, over = threading.Event(), threading.Event(), threading.Event()

    async def answer(_request: bytes, _context: Any) -> bytes:
        return b""

    async def serve() -> None:
        server = grpc.aio.server(options=grpc_server_options())
        handler = grpc.method_handlers_generic_handler("x", {"y": grpc.unary_unary_rpc_method_handler(answer)})
        server.add_generic_rpc_handlers((handler,))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        served.set()
        go.wait(60)  # the loop stands still
        await asyncio.to_thread(over.wait, 60)
        await server.stop(0)

    serving = threading.Thread(target=lambda: asyncio.run(serve()))
    serving.start()
    with ExitStack() as held:
        held.callback(serving.join)
        held.callback(over.set)
        held.callback(go.set)
        assert served.wait(60)
        callers = [Caller(ports[0]) for _ in range(6)]
        for caller in callers:
            held.callback(caller.close)
            caller.call(calls)
        go.set()
        for caller in callers:
            caller.until_ended(calls)
            assert caller.ended == {HEADERS: calls}
