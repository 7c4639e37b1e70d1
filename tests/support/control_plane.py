"""A coordinator's port with a service of the test's own behind it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from smb.rpc.control_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server


@contextmanager
def served(service: CoordinatorServicer) -> Iterator[str]:
    """Serve it on a free port; the address."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_CoordinatorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)
