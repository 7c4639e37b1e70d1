"""memserver.threads: those that begin with the first need, in each part of the daemon that has one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from memserver.copier import Copier
from memserver.relays import Relays
from memserver.replication import Replication
from smb.rpc import control_pb2 as pb


@pytest.mark.parametrize("kind", ["replication", "copier", "relays"])
def test_one_that_could_not_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It was taken for one that runs, until the server's restart: nothing was copied or mirrored any more."""
    begun, ran, refused = threading.Thread.start, threading.Event(), []

    def start(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        begun(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for part in (Replication, Copier, Relays):
        monkeypatch.setattr(part, "_run", lambda _: ran.set())
    replication, copier = Replication(Mock()), Copier(Mock(), 0, Mock())
    relays = Relays("127.0.0.1:1", "server", None)
    takes: dict[str, Callable[[], object]] = {
        "replication": lambda: replication.take([pb.Replica(segment_id=1, epoch=1, role=1)]),
        "copier": lambda: copier.want({1: 1}),
        "relays": lambda: relays.take([pb.MirrorTask(name="m", source="s", id=1)]),
    }
    takes[kind]()  # what it is told beside that counts, and the next renewal comes soon
    assert not ran.is_set()
    takes[kind]()
    assert ran.wait(30)
    assert refused == [kind]
    for each in (replication, copier, relays):
        each.close()
