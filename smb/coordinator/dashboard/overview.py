"""What people are shown of the cluster, as JSON: by the page at /, by `smb top`. docs/operating.md has its fields.

Pure but for `Overview`, which keeps the last answer for a while, so that many who look cost as much as one. Lists are
bounded: what is left out is counted. Ids of sessions are not shown: who knows one could shut its client out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from smb.coordinator.dashboard.diagnosis import LATE_S, owners_of, problems
from smb.coordinator.dashboard.history import Amounts, History, Seen, ServerWatch, Watch
from smb.coordinator.events import Instant
from smb.coordinator.records import BufferRecord, Kind, ServerRecord
from smb.coordinator.state import State
from smb.errors import NotFoundError
from smb.rpc import control_pb2 as pb

FORM = 1  # of the JSON; grows when a field changes its meaning or goes
BUFFERS_MAX = 500
CLIENTS_MAX = 500
WAITS_MAX = 200
PARTS_MAX = 32  # servers of one buffer in the list of all
FRESH_S = 1.0
SHARE = 10  # in a huge cluster no more than a tenth of the coordinator's time goes into being watched

Look = Callable[[], tuple[State, Instant]]
Json = dict[str, Any]


@dataclass(frozen=True)
class View:
    """One moment of all that is known."""

    state: State
    seen: Seen
    now: Instant
    salt: bytes = b""  # for keys that stand for sessions

    @cached_property
    def alive(self) -> frozenset[str]:
        """Servers whose lease runs."""
        return frozenset(name for name in self.state.servers if self.state.alive(name, self.now))

    def server_state(self, name: str) -> str:
        """Return alive, late, gone, left or unknown."""
        server = self.state.servers.get(name)
        if server is None:
            return "unknown"
        if not self.state.alive(name, self.now):
            return "left" if name in self.seen.left else "gone"
        return "late" if self.now.wall - server.last_seen_at > LATE_S else "alive"

    def watch_of(self, server: ServerRecord) -> ServerWatch | None:
        """Return what this run of the server told, if it did."""
        watch = self.seen.servers.get(server.name)
        return watch if watch is not None and watch.instance_id == server.instance_id else None


def overview(view: View, address: str) -> Json:
    """Return everything, in brief."""
    state = view.state
    servers = [_server(view, server) for _, server in sorted(state.servers.items())]
    buffers = state.listed()
    waits = _waits(view)
    shown_buffers = _shown(view, buffers)
    clients = _clients(view, waits)
    return {
        "form": FORM,
        "now": view.now.wall,
        "coordinator": {"address": address, "started": view.seen.started_at},
        "totals": _totals(view, servers, buffers),
        "problems": [asdict(problem) for problem in problems(state, view.seen, view.now)],
        "servers": servers,
        "buffers": [_buffer(view, record) for record in shown_buffers],
        "clients": clients[:CLIENTS_MAX],
        "waits": waits[:WAITS_MAX],
        "events": [_event(*event) for event in reversed(view.seen.events)],
        "history": _history(view, view.seen.history),
        "left_out": {
            "buffers": len(buffers) - len(shown_buffers),
            "clients": max(0, len(clients) - CLIENTS_MAX),
            "waits": max(0, len(waits) - WAITS_MAX) + _waits_left_out(view),
        },
    }


def server_detail(view: View, name: str, history: History) -> Json:
    """Return all of one server. Raises NotFoundError."""
    server = view.state.servers.get(name)
    if server is None:
        raise NotFoundError(f'no memory server "{name}"')
    watch = view.watch_of(server)
    load = watch.load if watch else pb.ServerLoad()
    on_it = [_held(view, record, name) for record in view.state.buffers.values() if record.ready]
    on_it = [held for held in on_it if held["segments"]]
    return {
        **_server(view, server),
        "now": view.now.wall,
        "control_address": server.control_address,
        "unix_path": server.unix_path,
        "operations": [
            {"transport": done.transport, "kind": done.kind, "count": done.count, "bytes": done.bytes}
            for done in sorted(load.operations, key=lambda done: -done.count)
        ],
        "errors": [
            {"reason": reason, "count": count, "recently": watch.errors_recently.get(reason, 0) if watch else 0}
            for reason, count in sorted(load.errors.items())
        ],
        "connections_by_transport": dict(load.connections),
        "replayed_requests": load.replayed_requests,
        "recovered_locks": load.recovered_locks,
        "memory_free": load.memory_free_bytes,
        "holds": _first(on_it, BUFFERS_MAX, "size"),
        "holds_left_out": max(0, len(on_it) - BUFFERS_MAX),
        "waits": [wait for wait in _waits(view) if wait["server"] == name][:WAITS_MAX],
        "history": _history(view, history),
    }


def buffer_detail(view: View, name: str) -> Json:
    """Return all of one buffer, but for its metadata. Raises NotFoundError."""
    record = view.state.find(Kind.BUFFER, name)
    if record is None:
        raise NotFoundError(f'no buffer "{name}"')
    segments = [
        {
            "index": index,
            "server": segment.server,
            "state": "lost" if segment.id in view.seen.lost_segments else view.server_state(segment.server),
            "size": segment.nbytes,
        }
        for index, segment in enumerate(record.segments)
    ]
    return {
        **_buffer(view, record),
        "now": view.now.wall,
        "parts": _parts(record),
        "chunk": record.chunk_bytes,
        "epoch": record.epoch,
        "segment_list": segments,
        "waits": [wait for wait in _waits(view) if wait["kind"] == "buffer" and wait["name"] == name],
    }


class Overview:
    """The JSON texts, for any thread."""

    def __init__(self, look: Look, watch: Watch, address: str) -> None:
        self._look = look
        self._watch = watch
        self._address = address
        self._salt = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._due = float("-inf")
        self._text = b""

    def all(self) -> bytes:
        """Return the JSON of everything in brief, at most a second old."""
        with self._lock:
            state, now = self._look()
            if now.monotonic >= self._due:
                begun = time.perf_counter()
                view = View(state, self._watch.seen(now), now, self._salt)
                self._text = _text(overview(view, self._address))
                took_s = time.perf_counter() - begun
                self._due = now.monotonic + max(FRESH_S, SHARE * took_s)
            return self._text

    def server(self, name: str) -> bytes:
        """Return the JSON of all of one server. Raises NotFoundError."""
        view = self._view()
        return _text(server_detail(view, name, self._watch.history_of(name, view.now)))

    def buffer(self, name: str) -> bytes:
        """Return the JSON of all of one buffer. Raises NotFoundError."""
        return _text(buffer_detail(self._view(), name))

    def _view(self) -> View:
        state, now = self._look()
        return View(state, self._watch.seen(now), now, self._salt)


def _text(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _totals(view: View, servers: list[Json], buffers: tuple[BufferRecord, ...]) -> Json:
    alive = [server for server in servers if server["state"] in ("alive", "late")]
    rates = [server["rates"] for server in alive if server["rates"]]
    return {
        "servers": len(servers),
        "alive": len(alive),
        "capacity": sum(server["capacity"] for server in alive),
        "used": sum(server["used"] for server in alive),
        "buffers": len(buffers),
        "buffer_bytes": sum(record.nbytes * record.versions for record in buffers),
        "clients": len(view.state.client_names),
        "rates": {key: sum(rate[key] for rate in rates) for key in ("operations", "in", "out", "within")},
        "connections": sum(server["connections"] for server in alive),
        "parked": sum(server["parked"] for server in alive),  # codespell:ignore parked - a public name
        "waiting": sum(server["waiting"] for server in alive),
    }


def _server(view: View, server: ServerRecord) -> Json:
    watch = view.watch_of(server)
    current = watch if watch and view.state.alive(server.name, view.now) else None
    load = current.load if current else pb.ServerLoad()
    return {
        "name": server.name,
        "state": view.server_state(server.name),
        "address": server.data_address,
        "metrics": server.metrics_address,
        "capacity": server.capacity_bytes,
        "used": server.used_bytes,
        "segments": view.state.allocation(server.name).segments,
        "weight": server.weight,
        "last_seen": view.seen.left.get(server.name, server.last_seen_at),
        "rates": _rates(current.rates) if current and current.rates else None,
        "connections": sum(load.connections.values()),
        "parked": load.parked_requests,  # codespell:ignore parked
        "waiting": load.waiting_requests,
        "errors_recently": sum(current.errors_recently.values()) if current else 0,
    }


def _rates(amounts: Amounts) -> Json:
    return {
        "operations": round(amounts.operations, 1),
        "in": round(amounts.in_bytes),
        "out": round(amounts.out_bytes),
        "within": round(amounts.within_bytes),
    }


def _shown(view: View, buffers: Sequence[BufferRecord]) -> list[BufferRecord]:
    """Return the buffers by name; of too many those that are not well, and the largest."""
    if len(buffers) > BUFFERS_MAX:
        buffers = sorted(buffers, key=lambda record: (_health(view, record) == "ok", -record.nbytes))[:BUFFERS_MAX]
    return sorted(buffers, key=lambda record: record.name)


def _buffer(view: View, record: BufferRecord) -> Json:
    parts = _parts(record)
    return {
        "name": record.name,
        "state": _health(view, record),
        "shape": list(record.shape),
        "dtype": record.dtype,
        "size": record.nbytes,
        "versions": record.versions,
        "wire": record.wire,
        "stripe": record.stripe_bytes,
        "servers": len(parts),
        "segments": len(record.segments),
        "parts": parts[:PARTS_MAX],
        "created": record.created_at,
    }


def _health(view: View, record: BufferRecord) -> str:
    """Return ok, gone (a server is) or lost (a server came back without its memory)."""
    if view.seen.lost_segments and any(segment.id in view.seen.lost_segments for segment in record.segments):
        return "lost"
    return "ok" if view.alive.issuperset(segment.server for segment in record.segments) else "gone"


def _parts(record: BufferRecord) -> list[Json]:
    """Return what each server has of it, in the layout's order."""
    sizes: dict[str, int] = defaultdict(int)
    for segment in record.segments:
        sizes[segment.server] += segment.nbytes
    return [{"server": server, "size": size} for server, size in sizes.items()]


def _held(view: View, record: BufferRecord, server: str) -> Json:
    """Return what the server has of a buffer, lock or barrier; 0 segments: nothing."""
    sizes = [segment.nbytes for segment in record.segments if segment.server == server]
    return {
        "name": record.name,
        "kind": record.kind.value,
        "size": sum(sizes),
        "segments": len(sizes),
        "state": _health(view, record),
    }


def _clients(view: View, waits: list[Json]) -> list[Json]:
    holds: dict[str, int] = defaultdict(int)
    for wait in waits:
        holds[wait["holder_key"]] += 1
    state, now = view.state, view.now
    lease_s = state.session_leases.duration_s
    clients = []
    for session_id, name in state.client_names.items():
        left_s = max(0.0, state.session_leases.ends.get(session_id, now.monotonic) - now.monotonic)
        key = _key(view, session_id)
        clients.append(
            {
                "key": key,
                "name": name,
                "since": view.seen.sessions_since.get(session_id, 0.0),  # 0: before the coordinator started
                "silent_s": round(max(0.0, lease_s - left_s), 1),
                "lease_s": lease_s,
                "holds": holds[key],
            }
        )
    return sorted(clients, key=lambda client: (client["name"], client["since"]))


def _waits(view: View) -> list[Json]:
    """Return what is held and waited for, what most wait for first."""
    owners = owners_of(view.state, view.seen)
    waits = []
    for server, watch in view.seen.servers.items():
        record = view.state.servers.get(server)
        if record is None or not view.state.alive(server, view.now) or view.watch_of(record) is None:
            continue
        for wait in watch.load.waits:
            owner = owners.get(wait.segment_id)
            if owner is not None:
                waits.append(_wait(view, watch, server, wait, owner))
    return sorted(waits, key=lambda wait: (-wait["waiting"], wait["kind"], wait["name"]))


def _wait(view: View, watch: ServerWatch, server: str, wait: pb.Wait, owner: BufferRecord) -> Json:
    age_s = view.now.monotonic - watch.at
    token = wait.token if wait.session_id else 0
    since = view.seen.held_since.get((wait.segment_id, wait.kind, token), view.now.monotonic)
    holder = view.state.client_names.get(wait.session_id, "unknown") if wait.session_id else None
    return {
        "what": wait.kind,
        "kind": owner.kind.value,
        "name": owner.name,
        "server": server,
        "holder": holder,
        "holder_key": _key(view, wait.session_id) if wait.session_id else "",
        "left_s": round(max(0.0, wait.left_ms / 1000 - age_s), 1),
        "for_s": round(view.now.monotonic - since, 1),
        "waiting": wait.waiting,
        "arrived": wait.arrived,
        "parties": wait.parties,
    }


def _waits_left_out(view: View) -> int:
    return sum(watch.load.waits_left_out for watch in view.seen.servers.values())


def _event(at: float, level: int, text: str) -> Json:
    return {"at": at, "level": logging.getLevelName(level).lower(), "text": text}


def _history(view: View, history: History) -> Json:
    return {
        "step_s": history.step_s,
        "end": history.end,
        "started": view.seen.started_at,
        "operations": [round(value, 1) for value in history.operations],
        "in": [round(value) for value in history.in_bytes],
        "out": [round(value) for value in history.out_bytes],
    }


def _first(rows: Iterable[Json], most: int, by: str) -> list[Json]:
    """Return the rows by name; of too many those that are not well, and the largest."""
    rows = list(rows)
    if len(rows) > most:
        rows = sorted(rows, key=lambda row: (row["state"] == "ok", -row[by]))[:most]
    return sorted(rows, key=lambda row: str(row["name"]))


def _key(view: View, session_id: int) -> str:
    """Return what stands for a session on the page: the same during this run, and of no use elsewhere."""
    return hashlib.blake2b(session_id.to_bytes(8, "little"), key=view.salt, digest_size=6).hexdigest()
