"""All calls stood in one queue: behind eight thousand of a reader, the renewals of others' sessions took longer than
their time limit, and the sessions ended.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

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
