"""What a blocking call knows of async ones: the order of a buffer's async calls, and what this thread submitted last.

`async_order` has the calls themselves, and is a room of its own.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Protocol

from smb.engine import Switch


class Submitted(Protocol):
    """An async call."""

    @property
    def future(self) -> Future[Any]: ...

    @property
    def entered(self) -> bool:
        """True if the engine has accepted the call."""


class Here(threading.local):
    """State of each thread."""

    inside = False  # this thread runs async calls, and must not wait for other async calls
    last: Submitted | None = None  # the async call that this thread made last, until that call's method has returned

    def future(self) -> Future[Any] | None:
        """Return the future of `last`; None if the engine does not have the call."""
        return self.last.future if self.last is not None and self.last.entered else None


here = Here()


class Turns:
    """The order of a buffer's async calls. `quiet` is open while there are none; a call need not wait for its turn
    then.
    """

    __slots__ = ("__weakref__", "itemsize", "key", "quiet", "tags")

    def __init__(self, key: int = 0, itemsize: int = 1) -> None:
        """`key` is the engine's key of the buffer; 0 is for calls without an order."""
        self.key, self.itemsize = key, itemsize
        self.quiet = Switch()
        self.quiet.open = True
        self.tags: set[int] = set()  # tags of calls that have not ended
