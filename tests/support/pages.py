"""Runs the commands of a page of docs/ as a reader types them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def edited(script: str, diff: str) -> str:
    """Return the script after the diff, whose hunks have no headers: a line "..." parts them."""
    for hunk in re.split(r"^\.\.\.\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        assert script.count(before) == 1, f"the script does not have these lines once:\n{before}"
        script = script.replace(before, "".join(line[1:] for line in lines if not line.startswith("-")))
    return script


def follow(page: str, directory: Path, without: Collection[str] = ()) -> str:
    """Run all commands of a page but its installation and the blocks with one of these tags. Return what they print.

    They run in order, in one shell in `directory` that stops at the first failure, with free ports in place of 7070 and
    9470. A block of Python is saved under the name that it has, and a diff changes the file of its name. No process
    outlives the call.
    """
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"7070": str(one.getsockname()[1]), "9470": str(other.getsockname()[1])}
    # Jobs as in a terminal, in which Ctrl-C of one is not that of others; and none of them outlives a failure.
    script = ["set -m", "trap 'kill $(jobs -p) 2>/dev/null || :' EXIT"]
    for language, tag, text in _BLOCK.findall((ROOT / "docs" / page).read_text()):
        if language == "python":
            (directory / tag).write_text(text)
        elif language == "diff":
            (directory / tag).write_text(edited((directory / tag).read_text(), text))
        elif language == "sh" and tag not in ("install", *without):
            script.append(re.sub("7070|9470", lambda found: ports[found[0]], text))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    # Without OMP_NUM_THREADS PyTorch's threads make small steps many times as expensive on a busy machine.
    environment |= {"SMB_OWNER_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
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
    return run.stdout + run.stderr
