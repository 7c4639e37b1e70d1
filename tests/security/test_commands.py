"""Commands with certificates: what each holder can do with the command line, and which sentence tells why not."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from tests.support.commands import COMMAND, run_here
from tests.support.daemons import keep_port

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run_as(
    guarded: smb.LocalCluster, certificates: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a command with the certificate of that name: (exit code, all that it printed)."""
    monkeypatch.setenv("SMB_COORDINATOR", guarded.address)
    monkeypatch.setenv("COLUMNS", "1000")

    def run(who: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setenv("SMB_CREDENTIALS", str(certificates / who))
        code, out, err = run_here(capsys, *arguments)
        return code, out + err

    return run


def test_rm_inside_a_namespace(run_as: Run, connect_as: Any) -> None:
    """A client limited to a namespace deletes what is in it; outside it, and as a reader, it is told why it can't."""
    everybody = connect_as("client")
    for name in ("team/junk", "other/junk"):
        everybody.create(name, (4,))
    assert run_as("of-team", "rm", "team/none")[0] == 1
    assert run_as("of-team", "rm", "team/none", "--missing-ok") == (0, "")
    code, said = run_as("reader-of-team", "rm", "team/junk")
    assert code == 1
    assert "DeleteBuffer: a certificate of role reader" in said
    code, said = run_as("of-team", "rm", "other/junk")
    assert code == 1
    assert "is limited to team/..." in said
    assert run_as("of-team", "rm", "team/junk") == (0, "")
    assert [buffer.name for buffer in everybody.list()] == ["other/junk"]


def test_a_reader_takes_snapshots(run_as: Run, connect_as: Any, tmp_path: Path) -> None:
    """A reader's certificate is enough for a snapshot of a buffer of any kind; one under the lock takes a client's, and
    the refusal says so.
    """
    everybody = connect_as("client")
    everybody.create("team/w", (4,)).fill(3)
    everybody.create("team/v", (4,), versions=2).publish(np.full(4, 5, np.float32))
    assert run_as("reader-of-team", "snapshot", "team/w", str(tmp_path / "w.npy"))[0] == 0
    assert np.load(tmp_path / "w.npy").tolist() == [3, 3, 3, 3]
    assert run_as("reader-of-team", "snapshot", "team/v", str(tmp_path / "v.npy"))[0] == 0
    assert np.load(tmp_path / "v.npy").tolist() == [5, 5, 5, 5]
    code, said = run_as("reader-of-team", "snapshot", "team/w", str(tmp_path / "locked.npy"), "--lock")
    assert code == 1
    assert "snapshot of 'team/w': only clients that may change a buffer can take its lock" in said
    assert not (tmp_path / "locked.npy").exists()
    assert {buffer.name for buffer in everybody.list()} == {"team/v", "team/w"}


def test_who_had_no_right_is_named(guarded: smb.LocalCluster, connect_as: Any, run_as: Run) -> None:
    """A memory server's log says which certificate asked for what without a right to it; `smb top` shows the names."""
    everybody, reader = connect_as("client"), connect_as("reader-of-team", transport="tcp")
    everybody.create("team/w", (4,), servers=["server-0"])
    with pytest.raises(smb.PermissionDeniedError):
        reader.open("team/w").write(np.ones(4, np.float32))
    wanted = "refused: " + reader.name + " (reader-of-team) had no right to these requests: write of team/w (1 time)"
    end, log = time.monotonic() + 60, guarded.servers[0].log
    while wanted not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    said = run_as("operator", "top", "--once")[1]
    assert f"{reader.name} (reader-of-team)" in said
    assert f"{everybody.name} (client)" in said


def test_what_certs_prints_as_the_next_step_works(tmp_path: Path) -> None:
    """Its commands, with this machine for HOST, make a cluster with a server of each name that was given, which the
    client of the last line sees.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    options = {"env": environment, "text": True, "cwd": tmp_path, "timeout": 60}
    arguments = ["certs", "my lab", "--server", "node1", "--client", "alice", "--namespace", "team"]
    printed = subprocess.run([*COMMAND, *arguments], check=True, capture_output=True, **options).stdout
    with keep_port() as kept:
        port = kept.getsockname()[1]
        steps = printed.partition("(HOST:")[2].splitlines()[2:]
        coordinator, memserver, export = (
            shlex.split(step.replace("HOST", "127.0.0.1").replace("7070", str(port))) for step in steps
        )
        assert coordinator[:2] == ["smb", "coordinator"]
        assert memserver[0] == "smb-memserver"
        assert export[0] == "export"
        daemons = [
            [*COMMAND, *coordinator[1:], "--state", "state", "--metrics", "127.0.0.1:0"],
            [sys.executable, "-m", "memserver", *memserver[1:], "--memory-dir", str(tmp_path), "--capacity", "16MiB"],
        ]
        with contextlib.ExitStack() as stack:
            for command in daemons:
                process = stack.enter_context(subprocess.Popen(command, env=environment, cwd=tmp_path))
                stack.callback(process.terminate)
            environment |= dict(word.split("=", 1) for word in export[1:])
            assert environment["SMB_CREDENTIALS"] == "my lab/alice"
            end = time.monotonic() + 60
            while True:
                created = subprocess.run([*COMMAND, "create", "team/w", "--shape", "4"], capture_output=True, **options)
                if created.returncode == 0:
                    break
                assert time.monotonic() < end, created.stderr
            assert "node1" in subprocess.run([*COMMAND, "status"], check=True, capture_output=True, **options).stdout


def test_wrong_credentials_are_one_sentence_with_the_cause(guarded: smb.LocalCluster, certificates: Path) -> None:
    """An authority of another cluster, an expired certificate, and none: the error names that, and lines of gRPC's
    library stand neither before it nor in the daemons' logs.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SMB_", "GRPC_"))}

    def said(address: str, who: Path | None) -> str:
        if who is not None:
            environment["SMB_CREDENTIALS"] = str(who)
        command = [*COMMAND, "status", "-c", address]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "ssl_transport" not in done.stderr
        assert done.stderr.startswith(f"smb: no coordinator answers at {address} ("), done.stderr
        return done.stderr.partition(" (")[2]

    assert said(guarded.address, None).startswith("it wants credentials: set SMB_CREDENTIALS=DIR")
    other = certificates / "other" / "operator"
    assert f"no authority in {other / 'ca.pem'} issued it" in said(guarded.address, other)
    expired = certificates / "expired"
    refused = said(guarded.address, expired)
    assert f"ours is {expired / 'cert.pem'}" in refused
    assert "certificate has expired" in refused
    with smb.LocalCluster(servers=1) as open_to_all:
        assert "Or it is a coordinator without credentials, and this client has them" in said(
            open_to_all.address, certificates / "client"
        )
    for server in (guarded.coordinator, *guarded.servers):
        assert "ssl_transport" not in server.log.read_text()


def test_doctor_measures_inside_the_own_namespace(run_as: Run, connect_as: Any) -> None:
    """A client limited to a namespace hears how fast its servers are, and nothing is left there; a reader hears that it
    makes no buffers.
    """
    said = run_as("of-team", "doctor")[1]
    assert "server-0 over tcp" in said
    assert "not measured" not in said
    assert run_as("reader-of-team", "doctor")[1].count("use a certificate that may create buffers") == 2
    assert connect_as("operator").list() == []
