"""The tutorials of docs/, as a newcomer types them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch")

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


def run(page: str, folder: Path) -> str:
    """Run all commands of the page but the installation in `folder`, and return what they print.

    They run in order in one shell that stops at the first failure, with a free port in place of 7070. A block with a
    file's name is saved as that file, and a diff changes the file.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    # Jobs as in a terminal, in which Ctrl-C of one is not that of others; and none of them outlives a failure.
    script = ["set -m", "trap 'kill $(jobs -p) 2>/dev/null || :' EXIT"]
    for language, tag, text in _BLOCK.findall((ROOT / "docs" / page).read_text()):
        if language == "python":
            (folder / tag).write_text(text)
        elif language == "diff":
            (folder / tag).write_text(edited((folder / tag).read_text(), text))
        elif language == "sh" and tag != "install":
            script.append(text.replace("7070", port))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= {"SMB_OWNER_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONSAFEPATH": ""}
    shell = subprocess.run(
        ["bash", "-e", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
    )
    assert shell.returncode == 0, shell.stdout + shell.stderr
    return shell.stdout + shell.stderr


# More than 5 s: all commands of a page one after the other, as programs, some of which import PyTorch.
def test_training_together(tmp_path: Path) -> None:
    """Two processes join; the one that comes back after the kill takes over the model; both end with a good one."""
    output = run("tutorial-trainer.md", tmp_path)
    assert output.count("its weights are yours") == 1
    assert output.count("its weights replaced yours") >= 2  # the second process, and the one that came back
    accuracies = [float(found) for found in re.findall(r"^accuracy (.*)$", output, re.MULTILINE)]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.9


# More than 5 s: as above.
def test_publishing_to_readers(tmp_path: Path) -> None:
    """A reader that waits for the trainer, a late one, and one of the mirror itself end with the last generation."""
    output = run("tutorial-publisher.md", tmp_path)
    assert "published generation 10\n" in output
    assert output.count("generation 10\n") == 3  # the trainer's line has it, too
    assert re.search(r"^server-1 .*alive +10 ", output, re.MULTILINE)
    assert "\n10 10.0\n" in output  # from the mirror
