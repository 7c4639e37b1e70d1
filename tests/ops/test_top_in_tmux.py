"""`smb top` in a real terminal: tmux draws it, resizes it, presses its keys."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import smb
from tests.support.daemons import wait_for
from tests.support.live_training import training

pytestmark = [
    pytest.mark.skipif(shutil.which("tmux") is None, reason="not run: it needs Debian's package tmux (make tmux)"),
    pytest.mark.timeout(240),
]
DEADLINE_S = 60.0
Tmux = Callable[..., str]


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    """Run a command of a tmux server of our own; returns what it prints."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SMB_", "TMUX"))}
    environment |= {
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    def run(*words: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "tmux"), "-f", os.devnull, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    run("kill-server")


def test_top_in_a_terminal(tmux: Tmux) -> None:
    """A training with its workers, servers and clients are on the screen; they move; a smaller window shows what fits,
    no line of it wider; q leaves the terminal as it was.
    """
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster, training(cluster.address):
        top = [sys.executable, "-m", "smb.tools.cli.main", "top", "--coordinator", cluster.address, "--interval", "0.3"]
        tmux("new-session", "-d", "-x", "120", "-y", "40", f"{shlex.join(top)}; echo left; exec cat")

        def screen() -> str:
            return tmux("capture-pane", "-p")

        def shows(*words: str) -> str:
            def found() -> str:
                now = screen()
                return now if all(word in now for word in words) else ""

            return wait_for(found, f"{words} on the screen", DEADLINE_S)

        first = shows("vision/digits", "diloco", "alice", "server-0", "server-1")
        wait_for(lambda: screen() != first, "another screen", DEADLINE_S)
        tmux("resize-window", "-x", "80", "-y", "24")
        usual = shows("vision/digits", "trains", "WORKERS", "SAMPLES")
        assert "…" not in usual.partition("SERVER ")[0]  # nothing of a training is cut
        tmux("resize-window", "-x", "60", "-y", "20")
        small = shows("vision/digits")
        assert all(len(line) <= 60 for line in small.splitlines())
        tmux("resize-window", "-x", "120", "-y", "40")
        shows("vision/digits", "server-1")
        tmux("send-keys", "q")
        shows("left")
        assert "vision/digits" not in screen()  # the screen of before is back
