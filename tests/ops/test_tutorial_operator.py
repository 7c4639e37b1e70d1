"""docs/tutorial-operator.md, as an operator types it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.pages import follow


# More than 5 s: all commands of the page one after the other, as programs.
def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    """The buffer outlives a killed server, gets its second copy back, and leaves the drained server, which is then
    forgotten.
    """
    printed = follow("tutorial-operator.md", tmp_path)
    assert "copies    2, degraded" in printed
    assert "(1000, 1000) read" in printed
    assert "storage-1 is empty: it can be stopped" in printed
    assert "2 of 2 servers alive" in printed
    *_, last = re.findall(r"^SEGMENT .*(?:\n .*)+", printed, re.MULTILINE)
    assert re.findall(r"^ +\d+  storage-[23]  storage-[23]  alive ", last, re.MULTILINE)
    assert "storage-1" not in last
