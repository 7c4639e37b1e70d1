"""Our engines on the classes of each vLLM release that docs/publishing.md names, and of the newest one: see
tests/support/vllm_wheel.py. `make vllm` downloads the wheels, 0.3 GB each, and keeps of each what is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.vllm_wheel import FILES

DIRECTORY = os.environ.get("SMB_VLLM_WHEELS")
RELEASES = ["0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33", "newest"]
pytestmark = [
    pytest.mark.timeout(900),  # a download
    pytest.mark.skipif(not DIRECTORY, reason="not run: it downloads wheels of vLLM (make vllm)"),
]
ROOT = Path(__file__).parents[2]


def unpacked(release: str) -> Path:
    """Return a directory with the files of a release's last patch."""
    place = Path(DIRECTORY or "") / release
    if not place.exists():
        downloads = place.with_name(f"{release}.download")
        asked = "vllm" if release == "newest" else f"vllm=={release}.*"
        subprocess.run(
            [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--only-binary=:all:", "--dest",
             str(downloads), asked],
            check=True,
        )  # fmt: skip
        [wheel] = downloads.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if any(fnmatch(name, each) for each in FILES)]
            archive.extractall(downloads / "files", members)
        (downloads / "files" / "RELEASE").write_text(wheel.name)
        (downloads / "files").rename(place)
        wheel.unlink()
    return place


@pytest.mark.parametrize("release", RELEASES)
def test_both_halves_work_with_each_release(release: str) -> None:
    """Workers' and trainers' engines are made by its factory, and follow; what is refused leaves the weights as they
    were. The stand-in of the tests that every commit runs has the methods of the newest release."""
    place = unpacked(release)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_wheel", str(place)], cwd=ROOT, capture_output=True, text=True
    )
    said = f"{(place / 'RELEASE').read_text()}: {done.stdout}{done.stderr}"
    assert done.returncode == 0, said
    assert f"trainer engine: {'no' if release == '0.25' else 'yes'}" in said
    if release == "newest":
        assert "other than the stand-in: nothing" in said, said
