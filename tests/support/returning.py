"""A cluster whose coordinators and servers are killed, stopped and come back, and clients that know what must be there.

One round of faults is a `Plan`, drawn from a seed. At most one server's memory is lost at a time: a loss is over when
the product says that all is whole. Then everything rests, and `Cluster.judge` compares what is there with what the
clients were answered. Nothing here decides what the product should do: it finds acknowledged changes that are missing,
copies that differ, buffers called lost that are there, deleted ones that are back, and memory that nobody answers for.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import smb
from tests.support.checkers import BadHistoryError, check_between
from tests.support.commands import run_smb
from tests.support.daemons import Daemon, Daemons, keep_port, stop
from tests.support.etcd import Coordinators, EtcdCluster, Gate
from tests.support.returning_clients import CALL_S, NARROW, SINGLE_S, Lane, Worker
from tests.support.returning_plans import Plan
from tests.support.rights import may_mount
from tests.support.transports import SLOWNESS

NAMES = ("a", "b", "c")
WORKERS = 3
WIDE = 30_011  # elements of a lane on all servers
WHOLE_S = 40.0 * SLOWNESS  # until all is whole again
GIVEN_UP_S = 10.0 * SLOWNESS  # what has been called lost for so long is not coming back
REST_S = 15.0 * SLOWNESS  # until memory that was given up is free
LEADER_LEASE_S = 3
DISK_MIB = 24
UNREADABLE_MAX = 3

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Finding:
    """What is wrong. `kind` is one word or two, for counting."""

    kind: str
    text: str

    @property
    def ends_the_cluster(self) -> bool:
        """Whether what comes after it shows nothing more: all but a wrong word on a page."""
        return not self.kind.startswith("said")


class Cluster:
    """Coordinators, servers with memory of their own at fixed ports, workers. A context manager."""

    def __init__(
        self, directory: Path, daemons: Daemons, servers: int, etcd: EtcdCluster | None, rng: random.Random
    ) -> None:
        """`etcd`: two coordinators stand by for each other there; None: one keeps its state on a small disk."""
        self._directory, self._daemons, self._etcd, self._rng = directory, daemons, etcd, rng
        self._left = contextlib.ExitStack()
        self._memory = daemons.memory.with_name(f"{daemons.memory.name}-{time.monotonic_ns()}")
        self.names = NAMES[:servers]
        self.findings: list[Finding] = []
        self.deleted: set[int] = set()
        self._losses: list[tuple[str, float]] = []  # of servers' memory, and when
        self._cut_since: dict[str, float] = {}  # servers that can have reached no coordinator since then
        self._term_since = 0.0  # the leader leads since then, or since later
        self._looking = threading.Event()
        self.quarantined = 0

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as left:
            self._start(left)
            self._left = left.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    @property
    def address(self) -> str:
        """For smb.connect."""
        return self.coordinators.address

    def _start(self, left: contextlib.ExitStack) -> None:
        self._memory.mkdir()
        left.callback(shutil.rmtree, self._memory)
        self._directory.mkdir()
        self.disk = self._directory / "disk"
        self.disk.mkdir()
        if self._etcd is None:
            if may_mount():
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "smb-test", self.disk], check=True)
                left.callback(subprocess.run, ["umount", "--lazy", self.disk], check=False)
            self.coordinators = Coordinators(self._daemons, str(self.disk / "state"), 1)
        else:
            state = f"etcd://{self._etcd.addresses}/{self._memory.name}"
            self.coordinators = Coordinators(self._daemons, state, 2, "--leader-lease", str(LEADER_LEASE_S))
        left.callback(self.coordinators.close)
        left.callback(self._kill_all)
        self.gates: dict[str, list[Gate]] = {}
        self._ports: dict[str, tuple[int, int]] = {}
        for name in self.names:
            (self._memory / name).mkdir(mode=0o700)
            kept = [left.enter_context(contextlib.closing(keep_port())) for _ in range(2)]
            self._ports[name] = (kept[0].getsockname()[1], kept[1].getsockname()[1])
            self.gates[name] = [Gate(address) for address in self.coordinators.addresses]
            for gate in self.gates[name]:
                left.callback(gate.close)
        self.servers = {name: self._server(name) for name in self.names}
        assert all(server.address for server in self.servers.values())
        self._client = left.enter_context(smb.connect(self.address, timeout=CALL_S))
        self._until(lambda: len(self._client.servers()) == len(self.names), "all servers")
        self.pairs = [
            Lane("wide", 2, WIDE),
            *(Lane(f"pair-{name}-{each}", 2, NARROW) for name in self.names for each in "12"),
        ]
        self.singles = [Lane(f"single-{name}", 1, NARROW) for name in self.names]
        for lane in (*self.pairs, *self.singles):
            self.make(self._client, lane)
        self.workers = [Worker(self, number, random.Random(self._rng.random())) for number in range(WORKERS)]
        for worker in self.workers:
            left.callback(worker.end)
            worker.start()
        self._looking.set()
        looker = threading.Thread(target=self._look, daemon=True)
        left.callback(looker.join)
        left.callback(self._looking.clear)
        looker.start()

    def _kill_all(self) -> None:
        for daemon in (*self.coordinators.running, *self.servers.values()):
            daemon.kill()

    def _server(self, name: str) -> Daemon:
        data, control = self._ports[name]
        return self._daemons.memory_server(
            ",".join(gate.address for gate in self.gates[name]), name, "--listen", f"127.0.0.1:{data}",
            "--control", f"127.0.0.1:{control}", "--memory-dir", str(self._memory / name),
        )  # fmt: skip

    def make(self, client: smb.Client, lane: Lane) -> bool:
        """Create a lane's buffer; it is new. True, or an error."""
        _, _, server = lane.name.partition("-")
        on = [server[0]] if lane.name.startswith(("pair-", "single-")) else None
        stripe = "16KiB" if lane.count == WIDE else None
        lane.begun = time.monotonic()
        try:
            buffer = client.create(lane.name, lane.count, "int64", replicas=lane.replicas, servers=on, stripe=stripe)
        except smb.AlreadyExistsError as error:
            self.find("revived", f"{lane.name} is new, and there: {error}")
            raise
        lane.id, lane.acknowledged, lane.attempted = buffer.info.id, 0, 0
        lane.servers = frozenset(place.server for place in buffer.layout.segments)
        return True

    def is_lost(self, lane: Lane) -> bool:
        """Whether its only copy went, or may have gone, with a server's memory."""
        return lane.replicas == 1 and any(name in lane.servers and lane.begun < at for name, at in self._losses)

    def find(self, kind: str, text: str) -> None:
        """Note it, each once."""
        if (found := Finding(kind, text)) not in self.findings:
            self.findings.append(found)

    @property
    def broken(self) -> bool:
        """Whether it is of no use for another round."""
        return any(finding.ends_the_cluster for finding in self.findings)

    # ---- faults

    def play(self, plan: Plan) -> None:
        """Have a round's faults happen, and wait until all is whole."""
        self.findings.clear()
        events = [*self._coordinator_faults(plan), *self._server_faults(plan), *self._disk_faults(plan)]
        began = time.monotonic()
        for at, act in sorted(events, key=lambda event: event[0]):
            _pass_until(began + at)
            act()
        for gates in self.gates.values():
            for gate in gates:
                gate.open()
        self._wait_until_whole()
        if plan.server == "old" and not self.broken:
            before = [lane.bounds()[0] for lane in self.pairs]
            self._until(
                lambda: all(lane.bounds()[0] > least for lane, least in zip(self.pairs, before, strict=True)),
                "changes after the loss",
            )
            self._bring_back_old(self.names[plan.victim], plan)
            self._wait_until_whole()

    def _coordinator_faults(self, plan: Plan) -> Iterator[tuple[float, Callable[[], None]]]:
        if not plan.coordinator:
            return
        hit: list[int] = []

        def begin() -> None:
            both = plan.coordinator == "both"
            hit.extend(range(len(self.coordinators.running)) if both else [self._leader()])
            for index in hit:
                daemon = self.coordinators.running[index]
                if plan.coordinator == "stop":
                    stop(daemon.pid)
                elif plan.coordinator == "term":
                    daemon.stop()
                    daemon.ready_file.unlink(missing_ok=True)
                else:
                    daemon.kill()
            if plan.coordinator != "stop":
                self._term_since = time.monotonic()

        def end() -> None:
            for index in hit:
                if plan.coordinator == "stop":
                    os.kill(self.coordinators.running[index].pid, signal.SIGCONT)
                else:
                    if self._etcd is None or plan.coordinator == "both":
                        self._term_since = time.monotonic()
                    self.coordinators.start(index)

        yield plan.coordinator_at, begin
        lasts_s = max(plan.away_s, LEADER_LEASE_S + 1.0) if plan.coordinator == "stop" else plan.away_s
        yield plan.coordinator_at + lasts_s, end

    def _leader(self) -> int:
        return self.coordinators.leader() if self._etcd is not None else 0

    def _server_faults(self, plan: Plan) -> Iterator[tuple[float, Callable[[], None]]]:
        if not plan.server:
            return
        name = self.names[plan.victim]

        def begin() -> None:
            if plan.server == "stop":
                stop(self.servers[name].pid)
                self._cut(name)
                return
            self.servers[name].kill()
            self._cut(name)
            if plan.delay == "unheard":
                for gate in self.gates[name]:
                    gate.shut()
            if plan.second is not None:
                self._restart(self.names[plan.second])
            if plan.server in ("lose", "old"):
                self._lose(name)

        def back() -> None:
            if plan.server == "stop":
                self._cut_since.pop(name)
                os.kill(self.servers[name].pid, signal.SIGCONT)
                return
            if plan.delay != "unheard":
                self._cut_since.pop(name)
            self.servers[name] = self._server(name)
            if plan.delay == "late":
                self._until(lambda: _listens(self._ports[name][1]), f"{name}'s control port")
                stop(self.servers[name].pid)
                self._cut(name)

        def heard() -> None:
            self._cut_since.pop(name)
            if plan.delay == "late":
                os.kill(self.servers[name].pid, signal.SIGCONT)
            for gate in self.gates[name]:
                gate.open()

        yield plan.server_at, begin
        yield plan.server_at + plan.back_s, back
        if plan.delay:
            yield plan.server_at + plan.back_s + plan.delayed_s, heard

    def _disk_faults(self, plan: Plan) -> Iterator[tuple[float, Callable[[], None]]]:
        if not plan.full_s:
            return
        filler = self.disk / "filler"

        def fill() -> None:
            with filler.open("ab", buffering=0) as file:
                for size in (1 << 20, 4096):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(b"x" * size)

        yield 0.0, fill
        yield plan.full_s, lambda: filler.unlink(missing_ok=True)

    def _cut(self, name: str) -> None:
        self._cut_since[name] = time.monotonic()

    def _restart(self, name: str) -> None:
        """SIGKILL, and at once back with its memory."""
        self.servers[name].kill()
        self.servers[name] = self._server(name)

    def _lose(self, name: str) -> None:
        """Its memory is gone, and kept aside as what an old memory is."""
        shutil.rmtree(self._memory / f"{name}.old", ignore_errors=True)
        (self._memory / name).rename(self._memory / f"{name}.old")
        (self._memory / name).mkdir(mode=0o700)
        self._losses.append((name, time.monotonic()))

    def _bring_back_old(self, name: str, plan: Plan) -> None:
        """The memory from before the loss is there again, and what came since is lost; with a coordinator's fault."""
        away = bool(plan.coordinator)
        if away:
            index = self._leader()
            self.coordinators.running[index].kill()
            self._term_since = time.monotonic()
        self.servers[name].kill()
        self._cut(name)
        shutil.rmtree(self._memory / name)
        (self._memory / f"{name}.old").rename(self._memory / name)
        self._losses.append((name, time.monotonic()))
        self._cut_since.pop(name)
        self.servers[name] = self._server(name)
        if away:
            self._until(lambda: _listens(self._ports[name][1]), f"{name}'s control port")
            if self._etcd is None:
                self._term_since = time.monotonic()
            self.coordinators.start(index)

    # ---- what there is

    def lanes(self) -> list[Lane]:
        """Of all buffers that clients know."""
        workers = [lane for worker in self.workers for lane in (worker.board, *worker.churned.copy().values())]
        return [*self.pairs, *self.singles, *workers]

    def _until(self, condition: Callable[[], object], what: str, deadline_s: float = WHOLE_S) -> bool:
        """Wait for it; whether it came. That it did not is a finding, if it has a name."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            with contextlib.suppress(smb.Error):
                if condition():
                    return True
            time.sleep(0.05)
        if what:
            self.find("stuck", f"no {what} within {deadline_s:g} s")
        return False

    def _wait_until_whole(self) -> None:
        """Until all processes serve, and the product says that they are alive and every second copy is there."""
        assert all(daemon.address for daemon in (*self.coordinators.running, *self.servers.values()))
        wrong: list[str] = []
        lost_since = 0.0

        def is_settled() -> bool:
            nonlocal lost_since
            servers, infos = self._client.servers(), self._client.list()
            lost = [info for info in infos if info.replicas > 1 and info.lost]
            wrong[:] = [
                *(f"{server.name} is not alive" for server in servers if not server.alive),
                *(f"{info.name} has one copy" for info in infos if info.degraded),
                *(f"{info.name} is lost" for info in lost),
            ]
            lost_since = (lost_since or time.monotonic()) if lost else 0.0
            given_up = lost_since and time.monotonic() > lost_since + GIVEN_UP_S
            return bool(given_up) or (len(servers) == len(self.names) and not wrong)

        self._until(is_settled, "")
        if wrong:
            self.find("not whole", "; ".join(wrong[:6]))

    def _look(self) -> None:
        """Look at what the product says, again and again: of one that it has not heard of it says nothing."""
        while self._looking.is_set():
            with (
                contextlib.suppress(smb.Error),
                smb.connect(self.address, name="looker", timeout=SINGLE_S) as client,
            ):
                while self._looking.is_set():
                    self._look_once(client)
                    time.sleep(0.1)

    def _look_once(self, client: smb.Client) -> None:
        began, cut = time.monotonic(), dict(self._cut_since)
        unheard = {name for name, since in cut.items() if since < self._term_since < began}
        alive = {server.name for server in client.servers() if server.alive}
        # The same ones are cut off still: none was heard meanwhile.
        for name in unheard & alive & {each for each, since in self._cut_since.items() if cut.get(each) == since}:
            self.find("said alive", f'"{name}" is called alive by a leader that has not heard of it')
        for info in (each for each in client.list() if each.lost):
            lane = next((each for each in self.lanes() if each.id == info.id), None)
            if lane is not None and not lane.leaving and not self.is_lost(lane):
                self.find("said lost", f"{info.name}, {info.replicas} copies, is called lost: {_where(info)}")

    # ---- the judge

    def judge(self) -> None:
        """All rest; what is there is compared with what clients were answered. Then they work again.

        Where something was found by then, calls may not end: data are looked at under those who work.
        """
        if self.broken:
            self._check_data([*self.pairs, *self.singles])
            return
        for worker in self.workers:
            worker.go.clear()
        if not all(worker.resting.wait(CALL_S + 5.0) for worker in self.workers):
            self.find("stuck", f"a call did not end within {CALL_S + 5.0:g} s")
            return
        self._settle_names()
        self._check_data(self.lanes())
        self._check_copies()
        self._check_memory()
        if not self.broken:
            self._make_anew()
            for worker in self.workers:
                worker.go.set()

    def _settle_names(self) -> None:
        """Every name that was answered is there, every other one is not. Of an unknown outcome either may be so."""
        infos = {info.name: info for info in self._client.list()}
        by_id = {info.id: info for info in infos.values()}
        for worker in self.workers:
            for lane, names in worker.unsure:
                info = by_id.get(lane.id) if lane.id else infos.get(lane.name)
                if info is None:
                    self.deleted.add(lane.id)
                    if "" not in names:
                        self.find("vanished", f"{lane.name}, {lane.replicas} copies, is under none of {names}")
                elif info.name not in names:
                    self.find("vanished", f"{info.name} should have one of the names {names}")
                else:
                    lane.id, lane.name, lane.leaving = info.id, info.name, False
                    lane.servers = frozenset(place.server for place in info.layout.segments)
                    worker.churned[lane.name] = lane
            worker.unsure.clear()
        expected = {lane.name: lane for lane in self.lanes()}
        for name in expected.keys() - infos.keys():
            self.find("vanished", f"{name}, {expected[name].replicas} copies, is not there")
        for name in infos.keys() - expected.keys():
            self.find("revived", f"{name} is there, and was deleted or never made")
        for number in by_id.keys() & self.deleted:
            self.find("revived", f"{by_id[number].name} was deleted")

    def _check_data(self, lanes: Sequence[Lane]) -> None:
        infos = {info.name: info for info in self._client.list()}
        unreadable = 0
        with smb.connect(self.address, timeout=2 * SINGLE_S) as client:
            for lane in lanes:
                if self.is_lost(lane) or lane.name not in infos or unreadable >= UNREADABLE_MAX:
                    continue
                least, _ = lane.bounds()
                where = f"{lane.name}, {lane.replicas} copies, {_where(infos[lane.name])}"
                try:
                    check_between(client.open(lane.name).read(), least, lane.attempted, lane.name)
                except BadHistoryError as error:
                    self.find("lost data", f"{where}: {error}")
                except smb.Error as error:
                    unreadable += 1
                    kind = "lost data" if "memory was lost" in str(error) else "unreadable"
                    self.find(kind, f"{where}: {type(error).__name__}: {error}")

    def _check_copies(self) -> None:
        """Where two copies are said to be, there are two, and equal."""
        wrong: dict[str, str] = {}

        def is_right() -> bool:
            wrong.clear()
            before = self._places()
            found = {(name, number): self._compare(number, pair) for name, number, pair in before if pair[1]}
            after = set(self._places())
            for name, number, pair in before:
                if (said := found.get((name, number))) and (name, number, pair) in after:
                    wrong[f"{name} {number:016x}"] = said
            return not wrong

        if not self._until(is_right, "", REST_S):
            for name, said in wrong.items():
                self.find("copies", f"{name}: {said}")

    def _places(self) -> list[tuple[str, int, tuple[str, str]]]:
        return [
            (info.name, place.id, (place.server, place.backup))
            for info in self._client.list()
            for place in info.layout.segments
        ]

    def _compare(self, number: int, servers: Sequence[str]) -> str:
        """Return what is wrong with two copies; empty for nothing."""
        found = [self._data(name, number) for name in servers]
        for name, data in zip(servers, found, strict=True):
            if data is None:
                return f"no memory of it on {name}, one of {servers}"
        return "" if np.array_equal(*found) else f"copies on {servers} differ"

    def _data(self, server: str, number: int) -> Array | None:
        try:
            with self._file(server, number).open("rb") as file:
                header = file.read(128)
                (nbytes,), (at,) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<Q", header, 64)
                file.seek(at)
                return np.frombuffer(file.read(nbytes), np.uint8)
        except FileNotFoundError:
            return None

    def _file(self, server: str, number: int) -> Path:
        return self._memory / server / f"smb.{server}.{number:016x}.segment"

    def _check_memory(self) -> None:
        """Each segment that is held belongs to a buffer there, or is listed as quarantined."""
        wrong: list[str] = []

        def is_right() -> bool:
            wrong.clear()
            expected: defaultdict[str, set[int]] = defaultdict(set)
            for _, number, servers in self._places():
                for name in servers:
                    expected[name].add(number)
            left = {name: self._held(name) - expected[name] for name in self.names}
            if any(left.values()):
                listed = quarantined(self.address)
                self.quarantined = len(listed)
                for name, numbers in left.items():
                    wrong.extend(f"{name} holds {number:016x}" for number in numbers if (name, number) not in listed)
            return not wrong

        if not self._until(is_right, "", REST_S):
            self.find("left memory", f"neither a buffer's nor quarantined: {'; '.join(wrong[:6])}")

    def _held(self, name: str) -> set[int]:
        found = (self._memory / name).glob(f"smb.{name}.*.segment")
        return {int(path.name.split(".")[-2], 16) for path in found}

    def _make_anew(self) -> None:
        """What was lost with a server's memory is deleted, and lanes are created again."""
        lost = [lane for lane in self.lanes() if self.is_lost(lane)]
        for lane in lost:
            self._client.delete(lane.name, missing_ok=True)
            self.deleted.add(lane.id)
            if lane in self.singles:
                # The coordinator's connection to a server that has just come back may need a moment.
                self._until(partial(self.make, self._client, lane), f"creation of {lane.name}")
        for worker in self.workers:
            worker.churned = {name: lane for name, lane in worker.churned.items() if not self.is_lost(lane)}

    def logs(self) -> str:
        """Return the last lines of the coordinators' logs."""
        return "\n".join(daemon.log.read_text()[-2000:] for daemon in self.coordinators.running)


def quarantined(address: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what `smb status` lists as quarantined, by server and segment; nothing where it has no such list."""
    done = run_smb("status", "--json", coordinator=address)
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout).get("quarantined", [])
    return {(each["server"], segment_number(each["segment"])): each for each in listed}


def segment_number(segment: int | str) -> int:
    """Return a segment's number, as programs or people write it."""
    return segment if isinstance(segment, int) else int(segment, 16)


def _where(info: smb.BufferInfo) -> str:
    return " ".join(
        f"{place.id:016x}@{place.epoch}:{place.server}+{place.backup or '-'}" for place in info.layout.segments[:3]
    )


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


def _pass_until(moment: float) -> None:
    while (left_s := moment - time.monotonic()) > 0:
        time.sleep(left_s)
