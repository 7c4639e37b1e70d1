"""Servers are emptied under clients that work: no call fails, nothing is lost, and what was drained may vanish."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

import smb
from smb.daemon.failpoint import ALLOWED_VARIABLE, POINT_VARIABLE
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import find as find_credentials
from tests.fault.long import LIMIT_S, LONG
from tests.fault.test_second_copy import NAMES, Pool
from tests.support import second_copy
from tests.support.daemons import running_daemons, stop, wait_for
from tests.support.history import read_notes, tickets_of

pytestmark = pytest.mark.timeout(LIMIT_S)

# Where a coordinator is killed that moves a copy.
MOVING = ("coordinator.drain.stored", "coordinator.copy.made", "coordinator.copy.yielded", "coordinator.copy.begun")


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
                    assert place.backup
                    assert name not in (place.server, place.backup)

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


@pytest.mark.parametrize("ways", [("auto", "tcp"), *([("tcp", "tcp", "tcp")] if LONG else [])], ids="+".join)
def test_each_server_is_drained_in_turn(tmp_path: Path, ways: tuple[str, ...]) -> None:
    """Then it and its memory vanish at once: it had nothing. It is still being drained when it comes back."""
    drain_each(tmp_path, ways, NAMES * 10 if LONG else NAMES[:2])


def test_each_server_is_drained_with_credentials(tmp_path: Path, certificates: Path) -> None:
    """The same where servers feed each other inside TLS, and tokens are of an epoch and expire meanwhile."""
    drain_each(tmp_path, ("tcp", "auto"), NAMES * 10 if LONG else NAMES[:1], certificates)


def drain_each(tmp_path: Path, ways: tuple[str, ...], names: tuple[str, ...], certificates: Path | None = None) -> None:
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path, certificates=certificates)
        pool.begin(ways)
        for name in names:
            pool.drain(name)
            pool.wait_until_empty(name)
            pool.kill(name)
            pool.wait_for_work(20.0)
            pool.restart(name)
            pool.wait_for_servers()
            assert not pool.drain(name).segment_count
            pool.drain(name, undo=True)
        assert pool.end() == second_copy.SEGMENTS
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
@pytest.mark.parametrize("what", ["a", "b", "d", "coordinator"])
def test_a_process_stands_still(tmp_path: Path, what: str) -> None:
    """For 20 s in the middle of a drain, and goes on: calls may wait for it, none fails, and the drain ends."""
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path, "--copy-rate", "256KiB")
        pool.begin(("tcp", "auto"))
        pool.restart("d")
        pool.wait_for_servers()
        pool.drain("a")
        pool.wait_for_copying("d")
        pid = pool.coordinator.pid if what == "coordinator" else pool.servers[what].pid
        stop(pid)
        time.sleep(20.0)
        os.kill(pid, signal.SIGCONT)
        pool.wait_for_work(20.0)
        pool.wait_until_empty("a")
        assert pool.end() == second_copy.SEGMENTS


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


def test_the_coordinator_is_killed_while_it_moves_a_copy(tmp_path: Path) -> None:
    """At each step: what was stored goes on, and work does all the while."""
    with running_daemons(tmp_path) as daemons:
        pool = Drained(daemons, tmp_path)
        pool.begin(("tcp", "auto"))
        for number, point in enumerate(MOVING if LONG else ("coordinator.copy.yielded",)):
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
        assert pool.end() == second_copy.SEGMENTS
