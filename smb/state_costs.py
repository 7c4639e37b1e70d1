"""What publishing or reading a state costs a process: its counters, and what may make it cheaper."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_MUCH = 0.2  # share of a process's time from which on publishing or reading is worth a sentence
_YOUNG_S, _FEW = 10.0, 3  # before that a share says little
_MANY = 4  # readers of one state's servers from which on mirrors may help


class StateCosts:
    """The counters of one Publisher or Follower. It counts in one thread at a time; any thread may look.

    `times`: publications, or reads, that succeeded. `bytes`: sent or received by them, without frames. `copied_bytes`:
    copied by them between two arrays of this process, outside of calls; None: not counted. `seconds`: for which their
    callers stood still.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.times = 0
        self.bytes = 0
        self.copied_bytes: int | None = 0
        self.seconds = 0.0
        self.transports: tuple[str, ...] = ()
        self.now = now
        self._began = now()

    @property
    def age(self) -> float:
        """Seconds since the Publisher or Follower was made."""
        return max(1e-9, self.now() - self._began)

    def count(self, nbytes: int, copied: int | None, seconds: float, *, times: int = 1) -> None:
        """Count what succeeded."""
        self.times += times
        self.bytes += nbytes
        self.copied_bytes = None if self.copied_bytes is None or copied is None else self.copied_bytes + copied
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class StateUse:
    """One process's part in a published state. `seconds` of its `age` it stood still for `times` publications or reads.
    `direct_readers` read from the state's own servers; 0: unknown. `deltas`: generations travel as what changed.
    """

    name: str
    publishes: bool
    transports: tuple[str, ...]
    times: int
    seconds: float
    age: float
    deltas: bool
    direct_readers: int = 0
    mirrored: bool = False  # the state has mirrors


def advice(use: StateUse) -> Iterator[str]:
    """Yield sentences; none if nothing is known to help, or too little is known."""
    if use.times < _FEW or use.age < _YOUNG_S or use.seconds < _MUCH * use.age:
        return
    if use.publishes:
        yield "the publisher stands still while it publishes: publish_async() sends while it goes on"
    away = use.transports not in {("shm",), ()}
    if away and not use.deltas:
        yield "each generation travels whole: deltas=16 sends what changed, if a step changes few bits (bfloat16)"
    if away and not use.publishes and not use.mirrored and use.direct_readers >= _MANY:
        yield f"many readers read from the state's own servers: smb relay {use.name} --auto makes mirrors near them"
