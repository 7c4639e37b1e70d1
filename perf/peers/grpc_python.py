"""gRPC for Python over TCP, with raw bytes as messages: unary, streamed in chunks of 1 MiB, and unary without copies.

Without copies means outside of gRPC: a client sends bytes that it has made once, and the server keeps what came as it
came. Only an accumulate makes an array of it, once.

Limits on messages are lifted. A message holds at most 2 GiB less some bytes. The server has one thread for each client,
and adds with numpy under one lock: the interpreter's lock lets no two go on at once but within numpy and gRPC's core.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import numpy as np

from perf import remote
from perf.clients import Array, zeros
from perf.contender import FETCH_ADD, Case, Sample
from perf.peers import processes

CHUNK_BYTES = 1 << 20
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
)


class Store:
    """The array and the counter, in the server."""

    def __init__(self, nbytes: int) -> None:
        self._array = zeros(nbytes // 4)
        self._bytes = memoryview(self._array).cast("B")
        self._kept: bytes | None = None  # the contents, if they came whole and nothing was added since
        self._counter = 0
        self._lock = threading.Lock()

    def write(self, request: bytes, _: Any) -> bytes:
        self._bytes[:] = request
        return b""

    def read(self, _request: bytes, _: Any) -> bytes:
        return bytes(self._bytes)

    def keep(self, request: bytes, _: Any) -> bytes:
        with self._lock:
            self._kept = request
        return b""

    def read_kept(self, _request: bytes, _: Any) -> bytes:
        with self._lock:
            if self._kept is None:
                self._kept = bytes(self._bytes)
            return self._kept

    def accumulate_kept(self, request: bytes, _: Any) -> bytes:
        with self._lock:
            if self._kept is not None:
                self._bytes[:] = self._kept
                self._kept = None
            self._array += np.frombuffer(request, np.float32)
        return b""

    def accumulate(self, request: bytes, _: Any) -> bytes:
        with self._lock:
            self._array += np.frombuffer(request, np.float32)
        return b""

    def fetch_add(self, request: bytes, _: Any) -> bytes:
        with self._lock:
            before = self._counter
            self._counter = before + int.from_bytes(request, "little", signed=True)
        return before.to_bytes(8, "little", signed=True)

    def write_streamed(self, requests: Iterator[bytes], _: Any) -> bytes:
        at = 0
        for request in requests:
            self._bytes[at : at + len(request)] = request
            at += len(request)
        return b""

    def read_streamed(self, _request: bytes, _: Any) -> Iterator[bytes]:
        for at in range(0, len(self._bytes), CHUNK_BYTES):
            yield bytes(self._bytes[at : at + CHUNK_BYTES])

    def accumulate_streamed(self, requests: Iterator[bytes], _: Any) -> bytes:
        at = 0
        for request in requests:
            values = np.frombuffer(request, np.float32)
            with self._lock:
                self._array[at : at + values.size] += values
            at += values.size
        return b""


def serve(ready: Callable[[int], None], nbytes: int, clients: int) -> None:
    import grpc

    store = Store(nbytes)
    handlers = {
        "write": grpc.unary_unary_rpc_method_handler(store.write),
        "read": grpc.unary_unary_rpc_method_handler(store.read),
        "accumulate": grpc.unary_unary_rpc_method_handler(store.accumulate),
        "fetch_add": grpc.unary_unary_rpc_method_handler(store.fetch_add),
        "keep": grpc.unary_unary_rpc_method_handler(store.keep),
        "read_kept": grpc.unary_unary_rpc_method_handler(store.read_kept),
        "accumulate_kept": grpc.unary_unary_rpc_method_handler(store.accumulate_kept),
        "write_streamed": grpc.stream_unary_rpc_method_handler(store.write_streamed),
        "read_streamed": grpc.unary_stream_rpc_method_handler(store.read_streamed),
        "accumulate_streamed": grpc.stream_unary_rpc_method_handler(store.accumulate_streamed),
    }
    # One more thread for the process that sets and checks the array.
    at_server = grpc.server(futures.ThreadPoolExecutor(clients + 1), options=OPTIONS)
    at_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Store", handlers),))
    port = at_server.add_insecure_port(f"{remote.server_address()}:0")
    at_server.start()
    ready(port)
    at_server.wait_for_termination()


class Unary:
    """A channel to the store: one message with the whole array a call."""

    def __init__(self, port: int, _case: Case, _client: int) -> None:
        import grpc

        self._channel = grpc.insecure_channel(f"{remote.server_address()}:{port}", options=OPTIONS)
        self._write = self._channel.unary_unary("/Store/write")
        self._read = self._channel.unary_unary("/Store/read")
        self._accumulate = self._channel.unary_unary("/Store/accumulate")
        self._fetch_add = self._channel.unary_unary("/Store/fetch_add")

    def write(self, source: Array) -> None:
        self._write(source.tobytes())

    def read(self, _into: Array) -> Array:
        return np.frombuffer(self._read(b""), np.float32)

    def accumulate(self, contribution: Array) -> None:
        self._accumulate(contribution.tobytes())

    def fetch_add(self, value: int) -> int:
        return int.from_bytes(self._fetch_add(value.to_bytes(8, "little", signed=True)), "little", signed=True)

    def close(self) -> None:
        self._channel.close()


class Uncopied(Unary):
    """Messages that are made once for each array."""

    def __init__(self, port: int, case: Case, client: int) -> None:
        super().__init__(port, case, client)
        self._write = self._channel.unary_unary("/Store/keep")
        self._read = self._channel.unary_unary("/Store/read_kept")
        self._accumulate = self._channel.unary_unary("/Store/accumulate_kept")
        self._made: tuple[Array, bytes] | None = None

    def write(self, source: Array) -> None:
        self._write(self._message(source))

    def accumulate(self, contribution: Array) -> None:
        self._accumulate(self._message(contribution))

    def _message(self, array: Array) -> bytes:
        if self._made is None or self._made[0] is not array:
            self._made = (array, array.tobytes())
        return self._made[1]


class Streamed(Unary):
    """A stream of messages of 1 MiB a call."""

    def __init__(self, port: int, case: Case, client: int) -> None:
        super().__init__(port, case, client)
        self._write_streamed = self._channel.stream_unary("/Store/write_streamed")
        self._read_streamed = self._channel.unary_stream("/Store/read_streamed")
        self._accumulate_streamed = self._channel.stream_unary("/Store/accumulate_streamed")

    def write(self, source: Array) -> None:
        self._write_streamed(_chunks(source))

    def read(self, into: Array) -> Array:
        there = memoryview(into).cast("B")
        at = 0
        for chunk in self._read_streamed(b""):
            there[at : at + len(chunk)] = chunk
            at += len(chunk)
        return into

    def accumulate(self, contribution: Array) -> None:
        self._accumulate_streamed(_chunks(contribution))


def _chunks(array: Array) -> Iterator[bytes]:
    here = memoryview(array).cast("B")
    for at in range(0, len(here), CHUNK_BYTES):
        yield bytes(here[at : at + CHUNK_BYTES])


class GrpcUnary(processes.Peer):
    name = "gRPC, unary"
    connect: type[Unary] = Unary

    def missing(self) -> str | None:
        return processes.missing_modules("grpc")

    def takes(self, case: Case) -> bool:
        return case.over_tcp

    def measure(self, case: Case) -> Sample:
        with processes.server(serve, case.nbytes, case.clients) as (pid, port):
            return processes.measure(case, functools.partial(self.connect, port), pid)


class GrpcUncopied(GrpcUnary):
    name = "gRPC, unary, no copies"
    connect = Uncopied

    def takes(self, case: Case) -> bool:
        return case.over_tcp and case.operation != FETCH_ADD


class GrpcStreamed(GrpcUnary):
    name = "gRPC, streamed by 1 MiB"
    connect = Streamed

    def takes(self, case: Case) -> bool:
        return case.over_tcp and case.operation != FETCH_ADD and case.nbytes > CHUNK_BYTES


CONTENDERS = [GrpcUnary(), GrpcStreamed(), GrpcUncopied()]
