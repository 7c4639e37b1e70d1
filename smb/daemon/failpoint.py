"""Named places where a test may have the process killed. Unless armed they do nothing and cost nothing.

SMB_FAILPOINT=NAME kills this process with SIGKILL when it first reaches that place; NAME:3 kills it at the third time.
SMB_FAILPOINTS_ALLOWED=1 must be set too, so that one variable set by mistake cannot stop a daemon. Both are read once,
when this module is imported.
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
    """One armed place: `reach` kills the process at the count-th call with its name."""

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
    """Do nothing, because no failpoint is armed."""


def arm(environment: Mapping[str, str]) -> Callable[[str], None]:
    """Return the function that becomes `failpoint` in this environment. Raises ValueError for an invalid count."""
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
        raise ValueError(f"{POINT_VARIABLE}={asked}: the count must be at least 1, not {times}")
    return Armed(name, times).reach


failpoint: Callable[[str], None] = arm(os.environ)
