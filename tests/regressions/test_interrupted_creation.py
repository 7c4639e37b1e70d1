"""A creation whose end the coordinator's records do not show: calls wait for its servers, as their callers do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import smb
from smb.daemon.failpoint import ALLOWED_VARIABLE, POINT_VARIABLE
from smb.rpc import control_pb2 as pb
from tests.support.daemons import running_daemons
from tests.support.memory_server import coordinator_stub


def test_calls_for_its_name_wait_for_the_servers(tmp_path: Path) -> None:
    """A caller with little time hears why; another one's creation and lock are made once the server is back."""
    with running_daemons(tmp_path) as daemons, ThreadPoolExecutor() as pool:
        coordinator = daemons.coordinator()
        address = coordinator.address
        server = daemons.memory_server(address, "a")
        assert server.address
        coordinator.kill()
        daemons.variables = {POINT_VARIABLE: "coordinator.create.pending_stored", ALLOWED_VARIABLE: "1"}
        coordinator = daemons.coordinator(address)
        daemons.variables = {}
        with coordinator_stub(coordinator.address) as stub, pytest.raises(grpc.RpcError):
            stub.CreateBuffer(
                pb.CreateBufferRequest(name="w", shape=[10], dtype="float32"), timeout=30.0, wait_for_ready=True
            )
        for daemon in (coordinator, server):
            daemon.kill()
        coordinator = daemons.coordinator(address)
        with smb.connect(coordinator.address, timeout=2.0) as hasty, smb.connect(address, timeout=60.0) as patient:
            created = pool.submit(patient.create, "w", 20)
            for call in (lambda: hasty.open("w"), lambda: hasty.create("w", 20), lambda: hasty.rename("w", "v")):
                with pytest.raises(smb.Error, match=r"stopped within its creation.*until a has said"):
                    call()
            assert not created.done()
            assert daemons.memory_server(address, "a").address
            assert created.result(60).read().tolist() == [0] * 20
