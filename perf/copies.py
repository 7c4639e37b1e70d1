"""The cost of a second copy on shaped links: writes of one client and of many, small calls, a lost copy made anew.

    python -m perf.copies --rate 400mbit

Three memory servers and three clients, each in a network namespace of its own (perf/netlab.py, needs root). Each link
has the rate in both directions; 0.956 of the rate are data. Calls with one copy and with two are made in turns, and a
ratio is of one such pair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import smb
from perf.lab_daemons import LabDaemons
from perf.netlab import Host, Lab, parse_rate

SERVERS, CLIENTS = ("s0", "s1", "s2"), ("c0", "c1", "c2")
PAIRS = 5
WRITTEN_MIB, WRITES = 16, 4
SMALL_CALLS = 300
COPIED_MIB = 128
WHOLE_S = 300.0
DATA = 0.956  # of a link's rate: the rest are headers


def ask(address: str) -> None:
    """A client: do what each line of stdin asks for, and print what came of it."""
    with smb.connect(address, transport="tcp", timeout=600) as client:
        print(json.dumps({"ready": True}), flush=True)
        for asked in map(json.loads, sys.stdin):
            match asked.pop("do"):
                case "create":
                    buffer = client.create(**asked, dtype="uint8")
                    print(json.dumps({"backup": buffer.layout.segments[0].backup}), flush=True)
                case "write":
                    print(json.dumps(write(client.open(asked["buffer"]), asked["times"])), flush=True)
                case "copy":
                    print(json.dumps({"s": copied_s(client, asked["buffer"])}), flush=True)


def write(buffer: smb.Buffer, times: int) -> dict[str, float]:
    """Write all of it so many times; return seconds."""
    values, took = np.ones(buffer.size, buffer.dtype), []
    for _ in range(times):
        began = time.perf_counter()
        buffer.write(values)
        took.append(time.perf_counter() - began)
    return {"median_s": statistics.median(took), "s": sum(took)}


def copied_s(client: smb.Client, name: str) -> float:
    """Wait until a lost copy is made anew; return how long it was on its way."""
    began, deadline = 0.0, time.monotonic() + WHOLE_S
    while time.monotonic() < deadline:
        (place,) = next(info for info in client.list() if info.name == name).layout.segments
        if place.copying_to and not began:
            began = time.monotonic()
        if began and place.backup:
            return time.monotonic() - began
        time.sleep(0.01)
    raise SystemExit(f"the copy was not made within {WHOLE_S:g} s")


class Cluster:
    """A context manager."""

    def __init__(self, rate: str) -> None:
        self.lab = Lab([Host("ctl"), *(Host(name, rate) for name in (*SERVERS, *CLIENTS))])
        self._left = contextlib.ExitStack()
        self.servers: dict[str, subprocess.Popen[Any]] = {}
        self.clients: dict[str, subprocess.Popen[str]] = {}
        self.address = ""

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as left:
            self._directory = Path(
                left.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="smb-copies-"))
            )
            left.enter_context(self.lab)
            self._daemons = LabDaemons(self.lab, self._directory)
            self.address = self._daemons.coordinator("ctl")
            for name in SERVERS:
                self.serve(name)
            for name in ("ctl", *CLIENTS):
                command = [sys.executable, "-m", "perf.copies", "ask", self.address]
                self.clients[name] = self.lab.popen(
                    name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                line(self.clients[name])
            self._left = left.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def serve(self, name: str) -> None:
        """Start a memory server, with memory of its own."""
        memory = self._directory / name
        memory.mkdir(mode=0o700, exist_ok=True)
        command = ["memserver", "--coordinator", self.address, "--capacity", "1GiB", "--name", name, "--zone", name]
        command += ["--memory-dir", str(memory), "--loops", "1", "--copy-rate", "0"]
        self.servers[name] = self._daemons.start(name, command)
        self._daemons.address(name, self.servers[name])

    def lose(self, name: str) -> None:
        """A host dies with its memory."""
        self.servers[name].kill()
        self.servers.pop(name).wait()
        shutil.rmtree(self._directory / name)


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of JSON that it printed."""
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def tell(process: subprocess.Popen[str], **asked: Any) -> None:
    """Ask it for something."""
    assert process.stdin is not None
    print(json.dumps(asked), file=process.stdin, flush=True)


def one_client(cluster: Cluster, rate: float) -> None:
    """Large writes of one client to one server: the second copy's bytes go over the server's link."""
    found: dict[int, list[float]] = {1: [], 2: []}
    small: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(PAIRS):
        for copies in (1, 2):
            tell(cluster.clients["c0"], do="write", buffer=f"one-{copies}", times=WRITES)
            found[copies].append((WRITES * WRITTEN_MIB << 20) / line(cluster.clients["c0"])["s"])
            tell(cluster.clients["c0"], do="write", buffer=f"small-{copies}", times=SMALL_CALLS)
            small[copies].append(line(cluster.clients["c0"])["median_s"])
    show("one client, writes of 16 MiB", found, rate, "of the link", goal=0.9)
    one, two = (1e6 * statistics.median(small[copies]) for copies in (1, 2))
    print(f"8 bytes: {one:.0f} us with one copy, {two:.0f} with two, {two - one:+.0f}", flush=True)


def all_links(cluster: Cluster, rate: float) -> None:
    """Large writes of three clients to three servers: with two copies each byte comes in twice."""
    found: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(PAIRS):
        for copies in (1, 2):
            began = time.monotonic()
            for name in CLIENTS:
                tell(cluster.clients[name], do="write", buffer=f"{name}-{copies}", times=WRITES)
            for name in CLIENTS:
                line(cluster.clients[name])
            found[copies].append(len(CLIENTS) * (WRITES * WRITTEN_MIB << 20) / (time.monotonic() - began))
    show("three clients fill three servers' links", found, len(SERVERS) * rate, "of the links", goal=0.45)


def show(title: str, found: dict[int, list[float]], rate: float, of: str, goal: float) -> None:
    """Print bytes a second with one and with two copies, and the pairs' ratios."""
    ratios = [two / one for one, two in zip(found[1], found[2], strict=True)]
    parts = (
        f"{statistics.median(found[n]) / 1e6:.1f} MB/s ({statistics.median(found[n]) / rate:.2f} {of})" for n in (1, 2)
    )
    print(
        f"{title}: {' with one copy, '.join(parts)} with two: {statistics.median(ratios):.2f}, goal {goal:g}; "
        f"pairs {' '.join(f'{ratio:.2f}' for ratio in ratios)}",
        flush=True,
    )


def resync(cluster: Cluster, rate: float) -> None:
    """A server is lost with its memory, and what it had is copied to another one, over one link."""
    lost = create(cluster, "copied", COPIED_MIB << 20, ["s0"], 2)
    tell(cluster.clients["ctl"], do="copy", buffer="copied")
    cluster.lose(lost)
    speed = (COPIED_MIB << 20) / line(cluster.clients["ctl"])["s"]
    print(
        f"{COPIED_MIB} MiB copied anew at {speed / 1e6:.1f} MB/s: {speed / rate:.2f} of the link, goal 0.8", flush=True
    )


def create(cluster: Cluster, name: str, size: int, servers: list[str], replicas: int) -> str:
    """Make a buffer; return which server has the second copy of its first segment."""
    tell(cluster.clients["ctl"], do="create", name=name, shape=size, servers=servers, replicas=replicas)
    return str(line(cluster.clients["ctl"])["backup"])


def main() -> None:
    """Run all of it, or one client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--rate", default="400mbit")
    options = parser.parse_args()
    if options.part:
        ask(options.part[1])
        return
    rate = DATA * parse_rate(options.rate) / 8
    with Cluster(options.rate) as cluster:
        for copies in (1, 2):
            create(cluster, f"one-{copies}", WRITTEN_MIB << 20, ["s0"], copies)
            create(cluster, f"small-{copies}", 8, ["s0"], copies)
            for name in CLIENTS:
                create(cluster, f"{name}-{copies}", WRITTEN_MIB << 20, list(SERVERS), copies)
        one_client(cluster, rate)
        all_links(cluster, rate)
        resync(cluster, rate)


if __name__ == "__main__":
    main()
