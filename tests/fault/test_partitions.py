"""Buffers of two copies on a network that is cut: between two memory servers, or between one and the coordinator, both
ways or one. Hosts are network namespaces, and nft drops what would cross the cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf.lab_daemons import LabDaemons
from perf.netlab import Host, Lab, missing
from tests.fault.long import LIMIT_S, LONG, times
from tests.support import second_copy
from tests.support.daemons import wait_for
from tests.support.history import count_notes
from tests.support.transports import SLOWNESS

pytestmark = [
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nftables is not here (`make nftables` installs it)"),
]

SERVERS = ("a", "b", "c")
HOLD_S = times(0, 30)  # more than the lease of a memory server
GOES_ON_S = 12.0  # 3 s, the next renewal of a lease, 2 s, and what a busy machine takes
WORKERS = times(1, 2)
CUTS = {  # from whom to whom nothing comes any more
    "two servers": (("a", "b"), ("b", "a")),
    "two servers, one way": (("a", "b"),),
    "the coordinator from one": (("ctl", "a"), ("a", "ctl")),
    "what the coordinator says to one": (("ctl", "a"),),
    "what one says to the coordinator": (("a", "ctl"),),
}


class Network:
    """A coordinator, three servers and their users, each on a host of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._memory = Path(f"/dev/shm/smb-test-cut-{os.getpid()}")
        self._left = contextlib.ExitStack()
        self.lab = Lab([Host(name) for name in ("ctl", "users", *SERVERS)])
        self._cut: list[str] = []

    def __enter__(self) -> Network:
        self._memory.mkdir(mode=0o700)
        self._left.callback(self._tidy)
        self._left.enter_context(self.lab)
        self._daemons = daemons = LabDaemons(self.lab, self._directory)
        self.address = daemons.coordinator("ctl")
        memory = ["--memory-dir", str(self._memory), "--capacity", "64MiB", "--loops", "1"]
        for name in SERVERS:
            daemons.serve(name, ["memserver", "--coordinator", self.address, "--name", name, *memory])
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def _tidy(self) -> None:
        for path in self._memory.iterdir():
            path.unlink()
        self._memory.rmdir()

    def use(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of tests/support/second_copy.py where the users are."""
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.support.second_copy", *arguments]
        return self.lab.popen("users", command, stdout=subprocess.PIPE, text=True)

    def ask(self, *arguments: str) -> str:
        """Its answer."""
        process = self.use(*arguments)
        answer, _ = process.communicate(timeout=90 * SLOWNESS)
        assert process.returncode == 0, (arguments, answer)
        return answer.strip()

    def tell_why(self, workers: list[subprocess.Popen[str]]) -> None:
        """Print where the workers are, and the ends of the daemons' logs."""
        for worker in workers:
            worker.send_signal(signal.SIGABRT)  # by which faulthandler tells
            print(worker.communicate(timeout=90 * SLOWNESS)[0])
        for name in ("coordinator", *SERVERS):
            print(f"---- {name}\n{self._daemons.log(name)}")

    @property
    def memory(self) -> str:
        return str(self._memory)

    @contextlib.contextmanager
    def cut(self, ways: tuple[tuple[str, str], ...]) -> Iterator[None]:
        """In the block nothing comes from the first of a pair to the second."""
        rules: dict[str, list[str]] = {}
        for source, target in ways:
            rules.setdefault(target, []).append(f"ip saddr {self.lab.address(source)} drop")
        for host, drops in rules.items():
            lines = ["type filter hook input priority 0;", *drops]
            table = "table inet cut {\nchain in {\n" + "\n".join(lines) + "\n}\n}\n"
            self.lab.run(host, ["nft", "-f", "-"], input=table.encode())
        try:
            yield
        finally:
            for host in rules:
                self.lab.run(host, ["nft", "delete", "table", "inet", "cut"])


@pytest.mark.parametrize("what", CUTS if LONG else ["two servers"])
def test_a_cut(tmp_path: Path, what: str) -> None:
    """Work goes on during the cut, and after it; every change counts once, no read goes back, and copies are equal."""
    stop, histories = tmp_path / "stop", [tmp_path / f"history-{number}" for number in range(WORKERS)]
    with Network(tmp_path) as network:
        network.ask("make", network.address)
        workers = [
            network.use("work", network.address, "tcp", str(number), str(histories[number]), str(stop))
            for number in range(WORKERS)
        ]

        def goes_on() -> float:
            """Every worker ends some more calls; return how long that took."""
            began, before = time.monotonic(), [count_notes(path) for path in histories]

            def went_on() -> bool:
                for worker in workers:
                    assert worker.poll() is None, worker.communicate()
                return all(
                    count_notes(path) >= count + second_copy.TWO_ROUNDS
                    for path, count in zip(histories, before, strict=True)
                )

            try:
                wait_for(went_on, "work of every user", 60 * SLOWNESS)
            except AssertionError:
                network.tell_why(workers)
                raise
            return time.monotonic() - began

        goes_on()
        with network.cut(CUTS[what]):
            longest, ends = goes_on(), time.monotonic() + HOLD_S
            while time.monotonic() < ends:
                longest = max(longest, goes_on())
        longest = max(longest, goes_on())
        assert longest < GOES_ON_S * SLOWNESS, f"work went on after {longest:.1f} s"
        network.ask("whole", network.address)
        stop.touch()
        told = sorted(json.loads(worker.communicate(timeout=90 * SLOWNESS)[0]) for worker in workers)
        assert not any(why for _, _, why in told), told
        done = json.dumps([count for _, count, _ in told])
        compared = network.ask("check", network.address, network.memory, done, *map(str, histories))
        assert int(compared) == second_copy.SEGMENTS
    print(f"{what}: work went on within {longest:.2f} s, {done} rounds")
