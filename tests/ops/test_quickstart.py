"""docs/quickstart.md, as a newcomer types it."""

from __future__ import annotations

from pathlib import Path

from tests.support.pages import follow


# More than 5 s: all commands of the page one after the other, as programs.
def test_the_quickstart_works_as_it_is_written(tmp_path: Path) -> None:
    """Its programs print what it says, all servers are found each time, and the made key is its owner's alone."""
    printed = follow("quickstart.md", tmp_path)
    assert "the sum is 30.0" in printed
    assert "version 1 starts with [7. 7. 7.]" in printed
    assert printed.count("2 of 2 servers alive") == 3
    assert not (tmp_path / "lab/client/key.pem").stat().st_mode & 0o077
