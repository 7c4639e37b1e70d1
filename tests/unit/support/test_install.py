"""tests/support/install.sh gives uv the places and versions of pip, and pip what uv cannot install."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "install.sh"
SETTINGS = r"""
:env:.find-links='/wheels'
global.cert='/authority.pem'
global.extra-index-url='https://one/simple\nhttps://two/simple'
install.index-url='https://main/simple'
"""


def installed(folder: Path, uv: str) -> list[str]:
    """Run the script with a uv of this text; return what was called, in order."""
    (folder / "settings").write_text(SETTINGS)
    for name, text in {"python": 'case "$*" in *"config list") exec cat settings ;; esac', "uv": uv}.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{name} $UV_CONSTRAINT $*" >>called\n{text}\n')
        path.chmod(0o755)
    environment = {**os.environ, "PIP_CONSTRAINT": "versions.txt"}
    words = [str(SCRIPT), ".", "--editable", ".[certs]"]
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
    return (folder / "called").read_text().splitlines()


def test_uv_looks_where_pip_would_look(tmp_path: Path) -> None:
    _, uv = installed(tmp_path, uv="")
    assert uv.startswith("uv versions.txt ")
    options = "--find-links=/wheels --extra-index-url=https://one/simple --extra-index-url=https://two/simple"
    assert uv.endswith(f" {options} --index-url=https://main/simple --editable .[certs]")


@pytest.mark.parametrize("code", [1, 2])
def test_pip_installs_what_uv_cannot(tmp_path: Path, code: int) -> None:
    *_, last = installed(tmp_path, uv=f"exit {code}")
    assert last.endswith("-m pip --disable-pip-version-check install --quiet --editable .[certs]")
