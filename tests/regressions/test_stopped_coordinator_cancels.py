"""A coordinator that stops cancels the calls under way: the client said that it had been closed itself."""

from __future__ import annotations

from typing import Any

import grpc

from smb.rpc.coordinator_client import Coordinator


class Cancelled(grpc.RpcError):
    """What gRPC raises for a call that was cancelled, by whichever end."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return "CANCELLED"

    def trailing_metadata(self) -> tuple[Any, ...]:
        return ()


def test_who_cancelled_is_told_apart() -> None:
    """Of an open client it was the coordinator, and a change's outcome is unknown; of a closed one, the client."""
    client = Coordinator("127.0.0.1:1")
    stopped = client._error(Cancelled(), 1.0, changes=True, request_id="")
    assert "stopped before it answered" in str(stopped)
    assert stopped.outcome == "unknown"
    client.close()
    assert "the client was closed" in str(client._error(Cancelled(), 1.0, changes=True, request_id=""))
