"""The client of the coordinator, without one."""

from __future__ import annotations

from typing import Any

import pytest

from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import Coordinator


def test_a_create_that_is_made_again_finds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that must be the first has a number of its own: its answer may be lost, and the next run then has it."""
    asked: list[Any] = []

    def call(_method: str, request: Any, _timeout: float) -> pb.Buffer:
        asked.append(request)
        return pb.Buffer()

    coordinator = Coordinator("127.0.0.1:1")
    monkeypatch.setattr(coordinator, "_call", call)
    for exist_ok in (False, False, True):
        coordinator.create_buffer(pb.CreateBufferRequest(name="w", exist_ok=exist_ok), 1.0)
    coordinator.close()
    first, second, opens = (request.attempt_id for request in asked)
    assert first and second and first != second  # noqa: PT018 - one statement of all three
    assert opens == 0
