"""Clients that are closed while their queue pairs are made anew: nothing of pyverbs is freed under its user."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import smb
from smb.transport.verbs.devices import Port
from tests.regressions.test_close_while_reconnecting import at_work
from tests.support.daemons import wait_for
from tests.support.transports import SLOWNESS
from tests.verbs.test_daemons import on

ROUNDS = 500 if os.environ.get("SMB_LONG") == "1" else 10
COUNT = 40_000


@pytest.fixture(scope="module")
def cluster(ports: tuple[Port, Port]) -> Iterator[smb.LocalCluster]:
    """A memory server on one device; the tests' clients are on the other one."""
    with on(ports[0]), smb.LocalCluster(servers=1, capacity="64MiB") as running, on(ports[1]):
        yield running


def break_queue_pairs(client: smb.Client) -> int:
    """Close those that there are, as if they had failed; return how many there were."""
    carriers = client._session.verbs.carriers()
    for carrier in carriers:
        with contextlib.suppress(smb.TransportError):  # the client is closed
            client._session.verbs._moving().close_relay(carrier)
    return len(carriers)


def call_until_closed(buffer: smb.Buffer, answered: threading.Event, failures: list[BaseException]) -> None:
    ones = np.ones(COUNT, np.int64)
    try:
        while True:
            buffer.accumulate(ones)
            answered.set()
    except (smb.UnavailableError, smb.TimeoutError, smb.TransportError):
        return
    except BaseException as error:  # noqa: BLE001 - told to the test
        failures.append(error)


@pytest.mark.verbs("a client closed in the middle of a reconnection")
def test_nothing_is_at_work_once_close_returns(cluster: smb.LocalCluster) -> None:
    """Closed at any moment while its queue pair is made anew: its threads have ended, and the next client works."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw, failures = random.Random(seed), []
    with smb.connect(cluster.address, transport="verbs", timeout=20 * SLOWNESS) as first:
        first.create("w", COUNT, "int64")
    for _ in range(ROUNDS):
        client = smb.connect(cluster.address, transport="verbs", timeout=20 * SLOWNESS)
        answered, reconnects = threading.Event(), draw.random() < 0.5
        caller = threading.Thread(target=call_until_closed, args=(client.open("w"), answered, failures))
        caller.start()
        # One that breaks while it is greeted is not made anew: no way to that server, which the caller is told.
        if reconnects:
            wait_for(answered.is_set, "answer")
        wait_for(lambda client=client: break_queue_pairs(client), "queue pair")
        if reconnects:
            wait_for(lambda client=client: client._session.outages().begun > 0, "reconnection")
        client.close()
        assert at_work() == []
        caller.join(20 * SLOWNESS)
        assert not caller.is_alive()
    with smb.connect(cluster.address, transport="verbs", timeout=20 * SLOWNESS) as last:
        assert last.open("w").read().min() >= 0
        last.delete("w")
    assert failures == []
