"""A coordinator started on an empty state once told every server to drop its segments: all data of the cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import smb
from tests.support.daemons import running_daemons, wait_for


def test_a_coordinator_with_an_empty_state_costs_no_data(tmp_path: Path) -> None:
    """A running server and a restarted one both keep their segments, and serve again for the right coordinator."""
    with running_daemons(tmp_path) as daemons:
        right = daemons.coordinator()
        address = right.address
        server = daemons.memory_server(address, "a")
        assert server.address
        with smb.connect(address) as client:
            client.create("weights", (1000,)).write(np.arange(1000, dtype=np.float32))
        segments = daemons.files()
        right.kill()

        wrong = daemons.coordinator(address, state=str(tmp_path / "empty"))
        assert wrong.address == address
        wait_for(lambda: "not known here" in server.log.read_text(), "refusal in the running server's log")
        server.kill()
        restarted = daemons.memory_server(address, "a")
        assert restarted.wait() == 1
        assert "the --state that knows them" in restarted.log.read_text()
        assert [name for name in segments if name.endswith(".segment")] == [
            name for name in daemons.files() if name.endswith(".segment")
        ]
        wrong.stop()

        again = daemons.coordinator(address)
        assert again.address == address
        assert daemons.memory_server(address, "a").address
        with smb.connect(address) as client:
            np.testing.assert_array_equal(client.open("weights").read(), np.arange(1000, dtype=np.float32))
