"""Inboxes of killed workers kept a model's memory each while their slots were free, and no command showed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import smb
import smb.train
from smb.config.parse import TRAIN_HOST_VARIABLE
from smb.tools.cli.main import app
from smb.train import HSGD, LocalSGD
from tests.support.daemons import wait_for

Connect = Callable[..., smb.Client]

COUNT = 256
LEASE_S = 1.0


def _join(client: smb.Client, scheme: smb.train.Scheme) -> smb.train.Worker:
    return smb.train.join(client, "run", np.zeros(COUNT, np.float32), scheme, lease=LEASE_S)


def _die(worker: smb.train.Worker) -> None:
    worker.group.member._lock.release()


def _inboxes(client: smb.Client) -> list[str]:
    return [info.name for info in client.list() if "inbox" in info.name]


def _gone_bytes(client: smb.Client) -> int:
    return smb.train.status(client, "run").gone_bytes


def test_they_go_as_others_train(cluster: smb.LocalCluster, connect: Connect) -> None:
    """The memory is shown while the training rests, and free once the others have closed a round without the dead."""
    client, scheme = connect(), LocalSGD(every=1)
    worker, *dead = [_join(connect(), scheme) for _ in range(3)]
    assert _gone_bytes(client) == 0
    for each in dead:
        _die(each)
    assert _gone_bytes(client) == 2 * 4 * COUNT
    shown = CliRunner().invoke(app, ["train", "stat", "run", "--coordinator", cluster.address])
    assert "keep 2 KiB until others join" in " ".join(shown.output.split())
    worker.step()
    wait_for(lambda: _inboxes(client) == ["run/inbox/1"], "the dead ones' inboxes to go")
    assert _gone_bytes(client) == 0
    worker.close()


def test_they_go_as_others_join(connect: Connect) -> None:
    """Of all dead workers whose slots are free; not if a contribution may still count."""
    client, scheme = connect(), LocalSGD(every=1, quorum=2)
    workers = [_join(connect(), scheme) for _ in range(4)]
    group = workers[0].group
    exchange: Any = workers[1].exchange
    exchange._steps = 1
    exchange._send()
    exchange._contribution.mark()
    for each in workers[1:]:
        _die(each)
    assert group.reap([1, 2, 3]) == [1, 2, 3]
    assert _gone_bytes(client) == 3 * 4 * COUNT
    late = _join(connect(), scheme)  # in the slot of one that had not contributed
    assert _inboxes(client) == ["run/inbox/1", "run/inbox/2", "run/inbox/5"]
    assert _gone_bytes(client) == 4 * COUNT
    workers[0].step()
    assert smb.train.status(client, "run").round == 1
    late.close()
    workers[0].close()


def test_hosts_without_workers(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """With HSGD all that such a host has is shown."""
    client = connect()
    monkeypatch.setenv(TRAIN_HOST_VARIABLE, "A")
    first = _join(connect(), HSGD())
    monkeypatch.setenv(TRAIN_HOST_VARIABLE, "B")
    assert _gone_bytes(client) == 0
    _join(connect(), HSGD()).close()
    of_host = [info for info in client.list() if info.name.startswith("run/host/B")]
    assert _gone_bytes(client) == sum(info.nbytes for info in of_host) > 2 * 4 * COUNT
    with _join(connect(), HSGD()):
        assert _gone_bytes(client) == 0
    first.close()
