"""The `smb` command: in a process of its own, or in this one for each of many small cases."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from smb.tools.cli import main as cli
from tests.support import stem

COMMAND = (sys.executable, "-m", "smb.tools.cli.main")
_TIMEOUT_S = 60.0


def run_smb(
    *arguments: object, coordinator: str = "", variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command with none of our settings: with this coordinator, and with these variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SMB_")}
    environment |= ({"SMB_COORDINATOR": coordinator} if coordinator else {}) | (variables or {})
    command = [*COMMAND, *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = stem.launch(command, {"COLUMNS": "200"} | environment, out, err=err, new_session=False)
        try:
            code = process.wait(_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *said)


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the same main() in this process: (exit code, stdout, stderr)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["smb", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err
