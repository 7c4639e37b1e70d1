"""A network in one machine: hosts in network namespaces, joined by a switch, each behind a link of its own rate.

    with Lab([Host("server0", rate="1gbit"), Host("client0")]) as lab:
        process = lab.popen("server0", ["smb-memserver", ...])
        print(lab.address("server0"))

or `python -m perf.netlab --hosts 4 --rate 1gbit -- CMD`. Needs root, `ip` and `tc` (iproute2), no containers.

A host is a network namespace with one interface, a veth pair whose other end is a port of the switch: a bridge in a
namespace of its own, so that nothing of the machine's own network is touched. Each end of the pair is shaped on its way
out by a token bucket (tc-tbf): the host's end is its upload, the switch's end its download. Every end also carries the
other hosts' traffic on this machine's processors, which bound the sum of all rates.

With direct=True two hosts have one cable between them, a veth pair, and no switch, which would cost processor time for
every packet. Each end of it is shaped on its way out by its own host's rate.

Only named namespaces, and processes in them, can be left behind. A name carries the process that owns it, when that
started, and its PID namespace, so that whoever comes later in that namespace can tell one whose owner is dead; each
start, and `--clean`, sweeps those. Files,
shared memory and Unix sockets are not apart: only the network is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

PREFIX = "netlab"
NAMESPACES = Path("/run/netns")  # where `ip netns` keeps the names
HOSTS_MAX = 250  # one /24
# The largest packet of the sending stack is a GSO packet of 64 KiB and its headers: a smaller bucket would make the
# shaper cut it. A bucket larger than some milliseconds of the rate would let a paused sender jump ahead.
BURST_BYTES_MIN = 72 << 10
BURST_S = 0.002
# The queue in front of the bucket: enough for TCP to keep the link full, little enough to keep its delay.
QUEUE_BYTES_MIN = 256 << 10
QUEUE_S = 0.02
END_S = 5.0  # what a process is given between SIGTERM and SIGKILL
_CLONE_NEWNET = 0x40000000  # of <linux/sched.h>: os.setns is there from Python 3.12 on

_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # tc's: bits per second, powers of ten
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]{0,31}")
_OWNED = re.compile(rf"{PREFIX}-(?P<pid>\d+)\.(?P<started>\d+)\.(?P<space>\d+)-(?P<lab>\d+)-(?P<host>\w+)")
_numbers = iter(range(sys.maxsize))  # of the labs of this process


class LabError(Exception):
    """The lab cannot be had, or was asked for what it has not. The text says why and what to do."""


@dataclass(frozen=True)
class Host:
    """A host of the lab. `rate` shapes its link, each direction by itself, as tc writes it ("300mbit"; bits per second,
    headers counted); None: as fast as the machine moves it. `delay_ms` is added in each direction.
    """

    name: str
    rate: str | None = None
    delay_ms: float = 0.0


def parse_rate(rate: str) -> int:
    """Return "100mbit" as bits per second. Raises LabError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit)", rate.strip().lower())
    bits = int(float(match[1]) * _RATE_UNITS[match[2]]) if match else 0
    if not 8000 <= bits <= 10**12:
        raise LabError(f'"{rate}" is no rate: write 100mbit, 2.5gbit, ... (8kbit to 1000gbit)')
    return bits


def missing() -> str | None:
    """Why there can be no lab here, in words; None if there can."""
    if os.geteuid() != 0:
        return "the network laboratory makes network namespaces, which needs root: run it as root (sudo)"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the network laboratory needs the program {program}: install iproute2"
    probe = f"{_owner()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces can be made here: {made.stderr.strip()}"
    return None


class Lab:
    """The hosts, and the processes started on them; a context manager, entered once.

    Ends all of it with the block: also where SIGTERM or SIGINT comes (the main thread's block then ends by SystemExit
    or KeyboardInterrupt). The next lab sweeps the remains after a SIGKILL. Raises LabError where there can be no lab.
    """

    def __init__(self, hosts: Sequence[Host], *, direct: bool = False) -> None:
        names = [host.name for host in hosts]
        for name in names:
            if not _NAME.fullmatch(name) or name == "switch":
                raise LabError(f'"{name}" can\'t name a host: use 1 to 32 letters, digits and _, and not "switch"')
        if len(set(names)) != len(names) or not 1 <= len(hosts) <= HOSTS_MAX:
            raise LabError(f"a lab has 1 to {HOSTS_MAX} hosts of different names; asked: {', '.join(names) or 'none'}")
        for host in hosts:
            if host.rate is not None:
                parse_rate(host.rate)
        if direct and len(hosts) != 2:
            raise LabError(f"a cable joins two hosts, and asked were {len(hosts)}: leave direct out")
        self.hosts = tuple(hosts)
        self._direct = direct
        self._prefix = f"{_owner()}-{next(_numbers)}"
        self._processes: list[subprocess.Popen[Any]] = []
        self._handler_before: Any = None

    def address(self, host: str) -> str:
        """Return the host's IP address."""
        return f"10.77.0.{1 + self._index(host)}"

    def namespace(self, host: str) -> str:
        """Return the name of its network namespace: `ip netns exec NAME CMD` runs there."""
        self._index(host)
        return f"{self._prefix}-{host}"

    def set_rate(self, host: str, rate: str | None) -> None:
        """Give the host's link another rate, or none, from now on; connections stay. Raises LabError."""
        if rate is not None:
            parse_rate(rate)
        index = self._index(host)
        before, after = self.hosts[index], replace(self.hosts[index], rate=rate)
        for where, interface in self._ends(index):
            if _shape(before, interface):
                _tool("tc", "-n", where, "qdisc", "delete", "dev", interface, "root")
            _shape_end(after, where, interface)
        self.hosts = (*self.hosts[:index], after, *self.hosts[index + 1 :])

    def popen(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on the host, with subprocess.Popen's options. The pid is the command's own; it is ended with
        the lab.
        """
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace(host), *command], **options)
        self._processes.append(process)
        return process

    def run(self, host: str, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on the host to its end, with subprocess.run's options."""
        return subprocess.run(["ip", "netns", "exec", self.namespace(host), *command], check=True, **options)

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread is on the host during the block, and so are the processes and threads that it starts. Sockets
        that were open before stay where they were. It ends before the lab does: that kills all processes of a host.
        """
        with Path("/proc/thread-self/ns/net").open() as before, (NAMESPACES / self.namespace(host)).open() as there:
            _enter(there)
            try:
                yield
            finally:
                _enter(before)

    def variables(self) -> dict[str, str]:
        """Return what a command is told of the lab: NETLAB_HOSTS, NETLAB_<HOST>_ADDRESS, NETLAB_<HOST>_NAMESPACE."""
        told = {"NETLAB_HOSTS": " ".join(host.name for host in self.hosts)}
        for host in self.hosts:
            told[f"NETLAB_{host.name.upper()}_ADDRESS"] = self.address(host.name)
            told[f"NETLAB_{host.name.upper()}_NAMESPACE"] = self.namespace(host.name)
        return told

    def __enter__(self) -> Lab:
        reason = missing()
        if reason:
            raise LabError(reason)
        clean()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handler_before = signal.signal(signal.SIGTERM, _exit)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the lab and remove its namespaces. Doing it twice does nothing."""
        with _undisturbed():
            for process in self._processes:
                if process.poll() is None:
                    process.terminate()
            deadline = time.monotonic() + END_S
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for name in _namespaces():
                if name.startswith(f"{self._prefix}-"):
                    _remove(name)
            if self._handler_before is not None:
                signal.signal(signal.SIGTERM, self._handler_before)
                self._handler_before = None

    def _index(self, host: str) -> int:
        for index, known in enumerate(self.hosts):
            if known.name == host:
                return index
        raise LabError(f'no host "{host}" in this lab; there are {", ".join(known.name for known in self.hosts)}')

    def _ends(self, index: int) -> list[tuple[str, str]]:
        """Where a host's link is shaped: the namespace and the interface of each end that is its own."""
        own = (self.namespace(self.hosts[index].name), "eth0")
        return [own] if self._direct else [own, (self._switch, f"port{index}")]

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def _build(self) -> None:
        for host in self.hosts:
            _tool("ip", "netns", "add", self.namespace(host.name))
        if any(host.delay_ms for host in self.hosts):
            _check_delay(self.namespace(self.hosts[0].name))
        if self._direct:
            first, second = (self.namespace(host.name) for host in self.hosts)
            _tool("ip", "-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        else:
            self._add_switch()
        for index, host in enumerate(self.hosts):
            lines = ["link set lo up", f"address add {self.address(host.name)}/24 dev eth0", "link set eth0 up"]
            _tool("ip", "-n", self.namespace(host.name), "-batch", "-", stdin=lines)
            for where, interface in self._ends(index):
                _shape_end(host, where, interface)

    def _add_switch(self) -> None:
        _tool("ip", "netns", "add", self._switch)
        lines = ["link set lo up", "link add bridge type bridge", "link set bridge up"]
        for index, host in enumerate(self.hosts):
            lines += [
                f"link add port{index} type veth peer name eth0 netns {self.namespace(host.name)}",
                f"link set port{index} master bridge",
                f"link set port{index} up",
            ]
        _tool("ip", "-n", self._switch, "-batch", "-", stdin=lines)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that would end us wait: half a clean-up is none."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def clean() -> list[str]:
    """Remove what labs left whose owner is dead, processes included; return the names of their namespaces."""
    removed = []
    for name in _namespaces():
        match = _OWNED.fullmatch(name)
        if match and int(match["space"]) == _pid_namespace() and _started(int(match["pid"])) != match["started"]:
            _remove(name)
            removed.append(name)
    return removed


def _enter(namespace: IO[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _owner() -> str:
    return f"{PREFIX}-{os.getpid()}.{_started(os.getpid())}.{_pid_namespace()}"


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _started(pid: int) -> str | None:
    """When the process started, in clock ticks since boot: with the pid it names one process. None: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def _namespaces() -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}-*"))


def _remove(namespace: str) -> None:
    """Kill what runs there, then take its name away: the kernel frees the rest, the veth pairs included."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    waiting = []
    for pid in (int(word) for word in found.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            waiting.append(os.pidfd_open(pid))
            os.kill(pid, signal.SIGKILL)
    for descriptor in waiting:
        _wait_readable(descriptor, END_S)
        os.close(descriptor)
    gone = subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, text=True, check=False)
    if gone.returncode != 0 and (NAMESPACES / namespace).exists():
        raise LabError(f"the network namespace {namespace} can't be removed: {gone.stderr.strip()}")


def _shape(host: Host, interface: str) -> list[str]:
    """The lines for tc: the delay first, the bucket behind it."""
    lines, parent = [], "root"
    if host.delay_ms:
        lines.append(f"qdisc add dev {interface} root handle 1: netem delay {host.delay_ms}ms limit 100000")
        parent = "parent 1:1"
    if host.rate is not None:
        bytes_per_s = parse_rate(host.rate) / 8
        burst = int(max(BURST_BYTES_MIN, bytes_per_s * BURST_S))
        limit = burst + int(max(QUEUE_BYTES_MIN, bytes_per_s * QUEUE_S))
        bucket = f"tbf rate {8 * bytes_per_s:.0f}bit burst {burst} limit {limit}"
        lines.append(f"qdisc add dev {interface} {parent} handle 10: {bucket}")
    return lines


def _shape_end(host: Host, namespace: str, interface: str) -> None:
    lines = _shape(host, interface)
    if lines:
        _tool("tc", "-n", namespace, "-batch", "-", stdin=lines)


def _check_delay(namespace: str) -> None:
    line = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    tried = subprocess.run(line, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise LabError(
            f"a delay was asked, and this kernel has no netem (tc: {tried.stderr.strip()}); leave the delay out, or "
            f"load the module sch_netem"
        )
    subprocess.run(["tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root"], capture_output=True, check=False)


def _tool(*command: str, stdin: Sequence[str] = ()) -> None:
    done = subprocess.run(command, input="\n".join(stdin) + "\n", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise LabError(f"{' '.join(command)}: {said}" + (f" ({'; '.join(stdin)})" if stdin else ""))


def _wait_readable(descriptor: int, seconds: float) -> None:
    """A process's descriptor becomes readable when it ends, waited for by its parent or not."""
    select.select([descriptor], [], [], seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns CMD's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.netlab",
        description="Run CMD beside hosts whose links have a rate of their own. CMD runs on one more host, 'control', "
        "without a rate; NETLAB_HOSTS, NETLAB_<HOST>_ADDRESS and NETLAB_<HOST>_NAMESPACE tell it of the others: "
        'ip netns exec "$NETLAB_HOST0_NAMESPACE" ... runs something on host0.',
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many, named host0, host1, ... (default 2)")
    parser.add_argument("--rate", default="", help="of each link, both directions: 1gbit; or 100mbit,200mbit in turns")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds in each direction (needs netem)")
    parser.add_argument("--clean", action="store_true", help="only remove what killed runs left")
    parser.add_argument("command", nargs="*", metavar="CMD", help="after --")
    asked = parser.parse_args(arguments)
    try:
        if asked.clean:
            print("\n".join(clean()) or "nothing was left")
            return 0
        if not asked.command:
            parser.error("give a command to run, after --")
        rates = asked.rate.split(",") if asked.rate else [None]
        hosts = [Host(f"host{i}", rates[i % len(rates)], asked.delay) for i in range(asked.hosts)]
        with Lab([*hosts, Host("control")]) as lab:
            return lab.popen("control", asked.command, env=os.environ | lab.variables()).wait()
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
