"""The `smb` command: in a process of its own, or in this one for each of many small cases."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from smb.tools.cli import main as cli

COMMAND = (sys.executable, "-m", "smb.tools.cli.main")
_TIMEOUT_S = 60.0


def run_smb(
    *arguments: object, coordinator: str = "", variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command with none of our settings: with this coordinator, and with these variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SMB_")}
    environment |= ({"SMB_COORDINATOR": coordinator} if coordinator else {}) | (variables or {})
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env={"COLUMNS": "200"} | environment
    )


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the same main() in this process: (exit code, stdout, stderr)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["smb", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err
