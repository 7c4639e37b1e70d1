"""What this process leaves and ends at its exit, in this order."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from enum import IntEnum


class AtExit(IntEnum):
    """Trainings are left while their sessions run, and sessions end while there is a coordinator that hears of it."""

    TRAININGS = 0
    SESSIONS = 1
    CLUSTERS = 2


_functions: dict[AtExit, Callable[[], object]] = {}


def at_exit(when: AtExit) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Decorate the function that ends all of one kind. Import what the function needs before, as gRPC: Python calls the
    functions that were registered last first.
    """

    def decorate(function: Callable[[], object]) -> Callable[[], object]:
        _functions[when] = function
        # One by one: Python prints what one of them raises, and calls the next.
        for each in sorted(_functions, reverse=True):
            atexit.unregister(_functions[each])
            atexit.register(_functions[each])
        return function

    return decorate
