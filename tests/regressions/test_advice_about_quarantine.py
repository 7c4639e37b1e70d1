"""The advice about quarantined memory once named `smb forget SERVER`, which fails without segments or --all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from smb.coordinator.dashboard.diagnosis import problems
from smb.coordinator.dashboard.history import EventWatch
from smb.coordinator.records import Held
from smb.tools.cli import drain
from smb.tools.cli.main import app
from tests.support.decisions import Cluster

SEGMENT = 0x1F00AA94E21B07D3


def test_each_advised_command_frees_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the commands from the advice and run them: each asks the coordinator to free what it says."""
    cluster = Cluster()
    cluster.register("a")
    state = replace(cluster.state, unexplained={"a": {SEGMENT: Held(1, quarantined=True, nbytes=4096)}})
    (problem,) = problems(state, EventWatch(cluster.now).seen(cluster.now), cluster.now)
    commands = re.findall(r"smb (forget a(?: SEGMENT| --all)?)", problem.action)
    asked: list[tuple[str, list[int]]] = []

    class Coordinator:
        def forget_segments(self, server: str, numbers: list[int], _timeout_s: float) -> Any:
            asked.append((server, numbers))
            return SimpleNamespace(nbytes=4096, segment_count=1)

    @contextmanager
    def coordinator_at(_address: str | None) -> Iterator[Coordinator]:
        yield Coordinator()

    monkeypatch.setattr(drain, "coordinator_at", coordinator_at)
    for command in commands:
        answer = CliRunner().invoke(app, command.replace("SEGMENT", f"{SEGMENT:016x}").split())
        assert answer.exit_code == 0, (command, answer.output)
    assert asked == [("a", [SEGMENT]), ("a", [])]
