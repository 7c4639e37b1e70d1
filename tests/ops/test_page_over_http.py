"""The coordinator's page and its JSON over HTTP, on real daemons; `smb top` in a pipe and on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import smb
from smb.daemon.process import Answer, Pages
from tests.conftest import Connect
from tests.support.daemons import DEADLINE_S, wait_for

TOP = [sys.executable, "-m", "smb.tools.cli.main", "top"]


def ask(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """One of this file: "Nothing is wrong" is not so where tests before killed clients."""
    with smb.LocalCluster(servers=3, capacity="64MiB") as running:
        yield running


def state_of(cluster: smb.LocalCluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(cluster.coordinator.metrics, "/api/state")[2])
    return found


def test_the_page_brings_all_it_needs_and_allows_nothing_else(cluster: smb.LocalCluster) -> None:
    """Every file that it names is served, under a policy without inline scripts and other hosts; a tag saves the second
    answer.
    """
    metrics = cluster.coordinator.metrics
    for path in (
        "/",
        "/app.js",
        "/detail.js",
        "/chart.js",
        "/table.js",
        "/dom.js",
        "/format.js",
        "/style.css",
        "/icon.svg",
    ):
        status, headers, body = ask(metrics, path)
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not any(mark in body for mark in (b"https://", b"innerHTML", b" style=", b"onclick="))
        status, headers, rest = ask(metrics, path, **{"If-None-Match": headers["ETag"]})
        assert (status, rest) == (304, b"")


def test_read_only_and_nothing_beside_what_there_is(cluster: smb.LocalCluster) -> None:
    """Other methods and other paths are refused; metrics and health are where they were."""
    metrics = cluster.coordinator.metrics
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(metrics, "/api/state", method)[0] == 405
    assert ask(metrics, "/", "HEAD")[2] == b""
    beside = ("/../server.py", "/..%2fserver.py")  # a file that is there
    for path in (*beside, "/index.html", "/api", "/api/buffer?name=none", "/api/server?name="):
        assert ask(metrics, path)[0] == 404
    assert b"smb_coordinator_servers_alive" in ask(metrics, "/metrics")[2]
    assert ask(metrics, "/healthz")[0] == 200


def test_one_hook_decides_who_sees_the_pages() -> None:
    """Also metrics and health: what it refuses is answered with its refusal, and nothing is said of what there is."""
    refusal = Answer("401 Unauthorized", "text/plain", b"no token\n")

    def admit(request: Mapping[str, Any]) -> Answer | None:
        return None if request.get("HTTP_AUTHORIZATION") == "Bearer good" else refusal

    pages = Pages("127.0.0.1:0", CollectorRegistry(), lambda: {"ok": True}, admit=admit)
    try:
        for path in ("/metrics", "/healthz", "/", "/none"):
            assert ask(pages.address, path)[::2] == (401, b"no token\n")
        assert ask(pages.address, "/healthz", Authorization="Bearer good")[0] == 200
    finally:
        pages.close()


def test_what_the_page_tells_moves(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Traffic over both transports shows as rates and in the history; buffers, their stripes, clients and a held lock
    with who waits for it are there.
    """
    client, other = connect("shm"), connect("tcp")
    buffer = client.create("w", (3_000_000,))
    over_tcp = other.open("w")
    values = np.ones(3_000_000, dtype=np.float32)
    end = time.monotonic() + DEADLINE_S

    def all_move() -> bool:
        buffer.write(values)
        over_tcp.accumulate(values)
        over_tcp.read()
        rates = [server["rates"] for server in state_of(cluster)["servers"]]
        return all(rate and rate["in"] and rate["out"] and rate["operations"] for rate in rates)

    while not all_move():
        assert time.monotonic() < end, state_of(cluster)
    with ThreadPoolExecutor(1) as pool:
        with client.lock("turn"):
            waiting = pool.submit(lambda: other.lock("turn", timeout=60).acquire().release())
            wait_for(lambda: [w for w in state_of(cluster)["waits"] if w["holder"] and w["waiting"] == 1], "who waits")
        waiting.result()
    shown = wait_for(lambda: (s := state_of(cluster)) and max(s["history"]["in"]) and s, "history")
    (told,) = [b for b in shown["buffers"] if b["name"] == "w"]
    assert sum(part["size"] for part in told["parts"]) == buffer.nbytes
    assert {part["server"] for part in told["parts"]} == {"server-0", "server-1", "server-2"}
    assert shown["totals"]["clients"] >= 2
    assert shown["totals"]["connections"] > 0
    detail = json.loads(ask(cluster.coordinator.metrics, "/api/server?name=server-0")[2])
    done = {(o["transport"], o["kind"]) for o in detail["operations"]}
    assert {("shm", "write"), ("tcp", "accumulate"), ("tcp", "read")} <= done
    assert detail["memory_free"] > 0


def run_top(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, *arguments], stdin=stdin, capture_output=True, text=True, timeout=60)


def test_top_in_a_pipe(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Once, whole and without a terminal's escapes; --json is what the page gets; no coordinator is an error."""
    connect("shm").create("w", (10,))
    run = run_top("-c", cluster.address)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout
    assert all(word in run.stdout for word in ("server-0", "alive", "3/3 servers", "Nothing is wrong", "w  "))
    run = run_top("-c", cluster.address, "--json")
    assert json.loads(run.stdout).keys() == state_of(cluster).keys()
    run = run_top("-c", "127.0.0.1:1")
    assert (run.returncode, run.stdout) == (1, "")
    assert "no coordinator answers" in run.stderr


class Terminal:
    """`smb top` on a pseudo-terminal of 110 columns and 30 lines."""

    def __init__(self, address: str) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
            environment["TERM"] = "xterm-256color"
            os.execve(sys.executable, [*TOP, "-c", address, "--interval", "0.3"], environment)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
        self.out = ""

    def wait_for(self, condition: Callable[[str], bool], what: str) -> None:
        """Read until it holds of all that was written since the last call."""
        end = time.monotonic() + DEADLINE_S
        while not condition(self.out):
            assert time.monotonic() < end, f"no {what} in {self.out[-3000:]!r}"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self.out += os.read(self._descriptor, 65536).decode(errors="replace")

    def shows(self, text: str) -> None:
        self.wait_for(lambda out: text in out, text)
        self.out = ""

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def end(self) -> tuple[int, str]:
        """Return its exit code and the last that it wrote, once it has ended."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            try:
                self.out += os.read(self._descriptor, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                break
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status), self.out

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)


@contextmanager
def terminal(address: str) -> Iterator[Terminal]:
    made = Terminal(address)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("way_out", [b"q", b"\x03", signal.SIGTERM])
def test_top_on_a_terminal(cluster: smb.LocalCluster, way_out: bytes | signal.Signals) -> None:
    """It draws again and again, and leaves with the terminal as it was by q, Ctrl-C and SIGTERM."""
    with terminal(cluster.address) as screen:
        screen.shows("server-2")
        screen.shows("server-2")  # drawn again
        if isinstance(way_out, bytes):
            screen.type(way_out)
        else:
            os.kill(screen.pid, way_out)
        code, out = screen.end()
    assert code == 0
    assert "\x1b[?1049l" in out  # back from the alternate screen
    assert "\x1b[?25h" in out  # the cursor is there again
    assert "Traceback" not in out


def test_top_outlives_its_coordinator() -> None:
    """While it is away the last picture stays and says so; when it is back the picture moves again."""
    with smb.LocalCluster(servers=1, capacity="64MiB") as own, terminal(own.address) as screen:
        screen.shows("server-0")
        own.coordinator.kill()
        screen.shows("The coordinator is lost")
        own.coordinator.start()
        screen.wait_for(lambda out: "server-0" in out.rpartition("The coordinator is lost")[2], "the coordinator")
        screen.type(b"q")
        assert screen.end()[0] == 0
