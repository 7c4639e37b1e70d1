"""The network laboratory: links have the rate that was asked, hosts see only each other, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perf import netlab, remote
from perf.contender import ACCUMULATE, FETCH_ADD, READ, REMOTE, REMOTE_1GBIT
from perf.netlab import Host, Lab, LabError
from perf.results import Results
from tests.support.daemons import wait_for

REASON = netlab.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ROOT = Path(__file__).parents[2]

# Takes one connection and prints the bytes per second that arrive, from the first to the last of them.
RECEIVER = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
taken, _ = listener.accept()
first = taken.recv(1 << 16)
start, count = time.monotonic(), 0
while got := taken.recv(1 << 16):
    count += len(got)
print(count / (time.monotonic() - start))
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), 10) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
# Makes a lab with a process on it and waits; what is on it is named on the output.
# A job in the background of a shell is started with SIGINT ignored, and its children too.
OWNER = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from perf.netlab import Host, Lab
with Lab([Host("one")]) as lab:
    print(lab.namespace("one"), lab.popen("one", ["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
"""


@contextlib.contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Another process with a lab; its namespace, and the pid of a process on it."""
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            namespace, pid = process.stdout.readline().split()
            yield process, namespace, int(pid)
        finally:
            process.kill()


def namespaces() -> set[str]:
    return {path.name for path in netlab.NAMESPACES.glob(f"{netlab.PREFIX}-*")}


def ours() -> set[str]:
    """Those of this process: other tests may have labs at the same time."""
    return {name for name in namespaces() if name.startswith(f"{netlab.PREFIX}-{os.getpid()}.")}


def runs(pid: int) -> bool:
    return netlab._started(pid) is not None


@pytest.mark.parametrize(("shaped", "direct"), [("receiver", False), ("sender", False), ("sender", True)])
def test_a_link_has_its_rate_in_both_directions(shaped: str, direct: bool) -> None:
    hosts = [Host(name, rate="20mbit" if name == shaped else None) for name in ("receiver", "sender")]
    with Lab(hosts, direct=direct) as lab:
        address = lab.address("receiver")
        command = [sys.executable, "-c", RECEIVER, address]
        with lab.popen("receiver", command, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            lab.run("sender", [sys.executable, "-c", SENDER, address, str(4 << 20)])
            reached = 8 * float(receiver.stdout.read())
    assert 0.85 * 20e6 < reached < 1.15 * 20e6


def test_a_cable_joins_two_hosts_and_its_rate_can_change() -> None:
    with Lab([Host("receiver"), Host("sender")], direct=True) as lab:
        assert {name.rpartition("-")[2] for name in ours() if name.startswith(lab._prefix)} == {"receiver", "sender"}
        for rate in ("1gbit", "20mbit", None):
            lab.set_rate("sender", rate)
            shown = lab.run("sender", ["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout
            assert ("tbf" in shown) == (rate is not None)
            assert rate is None or f"rate {rate.replace('gbit', 'Gbit').replace('mbit', 'Mbit')} " in shown
        with pytest.raises(LabError, match="no rate"):
            lab.set_rate("sender", "fast")
        lab.run("sender", ["ip", "route", "get", lab.address("receiver")], capture_output=True)
    with pytest.raises(LabError, match="a cable joins two hosts"):
        Lab([Host("one")], direct=True)


def test_hosts_see_each_other_and_nothing_else() -> None:
    # Networks exist in which every address answers: what it answers tells who it is.
    serve = "import socket, sys; s = socket.create_server((sys.argv[1], 7001)); print(s.fileno(), flush=True)\n"
    serve += "while True: s.accept()[0].sendall(sys.argv[2].encode())"
    ask = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 2); "
    ask += "print(s.recv(9).decode())"

    def answer(lab: Lab, host: str, address: str, port: int = 7001) -> str:
        command = [sys.executable, "-c", ask, address, str(port)]
        asked = lab.popen(host, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return asked.communicate()[0].decode().strip()

    with Lab([Host("a"), Host("b")]) as lab, Lab([Host("a"), Host("b")]) as other:
        address = lab.address("a")
        assert other.address("a") == address
        for network, name in ((lab, "first"), (other, "second")):
            command = [sys.executable, "-c", serve, address, name]
            server = network.popen("a", command, stdout=subprocess.PIPE)
            server.stdout.readline()
            server.stdout.close()
        assert answer(lab, "b", address) == "first"
        assert answer(other, "b", address) == "second"
        outside = subprocess.run([sys.executable, "-c", ask, address, "7001"], capture_output=True, text=True)
        assert outside.stdout.strip() not in ("first", "second")
        with socket.create_server(("127.0.0.1", 0)) as ours:
            ours.settimeout(0)
            assert answer(lab, "b", "127.0.0.1", ours.getsockname()[1]) == ""
            with pytest.raises(BlockingIOError):
                ours.accept()


def test_a_thread_is_on_a_host_for_a_block() -> None:
    """With what it starts: there, and only there, the host's address is its own."""
    with Lab([Host("a")]) as lab:
        bind = f"import socket; socket.create_server(({lab.address('a')!r}, 0))"
        with lab.inside("a"):
            socket.create_server((lab.address("a"), 0)).close()
            subprocess.run([sys.executable, "-c", bind], check=True)
        with pytest.raises(OSError, match="assign requested address"):
            socket.create_server((lab.address("a"), 0))


def test_an_exception_leaves_nothing() -> None:
    before = ours()
    lab = Lab([Host("one")])

    def fail() -> None:
        with lab:
            lab.popen("one", ["sleep", "1000"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [process.returncode for process in lab._processes] == [-signal.SIGTERM]
    assert ours() <= before


def test_a_lab_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab, "_shape", lambda *_: ["qdisc add dev eth0 root nonsense"])
    before = ours()
    with pytest.raises(LabError, match="nonsense"), Lab([Host("one", rate="1mbit")]):
        pass
    assert ours() <= before


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(how: signal.Signals) -> None:
    with owner() as (process, namespace, pid):
        assert namespace in namespaces()
        process.send_signal(how)
        process.wait(20)
        assert namespace not in namespaces()
        assert not runs(pid)


def test_the_next_lab_sweeps_what_a_kill_left_and_nothing_else() -> None:
    with owner() as (alive, living, _), owner() as (killed, namespace, pid):
        killed.kill()
        killed.wait(20)
        assert namespace in namespaces()
        assert runs(pid)
        with Lab([Host("one")]):
            assert namespace not in namespaces()
            assert living in namespaces()
        wait_for(lambda: not runs(pid), "end of the process that the killed one left")
        assert alive.poll() is None


def test_the_command_tells_of_its_hosts_and_passes_the_exit_code_on() -> None:
    ask = 'test "$NETLAB_HOSTS" = "host0 host1 control" && ip netns exec "$NETLAB_HOST1_NAMESPACE" ip address && exit 7'
    command = [sys.executable, "-m", "perf.netlab", "--hosts", "2", "--rate", "10mbit", "--", "sh", "-c", ask]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert "10.77.0.2/24" in done.stdout
    assert not [name for name in namespaces() if "host1" in name]


def test_what_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for hosts in ([], [Host("a"), Host("a")], [Host("a b")], [Host("switch")], [Host("a", rate="fast")]):
        with pytest.raises(LabError):
            Lab(hosts)
    with Lab([Host("a")]) as lab, pytest.raises(LabError, match='no host "b" in this lab; there are a'):
        lab.popen("b", ["true"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"), Lab([Host("a")]):
        pass


def test_a_delay_is_kept() -> None:
    ping = "import socket, sys, time; t = time.monotonic(); socket.socket().connect_ex((sys.argv[1], 1)); "
    ping += "print(time.monotonic() - t)"
    lab = Lab([Host("far", delay_ms=20), Host("near")])
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lab)
        except LabError as error:
            pytest.skip(f"no delay here: {error}")
        done = lab.run("near", [sys.executable, "-c", ping, lab.address("far")], capture_output=True)
        assert 0.04 <= float(done.stdout) < 0.2


def test_a_kernel_without_delay_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def without_netem(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return run(["false"] if "netem" in command else command, **options)

    monkeypatch.setattr(subprocess, "run", without_netem)
    with pytest.raises(LabError, match="no netem"), Lab([Host("far", delay_ms=20)]):
        pass


def test_a_remote_run_measures_over_the_cable(tmp_path: Path) -> None:
    """Ours and the limit between two hosts, unshaped and with a rate, which no speed exceeds; nothing stays."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    before = namespaces()
    command = [
        *(sys.executable, "-m", "perf.run", "--transports", "remote,remote-1gbit", "--sizes", "8,256KiB"),
        *("--operations", "read,accumulate,fetch_add", "--clients", "1", "--rounds", "1", "--seconds", "0.01"),
        *("--contenders", "smb,polling", "--output", str(tmp_path)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = Results.load(tmp_path / "results.json")
    assert {(case.transport, case.operation, case.nbytes) for case in found.cases()} == {
        (transport, *cell)
        for transport in (REMOTE, REMOTE_1GBIT)
        for cell in ((READ, 8), (ACCUMULATE, 8), (FETCH_ADD, 8), (READ, 256 << 10), (ACCUMULATE, 256 << 10))
    }
    for case in found.cases():
        limit = found.best(case)
        assert limit
        assert found.ratio(case, limit), f"{case}: {[cell.failed for cell in found.cells.values()]}"
        if case.transport == REMOTE_1GBIT:
            # A bucket of 2 ms that is full at the start adds to what 10 ms carry.
            assert max(cell.speed for (_, of), cell in found.cells.items() if of == case) * 8 < 2e9
    assert not [name for name in namespaces() - before if name.endswith((remote.SERVER, remote.CLIENT))]
