"""A long fat link: reads and writes of one client and one server, beside bare connections.

    python -m perf.far --delay-ms 50 --rate 1gbit --lost 0

Two hosts in network namespaces (perf/netlab.py, needs root), and between them a link with a delay each way, a rate and
lost packets: perf/delay.c, as kernels may lack netem. Packets have 9000 bytes. The bare ones send as fast as they can
over so many TCP connections, with the kernel's own buffers. All is measured from one second after the first call on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import smb
from perf.lab_daemons import LabDaemons
from perf.netlab import Host, Lab, parse_rate

HERE = Path(__file__).parent
ADDRESSES = ("10.99.0.1", "10.99.0.2")  # the server's, the client's
MTU, HEADERS = 9000, 52  # of IP and TCP
PIECE_MIB = 256
WARM_S = 1.0


def ask(address: str, seconds: float) -> None:
    """The client: print bytes a second of writes, then of reads."""
    with smb.connect(address, transport="tcp", timeout=600) as client:
        buffer = client.create("far", PIECE_MIB << 20, "uint8")
        values = np.ones(buffer.size, buffer.dtype)
        for name, call in (("write", lambda: buffer.write(values)), ("read", lambda: buffer.read(out=values))):
            end = time.monotonic() + WARM_S
            while time.monotonic() < end:
                call()
            began, count = time.monotonic(), 0
            while time.monotonic() < began + seconds:
                call()
                count += 1
            print(json.dumps({name: count * buffer.nbytes / (time.monotonic() - began)}), flush=True)


def bare(address: str, connections: int, seconds: float) -> None:
    """Send over so many connections, or with "serve" take what comes; print bytes a second of what was taken."""
    if address == "serve":
        taken = [0]

        def take(peer: socket.socket) -> None:
            space = bytearray(1 << 20)
            while got := peer.recv_into(space):
                taken[0] += got

        with socket.create_server((ADDRESSES[0], 9999)) as listener:
            print(json.dumps({"ready": True}), flush=True)
            for _ in range(connections):
                threading.Thread(target=take, args=(listener.accept()[0],), daemon=True).start()
        time.sleep(WARM_S)
        before, began = taken[0], time.monotonic()
        time.sleep(seconds)
        print(json.dumps({"bare": (taken[0] - before) / (time.monotonic() - began)}), flush=True)
        os._exit(0)
    peers = [socket.create_connection((address, 9999)) for _ in range(connections)]

    def send(peer: socket.socket) -> None:
        data = bytes(1 << 20)
        with contextlib.suppress(OSError):
            while True:
                peer.sendall(data)

    for peer in peers:
        threading.Thread(target=send, args=(peer,), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of JSON that it printed."""
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


class Link:
    """The two hosts and what is between them; a context manager."""

    def __init__(self, delay_ms: float, rate: str, lost: float) -> None:
        self.lab = Lab([Host("server"), Host("client")])
        self._given = [str(round(1000 * delay_ms)), str(parse_rate(rate)), str(round(1e6 * lost))]
        self._left = contextlib.ExitStack()

    def __enter__(self) -> Link:
        with contextlib.ExitStack() as left:
            self.directory = Path(left.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="smb-far-")))
            left.enter_context(self.lab)
            program = self.directory / "delay"
            flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"]
            subprocess.run(["cc", *flags, "-o", program, HERE / "delay.c"], check=True)
            names = [self.lab.namespace(host) for host in ("server", "client")]
            between = left.enter_context(
                subprocess.Popen([program, *names, *self._given], stdout=subprocess.PIPE, text=True)
            )
            left.callback(between.kill)
            assert between.stdout is not None
            assert between.stdout.readline() == "ready\n"
            for host, address in zip(("server", "client"), ADDRESSES, strict=True):
                self.lab.run(host, ["ip", "address", "add", f"{address}/30", "dev", "far0"])
                self.lab.run(host, ["ip", "link", "set", "far0", "mtu", str(MTU), "up"])
            self._left = left.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def serve(self) -> str:
        """Start a coordinator and a memory server; return the coordinator's address."""
        daemons = LabDaemons(self.lab, self.directory)
        address = daemons.coordinator("server", at=ADDRESSES[0])
        (self.directory / "memory").mkdir(mode=0o700)
        command = ["memserver", "--coordinator", address, "--capacity", "1GiB", "--name", "far", "--loops", "1"]
        command += ["--memory-dir", str(self.directory / "memory")]
        daemons.serve("server", command, name="memserver", at=ADDRESSES[0])
        return address

    def part(self, host: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a part of this program on a host."""
        command = [sys.executable, "-m", "perf.far", *map(str, arguments)]
        return self.lab.popen(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Measure, or be one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--delay-ms", type=float, default=50.0, help="each way (50)")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--lost", type=float, default=0.0, help="share of the packets (0)")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args()
    match options.part:
        case ["ask", address]:
            ask(address, options.seconds)
            return
        case ["bare", address, connections]:
            bare(address, int(connections), options.seconds)
            return
    rate = parse_rate(options.rate) / 8 * (MTU - HEADERS) / MTU
    with Link(options.delay_ms, options.rate, options.lost) as link:
        for connections in options.connections:
            server = link.part("server", "bare", "serve", connections, "--seconds", options.seconds)
            line(server)
            client = link.part("client", "bare", ADDRESSES[0], connections)
            speed = line(server)["bare"]
            client.kill()
            print(f"{connections} bare: {speed / 1e6:.1f} MB/s, {speed / rate:.2f} of the link", flush=True)
        ours = link.part("client", "ask", link.serve(), "--seconds", options.seconds)
        for _ in range(2):
            for what, speed in line(ours).items():
                print(f"{what}: {speed / 1e6:.1f} MB/s, {speed / rate:.2f} of the link, goal 0.9", flush=True)


if __name__ == "__main__":
    main()
