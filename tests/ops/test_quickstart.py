"""docs/quickstart.md, as a newcomer types it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# More than 5 s: all commands of the page one after the other, as programs.
def test_the_quickstart_works_as_it_is_written(tmp_path: Path) -> None:
    """All its commands but the installation, in order in one shell that stops at the first failure, with a free port in
    place of 7070: the sum is what it says, and no daemon stays.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    # Jobs as in a terminal, in which Ctrl-C of one is not that of others; and none of them outlives a failure.
    script = ["set -m", "trap 'kill $(jobs -p) 2>/dev/null || :' EXIT"]
    for language, tag, text in _BLOCK.findall((ROOT / "docs/quickstart.md").read_text()):
        if language == "python":
            (tmp_path / tag).write_text(text)
        elif tag != "install":
            assert language == "sh"
            script.append(text.replace("7070", port))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= {"SMB_OWNER_PID": str(os.getpid())}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONSAFEPATH": ""}
    run = subprocess.run(
        ["bash", "-e", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the sum is 30.0" in run.stdout
    assert "version 1 starts with [7. 7. 7.]" in run.stdout
    assert run.stdout.count("2 of 2 servers alive") == 3
    assert not (tmp_path / "lab/client/key.pem").stat().st_mode & 0o077
