"""The term of the coordinator with which this server is registered, and the terms that it has left. A call of another
coordinator makes or drops nothing here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from smb.errors import Error

# This many terms of coordinators that lead no more are remembered.
TERMS_LEFT_MAX = 64


class NotRegisteredError(Error):
    """A coordinator asked for what only the one may ask with which this server is registered."""


class CoordinatorTerms:
    """Uses the lock of the segments: whoever holds it for a change knows that the term is that of the change."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._term = 0  # of the coordinator with which this server registered last; 0: with none, or an older one
        self._left: dict[int, None] = {}  # terms with which it was registered before, oldest first
        self._listed = False  # a list of the segments is with a coordinator, which has not answered

    def listed(self) -> None:
        """Take note that a list of the segments goes to a coordinator. Until `registered` nothing is destroyed for
        any.
        """
        with self._lock:
            self._listed = True

    def registered(self, term: int) -> bool:
        """Take note that this server has registered with that term (0: the coordinator does not say). Return True if
        it is another one than before.
        """
        with self._lock:
            self._listed = False
            if term == self._term:
                return False
            self._left.pop(term, None)
            if self._term:
                self._left[self._term] = None
            if len(self._left) > TERMS_LEFT_MAX:
                del self._left[next(iter(self._left))]
            self._term = term
            return True

    def check_not_left(self, term: int) -> None:
        """Raise NotRegisteredError for a call of a coordinator that this server has left for another one: a network can
        hold up a call for longer than its caller lives, and the records may have been restored meanwhile.
        """
        with self._lock:
            if term in self._left:
                raise NotRegisteredError(f"the coordinator of term {term:016x} leads no more")

    def check(self, term: int, *, destroys: bool = False) -> None:
        """As check_not_left, also for a term with which this server has not registered yet. 0: of a coordinator that
        does not name its term. `destroys`: it is refused while this server registers, too. Roles are not: a coordinator
        may be about to have a copy count as whole.
        """
        with self._lock:
            if term != 0 and (term != self._term or (destroys and self._listed)):
                raise NotRegisteredError(f"this server is not registered with the coordinator of term {term:016x} now")

    @contextmanager
    def during(self, term: int, *, registered: bool = True) -> Iterator[None]:
        """Check as above, or not `registered`: as check_not_left. Until the context ends this server registers with no
        other coordinator.
        """
        with self._lock:
            if registered:
                self.check(term)
            else:
                self.check_not_left(term)
            yield
