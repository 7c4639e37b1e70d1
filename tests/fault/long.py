"""How long the fault tests run: short as a part of `make test`, long with SMB_LONG=1 (`make fault`). The same code."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

LONG = os.environ.get("SMB_LONG") == "1"
LIMIT_S = 3600 if LONG else 120  # of one test
# Of clients that work all the time: without pauses they take the processors for which daemons and other tests wait, and
# with one after each change a daemon's kill would seldom meet a change under way.
PAUSE_S = 0.0 if LONG else 0.003
PAUSE_AFTER = 16  # changes


def times(short: int, long: int) -> int:
    """Return the number for this run."""
    return long if LONG else short


def some(cases: Sequence[Case]) -> Sequence[Case]:
    """Return all cases of a long run, every second one of a short run."""
    return cases[:: times(2, 1)]


def seed() -> int:
    """Return $SMB_SEED, or a fresh one; printed, so that a failure shows how to repeat it."""
    value = int(os.environ.get("SMB_SEED") or secrets.randbits(32))
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    print(f"seed {value}: repeat with SMB_SEED={value} SMB_LONG={int(LONG)} .venv/bin/pytest {test}")
    return value
