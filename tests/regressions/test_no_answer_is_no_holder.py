"""A lock whose server did not answer was said to be another's, and to be untouched: it may be ours by now."""

from __future__ import annotations

import os
import signal

import pytest

import smb
from smb.errors import NOT_APPLIED, UNKNOWN
from tests.support.daemons import stop


def test_a_stopped_server_is_no_holder() -> None:
    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address, timeout=0.5) as client:
        lock = client.lock("l", timeout=0.0)
        buffer = client.create("w", 10, versions=2)
        with lock, pytest.raises(smb.TimeoutError, match=f"{client.name} holds it") as held:
            client.lock("l", timeout=0.0).acquire()
        assert held.value.outcome == NOT_APPLIED
        buffer.publish(range(10))
        server = cluster.servers[0].pid
        stop(server)
        try:
            for call in (lock.acquire, lambda: buffer.publish(range(10), timeout=0.0)):
                with pytest.raises(smb.TimeoutError, match="no answer") as unknown:
                    call()
                assert unknown.value.outcome == UNKNOWN
        finally:
            os.kill(server, signal.SIGCONT)


def test_a_lock_without_a_timeout_has_none_to_name(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator did not say where a lock is that had been idle: that was a TypeError."""
    lock = client.lock("l")

    def hangs(*_: object, **__: object) -> None:
        raise smb.TimeoutError("the coordinator did not answer")

    monkeypatch.setattr(lock._home, "ask_lock", hangs)
    with pytest.raises(smb.TimeoutError, match="the coordinator did not answer"):
        lock.acquire()
