"""memserver.copier and memserver.replication: new copies of segments, and the threads that look after them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from memserver.copier import Copier
from memserver.engine import CopyState
from memserver.relays import Relays
from memserver.replication import Replication
from smb.rpc import control_pb2 as pb


def test_a_copy_of_a_later_epoch_is_not_given_up() -> None:
    """Whose server was found away was of before: a copy that was begun meanwhile was given up for it."""
    ours = Copier.__new__(Copier)
    ours._lock, ours._engine = threading.Condition(), Mock()  # type: ignore[assignment]
    ours._ended = Mock()  # type: ignore[method-assign]
    ours._copies = {2: SimpleNamespace(epoch=6, state=CopyState.BUSY)}  # type: ignore[dict-item]
    assert not ours.give_up(2, 5)
    assert not ours.give_up(3, 5)
    ours._engine.abandon_copy.assert_not_called()
    assert ours.give_up(2, 6)
    ours._engine.abandon_copy.assert_called_once_with(2, 6)


@pytest.mark.parametrize("kind", ["replication", "copier", "relays"])
def test_a_thread_that_could_not_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It was taken for one that runs, until the server's restart: nothing was copied or mirrored any more."""
    engine = Mock(await_replicas=Mock(return_value=0), replicas=Mock(return_value=[]))
    begun, ran, refused = threading.Thread.start, threading.Event(), []

    def start(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        begun(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for part in (Replication, Copier, Relays):
        monkeypatch.setattr(part, "_run", lambda _: ran.set())
    if kind == "replication":
        ours = Replication(engine)
        take = lambda: ours.take([pb.Replica(segment_id=1, epoch=1)])  # noqa: E731
    elif kind == "copier":
        ours = Copier(engine, 0, Mock())
        take = lambda: ours.want({1: 1})  # noqa: E731
    else:
        ours = Relays("127.0.0.1:1", "server", None)
        take = lambda: ours.take([pb.MirrorTask(name="m", source="s", id=1)])  # noqa: E731
    take()  # what it is told beside that counts, and the next renewal comes soon
    assert not ran.is_set()
    take()
    assert ran.wait(30)
    assert refused == [kind]
    ours.close()
