"""Reads tests/track-record.toml: every bug that the history tells of, how it was found, its mend and its tests."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "track-record.toml"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Kind:
    """A way to find bugs."""

    name: str
    means: str
    time: str
    hours: float = 0  # the same time as a number, where it is known


@dataclass(frozen=True)
class Bug:
    """One entry. `found` is a kind's name or NOT_RECORDED; `tests` are FILE or FILE::NAME."""

    bug: str
    mend: str
    commit: str = ""
    found: str = NOT_RECORDED
    tests: tuple[str, ...] = ()
    shown: bool = False


def read(text: str) -> tuple[list[Kind], list[Bug]]:
    """Return what a data file says. Raises TypeError if an entry has a key that there is not."""
    data = tomllib.loads(text)
    bugs = [Bug(**entry | {"tests": tuple(entry.get("tests", ()))}) for entry in data["bug"]]
    return [Kind(**entry) for entry in data["kind"]], bugs


def names(path: Path) -> set[str]:
    """Return the tests in a file, Python's or C's, without running anything."""
    text = path.read_text()
    if path.suffix == ".c":
        return set(re.findall(r"\bTEST\((\w+)\)", text))
    return set(re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE))
