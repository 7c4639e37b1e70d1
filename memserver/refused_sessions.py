"""The sessions that have ended: this server gives up what they hold here, and refuses them from then on.

Threads: the control service's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from memserver.engine import Engine
from smb.daemon.failpoint import failpoint

# The number of ended sessions that the coordinator remembers: after its restart it reports all of them again.
ENDED_MAX = 65_536


class RefusedSessions:
    """The last ENDED_MAX of them. The engine refuses all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ended: dict[int, None] = {}  # oldest first
        self.on_end: Callable[[int], None] = lambda _id: None  # called once the engine refuses a session

    def end(self, session_ids: Iterable[int]) -> None:
        """Give up all that these sessions hold here, and refuse them from now on. Repetitions are cheap."""
        for session_id in session_ids:
            with self._lock:
                if session_id in self._ended:
                    continue
            self._engine.end_session(session_id)
            self.on_end(session_id)
            # Recorded only now, because other threads may rely on a recorded end.
            with self._lock:
                self._ended[session_id] = None
                if len(self._ended) > ENDED_MAX:
                    del self._ended[next(iter(self._ended))]
            failpoint("memserver.session.ended")

    def know_all(self, all_of_them: bool) -> None:
        """Set whether `end` was given each session that has ended, also during earlier runs."""
        self._engine.know_ended(all_of_them)

    def __contains__(self, session_id: int) -> bool:
        """Return whether `end` was given this session."""
        with self._lock:
            return session_id in self._ended
