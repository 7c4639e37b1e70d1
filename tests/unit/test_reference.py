"""The API reference is built from the docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import smb

ROOT = Path(__file__).parents[2]


def test_the_reference_builds_without_a_warning(tmp_path: Path) -> None:
    """`make docs`, where warnings are errors, writes a page that has every public name."""
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-m pdoc" in line)
    command = line.strip().replace("$(BIN)", str(Path(sys.executable).parent))
    command = command.replace("$(or $(REFERENCE),build/reference)", str(tmp_path))
    run = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-2000:]
    text = (tmp_path / "smb.html").read_text()
    assert [name for name in smb.__all__ if f'id="{name}"' not in text] == []
    assert 'id="join"' in (tmp_path / "smb/train.html").read_text()
    assert 'id="Publisher"' in (tmp_path / "smb/torch.html").read_text()
