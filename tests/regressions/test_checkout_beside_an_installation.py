"""Python that is started in a checkout finds the checkout's `smb`, which has no compiled engine where the package was
installed elsewhere: "No module named 'smb._direct'" said neither why, nor what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_checkout_without_its_engine_says_what_to_do(tmp_path: Path) -> None:
    """Without -S the finder of an installation with `pip install -e` would find the engine."""
    shutil.copytree(ROOT / "smb", tmp_path / "smb", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import smb.engine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"the compiled engine is not in {tmp_path / 'smb'}. If this is a checkout of the project" in done.stderr
    assert "start Python in another folder" in done.stderr
