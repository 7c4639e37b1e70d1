"""Spans of OpenTelemetry, with its own SDK: from a program's step to the servers' change; by default nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.config import tracing

trace = pytest.importorskip("opentelemetry.trace", reason="opentelemetry-api")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

EXPORTER = in_memory.InMemorySpanExporter()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The finished spans of this process, which is traced."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, sdk.TracerProvider):  # a process has one for good
        provider = sdk.TracerProvider()
        provider.add_span_processor(export.SimpleSpanProcessor(EXPORTER))
        trace.set_tracer_provider(provider)
    monkeypatch.setattr(tracing, "_tracer", None)
    monkeypatch.setenv("SMB_TRACE", "1")
    EXPORTER.clear()
    yield EXPORTER
    EXPORTER.clear()


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """Its daemons log as JSON."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SMB_COORDINATOR_LOG_FORMAT", "json")
        running = smb.LocalCluster(servers=1, capacity="64MiB", log_format="json")
    with running:
        yield running


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trace_leads_from_a_call_to_the_servers_logs(exporter: Any, cluster: smb.LocalCluster) -> None:
    """The span of a creation has the request id, under which the coordinator and the memory server log it, and both
    logs have the trace; calls on data have their buffer, bytes and servers, also small ones over shared memory."""
    with smb.connect(cluster.address) as client, trace.get_tracer("program").start_as_current_span("step"):
        weights = client.create("w", (10,))
        weights.write(np.ones(10, np.float32))
        weights.accumulate(np.ones(10, np.float32))
        assert weights.read().sum() == 20
        with pytest.raises(smb.AlreadyExistsError) as refused:
            client.create("w", (10,))
    spans = exporter.get_finished_spans()
    step = next(span for span in spans if span.name == "step")
    ours = [span for span in spans if span.parent is not None]
    assert {span.context.trace_id for span in ours} == {step.context.trace_id}
    data = [span for span in ours if span.name.startswith("smb.buffer")]
    assert [span.attributes["smb.operation"] for span in data] == ["write", "accumulate", "read"]
    assert {(span.attributes["smb.buffer"], span.attributes["smb.bytes"]) for span in data} == {("w", 40)}
    assert {span.attributes["smb.servers"] for span in data} == {("server-0",)}
    assert {span.attributes["smb.client"] for span in data} == {client.name}
    made, failed = [span for span in ours if span.name == "smb.coordinator CreateBuffer"]
    assert failed.attributes["smb.request_id"] in str(refused.value)
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert made.status.status_code is not trace.StatusCode.ERROR
    request, number = made.attributes["smb.request_id"], f"{step.context.trace_id:032x}"
    for daemon, logger in ((cluster.coordinator, "audit"), (cluster.servers[0], "memserver")):
        found = [each for each in lines(daemon.log) if each.get("request") == request]
        assert logger in {line["logger"] for line in found}
        assert {line["trace"] for line in found} == {number}


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_trainings_step_holds_its_calls(exporter: Any, cluster: smb.LocalCluster, overlapped: bool) -> None:
    """In the caller's thread and in the thread of an exchange in the background, within the program's own span."""
    values, name = np.zeros(1000, np.float32), f"run{overlapped:d}"
    with smb.connect(cluster.address) as client, smb.train.join(client, name, values, smb.train.SEASGD()) as worker:
        exporter.clear()
        steps = worker._steps
        with trace.get_tracer("program").start_as_current_span("train"):
            if overlapped:
                steps.start(1, lambda: None)
            else:
                steps.step(1)
        if overlapped:
            steps.finish()
    spans = exporter.get_finished_spans()
    (step,) = [span for span in spans if span.name == "smb.step"]
    assert dict(step.attributes) == {"smb.training": name, "smb.scheme": smb.train.SEASGD.NAME}
    (program,) = [span for span in spans if span.name == "train"]
    assert step.parent.span_id == program.context.span_id
    inside = [span for span in spans if span.parent is not None and span.parent.span_id == step.context.span_id]
    assert any(span.name.startswith("smb.buffer") for span in inside), [span.name for span in spans]


def test_nothing_is_imported_or_slowed_by_default(cluster: smb.LocalCluster) -> None:
    """Without SMB_TRACE no module of OpenTelemetry is loaded, and small calls take the short path."""
    program = (
        f"import sys, smb, numpy as np\n"
        f"with smb.connect({cluster.address!r}) as client:\n"
        f"    b = client.create('plain', (4,)); b.write(np.ones(4, np.float32)); b.read()\n"
        f"    assert type(b._dispatcher).__name__ == 'Dispatcher' and b._session.switch.open\n"
        f"assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_missing_package_is_named(cluster: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMB_TRACE=1 without it is an error, and never ignored."""
    monkeypatch.setattr(tracing, "_tracer", None)
    monkeypatch.setenv("SMB_TRACE", "1")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(smb.Error, match=r'needs opentelemetry-api: pip install "soft-memory-box\[otel\]"'):
        smb.connect(cluster.address)
