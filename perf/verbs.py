"""One-sided READ and WRITE beside perftest in the same run, and what Python costs for each megabyte that it posts.

    python -m perf.verbs [--bytes 64MiB] [--rounds 5] [--posting]

The first needs an RDMA device and perftest (ib_write_bw, ib_read_bw): real ones, or the virtual machine of tests/verbs.
Ours and perftest take turns; every figure is the median of the rounds, and the bytes are checked. Afterwards a memory
server with a silent client by RDMA, and one without any, are watched doing nothing. --posting needs no device: it runs
the client's side of the transport over a queue that completes at once and moves nothing. The result is the processor
time that Python takes for a transfer, whatever the network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import smb
import smb.cluster
from smb._engine import lib
from smb.config.parse import parse_bytes
from smb.transport.verbs.descriptors import RECORD
from smb.transport.verbs.devices import Port, look
from smb.transport.verbs.queue_pair import Work
from smb.transport.verbs.requester import Carrier, Right

MIB = 1 << 20
CHUNK_BYTES = 256 << 10
PERFTEST_PORT = 18515
DEADLINE_S = 120.0
IDLE_S = 20.0
_LISTENING = "0A"  # of /proc/net/tcp


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=parse_bytes, default=64 * MIB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--posting", action="store_true")
    given = parser.parse_args()
    posting = {f"{name} us/MiB": cost_of_posting(name, given.bytes) * 1e6 for name in ("read", "write")}
    print(json.dumps({"python": posting}), flush=True)
    if given.posting:
        return 0
    found = look()
    if found.missing:
        print("not measured:", *found.missing, sep="\n", file=sys.stderr)
        return 1
    print(json.dumps(beside_perftest(given.bytes, given.rounds, found.ports[0], found.ports[-1])), flush=True)
    return 0


# ---- beside perftest


def beside_perftest(nbytes: int, rounds: int, server: Port, client: Port) -> dict[str, Any]:
    """Return MiB/s of ours and of perftest, their ratio, our processor time for each MiB, and an idle server's."""
    smb.cluster._START_S = DEADLINE_S  # a virtual machine is slow
    os.environ["SMB_VERBS_DEVICE"] = server.device
    with smb.LocalCluster(servers=2, capacity=2 * nbytes + (32 << 20)) as cluster:
        os.environ["SMB_VERBS_DEVICE"] = client.device
        with smb.connect(cluster.address, transport="verbs", timeout=DEADLINE_S) as one:
            buffer = one.create("bench", nbytes // 4, "float32", servers=["server-0"])
            source, sink = one.empty(nbytes // 4), one.empty(nbytes // 4)
            source[:] = np.arange(nbytes // 4) % 4093
            calls: dict[str, Callable[[], object]] = {
                "write": lambda: buffer.write(source),
                "read": lambda: buffer.read(out=sink),
            }
            ours: dict[str, list[float]] = {name: [] for name in calls}
            theirs: dict[str, list[float]] = {name: [] for name in calls}
            used: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
                    start = time.perf_counter()
                    call()
                    ours[name].append(nbytes / MIB / (time.perf_counter() - start))
                    used[name].append((resource.getrusage(resource.RUSAGE_SELF).ru_utime - before) / (nbytes / MIB))
                    theirs[name].append(perftest(f"ib_{name}_bw", nbytes, server, client))
            np.testing.assert_array_equal(sink, source)
            assert buffer.transports == ("verbs",), buffer.transports
            idle = idle_shares(cluster, IDLE_S)
    table: dict[str, Any] = {"bytes": nbytes, "rounds": rounds, "server": str(server), "client": str(client)}
    for name in calls:
        mine, limit = statistics.median(ours[name]), statistics.median(theirs[name])
        table[name] = {
            "MiB/s": round(mine, 1),
            "perftest MiB/s": round(limit, 1),
            "ratio": round(mine / limit, 2),
            "client's user time, us/MiB": round(1e6 * statistics.median(used[name])),
            "all": [[round(a, 1), round(b, 1)] for a, b in zip(ours[name], theirs[name], strict=True)],
        }
    table["idle server's share of a processor"] = {
        "with a silent client": round(idle["server-0"], 4),
        "without any": round(idle["server-1"], 4),
    }
    return table


def idle_shares(cluster: smb.LocalCluster, seconds: float) -> dict[str, float]:
    """Return which share of a processor each memory server uses while nobody wants anything of it."""

    def used() -> dict[str, float]:
        found = {}
        for server in cluster.servers:
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            found[server.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    before, began = used(), time.monotonic()
    time.sleep(seconds)
    after, took = used(), time.monotonic() - began
    return {name: (after[name] - before[name]) / took for name in before}


def perftest(tool: str, nbytes: int, server: Port, client: Port) -> float:
    """Return its average bandwidth in MiB/s, for as many bytes in messages of 1 MiB."""
    count = max(5, nbytes // MIB)
    options = ["-s", str(MIB), "-n", str(count), "-p", str(PERFTEST_PORT), "-F"]

    def command(port: Port, *more: str) -> list[str]:
        return [tool, "-d", port.device, "-i", str(port.number), "-x", str(port.gid.index), *options, *more]

    with subprocess.Popen(command(server), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as waiting:
        try:
            _wait_for_listener(PERFTEST_PORT)
            done = subprocess.run(
                command(client, "127.0.0.1"), stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True
            )
        finally:
            if waiting.wait(DEADLINE_S):
                print(waiting.stdout.read() if waiting.stdout else "", file=sys.stderr)
    found = re.search(rf"^ *{MIB} +\d+ +[\d.]+ +([\d.]+)", done.stdout, re.M)
    assert found, done.stdout
    return float(found[1])


def _wait_for_listener(port: int) -> None:
    """Wait until somebody listens there, without connecting: perftest takes the first who does."""
    end = time.monotonic() + DEADLINE_S
    wanted = f":{port:04X}"
    while time.monotonic() < end:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            lines = Path(table).read_text().splitlines()[1:]
            if any(line.split()[1].endswith(wanted) and line.split()[3] == _LISTENING for line in lines):
                return
        time.sleep(0.01)
    raise AssertionError(f"nobody listens at {port}")


# ---- what Python costs


class _Completed:
    """A queue pair that moves nothing: what is posted is complete at the next look."""

    def __init__(self) -> None:
        self.failed, self.posted = "", 0
        self.on_message: Callable[[bytes], None] = lambda _message: None
        self._finished: list[Callable[[], None]] = []
        self._pair = _Pair()

    def room(self) -> int:
        return 1024

    def may_send(self) -> bool:
        return True

    def send(self, message: bytes) -> None:
        """HELLO goes nowhere."""

    def post(self, works: Sequence[Work], finished: Callable[[], None] | None = None) -> None:
        """As Queue does, call by call."""
        pair = self._pair
        for number, work in enumerate(works):
            pair.build(number, work)
        self.posted += len(works)
        if finished is not None:
            self._finished.append(finished)

    def poll(self) -> int:
        finished, self._finished = self._finished, []
        for call in finished:
            call()
        return len(finished)

    def close(self) -> None:
        """Nothing is open."""


class _Pair:
    """The calls of pyverbs for one work request, empty ones: what is left is Python's own."""

    wr_id = wr_flags = addr = length = lkey = 0

    def build(self, number: int, work: Work) -> None:
        self.wr_id = number
        self.wr_flags = 0
        self.start(work.remote_key, work.remote)
        self.addr, self.length, self.lkey = work.address, work.nbytes, work.local_key
        self.end(self)

    def start(self, key: int, address: int) -> None:
        """wr_rdma_read or wr_rdma_write."""

    def end(self, element: object) -> None:
        """wr_set_sge."""


class _Region:
    local_key = 1

    def close(self) -> None:
        """Nothing is registered."""


class _Memory:
    """Where all is registered."""

    domain: Any = None
    block_bytes = MIB

    def register(self, _address: int, _nbytes: int) -> _Region:
        return _Region()

    def key_of(self, _address: int, _nbytes: int) -> int:
        return 1

    def give_back(self, _taker: object) -> None:
        """No blocks were taken."""


def cost_of_posting(name: str, nbytes: int) -> float:
    """Return the processor seconds that the progress thread takes for each MiB of a large READ or WRITE."""
    memory = _Memory()
    memory.domain = memory
    queue: Any = _Completed()
    right = Right(1, 2, nbytes, 1 << 40, 7, True, CHUNK_BYTES, 1 << 41, 8, 0)
    carrier = Carrier(queue, [], {5: right}, memory)  # type: ignore[arg-type]
    count = nbytes // CHUNK_BYTES
    records = np.zeros(count, RECORD)
    records["opcode"] = lib.SMB_READ if name == "read" else lib.SMB_WRITE
    records["dtype"], records["epoch"], records["segment"] = 2, 1, 5
    records["offset"] = np.arange(count) * CHUNK_BYTES
    records["length"] = CHUNK_BYTES
    records["sink" if name == "read" else "source"] = (1 << 42) + records["offset"]
    engine = carrier.engine_end
    engine.sendall(bytes(64))  # HELLO
    carrier.turn()
    rounds, spent = 7, []
    for _ in range(rounds):
        spent.append(_move(carrier, engine, records.tobytes(), 64 * count))
    carrier.close()
    engine.close()
    return min(spent) / (nbytes / MIB)


def _move(carrier: Carrier, engine: socket.socket, requests: bytes, answer_bytes: int) -> float:
    """Give the carrier requests as the engine does, and return the time that its turns take until all are answered."""
    engine.setblocking(False)
    spent, given, answered = 0.0, 0, 0
    while answered < answer_bytes:
        if given < len(requests):
            with contextlib.suppress(BlockingIOError):
                given += engine.send(requests[given : given + (64 << 10)])
        start = time.thread_time()
        carrier.turn()
        spent += time.thread_time() - start
        try:
            answered += len(engine.recv(64 << 10))
        except BlockingIOError:
            continue
    return spent


if __name__ == "__main__":
    sys.exit(main())
