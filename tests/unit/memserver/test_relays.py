"""memserver.relays: the process that fills mirrors."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

from memserver import relays
from memserver.relays import Relays
from smb.rpc import control_pb2 as pb


def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of descriptors for a moment: the thread ended, and no mirror was filled until the server's restart."""
    for pause in ("_AGAIN_FIRST_S", "_AGAIN_MAX_S"):
        monkeypatch.setattr(relays, pause, 0.001)
    tries, twice = [], threading.Event()

    def popen(command: Any, **_: Any) -> Any:
        tries.append(command)
        if len(tries) == 2:
            twice.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", popen)
    ours = Relays("127.0.0.1:1", "server")
    ours.take([pb.MirrorTask(name="m", source="s", id=1)])
    assert twice.wait(30)
    ours.close()
    assert "cannot be started: [Errno 24] Too many open files" in caplog.text
