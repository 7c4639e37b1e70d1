"""All that the dashboard looks at, at one moment. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from smb.coordinator.dashboard.diagnosis import late_s
from smb.coordinator.dashboard.history import LoadRates, Seen, ServerWatch
from smb.coordinator.events import Instant
from smb.coordinator.published import published_as
from smb.coordinator.records import BufferRecord, ServerRecord
from smb.coordinator.state import State
from smb.rpc import metadata

TRAINING = "smb.train"  # the key of a training's settings in the metadata of its weights (smb/train/group.py)

Json = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """The state and all observations at one moment."""

    state: State
    seen: Seen
    now: Instant
    salt: bytes = b""  # for the keys that replace session ids on the page

    @cached_property
    def alive(self) -> frozenset[str]:
        """Servers whose lease runs."""
        return frozenset(name for name in self.state.servers if self.state.alive(name, self.now))

    @cached_property
    def lost(self) -> frozenset[int]:
        """Segments whose memory was lost."""
        return self.state.lost_segments(self.now)

    @cached_property
    def trainings(self) -> dict[str, BufferRecord]:
        """The weights of each training, by its name."""
        listed = (record for record in self.state.listed() if record.metadata)
        return {record.name: record for record in listed if settings_of(record.id, record.metadata)}

    @cached_property
    def states(self) -> dict[str, BufferRecord]:
        """The published states by name, without their mirrors."""
        listed = (record for record in self.state.listed() if record.metadata and record.versions > 1)
        return {
            record.name: record
            for record in listed
            if not record.mirror_of and published_as(record.metadata) is not None
        }

    @cached_property
    def busy(self) -> dict[tuple[str, int], LoadRates]:
        """The load of each busy segment, by the server that reports it. The two copies of a segment have loads of their
        own."""
        watches = ((name, self.watch_of(self.state.servers[name])) for name in self.alive)
        return {(name, number): busy for name, watch in watches if watch for number, busy in watch.segments.items()}

    def load_of(self, record: BufferRecord) -> LoadRates:
        """Return the load of a buffer: of the copies that its users reach."""
        return summed(self.busy.get((segment.server, segment.id)) for segment in record.segments)

    @cached_property
    def busy_sessions(self) -> dict[int, LoadRates]:
        """The load that each busy session makes, summed over all servers."""
        found: dict[int, LoadRates] = {}
        for name, server in self.state.servers.items():
            watch = self.watch_of(server) if name in self.alive else None
            for number, busy in (watch.sessions if watch else {}).items():
                found[number] = found.get(number, LoadRates()).plus(busy)
        return found

    @cached_property
    def connections(self) -> dict[int, int]:
        """The open connections of each session, summed over all servers."""
        found: dict[int, int] = {}
        for name, server in self.state.servers.items():
            watch = self.watch_of(server) if name in self.alive else None
            for each in watch.load.connected if watch else ():
                found[each.session_id] = found.get(each.session_id, 0) + each.connections
        return found

    def training_of(self, name: str) -> str | None:
        """Return the training to which a buffer belongs; None for other buffers."""
        if name in self.trainings:
            return name
        parts = name.split("/")
        folders = ("/".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        return next((folder for folder in folders if folder in self.trainings), None)

    def server_state(self, name: str) -> str:
        """Return alive, late, unheard, gone, left or unknown."""
        server = self.state.servers.get(name)
        if server is None:
            return "unknown"
        if not self.state.alive(name, self.now):
            return "left" if name in self.seen.left else "gone"
        if not self.state.heard(name, self.now):
            return "unheard"
        return "late" if self.now.wall - server.last_seen_at > late_s(self.state) else "alive"

    def watch_of(self, server: ServerRecord) -> ServerWatch | None:
        """Return the last report of this run of the server; None if there is none."""
        watch = self.seen.servers.get(server.name)
        return watch if watch is not None and watch.instance_id == server.instance_id else None


@lru_cache(maxsize=4096)
def settings_of(_id: int, packed: bytes) -> Json:
    """Return a training's settings as its first worker stored them; empty if the buffer has none."""
    text = metadata.unpack(packed)
    found = json.loads(text).get(TRAINING) if f'"{TRAINING}"' in text else None
    return found if isinstance(found, dict) and isinstance(found.get("scheme"), str) else {}


def summed(amounts: Iterable[LoadRates | None]) -> LoadRates:
    """Return the sum of those that are known."""
    total = LoadRates()
    for each in amounts:
        total = total.plus(each) if each else total
    return total
