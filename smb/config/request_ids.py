"""The id of a call on the control plane: the same in a client's error, in the coordinator's log and audit lines, and in
the logs of the memory servers that the call changed.

A client makes the id and sends it as metadata, with its own name and, if it is traced, the W3C's `traceparent`.
A daemon takes nothing else from there than a well-formed id, a trace and a short name, which are all for people.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from smb.config.tracing import TRACE_METADATA

REQUEST, CLIENT, TRACE = "smb-request", "smb-client", TRACE_METADATA
_ID = re.compile(r"[0-9a-f]{16}")
_TRACE = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_NAME_MAX = 255
Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class CallInfo:
    """A call that runs now. `action` and `target` are what the audit line says of it; without an action there is no
    line."""

    request: str
    client: str = ""
    trace: str = ""
    action: str = ""
    target: str = ""


_now: ContextVar[CallInfo | None] = ContextVar("call", default=None)


def new_id() -> str:
    return secrets.token_hex(8)


def metadata_of(request: str, client: str = "", trace: str = "") -> Metadata:
    """Return what a call sends. Names are quoted, because metadata is ASCII."""
    named = ((CLIENT, quote(client[:_NAME_MAX])),) if client else ()
    return ((REQUEST, request), *named, *(((TRACE, trace),) if trace else ()))


def passed_on() -> Metadata:
    """Return the metadata for a daemon's own calls that belong to the call that runs now; empty outside of calls."""
    call = _now.get()
    return metadata_of(call.request, "", call.trace) if call is not None else ()


def begin(metadata: Sequence[tuple[str, Any]]) -> CallInfo:
    """Return the call that begins in this context, with what its caller sent."""
    found = {key: value for key, value in metadata if key in (REQUEST, CLIENT, TRACE) and isinstance(value, str)}
    request, trace = found.get(REQUEST, ""), found.get(TRACE, "")
    call = CallInfo(
        request if _ID.fullmatch(request) else new_id(),
        unquote(found.get(CLIENT, "")[: 3 * _NAME_MAX], errors="replace")[:_NAME_MAX],
        trace if _TRACE.fullmatch(trace) else "",
    )
    _now.set(call)
    return call


def request_of_call() -> str:
    """Return the id of the call that runs now; empty outside of calls."""
    call = _now.get()
    return call.request if call is not None else ""


def end() -> None:
    """Leave the call, in a thread that goes on with another."""
    _now.set(None)


def audited(action: str, target: str) -> None:
    """Have the call that runs now leave an audit line: what is done, and to what."""
    call = _now.get()
    if call is not None:
        call.action, call.target = action, target


class LogsRequest(logging.Filter):
    """Adds the id and the trace of the call that runs now to a record of the log: `request` and `trace`."""

    def filter(self, record: logging.LogRecord) -> bool:
        call = _now.get()
        if not hasattr(record, "request"):
            record.request = call.request if call is not None else ""
            found = _TRACE.fullmatch(call.trace) if call is not None else None
            record.trace = found[1] if found else ""
        return True
