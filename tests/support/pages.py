"""Runs the commands of a page of docs/ as a reader types them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(page: str, directory: Path) -> str:
    """Run all commands of a page but its installation, in order, in one shell in `directory` that stops at the first
    failure; return what they print. Free ports take the place of 7070 and 9470. A block of Python is saved under the
    name that it has. No process outlives the call.
    """
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"7070": str(one.getsockname()[1]), "9470": str(other.getsockname()[1])}
    # Jobs as in a terminal, in which Ctrl-C of one is not that of others; and none of them outlives a failure.
    script = ["set -m", "trap 'kill $(jobs -p) 2>/dev/null || :' EXIT"]
    for language, tag, text in _BLOCK.findall((ROOT / "docs" / page).read_text()):
        if language == "python":
            (directory / tag).write_text(text)
        elif tag != "install":
            assert language == "sh"
            script.append(re.sub("7070|9470", lambda found: ports[found[0]], text))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= {"SMB_OWNER_PID": str(os.getpid())}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONSAFEPATH": ""}
    run = subprocess.run(
        ["bash", "-e", "-c", "\n".join(script)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
