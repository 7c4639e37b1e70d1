"""memserver.relays: the process that fills mirrors."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

from memserver import relays
from memserver.relays import Relays


def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of descriptors for a moment: the thread ended, and no mirror was filled until the server's restart."""
    for pause in ("_AGAIN_FIRST_S", "_AGAIN_MAX_S"):
        monkeypatch.setattr(relays, pause, 0.001)
    ours = Relays.__new__(Relays)
    ours._command, ours._variables, ours._wanted = ["relay"], {}, "tasks"
    ours._stop, ours._changed, ours._lock = threading.Event(), threading.Event(), threading.Lock()
    ours._changed.set()
    started: list[Any] = []

    def popen(command: Any, **_: Any) -> Any:
        started.append(command)
        if len(started) == 2:
            ours._stop.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", popen)
    ours._run()
    assert len(started) == 2
    assert "cannot be started: [Errno 24] Too many open files" in caplog.text
