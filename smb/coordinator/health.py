"""Whether the coordinator works: that its event loop goes round, and that its store can be written.

Threads: the loop ticks, the pages' threads read. Each value is one attribute, read once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.store import Store

# Since its last tick, of two a second: the loop hangs.
TICK_LATE_S = 10.0


class Health:
    """What /healthz, /livez and /readyz tell; no name of a buffer, client or file is in it."""

    def __init__(
        self, commit_log: CommitLog, store: Store, address: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` returns seconds, of any beginning."""
        self._commit_log = commit_log
        self._store = store
        self._address = address
        self._clock = clock
        self._ticked_at = clock()

    def ticked(self) -> None:
        """Take note that the loop went round."""
        self._ticked_at = self._clock()

    @property
    def tick_age_s(self) -> float:
        """Seconds since the loop last went round."""
        return self._clock() - self._ticked_at

    @property
    def alive(self) -> bool:
        """Whether the loop goes round; a restart helps where it does not."""
        return self.tick_age_s < TICK_LATE_S

    @property
    def store_error(self) -> str:
        """Why the store cannot be written; empty where it can."""
        return self._commit_log.store_error

    def state_free_bytes(self) -> int | None:
        """Return how much room the store's disk has; None where nobody knows."""
        return self._store.free_bytes()

    def show(self) -> Mapping[str, Any]:
        """Return the object: `alive` is for /livez, `ok` for the others."""
        state, now = self._commit_log.state, self._commit_log.now()
        alive = self.alive
        return {
            "ok": alive and not self.store_error,
            "alive": alive,
            "role": "coordinator",
            "address": self._address,
            "pid": os.getpid(),
            "tick_age_s": round(self.tick_age_s, 3),
            "store": "failing" if self.store_error else "ok",
            "state_free_bytes": self.state_free_bytes(),
            "buffers": len(state.listed()),
            "servers_alive": sum(state.alive(name, now) for name in state.servers),
            "servers_known": len(state.servers),
        }
