"""Spans of OpenTelemetry, in a program that asks for them with SMB_TRACE=1: a training's steps, calls on buffers, calls
to the coordinator. Off by default: then nothing of OpenTelemetry is imported.

The library uses opentelemetry-api (the extra "otel") alone. Where the spans go is up to the program, which sets up an
SDK. The W3C's `traceparent` goes along with calls to the coordinator, whose logs and memory servers' logs have the
trace; frames of data have no place for it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from smb.config.settings import switch_of
from smb.errors import Error

TRACE_METADATA = "traceparent"
_tracer: Any = None  # None: off


def start() -> None:
    """Begin to make spans if SMB_TRACE says so. Raises Error if opentelemetry-api is not installed."""
    global _tracer
    if _tracer is not None or not switch_of("client.trace"):
        return
    try:
        from opentelemetry import trace
    except ImportError:
        raise Error('SMB_TRACE=1 needs opentelemetry-api: pip install "soft-memory-box[otel]"') from None
    _tracer = trace.get_tracer("smb")


def on() -> bool:
    """Whether this process makes spans."""
    return _tracer is not None


@contextlib.contextmanager
def span(name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Make a span of the block, within the span of its caller; an error that leaves the block is noted in it. Does
    nothing while tracing is off.
    """
    if _tracer is None:
        yield
        return
    with _tracer.start_as_current_span(name, attributes=attributes):
        yield


def parent() -> str:
    """Return the `traceparent` of the span that runs now; empty without one."""
    if _tracer is None:
        return ""
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get(TRACE_METADATA, "")


def carried(run: Callable[[], None]) -> Callable[[], None]:
    """Return `run` so that, in another thread, its spans are within the span that runs now."""
    if _tracer is None:
        return run
    context = contextvars.copy_context()
    return lambda: context.run(run)
