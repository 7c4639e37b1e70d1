"""A coordinator that was started again ended trainings. A worker that waited for a dead one could not ask whether that
one lives, and its step raised UnavailableError after 2 s, whatever the client's timeout said. So did any call that the
coordinator answers.
"""

from __future__ import annotations

import logging
import socket
import time

import numpy as np
import pytest

import smb
import smb.train
from smb.rpc import coordinator_client
from tests.support.clients import in_process
from tests.support.daemons import wait_for
from tests.support.training import COUNT, DEADLINE_S, take_part, waiting

LEASE_S = 1.2


def test_a_training_loses_a_worker_while_the_coordinator_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """The other one's step goes on once the coordinator is back; its client's timeout has run out twice by then."""
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=1.0) as client,
    ):
        values = np.zeros(COUNT, np.float32)
        worker = smb.train.join(client, "run", values, smb.train.BSP(), lease=LEASE_S)
        with in_process(take_part, cluster.address, 1, 1) as (process, messages):
            assert messages.get(timeout=DEADLINE_S) == "joined"
            process.kill()
            process.join()
        cluster.coordinator.kill()
        values += 1
        with caplog.at_level(logging.WARNING), waiting(worker.step) as result:
            wait_for(lambda: caplog.text.count("is not known now") > 1, "asking whether it lives", DEADLINE_S)
            cluster.coordinator.start()
            result()
        assert (values == 1).all()
        assert worker.members == 1
        worker.close()


def test_a_call_waits_for_the_coordinator_as_long_as_its_client_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was answered before waits; a lock that must be had at once does not."""
    monkeypatch.setattr(coordinator_client, "_COMES_BACK_S", 0.0)
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=DEADLINE_S) as client,
    ):
        client.create("w", 10)
        cluster.coordinator.kill()
        begun = time.monotonic()
        with pytest.raises(smb.UnavailableError, match="no coordinator answers"):
            client.lock("l", timeout=0.0)
        assert time.monotonic() - begun < DEADLINE_S / 2
        with waiting(lambda: client.open("w")) as result:
            cluster.coordinator.start()
            result().fill(1)


def test_an_address_that_never_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a wrong one: connect says so at once, whatever its timeout."""
    monkeypatch.setattr(coordinator_client, "_COMES_BACK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(smb.UnavailableError, match="no coordinator answers"):
        smb.connect(address, timeout=10 * DEADLINE_S)
    assert time.monotonic() - begun < DEADLINE_S
