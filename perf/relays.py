"""Publishing through mirrors: from the trainer's call until the last reader has it, in times of one copy over its link.

    python -m perf.relays --mbytes 16 --rate 20mbit

Hosts in network namespaces (perf/netlab.py, needs root), each with a file system of its own for its segments, so that
only what is on one host is mapped there. Every reader reads into its own memory and says a sum over it. S/W is the time
of one copy over the trainer's link, with TCP's headers (0.956 of the rate are data). The next generation is published
as soon as the last reader has read one. `copies` is what the trainer's host has sent for a generation, in states.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import smb
from perf.lab_daemons import LabDaemons
from perf.netlab import Host, Lab, _shape_end, parse_rate
from smb.relay.reader_source import Nearest

PYTHON = [sys.executable, "-m"]
READY_S = 60.0
TOGETHER = 8  # readers in a process, where there are many


@dataclass(frozen=True)
class Case:
    """`uploads`: of the relays' hosts; None: as fast as the machine. `limit` is in S/W of the trainer's link."""

    title: str
    trainer: float  # its link's rate, of --rate; so below
    uploads: Sequence[float | None]
    readers: int = 1  # on each host
    zones: Sequence[str] = ()  # of the trainer and of each host; empty: none has a zone
    relays: bool = True
    formula: float = 1.0
    limit: float = 0.0
    kill: bool = False  # in the middle of each generation but the first, one host's relay


CASES = {
    "star": Case("8 readers behind the trainer's uplink, no mirrors", 1, [None] * 8, relays=False),
    "uplink": Case(
        "8 readers behind the trainer's uplink, one site", 1, [None] * 8, zones=["", *8 * ["site"]], limit=1.2
    ),
    "plain": Case("the same, no zones", 1, [None] * 8, limit=1.2),
    "home": Case("the same, half of them in the trainer's zone", 1, [None] * 8, zones=[*"AAAAA", *"BBBB"], limit=1.2),
    "equal": Case("8 hosts with equal links", 1, [1] * 8, limit=1.4),
    "unequal": Case("uplinks 1:2:4, the trainer's 4", 4, [1, 2, 4], formula=4 / (11 / 3), limit=1.2),
    "one": Case("1 reader on one host", 1, [1]),
    "four": Case("4 readers on one host", 1, [1], readers=4, limit=1.05),
    "killed": Case("4 hosts with equal links, a relay killed in the middle", 1, [1] * 4, kill=True),
    "many": Case("64 readers on 4 hosts", 1, [1] * 4, readers=16),
}


def state(mbytes: int, number: int) -> np.ndarray[Any, Any]:
    """Return a generation."""
    return np.random.default_rng(number).integers(0, 256, mbytes << 20, np.uint8)


def read(address: str, count: int, near: str) -> None:
    """Follow with so many clients; print a line of JSON for each generation that one has read."""
    print(json.dumps({"ready": True}), flush=True)

    telling = threading.Lock()

    def follow() -> None:
        with smb.connect(address, timeout=600) as client:
            source = client.open("m", timeout=READY_S)
            nearest = Nearest(client, source, near or None)
            memory = np.empty(source.shape, source.dtype)
            generation = 0
            while True:
                nearest.wait(generation + 1, None)
                generation = nearest.read(lambda buffer, _: buffer.read_version(memory), generation)
                told = {"generation": generation, "at": time.monotonic(), "sum": int(memory.sum(dtype=np.uint64))}
                with telling:
                    print(json.dumps(told | {"from": nearest.buffer().name}), flush=True)

    threads = [threading.Thread(target=follow, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    os._exit(0)


def train(address: str, mbytes: int, relays: int) -> None:
    """Publish whenever a line comes; print when that began."""
    with smb.connect(address, timeout=600) as client:
        buffer = client.create("m", mbytes << 20, "uint8", versions=3, servers=["trainer"], stripe="64KiB")
        deadline = time.monotonic() + READY_S
        while relays:
            try:
                client.relay("m")
                break
            except smb.UnavailableError:  # on a busy machine a server may be too slow to make its mirror
                if time.monotonic() > deadline:
                    raise
        print(json.dumps({"ready": True}), flush=True)
        for number, _ in enumerate(sys.stdin, 1):
            array = state(mbytes, number)
            began = time.monotonic()
            buffer.publish(array)
            took = time.monotonic() - began
            print(json.dumps({"at": began, "took": took, "sum": int(array.sum(dtype=np.uint64))}), flush=True)


class Cluster:
    """The daemons of a case, and processes beside them. A context manager."""

    def __init__(self, case: Case, rate: str, mbytes: int) -> None:
        self._case = case
        self._mbytes = mbytes
        bits = parse_rate(rate)
        self._rates = [None if up is None else f"{round(up * bits / 1000)}kbit" for up in case.uploads]
        # Only sending is limited: with a slow way in no trees could help.
        hosts = [Host("ctl"), Host("trainer"), *(Host(f"h{i}") for i in range(len(case.uploads)))]
        self._uplinks = {"trainer": f"{round(case.trainer * bits / 1000)}kbit"}
        self._uplinks |= {f"h{i}": up for i, up in enumerate(self._rates) if up is not None}
        self.lab = Lab(hosts)
        self.address = ""
        self.servers: dict[str, subprocess.Popen[Any]] = {}

    def __enter__(self) -> Cluster:
        self._leaving = contextlib.ExitStack()
        self._directory = Path(self._leaving.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rl-")))
        try:
            self._leaving.enter_context(self.lab)
            for name, up in self._uplinks.items():
                _shape_end(Host(name, up), self.lab.namespace(name), "eth0")
            self._serve()
        except BaseException:
            self._leaving.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    def _serve(self) -> None:
        self._daemons = LabDaemons(self.lab, self._directory)
        self.address = self._daemons.coordinator("ctl")
        room = f"{6 * self._mbytes + 64}MiB"
        memory = self._directory / "memory"
        memory.mkdir(mode=0o700)
        names = [host.name for host in self.lab.hosts[1:]]
        zones = dict(zip(names, self._case.zones or [""] * len(names), strict=True))
        for host in self.lab.hosts[1:]:
            if host.name == "trainer" or self._case.relays:
                zone = zones[host.name]
                command = ["memserver", "--coordinator", self.address, "--capacity", room, "--name", host.name]
                command += ["--memory-dir", str(memory), "--loops", "1", *(["--zone", zone] * bool(zone))]
                self.servers[host.name] = self._daemons.start(host.name, command, memory=memory)
        for name, process in self.servers.items():
            self._daemons.address(name, process)

    def log(self, host: str) -> str:
        """Return the end of a daemon's log."""
        return self._daemons.log(host)

    def beside(self, host: str, *command: str, module: str = "perf.relays") -> subprocess.Popen[str]:
        """Start a part of this program on a host, with its memory server's files."""
        line = [*PYTHON, module, *command]
        if host in self.servers:
            line = ["nsenter", f"--mount=/proc/{self.servers[host].pid}/ns/mnt", "--wd=.", *line]
        return self.lab.popen(host, line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def kill_relay(self, host: str) -> None:
        """End the process that fills a host's mirrors."""
        for path in Path(f"/proc/{self.servers[host].pid}/task").glob("*/children"):
            for pid in path.read_text().split():
                os.kill(int(pid), signal.SIGKILL)

    def sent_bytes(self) -> int:
        """Return how many bytes the trainer's host has sent."""
        table = self.lab.run("trainer", ["cat", "/proc/net/dev"], capture_output=True, text=True).stdout
        (line,) = (line for line in table.splitlines() if line.strip().startswith("eth0:"))
        return int(line.split()[9])


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of JSON that it printed."""
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


@dataclass(frozen=True)
class Found:
    """What was measured of a generation: its time in S/W, what the trainer's host sent in states, and from how many
    buffers it was read.
    """

    time: float
    copies: float
    sources: int


def run(case: Case, rate: str, mbytes: int, generations: int) -> Iterator[Found]:
    """Yield what was measured of each generation, and before these of one that is published while relays begin."""
    one_copy_s = (mbytes << 23) / (0.956 * case.trainer * parse_rate(rate))
    with Cluster(case, rate, mbytes) as cluster:
        trainer = cluster.beside("trainer", "train", cluster.address, str(mbytes), str(int(case.relays)))
        line(trainer)
        processes = []
        for i in range(len(case.uploads)):
            left = case.readers
            while left:
                part = min(left, TOGETHER if case.readers > TOGETHER else 1)
                processes.append((cluster.beside(f"h{i}", "read", cluster.address, str(part), ""), part))
                left -= part
        for process, _ in processes:
            line(process)
        for number in range(1, generations + 2):
            assert trainer.stdin is not None
            before = cluster.sent_bytes()
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            sent = line(trainer)
            if case.kill and number > 1:
                time.sleep(0.4 * one_copy_s)
                cluster.kill_relay(f"h{number % len(case.uploads)}")
            last, sources = 0.0, set()
            for process, part in processes:
                for _ in range(part):
                    told = line(process)
                    assert (told["generation"], told["sum"]) == (number, sent["sum"]), (told, sent)
                    last = max(last, told["at"])
                    sources.add(told["from"])
            copies = (cluster.sent_bytes() - before) / (mbytes << 20)
            yield Found((last - sent["at"]) / one_copy_s, copies, len(sources))


def main() -> None:
    """Run all cases, or some, or one process's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*")
    parser.add_argument("--mbytes", type=int, default=16)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    if options.part:
        part, address, *rest = options.part
        if part == "train":
            train(address, int(rest[0]), int(rest[1]))
        else:
            read(address, int(rest[0]), rest[1])
        return
    for name in options.cases.split(","):
        case = CASES[name]
        found = list(run(case, options.rate, options.mbytes, options.generations))
        first, *times = (each.time / case.formula for each in found)
        goal = f", goal {case.limit:g}" if case.limit else ""
        of = "S/W" if case.formula == 1.0 else "the formula"
        print(
            f"{name}: {case.title}: median {median(times):.2f} {of}, at most {max(times):.2f}{goal}; by generation "
            f"{' '.join(f'{each:.2f}' for each in times)}; copies "
            f"{' '.join(f'{each.copies:.2f}' for each in found[1:])}; before these, while relays began: "
            f"{first:.2f}, {found[0].copies:.2f} copies; "
            f"read from {found[-1].sources} buffers",
            flush=True,
        )


if __name__ == "__main__":
    main()
