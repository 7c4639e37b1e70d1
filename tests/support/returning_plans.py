"""What happens in a round: coordinators and servers go, and come back early, late, empty or with old memory. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.support.rights import may_mount

_LATE = ("late", "unheard")


@dataclass(frozen=True)
class Plan:
    """The faults of a round. Times are seconds: `coordinator_at` and `server_at` from its begin, the others from there.

    `server`: "kill" keeps the memory, "lose" does not, "old" loses it and brings it back once all is whole without it,
    "stop" is SIGSTOP. `delay`: a process that is back is stopped as soon as it listens ("late"), or does not reach the
    coordinators ("unheard"), for `delayed_s`. `second` is another server that is killed at the same time, and started
    at once with its memory.
    """

    coordinator: str = ""  # "away", "stop", "term"; with etcd "leader" and "both", too
    coordinator_at: float = 0.0
    away_s: float = 0.0
    server: str = ""
    victim: int = 0
    server_at: float = 0.0
    back_s: float = 0.0
    delay: str = ""
    delayed_s: float = 0.0
    second: int | None = None
    full_s: float = 0.0  # the coordinator's disk is full, from the begin on

    def __str__(self) -> str:
        """The fields that say something."""
        numbers = {name: round(value, 2) if isinstance(value, float) else value for name, value in vars(self).items()}
        plain = vars(Plan())
        return ", ".join(f"{name}={value!r}" for name, value in numbers.items() if value != plain[name])


def draw(rng: random.Random, servers: int, etcd: bool) -> Plan:
    """Return a round's faults."""
    coordinators = ("", "leader", "leader", "both", "stop", "term") if etcd else ("", "away", "away", "away", "term")
    coordinator = rng.choice(coordinators)
    away_s = rng.choice((0.0, rng.uniform(0.0, 5.0), rng.uniform(3.0, 5.0)))
    server = rng.choice(("kill", "lose", "lose", "lose", "old", "stop"))
    victim = rng.randrange(servers)
    # At once, within the leases, or when they have run out.
    back_s = rng.choice((0.0, rng.uniform(0.1, 3.0), rng.uniform(0.1, 3.0), rng.uniform(6.5, 9.0)))
    if server == "stop":
        back_s = rng.uniform(6.5, 9.0)
    # Around each other: who goes first, and who is back first, is open.
    at = rng.uniform(0.0, 0.5)
    coordinator_at, server_at = (at, at + rng.uniform(0.0, 1.0))[:: rng.choice((1, -1))]
    delay = rng.choice(("", *_LATE)) if server != "stop" else ""
    delayed_s = rng.uniform(0.3, 5.0)
    if coordinator and rng.random() < 0.5:  # behind the coordinator's return, too
        delayed_s += max(0.0, coordinator_at + away_s - server_at - back_s)
    second = None
    if server in ("kill", "lose") and rng.random() < 0.15:
        second = rng.choice([other for other in range(servers) if other != victim])
    full = rng.random() < 0.15 and not etcd and may_mount()
    full_s = rng.uniform(3.0, 12.0) if full else 0.0
    return Plan(
        coordinator, coordinator_at, away_s, server, victim, server_at, back_s, delay, delayed_s if delay else 0.0,
        second, full_s,
    )  # fmt: skip
