"""Named places where a test may have the process killed. They cost nothing and do nothing unless they are armed.

SMB_FAILPOINT=NAME kills this process, with SIGKILL, when it first gets to that place; NAME:3 when it gets there for the
third time. It counts only if SMB_FAILPOINTS_ALLOWED=1 is set as well: a single variable that went astray stops no
daemon. Both are read once, when this module is imported.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping

POINT_VARIABLE = "SMB_FAILPOINT"
ALLOWED_VARIABLE = "SMB_FAILPOINTS_ALLOWED"


class Armed:
    """One armed place: `reach` kills at the count-th time that its name comes by."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._left = count
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        if name != self._name:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _pass(name: str) -> None:
    """Go on: nothing is armed."""


def arm(environment: Mapping[str, str]) -> Callable[[str], None]:
    """Return what `failpoint` is in this environment. Raises ValueError for a count that is none."""
    asked = environment.get(POINT_VARIABLE, "")
    if not asked:
        return _pass
    if environment.get(ALLOWED_VARIABLE) != "1":
        logging.getLogger("failpoint").warning(
            "%s=%s is ignored: that is for tests, which set %s=1 too", POINT_VARIABLE, asked, ALLOWED_VARIABLE
        )
        return _pass
    name, _, count = asked.partition(":")
    times = int(count or 1)
    if times < 1:
        raise ValueError(f"{POINT_VARIABLE}={asked}: the count is at least 1")
    return Armed(name, times).reach


failpoint: Callable[[str], None] = arm(os.environ)
