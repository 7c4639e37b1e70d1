"""The coordinator's description of a memory server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuarantinedInfo:
    """Memory that a server keeps although no record of the coordinator accounts for it.

    It takes `nbytes` of the server's capacity. `buffer` is the name of the buffer with this segment, or empty.
    """

    segment_id: int
    buffer: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A memory server as the coordinator sees it. Sizes are bytes; `last_seen` is seconds since 1970.

    - `used` counts whole segment files, which are a little larger than their data.
    - `alive` is true while the server's lease runs. `unheard` is true if the coordinator that leads now has not heard
      of the server yet; it may be alive.
    - `weight` is the server's share of a new buffer's traffic, relative to the other servers.
    - `zone` is the location that the server was given, and `host_name` the machine: two copies lie apart if possible.
    - `draining`: the server gets no new memory and gives up what it has.
    - `overdue`: the server is late, and counts as alive for one lease more.
    - `maintenance_until`: until then lost copies are not made anew if the server is away, in seconds since 1970; 0 if
      no maintenance is planned.
    - `quarantined` lists memory that no record accounts for. It is empty for clients that are limited to namespaces.
    """

    name: str
    address: str
    alive: bool
    capacity: int
    used: int
    segments: int
    last_seen: float
    metrics: str
    weight: float = 1.0
    zone: str = ""
    draining: bool = False
    unheard: bool = False
    overdue: bool = False
    maintenance_until: float = 0.0
    quarantined: tuple[QuarantinedInfo, ...] = ()
    host_name: str = ""

    @property
    def may_live(self) -> bool:
        """True if the server is alive, or the coordinator has not heard of it yet."""
        return self.alive or self.unheard

    @property
    def free(self) -> int:
        """Free capacity in bytes."""
        return max(0, self.capacity - self.used)
