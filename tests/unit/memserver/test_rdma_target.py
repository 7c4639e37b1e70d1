"""memserver.rdma_target, without a device: what is left of a connection that could not be made."""

from __future__ import annotations

import socket
import threading
import time
from unittest.mock import Mock

import pytest

from memserver import rdma_target
from memserver.rdma_target import RdmaTarget
from smb.errors import UnavailableError
from smb.transport.verbs.queue_pair import End


@pytest.mark.parametrize("missing", ["socket", "progress"])
def test_a_connection_that_could_not_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Without descriptors each try took eight slots for good, until no connection had one to write with."""
    engine, queue, slots = Mock(), Mock(), Mock(addresses=[1, 2])
    engine.take_slots.return_value = slots
    monkeypatch.setattr(rdma_target, "Domain", Mock())
    monkeypatch.setattr(rdma_target, "QueuePair", Mock(return_value=queue))
    error = OSError(24, "Too many open files")
    if missing == "socket":
        monkeypatch.setattr(rdma_target, "ProgressThread", Mock())
        monkeypatch.setattr(socket, "socketpair", Mock(side_effect=error))
    else:
        monkeypatch.setattr(rdma_target, "ProgressThread", Mock(side_effect=error))
    ours = RdmaTarget(engine, 1, None)
    ours._device = Mock()
    with pytest.raises(UnavailableError, match="Too many open files"):
        ours.connect(7, End(5, bytes(16), 0, 0, 1024, 4))
    assert engine.take_slots.call_count == slots.close.call_count == queue.close.call_count
    assert engine.take_slots.call_count == (missing == "socket")
    assert ours.connections() == 0


def test_no_keys_that_nobody_would_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be had a segment is not opened: its keys would be good past the token's end."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours = RdmaTarget(Mock(), 1, None)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(UnavailableError, match="ends RDMA keys in time"):
        ours.open_segment(7, 1, 1, writable=True, until=time.monotonic() + 10)
