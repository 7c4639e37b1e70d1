"""One cluster, everything at once, and faults in an order drawn from one seed; one judge of all at the end.

    python -m tests.soak [--minutes 60] [--seed N] [--etcd]        or make soak MINUTES=60

Clients of every kind work in processes of their own (clients.py); daemons are killed and stopped, networks cut, disks
filled (world.py), clients killed and replaced. After each fault every client gets on. Clients check versions, snapshots
and files as they work. At the end sums, histories, copies and models are what they must be (judges.py), and nothing was
lost hold of: sessions, descriptors, memory, names.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import smb
import smb.train
from smb.security.credentials import CREDENTIALS_VARIABLE
from tests.soak import clients, judges
from tests.soak.world import LASTING, LEASE_S, SERVERS, World, missing_for
from tests.support import second_copy
from tests.support.clients import spawn
from tests.support.daemons import running_daemons, wait_for
from tests.support.etcd import running_etcd
from tests.support.history import count_notes
from tests.support.mounts import end_mount, is_mounted, missing_for_mounts, start_mount, unmount
from tests.support.transports import EACH_WAY

COUNT = 20_000  # elements of a lane
GET_ON_S = 90.0  # after a fault: longer than a call's own time limit
GAP_S = (0.2, 2.0)  # between faults
LEAKED_FDS, LEAKED_BYTES = 16, 64 << 20  # what a process may have more at the end, or once all clients have left


@dataclass
class Seat:
    """One client's: whoever is killed there is replaced."""

    work: Callable[..., None]
    way: str
    given: tuple[Any, ...] = ()
    mortal: bool = True
    paths: list[Path] = field(default_factory=list)
    process: Any = None


class Soak:
    """One run."""

    def __init__(self, directory: Path, world: World, rng: random.Random) -> None:
        self._began = time.monotonic()
        self._directory = directory
        self._world = world
        self._rng = rng
        self._stop = directory / "stop"
        self._seats = _seats(directory)
        self._mount = directory / "mount"
        self.faults: dict[str, int] = {}
        self._left: list[str] = []

    def run(self, seconds: float) -> list[str]:
        """Return the judges' lines. Raises AssertionError with what was wrong."""
        with smb.connect(self._world.address, timeout=clients.TIMEOUT_S) as client:
            _make(client)
            names = {info.name for info in client.list()}
        before, memory = self._held(), sum(_segments(self._world.memory).values())
        with self._files() as mount, self._at_work():
            self._get_on()
            lasting = [mount.pid] if mount else []
            lasting += [seat.process.pid for seat in self._seats.values() if not seat.mortal]
            at_first = [_held(pid) for pid in lasting]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self._fault()
                self._get_on()
            for pid, first in zip(lasting, at_first, strict=True):
                _check_held(f"process {pid}, over the run", first, _held(pid))
        lines = self._judge()
        with smb.connect(self._world.address, timeout=clients.TIMEOUT_S) as client:
            for name in ("rounds", "elastic"):
                smb.train.delete(client, name)
            client.delete("file", missing_ok=True)  # the mount's
            client.stop_relays("versions")
            left = {info.name for info in client.list()} - names
            assert not left, f"buffers are left: {sorted(left)}"
        self._world.wait_for_no_session()
        with contextlib.suppress(AssertionError):  # idle barriers are freed; the next line says what is left
            wait_for(lambda: self._held()[0] <= before[0] + LEAKED_FDS, "descriptors", 2 * LEASE_S)
        _check_held("all daemons", before, self._held())
        with contextlib.suppress(AssertionError):  # as above
            wait_for(lambda: sum(_segments(self._world.memory).values()) <= memory, "segments", 2 * LEASE_S)
        shared = _segments(self._world.memory)
        assert sum(shared.values()) <= memory, f"shared memory was {memory} bytes, and is {shared}"
        return [*lines, "sessions, descriptors, memory and names are what they were"]

    def _held(self) -> tuple[int, int]:
        """All daemons' together: copies, with their connections, go from one to another."""
        each = [_held(daemon.pid) for daemon in self._world.daemons()]
        return sum(fds for fds, _ in each), sum(nbytes for _, nbytes in each)

    def _start(self, name: str) -> None:
        seat = self._seats[name]
        path = self._directory / f"{name}.{len(seat.paths)}"
        seat.paths.append(path)
        seat.process = spawn(seat.work, self._world.address, seat.way, path, self._stop, *seat.given)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """All clients, until they are told to stop: none has failed then."""
        try:
            for name in self._seats:
                self._start(name)
            yield
            self._stop.touch()
            for name, seat in self._seats.items():
                seat.process.join(GET_ON_S)
                assert seat.process.exitcode == 0, f"client {name} ended with {seat.process.exitcode}"
        finally:
            for seat in self._seats.values():
                if seat.process is not None:
                    seat.process.kill()
                    seat.process.join()

    @contextlib.contextmanager
    def _files(self) -> Iterator[Any]:
        """A mount, where this machine can have one, and a client that changes a file there."""
        if missing_for_mounts():
            yield None
            return
        process = start_mount(self._world, self._mount, "--replicas", "2")
        try:
            given = (self._mount / "file", self._directory / "model", self._rng.getrandbits(32))
            self._seats["files"] = Seat(clients.change_files, "tcp", given, mortal=False)
            yield process
        finally:
            if is_mounted(self._mount):
                unmount(self._mount)
            end_mount(process, self._mount)

    def _fault(self) -> None:
        faults = {**self._world.faults(), "kill-client": self._kill_client}
        if not self._left:  # each kind once before any comes again: a short run has all of them
            self._left = sorted(faults)
            self._rng.shuffle(self._left)
        name = self._left.pop()
        time.sleep(self._rng.uniform(*GAP_S))
        begun = time.monotonic()
        faults[name](self._rng)
        print(f"{begun - self._began:.1f} s: {name}, {time.monotonic() - begun:.1f} s", flush=True)
        self.faults[name] = self.faults.get(name, 0) + 1

    def _kill_client(self, rng: random.Random) -> None:
        name = rng.choice(sorted(name for name, seat in self._seats.items() if seat.mortal))
        process = self._seats[name].process
        process.kill()
        process.join()
        self._start(name)

    def _get_on(self) -> None:
        """Until each client was answered once more."""
        before = {name: self._told(seat) for name, seat in self._seats.items()}

        def behind() -> list[str]:
            for name, seat in self._seats.items():
                assert seat.process.exitcode is None, f"client {name} ended with {seat.process.exitcode}"
            # Two notes for each answered call, and one may have been on its way.
            return [name for name, seat in self._seats.items() if self._told(seat) < before[name] + 3]

        deadline = time.monotonic() + GET_ON_S
        while late := behind():
            assert time.monotonic() < deadline, f"{GET_ON_S:g} s after the last fault there is no progress of {late}"
            time.sleep(0.05)

    def _told(self, seat: Seat) -> int:
        return count_notes(seat.paths[-1])

    def _judge(self) -> list[str]:
        def of(prefix: str) -> list[Path]:
            return [path for name, seat in self._seats.items() if name.startswith(prefix) for path in seat.paths]

        self._world.wait_until_whole()
        lanes = {name: seat.paths for name, seat in self._seats.items() if name.startswith("lane-")}
        with smb.connect(self._world.address, timeout=clients.TIMEOUT_S) as client:
            lines = [
                judges.judge_additions(client, lanes),
                judges.judge_tickets(client, of("draw-")),
                judges.judge_locks(of("lock-")),
                judges.judge_meetings([of("meet-0"), of("meet-1")]),
                judges.judge_copies(client, self._world.memory, of("copies-")),
                judges.judge_training(client, "rounds", of("rounds-")),
                judges.judge_training(client, "elastic", of("elastic-")),
            ]
        for prefix, what in (
            ("publish", "publications"),
            ("read-", "reads of them, none mixed"),
            ("mirror", "reads of their mirror, none mixed"),
            ("save", "snapshots, each chunk whole"),
            ("files", "operations on a file"),
        ):
            if paths := of(prefix):
                lines.append(f"{judges.asked_and_told(paths)[1]} {what}")
        return lines


def _seats(directory: Path) -> dict[str, Seat]:
    """The clients, besides those that change files: the transports in turn."""
    ways = [EACH_WAY[number % len(EACH_WAY)] for number in range(3)]
    seats = {f"lane-{n}": Seat(clients.add, way, (f"lane-{n}",), mortal=n > 0) for n, way in enumerate(ways)}
    for n, way in enumerate(ways[:2]):
        seats[f"draw-{n}"] = Seat(clients.draw, way)
        seats[f"lock-{n}"] = Seat(clients.lock, way)
        seats[f"meet-{n}"] = Seat(clients.meet, way)
        seats[f"read-{n}"] = Seat(clients.read, way)
        far = way if way != "shm" else "auto"  # what has two copies is not mapped
        seats[f"rounds-{n}"] = Seat(clients.train, far, ("rounds",))
        seats[f"elastic-{n}"] = Seat(clients.train, far, ("elastic",))
        seats[f"copies-{n}"] = Seat(clients.use_copies, far, (n,), mortal=False)
    seats["mirror"] = Seat(clients.read_mirror, ways[0], (SERVERS[-1],))
    seats["publish"] = Seat(clients.publish, ways[0])
    seats["save"] = Seat(clients.save, ways[1], (directory / "snapshots",))
    return seats


def _make(client: smb.Client) -> None:
    """The buffers."""
    for lane in ("lane-0", "lane-1", "lane-2", "common"):
        client.create(lane, COUNT, "int64", stripe="64KiB", servers=LASTING)
    client.create("tickets", 8, "int64", servers=LASTING)
    client.create("locked", 10_000, "int64", stripe="64KiB", servers=LASTING)
    client.create("meetings", 1, "int64", servers=LASTING)
    client.create("versions", COUNT, "int64", versions=2, stripe="64KiB", servers=LASTING)
    second_copy.make(client)


def _held(pid: int) -> tuple[int, int]:
    """A process's open descriptors, and the bytes that are its alone."""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()), int(anonymous.split()[1]) << 10


def _segments(memory: Path) -> dict[str, int]:
    """The servers' files in shared memory, and the size of each."""
    found = {}
    for path in memory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if path.is_file():
                found[str(path.relative_to(memory))] = path.stat().st_size
    return found


def _check_held(what: str, first: tuple[int, int], last: tuple[int, int]) -> None:
    assert last[0] <= first[0] + LEAKED_FDS, f"{what}: {first[0]} descriptors, then {last[0]}"
    assert last[1] <= first[1] + LEAKED_BYTES, f"{what}: {first[1] >> 20} MiB, then {last[1] >> 20}"


def soak(directory: Path, seconds: float, seed: int, *, etcd: bool = False) -> None:
    """Run one, and print what was seen."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as left:
        members = left.enter_context(running_etcd(1)) if etcd else None
        if members is not None:
            members.wait_ready()
        daemons = left.enter_context(running_daemons(directory))
        world = left.enter_context(World(directory, daemons, members))
        left.enter_context(_environment({CREDENTIALS_VARIABLE: str(world.credentials / "client")}))
        run = Soak(directory, world, rng)
        lines = run.run(seconds)
        print(f"seed {seed}, {seconds:.0f} s, faults: " + ", ".join(f"{n} {k}" for k, n in sorted(run.faults.items())))
        for fault in ("cut", "full-disk"):
            if missing_for(fault):
                print(f"not done: {fault}, which needs {missing_for(fault)}")
        if etcd:
            print("not done: full-disk, since the state is in etcd")
        if missing_for_mounts():
            print(f"not done: files in a mount, which need {', '.join(missing_for_mounts())}")
        print("\n".join(lines))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Ours and of what is started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
