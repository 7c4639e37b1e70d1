"""tests/support/rights.py: root without the rights of root is told apart from root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

NONE = "-sys_admin,-net_admin"
ASK = "from tests.support.rights import may_filter, may_mount; print(may_mount(), may_filter())"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_root_in_a_plain_container_may_neither_mount_nor_cut() -> None:
    command = ["setpriv", f"--bounding-set={NONE}", f"--inh-caps={NONE}", sys.executable, "-c", ASK]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "False False\n"
