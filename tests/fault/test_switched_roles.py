"""The two copies of segments switch their roles under clients that work: no call fails, nothing is lost or copied."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

import smb
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import find as find_credentials
from tests.fault.long import LIMIT_S, LONG
from tests.fault.test_drain import Drained
from tests.fault.test_second_copy import NAMES
from tests.support import second_copy
from tests.support.daemons import running_daemons, wait_for

pytestmark = pytest.mark.timeout(LIMIT_S)

AFTER_VARIABLE = "SMB_COORDINATOR_BALANCE_AFTER"
SPREAD = ("sum", "news", "turns")
SWITCHING = ("coordinator.switch.handed", "coordinator.switch.stored")


class Switched(Drained):
    """A pool whose servers are restarted, so that primaries are where the last restart left them."""

    def rebalance(self, *, dry_run: bool = False) -> pb.RebalanceReply:
        """Ask for it; the answer says what switches and moves."""
        with closing(Coordinator(self.address, find_credentials())) as coordinator:
            return coordinator.rebalance(10.0, dry_run=dry_run)

    def roll(self, names: Iterable[str] = NAMES) -> None:
        """Restart these servers one after the other, as an upgrade does."""
        for name in names:
            assert self.servers[name].stop() == 0
            self.restart(name)
            self.wait_for_servers()
            self.wait_for_copies(60.0)

    def roll_until_uneven(self) -> None:
        """Restart one server after the other until a switch is wanted: the first one's primaries are elsewhere then."""
        for name in NAMES * 2:
            self.roll([name])
            if any(move.switches for move in self.rebalance(dry_run=True).moves):
                return
        raise AssertionError("the restarts left primaries as they were")

    def wait_until_balanced(self) -> None:
        """The primaries of each buffer over three servers lie as evenly as its copies allow."""
        wait_for(lambda: not any(map(self.uneven, SPREAD)), "balanced primaries", 60.0)

    def rebalance_until_balanced(self) -> None:
        """As an operator does: a switch that could not be made is asked for again."""

        def is_balanced() -> bool:
            self.rebalance()
            with suppress(AssertionError):
                wait_for(lambda: not any(map(self.uneven, SPREAD)), "balanced primaries", 5.0)
                return True
            return False

        wait_for(is_balanced, "balanced primaries", 60.0)

    def uneven(self, name: str) -> int:
        """By how many the busiest server has more primaries of a buffer than it would have to."""
        with smb.connect(self.address) as client:
            segments = client.open(name).layout.segments
        pairs = [(segment.server, segment.backup or segment.server) for segment in segments]
        return _most(pair[0] for pair in pairs) - min(map(_most, itertools.product(*pairs)))

    def files(self) -> set[tuple[str, int]]:
        """The memory of all copies."""
        return {(path.name, path.stat().st_ino) for path in self._daemons.memory.glob("smb.*.segment")}


def _most(servers: Iterable[str]) -> int:
    return max(Counter(servers).values())


@contextmanager
def switched(tmp_path: Path, after_s: float, certificates: Path | None = None) -> Iterator[Switched]:
    """A pool with clients after a rolling restart. Its coordinator balances primaries after so long; 0: if asked."""
    with running_daemons(tmp_path) as daemons:
        daemons.variables[AFTER_VARIABLE] = str(after_s)
        pool = Switched(daemons, tmp_path, certificates=certificates)
        pool.begin(("tcp", "auto"))
        pool.roll()
        pool.wait_for_work(20.0)
        yield pool
        pool.wait_for_work(20.0)
        pool.wait_for_copies(60.0)
        assert pool.end() == second_copy.SEGMENTS


# More than 5 s: each server is restarted under clients, and copies are made.
def test_servers_get_their_primaries_back(tmp_path: Path) -> None:
    """By themselves, a while after the last restart, and nothing is copied for that."""
    with switched(tmp_path, 2.0) as pool:
        pool.wait_until_balanced()
        before = pool.files()
        pool.wait_for_work(20.0)
        assert pool.files() == before


# More than 5 s: as above.
@pytest.mark.skipif(not LONG, reason="the next test begins with it; SMB_LONG=1")
@pytest.mark.parametrize("secured", [False, True])
def test_rebalance_switches_roles(tmp_path: Path, secured: bool, request: pytest.FixtureRequest) -> None:
    """Without a copy: the same files are there afterwards. Until it is asked for, roles stay as they are."""
    certificates = request.getfixturevalue("certificates") if secured else None
    with switched(tmp_path, 0.0, certificates) as pool:
        switch(pool)


def switch(pool: Switched) -> None:
    """Ask for it after a rolling restart, and wait for it."""
    before = pool.files()
    assert any(map(pool.uneven, SPREAD)), "the restarts left primaries as they were"
    moves = pool.rebalance().moves
    assert any(move.switches for move in moves)
    if all(move.switches for move in moves):
        pool.wait_until_balanced()
        assert pool.files() == before
    else:  # copies lie elsewhere after moves, so that more roles may have to switch than were planned before
        pool.rebalance_until_balanced()


# More than 5 s: as above, and the coordinator is killed.
@pytest.mark.parametrize("victim", ["", *(["primary", "backup"] if LONG else [])])
def test_the_coordinator_is_killed_while_roles_switch(tmp_path: Path, victim: str) -> None:
    """At each step, alone or with one of the two servers, which keeps its memory: work goes on. Before that roles
    switch as nobody dies.
    """
    with switched(tmp_path, 0.0) as pool:
        switch(pool)
        for point in SWITCHING:
            pool.roll_until_uneven()
            switch_and_kill(pool, point, victim)


def switch_and_kill(pool: Switched, point: str, victim: str) -> None:
    pool.restart_coordinator(point)
    pool.wait_for_servers()
    move = next(move for move in pool.rebalance(dry_run=True).moves if move.switches)
    with suppress(smb.Error):
        pool.rebalance()
    assert pool.coordinator.wait() == -signal.SIGKILL
    pool.coordinator.ready_file.unlink(missing_ok=True)
    name = {"primary": move.leaving, "backup": move.target}.get(victim, "")
    if name:
        pool.servers[name].kill()
    pool.restart_coordinator()
    if name:
        pool.restart(name)
    pool.wait_for_servers()
    pool.wait_for_copies(60.0)
    pool.wait_for_work(20.0)
    pool.rebalance_until_balanced()
