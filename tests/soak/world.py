"""The cluster of a soak: coordinators, memory servers and certificates, and all that can happen to them."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import smb
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import load_directory
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from tests.support import second_copy
from tests.support.clocks import Clock
from tests.support.daemons import Daemon, Daemons, keep_port, stopped, wait_for
from tests.support.etcd import Coordinators, EtcdCluster
from tests.support.floods import flooded
from tests.support.rights import may_filter, may_mount

LASTING = ("a", "b", "c")  # they have the buffers with one copy
SERVERS = (*LASTING, "d")
STEP_S = 30  # by which a wall clock jumps, at most: tokens are good for minutes
WHOLE_S = 60.0  # until all that had one copy has two again
LEASE_S = 15.0  # of a client's session: its process may wait long for a processor
FAULT_S = (0.0, 3.0)  # how long one lasts
FLOOD_S = 15.0  # two leases of a server, and more
_TABLE = "smbsoak"
_LOST = 'smb_coordinator_leases_lost_total{of="server"}'


def missing_for(fault: str) -> str:
    """This machine's missing tool or right for a fault; empty if the fault is possible."""
    if fault == "cut" and not may_filter():
        return "root, nft and the right to change nftables"
    if fault == "full-disk" and not may_mount():
        return "root and the right to mount a small disk"
    return ""


class World:
    """Given as a context manager. `etcd`: the coordinators' state is there, and there are two; else one, on a disk."""

    def __init__(self, directory: Path, daemons: Daemons, etcd: EtcdCluster | None) -> None:
        self._directory = directory
        self._daemons = daemons
        self._etcd = etcd
        self._left = contextlib.ExitStack()
        self.disk = directory / "disk"
        self.credentials = directory / "credentials"

    def __enter__(self) -> World:
        with contextlib.ExitStack() as left:
            self._start(left)
            self._left = left.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def _start(self, left: contextlib.ExitStack) -> None:
        roles = [Holder(role, "") for role in (Role.COORDINATOR, Role.CLIENT, Role.OPERATOR, Role.READER)]
        make_set(self.credentials, [*roles, *(Holder(Role.SERVER, name) for name in SERVERS)])
        self.disk.mkdir()
        if self._etcd is None and not missing_for("full-disk"):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", self.disk], check=True)
            left.callback(subprocess.run, ["umount", "--lazy", self.disk], check=False)
        state = str(self.disk / "state")
        count = 1
        if self._etcd is not None:
            state, count = f"etcd://{','.join(member.address for member in self._etcd.members)}/soak", 2
        options = (
            "--credentials",
            str(self.credentials / "coordinator"),
            "--session-lease",
            str(LEASE_S),
            "--idle-names",
            str(LEASE_S),
        )
        self._clocks = [Clock(self._directory, f"coordinator-{index}") for index in range(count)]
        self.coordinators = Coordinators(self._daemons, state, count, *options, clocks=self._clocks)
        left.callback(self.coordinators.close)
        kept = [left.enter_context(contextlib.closing(keep_port())) for _ in SERVERS]
        self._ports = [one.getsockname()[1] for one in kept]
        self.servers = [self._server(index) for index in range(len(SERVERS))]
        assert all(server.address for server in self.servers)
        left.callback(_nft, "delete", "table", "inet", _TABLE)

    @property
    def address(self) -> str:
        """For smb.connect."""
        return self.coordinators.address

    def daemons(self) -> list[Daemon]:
        """All that run."""
        return [*self.coordinators.running, *self.servers]

    def _server(self, index: int) -> Daemon:
        name = SERVERS[index]
        return self._daemons.memory_server(
            self.address, name, "--listen", f"127.0.0.1:{self._ports[index]}", "--capacity", "256MiB",
            "--credentials", str(self.credentials / name), "--metrics", "127.0.0.1:0",
        )  # fmt: skip

    # ---- faults

    def faults(self) -> dict[str, Callable[[random.Random], None]]:
        """By name, those that this machine can do; each returns once it is mended."""
        found = {
            "kill-server": self._kill_server,
            "stop-server": self._stop_server,
            "kill-coordinator": self._kill_coordinator,
            "stop-coordinator": self._stop_coordinator,
            "flood": self._flood,
            "cut": self._cut,
            "lose-host": self._lose_host,
            "drain": self._drain,
            "set-clock": self._set_clock,
        }
        if self._etcd is None:
            found["full-disk"] = self._fill_disk
        return {name: fault for name, fault in found.items() if not missing_for(name)}

    def _kill_server(self, rng: random.Random) -> None:
        index = rng.randrange(len(SERVERS))
        self.servers[index].kill()
        _last(rng)
        self.servers[index] = self._server(index)
        assert self.servers[index].address

    def _lose_host(self, rng: random.Random) -> None:
        """A server and its memory; what had a copy there gets one elsewhere, or on the one that comes in its place."""
        self.wait_until_whole()
        self.servers[-1].kill()
        second_copy.lose(self.memory, SERVERS[-1])
        _last(rng)
        self.servers[-1] = self._server(len(SERVERS) - 1)
        assert self.servers[-1].address
        self.wait_until_whole()

    def _drain(self, rng: random.Random) -> None:
        """All copies of buffers with two leave a server, under those who use them. Then it takes some again."""
        name = rng.choice(SERVERS)
        with (
            contextlib.closing(Coordinator(self.address, load_directory(self.credentials / "operator"))) as coordinator,
            smb.connect(self.address, timeout=WHOLE_S) as client,
        ):

            def holds() -> bool:
                return any(
                    name in (place.server, place.backup)
                    for info in client.list()
                    if info.replicas > 1
                    for place in info.layout.segments
                )

            coordinator.drain_server(name, WHOLE_S)
            try:
                wait_for(lambda: not holds(), f"{name} without copies", WHOLE_S)
            finally:
                coordinator.drain_server(name, WHOLE_S, undo=True)

    def _set_clock(self, rng: random.Random) -> None:
        """The coordinator's wall clock is put wrong, and then right."""
        clock = self._clocks[self._leader()]
        clock.set(rng.randint(-STEP_S, STEP_S))
        _last(rng)
        clock.set(0)

    def _flood(self, _: random.Random) -> None:
        """A reader asks for everything at once, for longer than servers' leases run. No lease is lost to that."""
        leader = self.coordinators.running[self._leader()]
        # Faults before may cost a server its lease still: first all live.
        wait_for(lambda: leader.metric("smb_coordinator_servers_alive") == len(SERVERS), "all servers alive", WHOLE_S)
        lost = leader.metric(_LOST)
        with flooded(leader.address, self.credentials / "reader", everything=True):
            time.sleep(FLOOD_S)
        assert leader.metric(_LOST) == lost, "servers lost their leases while a reader asked for much"
        with smb.connect(self.address, timeout=WHOLE_S) as client:  # the rest of the flood is refused or answered
            client.servers()

    def _stop_server(self, rng: random.Random) -> None:
        with stopped(self.servers[rng.randrange(len(SERVERS))].pid):
            _last(rng)

    def _leader(self) -> int:
        return self.coordinators.leader() if self._etcd is not None else 0

    def _kill_coordinator(self, rng: random.Random) -> None:
        index = self._leader()
        self.coordinators.running[index].kill()
        _last(rng)
        assert self.coordinators.start(index).address

    def _stop_coordinator(self, rng: random.Random) -> None:
        with stopped(self.coordinators.running[self._leader()].pid):
            _last(rng)

    def _cut(self, rng: random.Random) -> None:
        """Nothing that is sent to a server's data port arrives."""
        port = self._ports[rng.randrange(len(SERVERS))]
        rule = f"add table inet {_TABLE}; add chain inet {_TABLE} in {{ type filter hook input priority 0; }}; "
        subprocess.run(["nft", f"{rule} add rule inet {_TABLE} in tcp dport {port} drop"], check=True)
        try:
            _last(rng)
        finally:
            _nft("delete", "table", "inet", _TABLE)

    def _fill_disk(self, rng: random.Random) -> None:
        """The coordinator's disk is full; a create then succeeds, or fails and leaves nothing."""
        filler = self.disk / "filler"
        try:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            with smb.connect(self.address, timeout=10) as client:
                with contextlib.suppress(smb.OutOfMemoryError):
                    client.create("on-a-full-disk", 1000)
                _last(rng)
        finally:
            filler.unlink(missing_ok=True)
        with smb.connect(self.address, timeout=30) as client:
            client.create("on-a-full-disk", 1000, exist_ok=True)
            client.delete("on-a-full-disk")

    # ---- what it has

    @property
    def memory(self) -> Path:
        """The directory of all servers' segments."""
        return self._daemons.memory

    def wait_until_whole(self) -> None:
        """All that is to have two copies has them."""
        with smb.connect(self.address, timeout=WHOLE_S) as client:
            wait_for(lambda: second_copy.are_whole(client), "two copies of each segment", WHOLE_S)

    def sessions(self) -> int:
        """How many the coordinator knows."""
        return int(self.coordinators.running[self._leader()].metric("smb_coordinator_sessions"))

    def wait_for_no_session(self) -> None:
        """Those that were killed end with their leases."""
        wait_for(lambda: self.sessions() == 0, "end of all sessions", 120)


def _last(rng: random.Random) -> None:
    """A fault lasts for a while."""
    time.sleep(rng.uniform(*FAULT_S))


def _nft(*command: str) -> None:
    if shutil.which("nft") is not None:
        subprocess.run(["nft", *command], check=False, capture_output=True)
