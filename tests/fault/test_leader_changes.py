"""The coordinator that leads, and etcd's own leader, are killed, stopped and cut off, and wall clocks jump, while
clients create, delete, rename and add.

Afterwards: what clients were answered about names is a history that one coordinator can have; every addition counted;
the data path saw no error; and a create begun at the fault was answered within the lease and a little more.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smb
from tests.fault.long import LIMIT_S, LONG, seed, times
from tests.support.clocks import Clock
from tests.support.daemons import running_daemons, stop, wait_for
from tests.support.etcd import LEASE_S, Coordinators, EtcdCluster, Gate, Member, needs_etcd, running_etcd
from tests.support.name_callers import TIMEOUT_S, NameCallers
from tests.support.name_history import UNKNOWN, find_order
from tests.support.transports import SLOWNESS

pytestmark = [needs_etcd, pytest.mark.timeout(LIMIT_S)]

ROUNDS = times(1, int(os.environ.get("SMB_ROUNDS", "100")))
LEASE = times(3, LEASE_S)
SLACK_S = 4.0 if LONG else 8.0  # a short run is one of many on a busy machine, a long one of two
ELECTION_S = 4.0  # etcd's own takes 1 to 3 s
JUMP_S = 3 * 86_400  # of a wall clock
PAUSE_S = 0.05


class Rig:
    """All of it."""

    def __init__(self, directory: Path, members: int) -> None:
        self._left = contextlib.ExitStack()
        self.etcd: EtcdCluster = self._left.enter_context(running_etcd(members))
        self.etcd.wait_ready()
        self._daemons = self._left.enter_context(running_daemons(directory))
        # Each coordinator has its own way to each member, which can be cut.
        self.gates = [[Gate(member.address) for member in self.etcd.members] for _ in range(2 if members == 1 else 3)]
        for gate in (gate for gates in self.gates for gate in gates):
            self._left.callback(gate.close)
        states = [f"etcd://{','.join(gate.address for gate in gates)}/rounds" for gates in self.gates]
        self.clocks = [Clock(directory, str(index)) for index in range(len(states))]
        self.coordinators = Coordinators(
            self._daemons, states, len(states), "--leader-lease", str(LEASE), clocks=self.clocks
        )
        self._left.callback(self.coordinators.close)
        self.servers = [self._daemons.memory_server(self.coordinators.address, name) for name in "ab"]
        assert all(server.address for server in self.servers)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    @contextlib.contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """It begins with the block and is mended behind it."""
        leader = self.coordinators.leader()
        daemon = self.coordinators.running[leader]
        member = self.etcd.leader() if "etcd" in kind else None
        with contextlib.ExitStack() as mended:
            for what in kind.split("+"):
                match what:
                    case "kill":
                        daemon.kill()
                        mended.callback(self.coordinators.start, leader)
                    case "stop":
                        stop(daemon.pid)
                        mended.callback(os.kill, daemon.pid, signal.SIGCONT)
                    case "cut":
                        for gate in self.gates[leader]:
                            gate.shut()
                            mended.callback(gate.open)
                    case "etcd-kill":
                        assert member is not None
                        member.kill()
                        mended.callback(self.etcd.start, member)
                    case "etcd-stop":
                        assert member is not None
                        member.pause()
                        mended.callback(member.resume)
                    case "ahead" | "behind":
                        self.clocks[leader].set(JUMP_S if what == "ahead" else -JUMP_S)
                        mended.callback(self.clocks[leader].set, 0)
                    case "term":
                        daemon.stop()
                        mended.callback(self.coordinators.start, leader)
            yield
        self._settle(member)

    def _settle(self, member: Member | None) -> None:
        if member is not None:
            self.etcd.leader()
            wait_for(lambda: _answers(member), "return of etcd's member", 60)
        self.coordinators.leader()
        for index, daemon in enumerate(self.coordinators.running):
            try:
                wait_for(
                    lambda: self.coordinators.health(index).get("leadership") in ("leader", "standby"),  # noqa: B023
                    f"return of coordinator {index}",
                    60 * SLOWNESS,
                )
            except AssertionError:
                print(f"coordinator {index}, {daemon.process.poll()}, {self.coordinators.health(index)}")
                print(daemon.log.read_text()[-4000:])
                raise


def _answers(member: Member) -> bool:
    with contextlib.suppress(OSError):
        return bool(member.ask("kv/range", {"key": "AA=="}))
    return False


SHORT_KINDS = ("stop",)
LONG_KINDS = (
    "kill",
    "stop",
    "cut",
    "etcd-kill",
    "etcd-stop",
    "kill+etcd-kill",
    "stop+etcd-stop",
    "kill+etcd-stop",
    "term",
    "ahead",
    "behind+etcd-kill",
    "ahead+kill",
)


def test_rounds(tmp_path: Path) -> None:
    """In every round a fault, drawn from a seed; the history of names is searched at its end."""
    rng = random.Random(seed())
    waits: dict[str, list[float]] = {}
    with Rig(tmp_path, times(1, 3)) as rig, smb.connect(rig.coordinators.address, timeout=TIMEOUT_S) as client:
        total = client.create("sum", 1000, "int64")
        callers = NameCallers(rig.coordinators.address, PAUSE_S)
        callers.start(rng)
        try:
            names: dict[str, Any] = {}
            done = unknown = 0
            for number in range(ROUNDS):
                kinds = LONG_KINDS if LONG else SHORT_KINDS
                kind = kinds[number % len(kinds)] if number < len(kinds) else rng.choice(kinds)
                with rig.fault(kind):
                    begun = time.monotonic()
                    client.create("probe", 1)
                    waits.setdefault(kind, []).append(time.monotonic() - begun)
                client.delete("probe")
                before = callers.additions
                wait_for(lambda: callers.additions > before or callers.errors, "additions")  # noqa: B023 - called at once
                assert not callers.errors, f"round {number}, {kind}: {callers.errors}"
                with callers.held() as calls:
                    found = {info.name: client.open(info.name).metadata["mark"] for info in client.list()[:-1]}
                assert find_order(calls, names, found), f"round {number}, {kind}: no coordinator answers so: {calls}"
                names = found
                done += len(calls)
                unknown += sum(call.answer == UNKNOWN for call in calls)
                # A new leader of etcd gives every lease its whole time again.
                slack_s = SLACK_S + (ELECTION_S if "+etcd" in kind else 0.0)
                assert waits[kind][-1] < (LEASE + slack_s) * SLOWNESS, (
                    f"round {number}, {kind}: {waits[kind][-1]:.1f} s"
                )
                print(f"round {number}: {kind}, a create after {waits[kind][-1]:.2f} s", flush=True)
        finally:
            callers.end()
        assert not callers.errors, callers.errors
        assert total.read().tolist() == [callers.additions] * 1000
    print(f"{ROUNDS} rounds, {callers.additions} additions, {done} calls about names, {unknown} of unknown outcome")
    for kind, seconds in waits.items():
        median, most = statistics.median(seconds), max(seconds)
        print(f"{kind:16} {len(seconds):3} times, a create after {median:.2f} s, at most {most:.2f} s")
