"""A rolling upgrade from an earlier version to this tree, and the way back, while clients of both versions go on.

    python -m tests.ops.deploy.upgrade [COMMIT]         or make upgrade FROM=COMMIT; default: README's

The coordinator first, then the memory servers one by one, as docs/run.md says. Clients of both versions add to
buffers over TCP and shared memory, and train one model together, from before the first change until after the last.
Each addition that returned counts once: read by both versions in the end. The earlier version is built below
build/upgrade.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build" / "upgrade"
SERVERS = ("server-0", "server-1")
START_S, END_S = 60.0, 120.0
PAUSE_S = 4.0  # so long do clients work between two changes
ADD = """
import signal, sys
import numpy as np, smb
leaving = []
signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
with smb.connect(sys.argv[1], timeout=60, transport=sys.argv[2]) as client:
    buffer = client.create(sys.argv[3], 200_000, servers=2)
    ones, done = np.ones(200_000, np.float32), 0
    with buffer.lock() as lock:
        print("ready", flush=True)
        while not leaving:
            buffer.accumulate(ones, fence=lock)
            done += 1
print(done)
"""
TRAIN = """
import signal, sys, time
import numpy as np, smb, smb.train
leaving = []
signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
with smb.connect(sys.argv[1], timeout=60) as client:
    values = np.zeros(5000, np.float32)
    with smb.train.join(client, "run", values, smb.train.LocalSGD(every=5)) as worker:
        print("ready", flush=True)
        while not leaving:
            values += 1
            time.sleep(0.01)
            worker.step(samples=1)
        print(smb.train.status(client, "run").round)
"""
LOOK = """
import sys, smb
with smb.connect(sys.argv[1], timeout=60) as client:
    for name in sys.argv[2:]:
        values = client.open(name).read()
        print(name, int(values.min()), int(values.max()))
"""


class Version:
    """A tree, and a Python that has what it needs."""

    def __init__(self, name: str, tree: Path, python: Path) -> None:
        self.name, self.tree, self.python = name, tree, python

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        """A process of this version's Python."""
        environment = os.environ | {"PYTHONPATH": str(self.tree), "PYTHONSAFEPATH": "1"}
        return subprocess.Popen([str(self.python), *arguments], env=environment, cwd="/", text=True, **options)  # type: ignore[call-overload,no-any-return]


def earlier(commit: str) -> Version:
    """Build it, with its own dependencies."""
    tree, environment = BUILD / commit / "tree", BUILD / commit / "venv"
    if not (environment / "made").exists():
        shutil.rmtree(BUILD / commit, ignore_errors=True)
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        constrained = os.environ | {"PIP_CONSTRAINT": str(tree / "tests" / "constraints.txt")}
        install = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--editable", str(tree)]
        subprocess.run(install, check=True, env=constrained)
        (environment / "made").touch()
    return Version(commit, tree, environment / "bin" / "python")


class Cluster:
    """Daemons at addresses that stay, whatever version each has."""

    def __init__(self, running: ExitStack) -> None:
        self._running = running
        self._state = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="smb-upgrade-")))
        self._memory = running.enter_context(tempfile.TemporaryDirectory(prefix="smb-upgrade-", dir="/dev/shm"))
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        self._listen = dict.fromkeys(("coordinator", *SERVERS), "127.0.0.1:0")

    @property
    def address(self) -> str:
        return self._listen["coordinator"]

    def change(self, name: str, version: Version) -> None:
        """Stop the daemon in order, where it runs, and start it in this version."""
        if before := self._daemons.get(name):
            before.terminate()
            before.wait(START_S)
        module = ["smb.tools.cli.main", "coordinator", "--state", str(self._state / "state")]
        if name != "coordinator":
            module = ["memserver", "--name", name, "--capacity", "64MiB", "--memory-dir", self._memory]
            module += ["--coordinator", self.address]
        ready, log = self._state / f"{name}.ready", self._state / f"{name}.log"
        ready.unlink(missing_ok=True)
        with log.open("a") as said:
            common = ["--listen", self._listen[name], "--metrics", "127.0.0.1:0", "--ready-file", str(ready)]
            daemon = version.start("-m", *module, *common, stdout=said, stderr=said)
        self._running.callback(daemon.kill)
        self._daemons[name] = daemon
        end = time.monotonic() + START_S
        while not ready.exists():
            if daemon.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{name} of {version.name} does not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        self._listen[name] = json.loads(ready.read_text())["address"]
        print(f"{name}: {version.name}", flush=True)


@contextmanager
def at_work(cluster: Cluster, versions: tuple[Version, ...]) -> Iterator[dict[str, int]]:
    """Clients of each version for the length of the block; then, by buffer, how often each one added."""
    done: dict[str, int] = {}
    with ExitStack() as running:
        clients: dict[str, subprocess.Popen[str]] = {}
        for version in versions:
            for transport in ("tcp", "shm"):
                name = f"{transport}-{version.name}"
                clients[name] = version.start("-c", ADD, cluster.address, transport, name, stdout=subprocess.PIPE)
            clients[f"train-{version.name}"] = version.start("-c", TRAIN, cluster.address, stdout=subprocess.PIPE)
        for name, client in clients.items():
            running.callback(client.kill)
            assert client.stdout is not None
            if client.stdout.readline() != "ready\n":
                raise SystemExit(f"{name}: did not begin")
        time.sleep(PAUSE_S)
        yield done
        for client in clients.values():
            client.send_signal(signal.SIGTERM)
        for name, client in clients.items():
            told = client.communicate(timeout=END_S)[0]
            if client.returncode != 0:
                raise SystemExit(f"{name}: ended with {client.returncode}")
            print(f"{name}: {told.strip()}")
            if not name.startswith("train-"):
                done[name] = int(told)


def roll(first: Version, last: Version) -> None:
    """All daemons from the first version to the last one."""
    both = (first, last)
    with ExitStack() as running:
        cluster = Cluster(running)
        for name in ("coordinator", *SERVERS):
            cluster.change(name, first)
        with at_work(cluster, both) as done:
            for name in ("coordinator", *SERVERS):
                cluster.change(name, last)
                time.sleep(PAUSE_S)
        for version in both:
            with version.start("-c", LOOK, cluster.address, *done, stdout=subprocess.PIPE) as look:
                seen = look.communicate(timeout=END_S)[0].splitlines()
            if seen != [f"{name} {count} {count}" for name, count in done.items()]:
                raise SystemExit(f"{version.name} reads {seen}; added were {done}")


def named_in(readme: str) -> str:
    """Return the commit or tag from which README says that an upgrade is tested."""
    match = re.search(r"rolling upgrade from (?:commit )?([\w.-]*\w)", readme)
    if not match:
        raise SystemExit("README.md has no sentence about a rolling upgrade from a commit: name one")
    return match[1]


def main() -> int:
    asked = sys.argv[1] if sys.argv[1:] else named_in((ROOT / "README.md").read_text())
    command = ["git", "rev-parse", "--verify", "--short", f"{asked}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        raise SystemExit(f"{asked} is no commit of this clone: name one ({found.stderr.strip()})")
    before, now = earlier(found.stdout.strip()), Version("now", ROOT, Path(sys.executable))
    for first, last in ((before, now), (now, before)):
        print(f"from {first.name} to {last.name}", flush=True)
        roll(first, last)
    print("all sums are exact")
    return 0


if __name__ == "__main__":
    sys.exit(main())
