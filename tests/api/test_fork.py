"""A client and a child of fork: what was opened before belongs to the parent."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable

import pytest

import smb
from smb.spi import session_of
from tests.fault.long import times
from tests.support.transports import EACH_WAY


def in_child(check: Callable[[], object]) -> int:
    """Run the check in a forked child; return its exit status: 0 where it raised nothing."""
    gc.collect()  # what other tests left in cycles, for instance gRPC's channels: a child may wait for these for ever
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: this process has threads; that is the point
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's raises, which garbage collection ignores
        signal.alarm(20)
        status = 1
        try:
            check()
            status = 0
        except BaseException:  # noqa: BLE001 - the child ends here, and must not run the parent's tests
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def test_the_childs_use_is_refused(client: smb.Client) -> None:
    """Every call of the parent's client is an error in the child, which says to connect there; the parent goes on."""
    buffer = client.create("w", 5)
    buffer.fill(1)

    def check() -> None:
        for call in (buffer.read, lambda: buffer.accumulate([1.0], 0), buffer.read_async, client.list):
            with pytest.raises(smb.Error, match=r"call smb.connect in the child"):
                call()
        client.close()  # not the child's to close
        with pytest.raises(smb.Error, match=r"call smb.connect in the child"):
            client.reconnect()  # nor to renew

    assert in_child(check) == 0
    buffer.accumulate([1.0], 0)
    assert buffer.read().tolist() == [2, 1, 1, 1, 1]


def test_the_child_drops_the_parents_client_at_any_moment(cluster: smb.LocalCluster) -> None:
    """The renewal's lock is taken by another thread as the process forks: the child's garbage collection goes on."""
    clients = [smb.connect(cluster.address)]
    stop = session_of(clients[0])._stop
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with stop._cond:
            taken.set()
            over.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    taken.wait(60)

    def check() -> None:
        clients.clear()
        gc.collect()

    try:
        assert in_child(check) == 0
    finally:
        over.set()
        holding.join()
    assert clients[0].list() == []
    clients[0].close()


@pytest.mark.parametrize("transport", EACH_WAY)
def test_the_child_connects_by_itself(
    cluster: smb.LocalCluster, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A child makes its own client, with the parent's kept or dropped; the parent's connections stay whole."""
    children = times(8, 20)
    parents = [smb.connect(cluster.address, transport=transport)]
    buffers = [parents[0].create("w", 5)]

    def check(drop: bool) -> None:
        if drop:
            buffers.clear()
            parents.clear()
            gc.collect()
        with smb.connect(cluster.address, transport=transport) as own:
            own.open("w").accumulate([1.0], 0)

    with caplog.at_level(logging.INFO, "smb"):
        for number in range(children):
            buffers[0].accumulate([1.0], 0)
            assert in_child(lambda: check(drop=number % 2 == 0)) == 0  # noqa: B023 - it runs here and now
        assert buffers[0].read(0, 1)[0] == 2 * children
    parents[0].delete("w")
    parents[0].close()
    lines = [record for record in caplog.records if record.name == "smb"]
    assert len(lines) == 1  # the way was looked for once: no connection broke
