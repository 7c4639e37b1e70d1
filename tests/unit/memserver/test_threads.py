"""memserver.threads: those that begin with the first need, in each part of the daemon that has one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from memserver.copier import Copier
from memserver.relays import Relays
from memserver.replication import Replication
from smb.rpc import control_pb2 as pb
from tests.unit.memserver.test_segments import FORM, Run


@pytest.mark.parametrize("kind", ["replication", "copier", "relays"])
def test_one_that_could_not_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """It was taken for one that runs, until the server's restart: nothing was copied or mirrored any more."""
    begun, ran, refused = threading.Thread.start, threading.Event(), []

    def start(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        begun(thread)

    with ExitStack() as leaving:
        run = Run(tmp_path, leaving)
        run.segments.create(FORM)
        monkeypatch.setattr(threading.Thread, "start", start)
        for part in (Replication, Copier, Relays):
            monkeypatch.setattr(part, "_run", lambda _: ran.set())
        replication, copier = Replication(run.engine), Copier(run.engine, 0, lambda: None)
        relays = Relays("127.0.0.1:1", "server", None)
        for each in (replication, copier, relays):
            leaving.callback(each.close)
        takes: dict[str, Callable[[], object]] = {
            "replication": lambda: replication.take([pb.Replica(segment_id=FORM.id, epoch=FORM.epoch, role=1)]),
            "copier": lambda: copier.want({FORM.id: FORM.epoch}),
            "relays": lambda: relays.take([pb.MirrorTask(name="m", source="s", id=1)]),
        }
        takes[kind]()  # what it is told beside that counts, and the next renewal comes soon
        assert not ran.is_set()
        takes[kind]()
        assert ran.wait(30)
        assert refused == [kind]
