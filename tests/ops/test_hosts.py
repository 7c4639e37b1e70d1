"""`smb up --hosts` and `smb run`: a cluster and programs over real sshd's, on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import smb
from perf import netlab
from perf.netlab import Host, Lab
from smb.daemon.held_directory import HeldDirectory
from smb.errors import InvalidArgumentError
from smb.tools.hosts import Ssh, check_servers, hosts_of, run_on, there
from tests.support.daemons import wait_for

ROOT = Path(__file__).parents[2]
SSHD = Path("/usr/sbin/sshd")
REASON = netlab.missing() or (None if SSHD.exists() and shutil.which("ssh") else "sshd is missing: make openssh-server")
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))
WAIT_S = 150.0  # for several Python processes on a busy machine
ADD = """
import os, sys
os.environ["SMB_LOG"] = "warning"
import numpy as np, smb, smb.train
values = np.zeros(1000, np.float32)
with smb.connect(timeout=60) as client, smb.train.join(client, "run", values, smb.train.ASP()) as worker:
    values += 1
    worker.step(1)
    print("added", sys.argv[1:], "RANK" in os.environ)
"""
READ = """
import smb, smb.train
with smb.connect(timeout=60) as client:
    print(sorted(server.name for server in client.servers()), smb.train.shared(client, "run").sum())
"""


def test_hosts_come_from_a_list_a_file_or_slurm(tmp_path: Path) -> None:
    assert hosts_of("a, root@b ,10.0.0.3") == ["a", "root@b", "10.0.0.3"]
    listed = tmp_path / "hosts"
    listed.write_text("# of the lab\na\n\nb  # slow\n")
    assert hosts_of(f"@{listed}") == ["a", "b"]
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "PATH": str(tmp_path)}
    assert hosts_of("slurm", slurm) == ["node1", "node2"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no host"),
        (" , ", "there is no host"),
        ("a,-oProxyCommand=x", "is not HOST"),
        ("a,b:22", "ssh/config"),
        ("a,root@a", "a stands there twice"),
        ("@/nowhere", "cannot read"),
        ("slurm", "SLURM_JOB_NODELIST is not set"),
        (",".join(f"n{i}" for i in range(300)), "at most 256"),
    ],
)
def test_other_lists_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        hosts_of(text, {})


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        (["ca"], "name of a directory"),
        (["a", "root@coordinator"], '"coordinator" is the name of a directory'),
        (["a", "localhost"], "each host would take localhost for itself"),
        (["127.0.0.1", "b"], "each host would take 127.0.0.1 for itself"),
    ],
)
def test_hosts_that_cannot_have_a_memory_server_are_refused(hosts: list[str], reason: str) -> None:
    """One whose directory of credentials is another one's, and one that the others do not find."""
    check_servers(["a", "server", "coordinator.lab"])
    check_servers(["localhost"])
    with pytest.raises(InvalidArgumentError, match=reason):
        check_servers(hosts)


class Hosts:
    """Hosts `a` and `b` with an sshd each, and `c`, from which commands are given."""

    def __init__(self, lab: Lab, work: Path) -> None:
        self.lab, self.work = lab, work
        self.names = [lab.address(host) for host in "ab"]
        self.python = work / "python"
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
        self.python.chmod(0o755)
        key, host_key = work / "key", work / "host_key"
        for file in (key, host_key):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
        (work / "authorized").write_text(Path(f"{key}.pub").read_text())
        known = Path(f"{host_key}.pub").read_text()
        (work / "known").write_text("".join(f"{name} {known}" for name in self.names))
        self.ssh = f"ssh -F none -i {key} -o UserKnownHostsFile={work / 'known'}"
        server = [
            str(SSHD), "-D", "-e", "-f", "/dev/null", "-h", str(host_key),
            "-o", f"AuthorizedKeysFile={work / 'authorized'}",
            "-o", "PidFile=none", "-o", "StrictModes=no", "-o", "UsePAM=no", "-o", "PasswordAuthentication=no",
        ]  # fmt: skip
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (work / "sshd.log").open("wb") as log:
            self.sshd = {host: lab.popen(host, server, stderr=log) for host in "ab"}
        for name in self.names:
            wait_for(
                lambda name=name: self.call("ssh", *self.ssh.split()[1:], name, "true").returncode == 0, "sshd", WAIT_S
            )

    def variables(self, **more: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
        return kept | {"PYTHONPATH": str(ROOT)} | more

    def call(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on `c`."""
        command = ["ip", "netns", "exec", self.lab.namespace("c"), *words]
        return subprocess.run(
            command, env=self.variables(**variables), cwd=self.work, capture_output=True, text=True, timeout=WAIT_S
        )

    def smb(self, *words: str, ssh: bool = True) -> list[str]:
        more = ["--ssh", self.ssh, "--python", str(self.python)] if ssh else []
        return [sys.executable, "-m", "smb.tools.cli.main", words[0], *more, *words[1:]]

    def there(self) -> list[str]:
        """The command lines of what runs on `a` and `b`, beside sshd."""
        found = []
        for host in "ab":
            pids = self.lab_pids(host)
            for pid in pids:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words and "sshd" not in words:
                        found.append(words)
        return found

    def lab_pids(self, host: str) -> list[str]:
        command = ["ip", "netns", "pids", self.lab.namespace(host)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    @contextlib.contextmanager
    def up(self) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
        """`smb up --hosts` on `c`: the process, and the variables that it prints."""
        words = self.smb("up", "--hosts", ",".join(self.names), "--capacity", "16MiB")
        log = self.work / "up.log"
        with log.open("w") as errors:
            process = self.lab.popen(
                "c", words, env=self.variables(), cwd=self.work, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            exported = {}
            assert process.stdout
            for line in process.stdout:
                if "export " in line:
                    name, _, value = line.strip().removeprefix("export ").partition("=")
                    exported[name] = value
                if line.startswith("Ctrl-C"):
                    break
            else:
                process.wait(WAIT_S)
                pytest.fail(log.read_text())
            yield process, exported
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(WAIT_S)
            assert process.stdout
            process.stdout.close()

    def directories(self) -> set[Path]:
        """Where the daemons on `a` and `b` have keys and memory."""
        return {Path(found) for line in self.there() for found in re.findall(r"/dev/shm/smb-cluster-[\w-]+", line)}

    def nothing_is_left(self, directories: set[Path]) -> None:
        """Fail if a process or memory of the cluster is still there after a while."""
        assert directories
        end = time.monotonic() + WAIT_S
        while left := [*self.there(), *filter(Path.exists, directories)]:
            assert time.monotonic() < end, left
            time.sleep(0.2)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Lab([Host("a"), Host("b"), Host("c")]) as lab:
        yield Hosts(lab, tmp_path_factory.mktemp("hosts"))


@needs_hosts
@pytest.mark.timeout(900)  # two clusters' worth of Python processes, each over ssh
def test_a_cluster_on_two_hosts_trains_and_ends_with_ctrl_c(hosts: Hosts) -> None:
    """Daemons have certificates, no key is in a command line, programs find the cluster, and nothing is left."""
    (hosts.work / "add.py").write_text(ADD)
    (hosts.work / "fails.py").write_text("import sys; sys.exit(7)")
    with hosts.up() as (process, exported):
        assert exported["SMB_COORDINATOR"] == f"{hosts.names[0]}:7070"
        running, directories = hosts.there(), hosts.directories()
        assert sum("--credentials" in line for line in running) == 3, running
        assert not any("PRIVATE" in line for line in running)
        secret = Path(exported["SMB_CREDENTIALS"])
        assert secret.parent.stat().st_mode & 0o77 == 0
        names = ",".join(hosts.names)
        ran = hosts.call(*hosts.smb("run", "-n", "4", "--hosts", names, "add.py", "--hosts", "x"), **exported)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert sorted(ran.stdout.splitlines()) == sorted(
            f"{hosts.names[i % 2]}: added ['--hosts', 'x'] False" for i in range(4)
        )
        read = hosts.call(sys.executable, "-c", READ, **exported)
        assert read.stdout.split("] ") == [f"{sorted(hosts.names)!r}"[:-1], "4000.0\n"], read.stderr
        failed = hosts.call(*hosts.smb("run", "--hosts", names, "fails.py"), **exported)
        assert failed.returncode == 7
        assert f"fails.py on {hosts.names[0]} ended with 7" in failed.stdout
        stranger = hosts.call(
            sys.executable, "-c", READ.replace("60", "5"), SMB_COORDINATOR=exported["SMB_COORDINATOR"]
        )
        assert stranger.returncode != 0
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert not secret.exists()
    hosts.nothing_is_left(directories)


@needs_hosts
@pytest.mark.timeout(900)
def test_a_lost_connection_and_a_killed_command_end_everything(hosts: Hosts) -> None:
    with hosts.up() as (process, _):
        directories = hosts.directories()
        sessions = [pid for pid in hosts.lab_pids("b") if int(pid) != hosts.sshd["b"].pid and is_sshd(pid)]
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        assert process.wait(WAIT_S) == 1
        assert f"the memory server on {hosts.names[1]}: ssh failed" in (hosts.work / "up.log").read_text()
    hosts.nothing_is_left(directories)
    with hosts.up() as (process, _):
        directories = hosts.directories()
        process.kill()
        process.wait()
        hosts.nothing_is_left(directories)


def is_sshd(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@needs_hosts
@pytest.mark.timeout(600)
def test_an_error_names_the_host_and_what_to_do(hosts: Hosts) -> None:
    name = hosts.names[0]
    began = time.monotonic()
    wrong = hosts.call(*hosts.smb("up", "--hosts", f"{name},10.77.0.77"))
    assert wrong.returncode == 1
    assert "on 10.77.0.77: ssh failed" in wrong.stderr
    assert "Try it: ssh " in wrong.stderr
    assert time.monotonic() - began < WAIT_S
    missing = hosts.call(*hosts.smb("up", "--python", "/nowhere/python", "--hosts", name))
    assert missing.returncode == 1
    assert f"coordinator on {name}: " in missing.stderr
    assert "name its Python by --python" in missing.stderr
    unset = hosts.call(*hosts.smb("run", "--hosts", name, "train.py"))
    assert (unset.returncode, "SMB_COORDINATOR is not set" in unset.stderr) == (2, True)
    loopback = hosts.call(*hosts.smb("run", "--hosts", name, "train.py"), SMB_COORDINATOR="127.0.0.1:7070")
    assert (loopback.returncode, "is this machine for each host" in loopback.stderr) == (2, True)
    assert hosts.there() == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [(("-n", "2"), ["rank None x", "rank None x"]), (("--mesh", "2"), ["rank 0 x", "rank 1 x"])],
    ids=["processes", "mesh"],
)
def test_programs_run_on_this_machine_without_ssh(
    tmp_path: Path, options: tuple[str, ...], expected: list[str]
) -> None:
    """A mesh is one process of so many ranks, under torchrun."""
    if "--mesh" in options:
        pytest.importorskip("torch")
    (tmp_path / "rank.py").write_text(
        "import os, sys; sys.stdout.write(f'rank {os.environ.get(\"RANK\")} {sys.argv[1]}\\n')"
    )
    command = [sys.executable, "-m", "smb.tools.cli.main", "run", *options, "rank.py", "x"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    assert sorted(line for line in ran.stdout.splitlines() if line.startswith("rank")) == expected


def call_run(tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`smb run` on this machine."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    code = "import sys; sys.modules['cryptography'] = None; from smb.tools.cli.main import main; main()"
    command = [sys.executable, "-c", code, "run", *words]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)


def test_programs_run_without_the_package_that_makes_certificates(tmp_path: Path) -> None:
    """It comes with an extra, which who only trains has not installed."""
    (tmp_path / "says.py").write_text("print('here')")
    ran = call_run(tmp_path, "says.py")
    assert (ran.returncode, ran.stdout) == (0, "here\n"), ran.stderr


def test_a_cluster_at_localhost_is_refused_to_other_hosts_alone(tmp_path: Path) -> None:
    """`smb up --hosts localhost` prints a command that works: it gets as far as to ssh."""
    words = ("--ssh", "false", "--hosts")
    local = call_run(tmp_path, *words, "me@localhost", "says.py", SMB_COORDINATOR="localhost:7070")
    assert (local.returncode, "says.py on localhost" in local.stderr) == (1, True), local.stderr
    other = call_run(tmp_path, *words, "a", "says.py", SMB_COORDINATOR="localhost:7070")
    assert (other.returncode, "is this machine for each host" in other.stderr) == (2, True), other.stderr


def test_hundreds_of_processes_on_a_host_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells that they run is read as a whole, however many they are; so is a long reason."""
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\nspec = json.loads(sys.stdin.readline())\n"
        "print(json.dumps({'event': 'failed', 'reason': str(spec['count']) + 'x' * 9000}))\n"
    )
    python.chmod(0o755)
    with pytest.raises(smb.UnavailableError, match=r"^says.py on this machine: 4000x{9000}$"):
        run_on(
            Ssh((), str(python)), [], ["says.py"], processes=4000, mesh=0, environment={}, credentials=None,
            show=lambda _: None,
        )  # fmt: skip


def test_children_of_a_program_end_while_its_id_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a program is waited for, its id may be that of a stranger's processes, which must not be killed."""
    (tmp_path / "parent.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "try:\n    pathlib.Path('first').touch(exist_ok=False)\n"
        "except FileExistsError:\n    time.sleep(1)\n"
        "else:\n    child = subprocess.Popen(['sleep', '1000'])\n    pathlib.Path('child').write_text(str(child.pid))\n"
        "    sys.exit(3)\n"
    )
    real, killed = os.killpg, []

    def kill(group: int, how: int) -> None:
        killed.append((group, Path(f"/proc/{group}").exists()))
        real(group, how)

    monkeypatch.setattr(os, "killpg", kill)
    monkeypatch.setattr(there, "_ignore_signals", lambda: None)  # here they are pytest's
    spec = {"command": ["parent.py"], "count": 2, "environment": {}, "credentials": {}, "directory": str(tmp_path)}
    (tmp_path / "own").mkdir()
    held = HeldDirectory(tmp_path / "own")
    try:
        assert there.run_programs(spec, held) == 3
    finally:
        held.remove()
    child = (tmp_path / "child").read_text()
    wait_for(lambda: not Path(f"/proc/{child}").exists() or state(child) == "Z", "the child's end", 10)
    assert len({group for group, _ in killed}) == 2
    assert all(there_still for _, there_still in killed)


def state(pid: str) -> str:
    """Return the letter of a process's state; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""


@pytest.mark.parametrize("directory", [".", "nowhere"], ids=["ended", "failed"])
def test_keys_are_removed_although_the_process_is_told_to_end_meanwhile(tmp_path: Path, directory: str) -> None:
    """As it is when it has said "failed": then the other side ends it at once."""
    spec = {
        "what": "programs", "command": ["-c", ""], "count": 1, "environment": {}, "credentials": {"key.pem": "secret"},
        "directory": str(tmp_path / directory),
    }  # fmt: skip
    code = (
        "import os, signal, sys\nfrom smb.tools.hosts import there\nremove = there.HeldDirectory.remove\n"
        "def interrupted(held):\n    print(held.path)\n    os.kill(os.getpid(), signal.SIGTERM)\n    remove(held)\n"
        "there.HeldDirectory.remove = interrupted\nsys.exit(there.main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()  # and stays open: only the signal interrupts
        *_, held = process.stdout.read().split()
    assert held.startswith("/dev/shm/smb-cluster-")
    assert not Path(held).exists()
