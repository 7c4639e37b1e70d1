"""A connection to a daemon's gRPC port ends at a certain age, also if its peer goes on calling: a certificate that does
not count any more holds none for ever.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from smb.daemon import process
from tests.support.daemons import wait_for


class Port(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Notes the connection of each call. Calls named "stands" wait until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.connections: set[str] = set()

    def service(self, details: Any) -> Any:
        def answer(_request: bytes, context: Any) -> bytes:
            self.connections.add(context.peer())
            if details.method.endswith("stands"):
                self.go.wait(60)
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


def test_a_connection_ends_at_its_age_and_no_call_fails_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is under way, and none of those that come meanwhile."""
    monkeypatch.setattr(process, "GRPC_CONNECTION_AGE_MS", 200)
    port, threads = Port(), ThreadPoolExecutor(4)
    server = grpc.server(threads, handlers=[port], options=process.grpc_server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            stands = channel.unary_unary("/smb/stands", None, None).future(b"")
            call = channel.unary_unary("/smb/call", None, None)

            def came_over_several() -> bool:
                call(b"", timeout=60)
                return len(port.connections) > 4

            wait_for(came_over_several, "calls over several connections")
            assert not stands.done()
            port.go.set()
            assert stands.result(60) == b""
    finally:
        port.go.set()
        server.stop(0).wait()
        threads.shutdown()
