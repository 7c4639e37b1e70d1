"""Collected in one go, a link once outlived its client by a moment and woke it: a use after free."""

from __future__ import annotations

import gc

from smb.engine import EngineClient, Lane, Link
from tests.support.engine_server import engine_server


def test_a_link_may_be_freed_after_its_client(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    """The client's owner goes first, then the link closes: nothing of the client is touched that was freed (under the
    sanitizers this is what fails)."""
    with engine_server(tmp_path_factory.mktemp("server")) as server:
        for _ in range(100):
            client = EngineClient(1)
            link, _ = client.connect_tcp("127.0.0.1", server.port, Lane.TCP_DATA, 5000)
            assert isinstance(link, Link)
            link._client = None  # type: ignore[assignment]
            del client
            gc.collect(0)  # all of it, a hundred times, took 40 s behind tests that import PyTorch
            assert link.alive()
            del link
