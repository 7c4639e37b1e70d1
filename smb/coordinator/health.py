"""The coordinator's health: its event loop runs, it leads or knows the leader, and its store can be written.

Threads: the loop's thread writes, the pages' threads read. Each value is one attribute, read once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.store import Store

# Seconds since the last tick (there are two a second) from which the loop counts as hung.
TICK_LATE_S = 10.0

Leadership = Literal["leader", "standby", "lost"]


class Health:
    """The answers of /healthz, /livez and /readyz. They contain no name of a buffer, client or file."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds; its zero does not matter."""
        self._address = address
        self._clock = clock
        self._ticked_at = clock()
        self._etcd_heard_at: float | None = None
        self._led: tuple[CommitLog, Store, Callable[[], bool]] | None = None
        self._leader = ""
        self._trouble = ""

    def ticked(self) -> None:
        """Record that the loop runs."""
        self._ticked_at = self._clock()

    def heard_etcd(self) -> None:
        """Record that a member of etcd answered."""
        self._etcd_heard_at = self._clock()

    def lead(self, commit_log: CommitLog, store: Store, holds: Callable[[], bool]) -> None:
        """Record that this coordinator leads while `holds` returns True."""
        self._led, self._leader, self._trouble = (commit_log, store, holds), self._address, ""

    def stand_by(self, leader: str, trouble: str = "") -> None:
        """Record that another coordinator leads. `trouble`: why the leader is unknown, or why this one could not
        lead."""
        self._led, self._leader, self._trouble = None, leader, trouble

    @property
    def leadership(self) -> Leadership:
        """Leader; standby: ready to lead; or lost: the leader is unknown, or this one has just stopped leading."""
        led = self._led
        if led is not None:
            return "leader" if led[2]() else "lost"
        return "lost" if self._trouble else "standby"

    @property
    def tick_age_s(self) -> float:
        """Seconds since the last tick of the loop."""
        return self._clock() - self._ticked_at

    @property
    def etcd_silent_s(self) -> float | None:
        """Seconds since etcd last answered, or since the start; None if the records are not in etcd."""
        heard_at = self._etcd_heard_at
        return None if heard_at is None else self._clock() - heard_at

    @property
    def alive(self) -> bool:
        """Whether the loop runs; if not, a restart helps."""
        return self.tick_age_s < TICK_LATE_S

    @property
    def store_error(self) -> str:
        """Why the store cannot be written; empty if it can."""
        led = self._led
        return self._trouble if led is None else led[0].store_error

    def state_free_bytes(self) -> int | None:
        """Return the free bytes of the store's disk; None if unknown."""
        led = self._led
        return None if led is None else led[1].free_bytes()

    def show(self) -> Mapping[str, Any]:
        """Return the JSON object. `alive` is the answer of /livez, `ok` that of the other pages."""
        alive, leadership, led, failing = self.alive, self.leadership, self._led, bool(self.store_error)
        shown: dict[str, Any] = {
            "ok": alive and leadership != "lost" and not failing,
            "alive": alive,
            "role": "coordinator",
            "leadership": leadership,
            "leader": self._leader,
            "address": self._address,
            "pid": os.getpid(),
            "tick_age_s": round(self.tick_age_s, 3),
            "store": "failing" if failing else "ok",
        }
        if (silent_s := self.etcd_silent_s) is not None:
            shown["etcd_silent_s"] = round(silent_s, 3)
        if led is None:
            return shown
        state, now = led[0].state, led[0].now()
        return shown | {
            "state_free_bytes": self.state_free_bytes(),
            "buffers": len(state.listed()),
            "servers_alive": sum(state.heard(name, now) for name in state.servers),
            "servers_known": len(state.servers),
        }
