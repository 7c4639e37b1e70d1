"""How daemons and commands end that lose their terminal, their output, their ready file or their state."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smb
from smb.coordinator.store import StoreError, open_store
from smb.daemon.process import clear_ready_file
from smb.errors import OutOfMemoryError, UnavailableError
from tests.support.commands import COMMAND
from tests.support.daemons import Daemons, running_daemons

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


def _memory_of(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"smb-cluster-{pid}-*"))


@pytest.mark.parametrize("ignored", [False, True])
def test_smb_up_whose_terminal_is_closed(ignored: bool) -> None:
    """SIGHUP ends it as SIGTERM does, and frees its memory; under nohup, which ignores SIGHUP, it goes on."""
    words = ["up", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--servers", "1", "--capacity", "16MiB"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # the child inherits it
    try:
        up = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        assert up.stdout is not None
        assert up.stdout.readline().startswith("coordinator at ")
        assert _memory_of(up.pid)
        up.send_signal(signal.SIGHUP)
        if ignored:
            (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{up.pid}/status").read_text())
            assert int(mask, 16) & 1 << (signal.SIGHUP - 1)
            up.send_signal(signal.SIGTERM)
        assert up.wait(30) == 0
        assert up.stdout.read().endswith("stopped\n")
        assert _memory_of(up.pid) == []
    finally:
        up.kill()
        up.communicate()


def test_daemons_whose_terminal_is_closed(daemons: Daemons) -> None:
    """A coordinator and a memory server end at SIGHUP with 0, and take their ready files away."""
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    assert server.address
    for daemon in (server, coordinator):
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.wait() == 0
        assert not daemon.ready_file.exists()
        assert "stopping" in daemon.log.read_text()


def test_ready_files_of_earlier_runs(daemons: Daemons, tmp_path: Path) -> None:
    """One that a killed run left is gone when a start fails; that of a run that serves stays."""
    old = json.dumps({"address": "10.9.9.9:1", "metrics": "", "name": "a", "pid": os.getppid()})
    for name in ("coordinator", "a"):
        (tmp_path / f"{name}.ready").write_text(old)
        os.utime(tmp_path / f"{name}.ready", (1, 1))  # long before that process began
    failed = daemons.coordinator("nonsense"), daemons.memory_server("127.0.0.1:1", "a", "--capacity", "nonsense")
    for daemon in failed:
        assert daemon.wait() == 1
        assert not daemon.ready_file.exists()
    running = daemons.coordinator()
    address = running.address
    again = daemons.coordinator(address, str(tmp_path / "other"))
    assert again.wait() == 1
    assert running.address == address
    running.process.kill()
    running.wait()
    assert running.ready_file.exists()
    assert daemons.coordinator("nonsense").wait() == 1
    assert not running.ready_file.exists()
    with pytest.raises(UnavailableError, match="cannot remove the ready file"):
        clear_ready_file(tmp_path)


def _say(shell: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SMB_")} | variables
    return subprocess.run(
        ["sh", "-c", shell, "sh", *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("shell", "variables", "told"),
    [
        ('"$@" >/dev/full', {}, "cannot write the output: No space left on device"),
        ('"$@" >&-', {}, "cannot write the output: standard output is closed"),
        ('"$@"', {"PYTHONIOENCODING": "ascii"}, "cannot write the output: ascii cannot encode U+00FC; "),
    ],
)
def test_output_that_cannot_be_written(
    cluster: smb.LocalCluster, shell: str, variables: dict[str, str], told: str
) -> None:
    """Commands say so in one line, and end with 1; those of smb-memserver, too."""
    with smb.connect(cluster.address) as client:
        client.create("t", 4, metadata={"note": "über"}, exist_ok=True)
        commands: list[tuple[str, ...]] = [(*COMMAND, "stat", "t")]
        if not variables:
            commands += [(*COMMAND, "--version"), (sys.executable, "-m", "memserver", "--help")]
        for command in commands:
            done = _say(shell, *command, SMB_COORDINATOR=cluster.address, **variables)
            assert (done.returncode, done.stdout) == (1, ""), command
            (line,) = done.stderr.splitlines()
            assert re.fullmatch(rf"smb(-memserver)?: {re.escape(told)}.*", line)
        client.delete("t")


def test_output_that_nobody_reads_to_its_end(cluster: smb.LocalCluster) -> None:
    """A pipe that is closed is no error to talk about; and standard error may be closed, too."""
    done = _say(
        '"$@" | head -c 1; "$@" 2>&- | head -c 1', *COMMAND, "status", "--json", SMB_COORDINATOR=cluster.address
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{{", "")


def test_a_state_directory_that_is_gone(tmp_path: Path) -> None:
    """A coordinator whose file was removed or replaced says so, and refuses all changes; the disk is not full."""

    async def change(*, urgent: bool) -> None:
        await store.change({"a": "b"}, urgent=urgent)

    store: Any = open_store(str(tmp_path / "state"))
    asyncio.run(change(urgent=False))
    shutil.rmtree(tmp_path / "state")
    for _ in range(2):
        for urgent in (False, True):
            with pytest.raises(StoreError, match="was removed or replaced while this coordinator runs") as refused:
                asyncio.run(change(urgent=urgent))
            assert not isinstance(refused.value, OutOfMemoryError)
        (tmp_path / "state").mkdir(exist_ok=True)
        (tmp_path / "state" / "coordinator.sqlite").touch()
    asyncio.run(store.close())
