"""Backups of the coordinator's records and their restoring (docs/disaster-recovery.md), and what servers hold then."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import struct
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Protocol

from tests.support.daemons import Daemons, keep_port
from tests.support.etcd import Coordinators, EtcdCluster

LEADER_LEASE_S = 3


class Store(Protocol):
    """Where coordinators keep their state. A backup is a path."""

    @property
    def address(self) -> str:
        """The coordinators', for smb.connect."""

    def save(self, path: Path) -> None:
        """Make a backup."""

    def restore(self, path: Path) -> None:
        """Put a backup in place of what is there; the coordinators are started anew on it."""

    def close(self) -> None:
        """Give the ports back."""


class SqliteFile:
    """One coordinator, its file copied while it is stopped."""

    def __init__(self, daemons: Daemons, directory: Path) -> None:
        self._daemons, self._directory = daemons, directory
        self._kept = keep_port()
        self.address = f"127.0.0.1:{self._kept.getsockname()[1]}"
        self._restored = 0
        self._state = directory / "state"
        self._start()

    def _start(self) -> None:
        self._coordinator = self._daemons.coordinator(self.address, str(self._state))
        assert self._coordinator.address

    def _stop(self) -> None:
        assert self._coordinator.stop() == 0
        self._coordinator.ready_file.unlink(missing_ok=True)

    def save(self, path: Path) -> None:
        """Stop, copy coordinator.sqlite*, start."""
        self._stop()
        path.mkdir()
        for file in self._state.glob("coordinator.sqlite*"):
            shutil.copy2(file, path)
        self._start()

    def restore(self, path: Path) -> None:
        """Stop, put the copied files into an empty directory, start on that."""
        self._stop()
        self._restored += 1
        self._state = self._directory / f"restored-{self._restored}"
        shutil.copytree(path, self._state)
        self._start()

    def close(self) -> None:
        """Give the ports back."""
        self._kept.close()


class EtcdSnapshot:
    """Two coordinators on an etcd of one member: `etcdctl snapshot save` and `restore`."""

    def __init__(self, daemons: Daemons, etcd: EtcdCluster) -> None:
        self._etcd = etcd
        state = f"etcd://{etcd.addresses}/restored"
        self._coordinators = Coordinators(daemons, state, 2, "--leader-lease", str(LEADER_LEASE_S))
        self.address = self._coordinators.address

    def save(self, path: Path) -> None:
        """While all work."""
        _etcdctl("--endpoints", self._etcd.addresses, "snapshot", "save", str(path))

    def restore(self, path: Path) -> None:
        """Stop the coordinators and etcd, restore into an empty directory, start all."""
        for daemon in self._coordinators.running:
            daemon.stop()
            daemon.ready_file.unlink(missing_ok=True)
        (member,) = self._etcd.members
        member.kill()
        data = member.directory / member.name
        shutil.rmtree(data)
        _etcdctl(
            "snapshot", "restore", str(path), "--data-dir", str(data), "--name", member.name, "--initial-cluster",
            f"{member.name}=http://{member.peers}", "--initial-advertise-peer-urls", f"http://{member.peers}",
        )  # fmt: skip
        self._etcd.start(member)
        self._etcd.wait_ready()
        for index in range(len(self._coordinators.running)):
            self._coordinators.start(index)

    def close(self) -> None:
        """Give the ports back."""
        self._coordinators.close()


def _etcdctl(*arguments: str) -> None:
    done = subprocess.run(["etcdctl", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- what servers hold


def held(memory: Path) -> dict[int, set[str]]:
    """Return which servers hold each segment, by its number."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for path in memory.glob("smb.*.segment"):
        *name, number, _ = path.name.removeprefix("smb.").split(".")
        found[int(number, 16)].add(".".join(name))
    return dict(found)


def digest(memory: Path, server: str, number: int) -> str:
    """Return a digest of a segment's data on a server; empty where it has none."""
    with contextlib.suppress(FileNotFoundError), (memory / f"smb.{server}.{number:016x}.segment").open("rb") as file:
        header = file.read(128)
        (nbytes,), (at,) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<Q", header, 64)
        file.seek(at)
        return hashlib.blake2b(file.read(nbytes)).hexdigest()
    return ""
