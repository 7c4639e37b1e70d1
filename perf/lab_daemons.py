"""Our daemons on the hosts of a lab (netlab.py): without credentials, at the host's address, each with a log."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf.netlab import Lab

READY_S = 60.0


class LabDaemons:
    """Starts them. Logs and files that say where each is are in a directory, by the daemon's name."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self._lab = lab
        self._directory = directory

    def start(
        self, host: str, command: Sequence[str], *, name: str = "", at: str = "", memory: Path | None = None
    ) -> subprocess.Popen[Any]:
        """Start a module with its options; `name`: if not the host's, `at`: an address that is not the lab's. `memory`:
        a directory that is a tmpfs of its own for this daemon.
        """
        name, at = name or host, at or self._lab.address(host)
        ready = self._directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        options = ["--insecure", "--listen", f"{at}:0", "--metrics", f"{at}:0", "--ready-file", str(ready)]
        line = [sys.executable, "-m", *command, *options]
        if memory is not None:
            mount = f'mount -t tmpfs -o mode=700 tmpfs {memory} 2>/dev/null; exec "$@"'
            line = ["unshare", "-m", "sh", "-c", mount, "sh", *line]
        with self._log(name).open("ab") as log:
            return self._lab.popen(host, line, stdout=log, stderr=log)

    def address(self, name: str, process: subprocess.Popen[Any]) -> str:
        """Return where a daemon serves, once it does. Raises SystemExit with the end of its log."""
        ready, deadline = self._directory / f"{name}.ready", time.monotonic() + READY_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not serve: {self.log(name)}")
            time.sleep(0.02)
        return str(json.loads(ready.read_text())["address"])

    def serve(self, host: str, command: Sequence[str], *, name: str = "", at: str = "") -> str:
        """Start one, and return where it serves."""
        return self.address(name or host, self.start(host, command, name=name, at=at))

    def coordinator(self, host: str, *, at: str = "") -> str:
        """Start a coordinator, and return where it serves."""
        state = str(self._directory / "state")
        return self.serve(host, ["smb.tools.cli.main", "coordinator", "--state", state], name="coordinator", at=at)

    def log(self, name: str) -> str:
        """Return the end of a daemon's log."""
        return self._log(name).read_text()[-2000:]

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"
