"""smb.tools.doctor: what is found on machines good and bad."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import smb
from smb.config.settings import SETTINGS, private_memory
from smb.tools.cli.main import app
from smb.tools.doctor import Finding, Severity, look_at_cluster, look_at_machine

SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)


def machine(root: Path, **texts: str) -> Path:
    """The files of a machine below root; each text is given by a path with dots for dashes of the file system."""
    good = {
        "proc/meminfo": "HugePages_Free:        0\n",
        "proc/sys/kernel/osrelease": "5.15.0-generic",
        "proc/sys/net/ipv4/tcp_rmem": "4096 131072 33554432",
        "proc/sys/net/ipv4/tcp_wmem": "4096 16384 16777216",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [within_size] advise never deny force",
        "sys/class/net/eth0/mtu": "9000",
        "sys/class/net/eth0/speed": "100000",
        "sys/class/net/eth0/operstate": "up",
        "sys/class/net/eth1/mtu": "1500",
        "sys/class/net/eth1/operstate": "down",
    }
    for path, text in (good | {name.replace("__", "/"): text for name, text in texts.items()}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def looked(root: Path, check: str, memory_dir: Path = SHM, capacity: str | None = None) -> list[Finding]:
    return [finding for finding in look_at_machine(memory_dir, capacity, root) if finding.check == check]


def test_memory_servers_ask_for_large_pages(tmp_path: Path) -> None:
    """From Linux 6.1 on they need not be allowed."""
    shmem = {"sys__kernel__mm__transparent_hugepage__shmem_enabled": "always within_size advise [never] deny force"}
    (finding,) = looked(machine(tmp_path, proc__sys__kernel__osrelease="6.1.0-13-amd64", **shmem), "huge pages")
    assert (finding.state, "memory servers ask for them" in finding.found) == (Severity.OK, True)


def test_a_good_machine_needs_no_change(tmp_path: Path) -> None:
    """Everything as it should be: no problem, no advice of ours, and a network interface that is down is left out."""
    memory = Path(private_memory())
    found = [f for f in look_at_machine(memory, "1MiB", machine(tmp_path)) if f.check not in ("open files", "memlock")]
    assert [finding for finding in found if finding.state is not Severity.OK] == []
    assert [finding.found for finding in found if finding.check == "MTU"] == ["eth0: MTU 9000, 100 Gb/s"]


@pytest.mark.parametrize(
    ("texts", "check", "change"),
    [
        ({"proc__sys__net__ipv4__tcp_rmem": "4096 1000 2000"}, "socket buffers", 'tcp_rmem="4096 1000 16777216"'),
        ({"sys__class__net__eth0__mtu": "1500"}, "MTU", "ip link set eth0 mtu 9000"),
        ({"sys__kernel__mm__transparent_hugepage__shmem_enabled": "[never]"}, "huge pages", "echo within_size > "),
        (
            {"proc__sys__kernel__osrelease": "6.1.0", "sys__kernel__mm__transparent_hugepage__shmem_enabled": "[deny]"},
            "huge pages",
            "echo within_size > ",
        ),
    ],
)  # fmt: skip
def test_what_could_be_faster_is_advice(tmp_path: Path, texts: dict[str, str], check: str, change: str) -> None:
    """Small buffers, small packets on a fast link, small pages: each is told with the command that changes it."""
    advised = [finding for finding in looked(machine(tmp_path, **texts), check) if finding.state is Severity.ADVICE]
    assert [change in finding.change for finding in advised] == [True]


def test_a_memory_directory_that_will_not_do(tmp_path: Path) -> None:
    """Missing, on disk, others may write there, or smaller than the capacity: a problem; others' memory: advice. One
    that a server makes is looked at where it is to be.
    """
    root = machine(tmp_path / "machine")

    def state(memory_dir: Path, capacity: str | None = None) -> Severity:
        (finding,) = looked(root, "memory directory", memory_dir, capacity)
        assert finding.state is Severity.OK or finding.change
        return finding.state

    assert state(tmp_path / "nowhere") is Severity.PROBLEM
    assert state(Path("/proc")) is Severity.PROBLEM
    assert state(SHM, "1MiB") is Severity.PROBLEM
    with tempfile.TemporaryDirectory(prefix="smb-doctor-", dir=SHM) as directory:
        for memory in (Path(directory), Path(private_memory(directory))):
            assert state(memory, "1MiB") is Severity.OK
            assert state(memory, "900TiB") is Severity.PROBLEM
            assert state(memory, f"{shutil.disk_usage(SHM).free + (1 << 20)}") in (Severity.ADVICE, Severity.PROBLEM)
        Path(directory).chmod(0o770)
        assert state(Path(directory), "1MiB") is Severity.PROBLEM
        Path(private_memory(directory)).touch()
        assert state(Path(private_memory(directory)), "1MiB") is Severity.PROBLEM


def test_a_machine_without_rdma_is_fine_unless_verbs_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device: nothing to change; a problem where SMB_TRANSPORT asks for verbs and that exists here."""
    root = machine(tmp_path)
    assert [finding.state for finding in looked(root, "RDMA")] == [Severity.OK]
    monkeypatch.setattr("smb.tools.doctor.machine.text_of", {"client.transport": "verbs"}.get)
    assert Severity.PROBLEM in [finding.state for finding in looked(root, "RDMA")]


@contextmanager
def refusing() -> Iterator[str]:
    """An address that is taken, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and what was printed."""
    answer = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return answer.exit_code, json.loads(answer.stdout) if answer.stdout else {}


def test_a_cluster_is_measured_and_left_as_it_was() -> None:
    """Each server over shm and tcp with round trip and speed, the clock, exit code 0, no buffer left; a server that is
    gone is a problem with exit code 1, and the others are measured all the same.
    """
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster:
        code, shown = doctor("-c", cluster.address)
        by_check = {finding["check"]: finding for finding in shown["findings"]}
        assert (code, shown["problems"]) == (0, 0), shown
        for server in ("server-0", "server-1"):
            for transport in ("shm", "tcp"):
                figures = by_check[f"server {server} over {transport}"]["figures"]
                assert 0 < figures["round_trip_s"] < 1
                assert figures["write_bytes_per_s"] > 1e6
                assert figures["read_bytes_per_s"] > 1e6
        assert abs(by_check["clock"]["figures"]["offset_s"]) < 1
        with smb.connect(cluster.address) as client:
            assert client.list() == []
        cluster.servers[1].kill()
        code, shown = doctor("-c", cluster.address)
        bad = [finding["check"] for finding in shown["findings"] if finding["state"] == "problem"]
        assert (code, bad) == (1, ["server server-1"])
        assert "server server-0 over tcp" in {finding["check"] for finding in shown["findings"]}


def test_without_an_address_it_looks_at_a_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all commands do; without one there only the machine is looked at. Of a list it takes who answers."""
    with refusing() as nobody:
        with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
            for given, here in (([], cluster.address), (["-c", f"{nobody},{cluster.address}"], nobody)):
                monkeypatch.setattr("smb.config.settings.DEFAULT_COORDINATOR", here)
                code, shown = doctor(*given)
                checks = {finding["check"] for finding in shown["findings"]}
                assert (code, "server server-0 over shm" in checks) == (0, True), shown
        answer = CliRunner().invoke(app, ["doctor"])
        assert f"no cluster was checked: nobody listens at {nobody}" in answer.stdout


def test_a_coordinator_that_does_not_answer_is_a_finding() -> None:
    """Nobody there, or no address: one problem with what to do, no exception; wrong usage has exit code 2."""
    with refusing() as nobody:
        for address in (nobody, "nonsense"):
            (finding,) = look_at_cluster(address, timeout=0.5)
            assert finding.state is Severity.PROBLEM
            assert finding.change
    assert doctor("--capacity", "some")[0] == 2
