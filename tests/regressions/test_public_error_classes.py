"""A wait that timed out raised a private class, and a traceback of it named that class instead of smb.TimeoutError."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest

import smb
from smb.call.sync_requests import SegmentMovedError


def test_waits_that_time_out(client: smb.Client) -> None:
    """Waiting for a version, a lock and a publisher's turn: the class is public, and so are its causes."""
    buffer = client.create("w", 10, versions=2)
    buffer.publish(range(10))
    _check(lambda: buffer.wait(2, timeout=0.0))
    with client.lock("l"), buffer.pin(1):
        buffer.publish(range(10))
        _check(lambda: client.lock("l", timeout=0.0).acquire())
        _check(lambda: buffer.publish(range(10), timeout=0.0))


def _check(call: Callable[[], object]) -> None:
    with pytest.raises(smb.TimeoutError) as caught:
        call()
    assert type(caught.value) is smb.TimeoutError
    assert "NotInTime" not in "".join(traceback.format_exception(caught.value))


def test_a_segment_that_moved(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does not answer for a segment: UnavailableError, with the outcome of the request."""
    lock = client.lock("l")

    def moved(*_: object, **__: object) -> None:
        raise SegmentMovedError("moved; nothing was done", outcome="not applied")

    monkeypatch.setattr(lock._home, "_ask", moved)
    monkeypatch.setattr(client._session, "timeout", 0.1)
    with pytest.raises(smb.UnavailableError, match="moved; nothing was done") as caught:
        lock.acquire()
    assert type(caught.value) is smb.UnavailableError
    assert caught.value.outcome == "not applied"
