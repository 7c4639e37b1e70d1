"""What one run of the daemon has seen since its start, for its metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Life:
    """Counters of one run of the daemon. Its threads write them and scrapes read them, one number at a time."""

    connected: bool = False
    leases_lost: int = 0
    recovery_s: float = 0.0
    recovered_segments: int = 0
    recovered_changes: int = 0
    torn_chunks: int = 0
    started_at: float = field(default_factory=time.time)  # seconds since 1970
