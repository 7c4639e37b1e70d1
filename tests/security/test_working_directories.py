"""No code of the working directory runs, not in the processes either that ours start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import smb.daemon.launch
from smb.daemon.launch import python_c, python_m
from smb.tools.bench.limits import socket_limit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules that tell that they were imported."""
    for module in ("smb", "memserver", "runpy", "json"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("option", [smb.daemon.launch._HAS_SAFE_PATH, False])
def test_a_module_is_pythons_own(planted: Path, monkeypatch: pytest.MonkeyPatch, option: bool) -> None:
    """Also as a Python starts it that has no option for that; the arguments are the module's."""
    monkeypatch.setattr(smb.daemon.launch, "_HAS_SAFE_PATH", option)
    told = subprocess.run(python_m("json.tool", "--compact"), input="[ 1 ]", capture_output=True, text=True, check=True)
    assert told.stdout == "[1]\n"
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    told = subprocess.run([*python_c(code), "one"], capture_output=True, text=True, check=True)
    assert told.stdout == '["one"]\n'
    assert not (planted / "ran").exists()


def test_a_benchmarks_peer_is_ours(planted: Path) -> None:
    with socket_limit():
        pass
    assert not (planted / "ran").exists()


def test_all_start_python_in_one_way() -> None:
    """A place that starts it by itself would have to think of all this, too."""
    files = [file for package in ("smb", "memserver") for file in (ROOT / package).rglob("*.py")]
    found = [file.relative_to(ROOT) for file in files if re.search(r"sys\.executable", file.read_text())]
    assert found == [Path("smb/daemon/launch.py")]
    assert sys.executable in python_m("x")
