"""Servers are emptied under clients that work: no call fails, nothing is lost, and what was drained may vanish."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.daemon.failpoint import ALLOWED_VARIABLE, POINT_VARIABLE
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import find as find_credentials
from tests.fault.long import LIMIT_S, LONG
from tests.fault.test_second_copy import NAMES, Pool
from tests.support import second_copy
from tests.support.builds import build
from tests.support.daemons import running_daemons, stop, wait_for
from tests.support.history import read_notes, tickets_of

pytestmark = pytest.mark.timeout(LIMIT_S)

# Where a coordinator is killed that moves a copy.
MOVING = ("coordinator.drain.stored", "coordinator.copy.made", "coordinator.copy.yielded", "coordinator.copy.begun")
# The same for a buffer with one copy.
MOVING_ONE = (
    "coordinator.move.allowed", "coordinator.move.stored", "coordinator.copy.made", "coordinator.copy.begun",
    "coordinator.move.yielded", "coordinator.move.dropped",
)  # fmt: skip


class Drained(Pool):
    """A pool whose servers are emptied."""

    def drain(self, name: str, *, undo: bool = False) -> pb.DrainServerReply:
        """Ask for it; the answer says what is left."""
        with closing(Coordinator(self.address, find_credentials())) as coordinator:
            return coordinator.drain_server(name, 10.0, undo=undo)

    def wait_until_empty(self, name: str) -> None:
        """It holds nothing, and all segments have two copies."""
        with closing(Coordinator(self.address, find_credentials())) as coordinator:

            def is_empty() -> bool:
                left = coordinator.drain_server(name, 10.0)
                return not left.segment_count and not left.copying

            wait_for(is_empty, f"{name} empty", 60.0)
        wait_for(lambda: not list(self._daemons.memory.glob(f"smb.{name}.*.segment")), f"no segments of {name}")
        with smb.connect(self.address) as client:
            assert {server.name for server in client.servers() if server.draining} == {name}
            for info in client.list():
                for place in info.layout.segments:
                    assert bool(place.backup) == (self._replicas == 2)
                    assert name not in (place.server, place.backup)

    def lose_target(self, name: str) -> None:
        """It dies, with its memory if nothing has moved there yet. Else it comes back."""
        self.servers[name].kill()
        with smb.connect(self.address) as client:
            moved = any(place.server == name for info in client.list() for place in info.layout.segments)
        if moved:
            self.restart(name)
        else:
            second_copy.lose(self._daemons.memory, name)

    def wait_for_servers(self) -> None:
        """All of them have registered: what is drained needs room."""
        with smb.connect(self.address) as client:
            wait_for(lambda: all(server.alive for server in client.servers()), "all servers")

    def restart_coordinator(self, point: str = "") -> None:
        """It is killed, and starts again at the same address."""
        self.coordinator.kill()
        if point:
            self._daemons.variables |= {POINT_VARIABLE: point, ALLOWED_VARIABLE: "1"}
        try:
            self.coordinator = self._start_coordinator(self.address)
            assert self.coordinator.address == self.address  # it serves
        finally:
            for variable in (POINT_VARIABLE, ALLOWED_VARIABLE):
                self._daemons.variables.pop(variable, None)

    def slowest_s(self) -> float:
        """The slowest fetch_add."""
        tickets = (ticket for path in self.histories for ticket in tickets_of(read_notes(path)))
        return max(ticket.ended - ticket.began for ticket in tickets)


@pytest.mark.skipif(not LONG, reason="the next test has it inside TLS; SMB_LONG=1")
@pytest.mark.parametrize("ways", [("auto", "tcp"), ("tcp", "tcp", "tcp")], ids="+".join)
def test_each_server_is_drained_in_turn(tmp_path: Path, ways: tuple[str, ...]) -> None:
    """Then it and its memory vanish at once: it had nothing. It is still being drained when it comes back."""
    drain_each(tmp_path, ways, NAMES * 10)


def test_each_server_is_drained_with_credentials(tmp_path: Path, certificates: Path) -> None:
    """The same where servers feed each other inside TLS, and tokens are of an epoch and expire meanwhile."""
    drain_each(tmp_path, ("tcp", "auto"), NAMES * 10 if LONG else NAMES[:1], certificates)


@pytest.mark.skipif(not LONG, reason="the next test has it with tokens; SMB_LONG=1")
@pytest.mark.parametrize("ways", [("auto", "tcp"), ("tcp", "auto", "auto")], ids="+".join)
def test_buffers_with_one_copy_move(tmp_path: Path, ways: tuple[str, ...]) -> None:
    """Clients that have them mapped, and clients over TCP: no call fails, and each change counts once. What was drained
    may vanish.
    """
    drain_each(tmp_path, ways, NAMES * 10, replicas=1)


def test_buffers_with_one_copy_move_with_credentials(tmp_path: Path, certificates: Path) -> None:
    """The same with tokens, which are of an epoch."""
    drain_each(tmp_path, ("tcp", "auto"), NAMES * 10 if LONG else NAMES[:1], certificates, replicas=1)


def drain_each(
    tmp_path: Path, ways: tuple[str, ...], names: tuple[str, ...], certificates: Path | None = None, replicas: int = 2
) -> None:
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path, certificates=certificates, replicas=replicas)
        pool.begin(ways)
        for name in names:
            pool.drain(name)
            pool.wait_until_empty(name)
            if replicas == 1:  # what is on its way to a server that is killed has an unknown outcome, as ever
                pool.wait_for_work(20.0)
            pool.kill(name)
            pool.wait_for_work(20.0)
            pool.restart(name)
            pool.wait_for_servers()
            assert not pool.drain(name).segment_count
            pool.drain(name, undo=True)
        assert pool.end() == (second_copy.SEGMENTS if replicas == 2 else 0)
        print(f"{'+'.join(ways)}: the slowest fetch_add took {pool.slowest_s():.3f} s")


@pytest.mark.skipif(not LONG, reason="copies slowly; test_second_copy.py has the dead target; SMB_LONG=1")
@pytest.mark.parametrize("victim", ["target", "drained", "other"])
def test_a_drain_is_interrupted(tmp_path: Path, victim: str) -> None:
    """The server that is copied to dies, or the drained one, or one of the others once that has a second copy; then the
    coordinator. It goes on, and nothing is lost.
    """
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path, "--copy-rate", "256KiB")
        pool.begin(("tcp", "auto"))
        pool.restart("d")  # empty: it has the most room
        pool.drain("a")
        pool.wait_for_copying("d")
        if victim == "other":  # what is being copied has one copy
            pool.wait_until_empty("a")
            pool.kill("b")
        else:
            pool.kill(
                "a" if victim == "drained" else "d"
            )  # of what is on its way to others there is one copy elsewhere
        pool.wait_for_work(20.0)
        pool.restart_coordinator()
        if victim != "drained":
            pool.wait_until_empty("a")
            pool.kill("a")
        pool.wait_for_copies(60.0)
        pool.wait_for_work(20.0)
        assert pool.end() == second_copy.SEGMENTS


@pytest.mark.skipif(not LONG, reason="waits for leases; SMB_LONG=1")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("what", ["a", "b", "d", "coordinator"])
def test_a_process_stands_still(tmp_path: Path, what: str, replicas: int) -> None:
    """For a while in the middle of a drain, and goes on: calls may wait for it, none fails, and the drain ends."""
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path, "--copy-rate", "256KiB", replicas=replicas)
        pool.begin(("tcp", "auto"))
        pool.restart("d")
        pool.wait_for_servers()
        pool.drain("a")
        pool.wait_for_copying("d")
        pid = pool.coordinator.pid if what == "coordinator" else pool.servers[what].pid
        stop(pid)
        # Longer than a server's lease, and shorter than that of a client's lock. A segment that is being moved has one
        # copy: nobody takes over, and a client that waits for it may hold the lock.
        time.sleep(10.0)
        os.kill(pid, signal.SIGCONT)
        pool.wait_for_work(20.0)
        pool.wait_until_empty("a")
        assert pool.end() == (second_copy.SEGMENTS if replicas == 2 else 0)


# More than 5 s: four servers start, two of them again, and the coordinator twice.
def test_the_other_copy_is_lost_and_nobody_knows(tmp_path: Path) -> None:
    """A coordinator that has just started takes every server for alive. It does not drop the last copy for that."""
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path)
        pool.begin(("tcp", "auto"))
        pool.restart("d")
        pool.wait_for_servers()
        pool.restart_coordinator("coordinator.drain.stored")
        with suppress(smb.Error):
            pool.drain("a")
        assert pool.coordinator.wait() == -signal.SIGKILL
        pool.coordinator.ready_file.unlink(missing_ok=True)
        pool.kill("b")
        pool.restart_coordinator()
        pool.wait_for_work(20.0)
        pool.wait_until_empty("a")
        assert pool.end() == second_copy.SEGMENTS


@pytest.mark.parametrize("replicas", [1, 2])
# More than 5 s: clients write all the while, and what they did is judged at the end.
def test_the_coordinator_is_killed_while_it_moves_a_copy(tmp_path: Path, replicas: int) -> None:
    """At each step: what was stored goes on, and work does all the while."""
    points = (
        (MOVING_ONE, MOVING)[replicas - 1] if LONG else ("coordinator.move.yielded", MOVING[2])[replicas - 1 : replicas]
    )
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path, replicas=replicas)
        pool.begin(("tcp", "auto"))
        for number, point in enumerate(points):
            if replicas == 1 and number:  # what has moved once moves as what has two copies
                pool.end()
                pool.begin(("tcp", "auto"))
            name = NAMES[number % len(NAMES)]
            with smb.connect(pool.address) as client:
                assert any(each.server == name for info in client.list() for each in info.layout.segments)
            pool.restart_coordinator(point)
            with suppress(smb.Error):
                pool.drain(name)
            assert pool.coordinator.wait() == -signal.SIGKILL
            pool.coordinator.ready_file.unlink(missing_ok=True)
            pool.restart_coordinator()
            pool.wait_for_work(20.0)  # a client that has to look for a primary needs the coordinator
            pool.wait_until_empty(name)
            pool.drain(name, undo=True)
        assert pool.end() == (second_copy.SEGMENTS if replicas == 2 else 0)


@pytest.mark.parametrize("victim", ["target", *(["drained", "both"] if LONG else [])])
def test_a_process_dies_while_a_buffer_with_one_copy_moves(tmp_path: Path, victim: str) -> None:
    """The target with its memory: the segment is still where it was. The server that is drained, its memory stays: it
    comes back, and goes on.
    """
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path, "--copy-rate", "256KiB", replicas=1)
        pool.begin(("tcp", "auto"))
        pool.restart("d")  # empty: it has the most room
        pool.wait_for_servers()
        pool.drain("a")
        pool.wait_for_copying("d")
        if victim != "drained":
            pool.lose_target("d")
        if victim != "target":
            pool.servers["a"].kill()
            pool.restart("a")
        pool.wait_for_work(40.0)
        pool.wait_until_empty("a")
        pool.wait_for_work(20.0)
        pool.kill("a")
        pool.wait_for_work(20.0)
        assert pool.end() == 0


def _take_lock(buffer: smb.Buffer) -> None:
    with buffer.lock():
        pass


def test_an_idle_client_calls_while_the_coordinator_is_away(tmp_path: Path) -> None:
    """It has mapped what has moved, and nobody says where to: it waits. It is not told that its memory was lost."""
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path, replicas=1)
        pool.wait_for_servers()
        with smb.connect(pool.address, timeout=30.0) as client:
            buffer = client.create("idle", 1000, servers=["a"])
            buffer.fill(1)
            pool.drain("a")
            pool.wait_until_empty("a")
            pool.coordinator.kill()
            pool.coordinator.ready_file.unlink(missing_ok=True)
            with ThreadPoolExecutor(2) as threads:
                calls = [
                    threads.submit(buffer.accumulate, np.ones(1000, np.float32)),
                    threads.submit(_take_lock, buffer),
                ]
                wait(calls, 2.0)
                assert not any(call.done() for call in calls), [call.exception(0) for call in calls if call.done()]
                pool.restart_coordinator()
                for call in calls:
                    call.result(30.0)
            assert (buffer.read() == 2).all()


# More than 5 s: the build with failpoints, whose daemons are programs; it is compiled if nobody has yet.
def test_a_server_dies_while_it_gates_a_segment(tmp_path: Path) -> None:
    """Its memory says that the segment is gated, and its file is that of one that has no copies yet: it serves nobody
    before it has heard of its role, and goes on.
    """
    with running_daemons(tmp_path) as daemons:
        failing = build("failpoints").environment
        daemons.variables |= failing | {"SMB_ENGINE_FAILPOINT": "segment.gated"}
        pool = Drained(daemons, tmp_path, replicas=1)
        daemons.variables.pop("SMB_ENGINE_FAILPOINT")
        pool.begin(("tcp", "auto"))
        pool.drain("a")
        assert pool.servers["a"].wait() == -signal.SIGKILL
        pool.servers["a"].ready_file.unlink(missing_ok=True)
        pool.drain("a", undo=True)  # what is on its way to a segment that has left its server has an unknown outcome
        pool.restart("a")
        pool.wait_for_work(20.0)
        pool.drain("a")
        pool.wait_until_empty("a")
        assert pool.end() == 0
