"""Forks of another process's server are to a test what forks of its own are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.daemons import wait_for

SERVES = """
import json, signal
from tests.support import forks
forks.PRELOADED.clear()
told = forks.serve()
told = {name: [*value] if isinstance(value, bytes) else value for name, value in told.items()}
print(json.dumps([forks._server._forkserver_pid, told]), flush=True)
signal.pause()
"""


def _tell(queue: Any) -> None:
    print("said by a fork", flush=True)
    queue.put((os.environ["SMB_OF_A_TEST"], os.getppid()))


@pytest.fixture
def serving() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Another process, whose server this one's forks come from, and the server's number."""
    with subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server, told = json.loads(process.stdout.readline())
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(forks, "_server", ForkServer())  # type: ignore[call-arg]
            monkeypatch.setattr("multiprocessing.forkserver._forkserver", forks._server)
            monkeypatch.setattr(
                "multiprocessing.forkserver.connect_to_new_process", forks._server.connect_to_new_process
            )
            forks.use({name: bytes(value) if isinstance(value, list) else value for name, value in told.items()})
            yield process, server
        process.kill()


def test_a_fork_has_variables_and_outputs_of_who_starts_it(
    serving: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server has neither."""
    _, server = serving
    monkeypatch.setenv("SMB_OF_A_TEST", "its value")
    queue = forks.Forks().Queue()
    process = forks.Forks().Process(target=_tell, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == ("its value", server)
    process.join(60)
    assert process.exitcode == 0
    assert "said by a fork" in capfd.readouterr().out


def test_a_server_ends_with_whoever_started_it_beside_forks_of_others(
    serving: tuple[subprocess.Popen[bytes], int],
) -> None:
    """Its forks go on: they end with whoever started them."""
    other, server = serving
    stop = forks.Forks().Event()
    process = forks.Forks().Process(target=stop.wait, daemon=True)
    process.start()
    other.kill()
    wait_for(lambda: not _runs(server), "the server ends")
    assert _runs(process.pid or 0)
    process.kill()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
