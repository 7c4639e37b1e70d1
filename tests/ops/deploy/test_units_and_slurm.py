"""deploy/systemd and deploy/slurm, with the real systemd-analyze, daemons and bash."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import smb
from smb.config.settings import SETTINGS, read_file
from tests.fault.long import LONG
from tests.ops.deploy import fake_slurm
from tests.support.daemons import wait_for
from tests.support.etcd import needs_etcd, running_etcd
from tests.support.other_users import AS_ROOT, STRANGER

ROOT = Path(__file__).parents[3]
SYSTEMD = ROOT / "deploy/systemd"
UNITS = ("smb-coordinator.service", "smb-memserver.service")
BIN = Path(sys.executable).parent
EXPOSURE_MAX = 20  # tenths of systemd's 0 to 10; a unit without a sandbox has 96
AT_NIGHT = pytest.mark.skipif(not LONG, reason="one more job; SMB_LONG=1 runs it")
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="Debian's package systemd is not here")


@pytest.fixture
def memory() -> Iterator[Path]:
    directory = Path("/dev/shm") / f"smb-deploy-{os.getpid()}"
    directory.mkdir(mode=0o700)
    yield directory
    shutil.rmtree(directory)


def installed(unit: str, directory: Path) -> Path:
    """The unit, for programs where they are here."""
    file = directory / unit
    file.write_text((SYSTEMD / unit).read_text().replace("/opt/smb/bin", str(BIN)))
    return file


@analyze
@pytest.mark.parametrize("unit", UNITS)
def test_units_are_sound_and_sandboxed(tmp_path: Path, unit: str) -> None:
    """systemd-analyze verify has nothing to say, and `security` sees an exposure of at most 2; a misspelt setting and a
    unit without a sandbox are seen.
    """
    good = installed(unit, tmp_path)

    def verify(file: Path) -> str:
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return run.stderr + ("" if run.returncode == 0 else "failed")

    def exposed(file: Path) -> bool:
        command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", str(file)]
        return subprocess.run(command, capture_output=True, timeout=60).returncode != 0

    assert verify(good) == ""
    assert not exposed(good)
    bad = tmp_path / "bad.service"
    bad.write_text(good.read_text().replace("WatchdogSec", "WatchDogSecs"))
    assert "WatchDogSecs" in verify(bad)
    bad.write_text(re.sub(r"(?m)^(Protect|Restrict|System|Capab|NoNew).*$", "", good.read_text()))
    assert exposed(bad)


@analyze
def test_the_backups_units_are_sound(tmp_path: Path) -> None:
    """The timer starts the service; both are as systemd reads them, and the service is in a sandbox. Its shell runs the
    command that there is.
    """
    service, timer = (installed(f"smb-backup.{kind}", tmp_path) for kind in ("service", "timer"))
    for file in (service, timer):
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", str(service)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    calendar = re.findall(r"^OnCalendar=(.*)$", timer.read_text(), re.MULTILINE)
    assert subprocess.run(["systemd-analyze", "calendar", *calendar], capture_output=True, timeout=60).returncode == 0
    (line,) = re.findall(r"^ExecStart=(.*)$", service.read_text(), re.MULTILINE)
    shell, option, script = shlex.split(line.replace("%%", "%"))
    script = script.replace("--config /etc/smb/smb.toml", "").replace("/var/backups/smb", str(tmp_path / "kept"))
    (tmp_path / "kept").mkdir()
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster, smb.connect(cluster.address) as client:
        client.create("w", 10).fill(7)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SMB_COORDINATOR": cluster.address}
        subprocess.run([shell, option, script], env=environment, check=True, timeout=60, cwd=ROOT)
        (made,) = (tmp_path / "kept").iterdir()
        assert re.fullmatch(r"\d{8}T\d{6}Z", made.name)
        assert (made / "backup.json").exists()


class Unit:
    """What systemd would do with a unit, as far as it concerns start, credentials and notification."""

    def __init__(self, unit: str, paths: dict[str, str], directory: Path) -> None:
        settings = [line.partition("=") for line in (SYSTEMD / unit).read_text().splitlines() if "=" in line]
        of = [(key, value) for key, _, value in settings if not key.startswith("#")]
        credentials = directory / "credentials"
        credentials.mkdir()
        for key, value in of:
            if key == "LoadCredential":
                name, _, source = value.partition(":")
                shutil.copy(self._here(source, paths), credentials / name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
        for key, value in of:
            if key == "Environment":
                name, _, text = value.partition("=")
                environment[name] = text.replace("%d", str(credentials))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(directory / "notify"))
        self._socket.settimeout(20)
        environment["NOTIFY_SOCKET"] = str(directory / "notify")
        self.log = directory / "log"
        command = self._here(dict(of)["ExecStart"], {**paths, "/opt/smb/bin": str(BIN)})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(shlex.split(command), env=environment, stderr=log, cwd="/")

    @staticmethod
    def _here(text: str, paths: dict[str, str]) -> str:
        for path, here in paths.items():
            text = text.replace(path, here)
        return text

    def hear(self, wanted: str) -> list[str]:
        """Wait for a message with this line, and return it."""
        while True:
            try:
                lines = self._socket.recv(4096).decode().splitlines()
            except TimeoutError:
                raise AssertionError(f"no {wanted}: {self.log.read_text()}") from None
            if wanted in lines:
                return lines

    def stop(self) -> int:
        """SIGTERM, and STOPPING is heard; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.hear("STOPPING=1")
        return self.process.wait(30)

    def close(self) -> None:
        self._socket.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_units_start_what_they_say(tmp_path: Path, memory: Path) -> None:
    """Both ExecStart lines, with the shipped smb.toml, free ports, and credentials of `smb certs`: READY, a
    client with a certificate writes and reads, one without is refused, SIGTERM ends both with 0.
    """
    certificates = tmp_path / "certificates"
    command = [sys.executable, "-m", "smb.tools.cli.main", "certs", str(certificates), "--server", "storage-1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    toml = (SYSTEMD / "smb.toml").read_text()
    toml = re.sub(r"coordinator\.example:7070", f"127.0.0.1:{port}", toml)
    toml = toml.replace("0.0.0.0:7070", f"127.0.0.1:{port}").replace("0.0.0.0:7071", "127.0.0.1:0")
    toml = re.sub(r"127\.0\.0\.1:947\d", "127.0.0.1:0", toml).replace("64GiB", "64MiB").replace("# name", "name")
    toml += f'memory_dir = "{memory}"\n'
    (tmp_path / "smb.toml").write_text(toml)
    paths = {
        "/etc/smb/smb.toml": str(tmp_path / "smb.toml"),
        "/var/lib/smb": str(tmp_path / "state"),
        "/etc/smb/credentials/memserver": str(certificates / "storage-1"),
        "/etc/smb/credentials": str(certificates),
    }
    units = []
    try:
        for unit in UNITS:
            (tmp_path / unit).mkdir()
            units.append(Unit(unit, paths, tmp_path / unit))
            assert any(line.startswith("STATUS=serving at") for line in units[-1].hear("READY=1"))
        address = f"127.0.0.1:{port}"
        with smb.connect(address, credentials=certificates / "client") as client:
            wait_for(lambda: [server for server in client.servers() if server.alive], "server")
            buffer = client.create("w", 1000)
            buffer.fill(3)
            assert buffer.read().sum() == 3000
            client.delete("w")
        with pytest.raises(smb.Error):
            smb.connect(address, timeout=1)
        assert [unit.stop() for unit in reversed(units)] == [0, 0]
    finally:
        for unit in units:
            unit.close()


@pytest.mark.parametrize("file", [SYSTEMD / "smb.toml", ROOT / "deploy/kubernetes/base/smb.toml"], ids=str)
def test_shipped_configurations_are_valid(file: Path) -> None:
    """Every key of the shipped files is a setting with a value that it takes."""
    assert set(read_file(file)) <= set(SETTINGS)


def slurm(tmp_path: Path, *program: str, etcd: str = "") -> subprocess.Popen[str]:
    """The batch script as Slurm starts it, on two nodes."""
    fake_slurm.install(tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= {
        "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}",
        "FAKE_NODES": "127.0.0.1 127.0.0.2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SMB_JOB_CAPACITY": "32MiB",
        "SMB_JOB_LAUNCH": "srun --overlap",
        "SMB_JOB_ETCD": etcd,
    }
    command = ["bash", str(ROOT / "deploy/slurm/smb.sbatch"), *program]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


_PROGRAM = """
import os, smb, numpy as np
with smb.connect() as client:
    sums = client.create("sums", 8, exist_ok=True, servers=2)
    sums.accumulate(np.ones(8, np.float32))
    client.barrier("all", 2, timeout=30)
    said = [os.environ["SLURMD_NODENAME"], int(sums.read()[0]), len(client.servers())]
    os.write(1, (" ".join(map(str, said)) + "\\n").encode())  # in one piece: both write into the same pipe
raise SystemExit(3)
"""


def test_a_slurm_job_has_a_cluster_of_its_own(tmp_path: Path) -> None:
    """On two nodes: a server on each, the program on both meets in one buffer over credentials of the job; its exit
    code is the job's, the keys are gone, and no daemon stays.
    """
    job = slurm(tmp_path, sys.executable, "-c", _PROGRAM)
    try:
        printed, _ = job.communicate(timeout=90)
    finally:
        job.kill()
        job.wait()
    assert sorted(printed.splitlines()) == ["127.0.0.1 2 2", "127.0.0.2 2 2"], printed
    assert job.returncode == 3
    assert not list(tmp_path.rglob("key.pem"))
    assert not list(Path("/dev/shm").glob(f"smb-{os.getpid()}-127*"))
    assert not _daemons(tmp_path)


@needs_etcd
@AT_NIGHT
# More than 5 s: the job by its script, as programs: coordinators, servers, and the command itself.
def test_a_slurm_job_with_two_coordinators(tmp_path: Path) -> None:
    """With etcd a coordinator on each of two nodes, both in the program's list: one leads, one stands by."""
    with running_etcd() as etcd:
        etcd.wait_ready()
        program = ("bash", "-c", "smb status --json; sleep 1")
        job = slurm(tmp_path, *program, etcd=f"etcd://{etcd.addresses}/job")
        try:
            printed, _ = job.communicate(timeout=90)
        finally:
            job.kill()
            job.wait()
    assert job.returncode == 0, printed
    assert (printed.count('"role": "leader"'), printed.count('"role": "standby"')) == (2, 2), printed
    assert not _daemons(tmp_path)


@AT_NIGHT
def test_a_slurm_job_ends_when_told(tmp_path: Path) -> None:
    """SIGTERM, a pre-emption, ends program and daemons, with 143."""
    mark = tmp_path / "started"
    job = slurm(tmp_path, "bash", "-c", f"touch {mark}; exec sleep 600")
    try:
        wait_for(mark.exists, "program", 60)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=90)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 143
    assert not _daemons(tmp_path)


@AS_ROOT
@pytest.mark.parametrize("linked", [False, True])
def test_a_slurm_job_uses_no_directory_of_another_user(tmp_path: Path, linked: bool) -> None:
    """Who guessed its name could have put an authority there, or a link to what the job's end would remove."""
    planted = tmp_path / f"smb-{os.getpid()}"
    kept = tmp_path / "own" / "state"
    kept.mkdir(parents=True)
    if linked:
        planted.symlink_to(kept.parent)
    else:
        planted.mkdir(mode=0o777)
    os.chown(planted, STRANGER, STRANGER, follow_symlinks=False)
    with slurm(tmp_path, "true") as job:
        printed, _ = job.communicate(timeout=90)
    assert (job.returncode, printed) == (1, f"{planted} is not a directory of this user's own\n")
    assert kept.exists()
    assert not list(planted.glob("c*"))


def _daemons(directory: Path) -> list[str]:
    """Processes whose command line names the directory, other than bash that is just ending."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(str(directory) in word for word in words) and any("smb" in Path(word).name for word in words[:2]):
            found.append(" ".join(words))
    return found
