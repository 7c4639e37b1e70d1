"""The clients of a cluster for people, as JSON: the rows of the page and of `smb clients`. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

from smb.coordinator.dashboard.history import LoadRates, Seen
from smb.coordinator.events import Instant
from smb.coordinator.state import State

HELD_MAX = 8  # titles of locks in one row
PAGE_CLIENTS = 1000
Json = dict[str, Any]


class View(Protocol):
    """What the rows need of a moment: see moment.Moment."""

    @property
    def state(self) -> State: ...

    @property
    def seen(self) -> Seen: ...

    @property
    def now(self) -> Instant: ...

    @property
    def salt(self) -> bytes: ...

    @property
    def busy_sessions(self) -> Mapping[int, LoadRates]:
        """The load that each busy session makes."""

    @property
    def connections(self) -> Mapping[int, int]:
        """The open connections of each session."""


def session_key(salt: bytes, session_id: int) -> str:
    """Return a key that replaces a session's id on the page. It is the same during this run, and useless elsewhere."""
    return hashlib.blake2b(session_id.to_bytes(8, "little"), key=salt, digest_size=6).hexdigest()


def client_rows(view: View, waits: list[Json]) -> list[Json]:
    """Return a row for each client, by name. `waits` are the rows of held locks and waits."""
    held: dict[str, list[str]] = defaultdict(list)
    for wait in waits:
        if wait["holder_key"]:
            held[wait["holder_key"]].append(wait["title"])
    state, now = view.state, view.now
    lease_s = state.session_leases.granted_s
    clients = []
    for session_id, session in state.sessions.items():
        left_s = max(0.0, state.session_leases.ends.get(session_id, now.monotonic) - now.monotonic)
        key = session_key(view.salt, session_id)
        rates = view.busy_sessions.get(session_id, LoadRates())
        clients.append(
            {
                "key": key,
                "name": session.client_name,
                "certificate": session.holder.name,
                "role": session.holder.role,
                "namespaces": list(session.holder.namespaces),
                "since": session.since,
                "connected_s": round(max(0.0, now.wall - (session.since or view.seen.started_at)), 1),
                "silent_s": round(max(0.0, lease_s - left_s), 1),
                "lease_s": lease_s,
                "lease_left_s": round(left_s, 1),
                "connections": view.connections.get(session_id, 0),
                "holds": len(held[key]),
                "held": held[key][:HELD_MAX],
                "rates": {"operations": round(rates.operations, 1), "bytes": round(rates.bytes)},
            }
        )
    return sorted(clients, key=lambda client: (client["name"], client["since"]))


def client_page(view: View, waits: list[Json], after: str) -> Json:
    """Return the rows whose keys are greater than `after`, by their keys, and whether there are more of them."""
    rows = sorted((row for row in client_rows(view, waits) if row["key"] > after), key=lambda row: str(row["key"]))
    return {"now": view.now.wall, "clients": rows[:PAGE_CLIENTS], "more": len(rows) > PAGE_CLIENTS}
