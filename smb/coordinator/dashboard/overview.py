"""The state of the cluster for people, as JSON: the one view model of the page at / and of `smb top`. docs/run.md has
the units, and the meaning of `form` and `left_out`; this module defines the other fields. Conclusions from the facts
are made here (a training's stage, a wait's title, the buffers of a training); the page and `smb top` only format and
arrange them.

Pure except for `OverviewJson`, which keeps the last answer for a while, so that many viewers cost as much as one. Lists
are bounded, and the number of entries left out is included. Ids of sessions are not shown, because whoever knows the id
of a session could shut its client out.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from smb.coordinator.dashboard.clients import client_page, client_rows, session_key
from smb.coordinator.dashboard.diagnosis import LATE_S, USUAL, Problem, owners_of, problems
from smb.coordinator.dashboard.history import Amounts, EventWatch, History, LoadRates, Seen, ServerWatch
from smb.coordinator.dashboard.states import ClientReport
from smb.coordinator.dashboard.trainings import Rounds, WorkerSeen
from smb.coordinator.events import Instant
from smb.coordinator.mirrors import Mirrors
from smb.coordinator.published import published_as
from smb.coordinator.records import BufferRecord, Kind, ServerRecord
from smb.coordinator.state import State
from smb.errors import NotFoundError
from smb.rpc import control_pb2 as pb
from smb.rpc import metadata

FORM = 1  # version of the JSON; grows when a field is removed or changes its meaning
BUFFERS_MAX = 500
CLIENTS_MAX = 500
WAITS_MAX = 200
TRAININGS_MAX = 200
WORKERS_MAX = 64  # of one training
WAITED_FOR_MAX = 3  # clients named for which a training waits
STATES_MAX = 200
READERS_MAX = 64  # of one published state
TENSORS_MAX = 1000  # of one buffer
TRAINING = "smb.train"  # the key of a training's settings in the metadata of its weights (smb/train/group.py)
TENSORS = "smb.tensors"  # the key of named tensors (smb/tensors.py)
PARTS_MAX = 32  # servers shown for one buffer in the list of all
FRESH_S = 1.0
SHARE = 10  # in a huge cluster, at most one tenth of the coordinator's time goes into this view

Look = Callable[[], tuple[State, Instant]]
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
        return {record.name: record for record in listed if _settings(record.id, record.metadata)}

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
        return _sum(self.busy.get((segment.server, segment.id)) for segment in record.segments)

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
        return "late" if self.now.wall - server.last_seen_at > LATE_S else "alive"

    def watch_of(self, server: ServerRecord) -> ServerWatch | None:
        """Return the last report of this run of the server; None if there is none."""
        watch = self.seen.servers.get(server.name)
        return watch if watch is not None and watch.instance_id == server.instance_id else None


def overview(view: Moment, address: str) -> Json:
    state = view.state
    servers = [_server(view, server) for _, server in sorted(state.servers.items())]
    buffers = state.listed()
    waits = _waits(view)
    shown_buffers = _shown(view, buffers)
    clients = client_rows(view, waits)
    states = _first_states(view)
    rows = [_buffer(view, record) for record in shown_buffers]
    return {
        "form": FORM,
        "now": view.now.wall,
        "coordinator": {"address": address, "started": view.seen.started_at},
        "totals": _totals(view, servers, buffers),
        "problems": [_problem(problem) for problem in problems(state, view.seen, view.now)],
        "servers": servers,
        "buffers": rows,
        "trainings": [_training(view, record) for record in _first_trainings(view)],
        "states": [_state(view, record) for record in states],
        "clients": clients[:CLIENTS_MAX],
        "waits": waits[:WAITS_MAX],
        "of_trainings": {  # of the rows above, those that belong to a training
            "buffers": sum(1 for row in rows if row["training"]),
            "waits": sum(1 for row in waits[:WAITS_MAX] if row["training"]),
        },
        "events": [_event(*event) for event in reversed(view.seen.events)],
        "history": _history(view, view.seen.history),
        "left_out": {
            "buffers": len(buffers) - len(shown_buffers),
            "trainings": max(0, len(view.trainings) - TRAININGS_MAX),
            "states": len(view.states) - len(states),
            "clients": max(0, len(clients) - CLIENTS_MAX),
            "waits": max(0, len(waits) - WAITS_MAX) + _waits_left_out(view),
        },
    }


def _problem(problem: Problem) -> Json:
    shown = {key: value for key, value in asdict(problem).items() if key not in ("kind", "members")}
    return shown | {"members": [_problem(member) for member in problem.members]}


def server_detail(view: Moment, name: str, history: History) -> Json:
    """Return the details of one server. Raises NotFoundError."""
    server = view.state.servers.get(name)
    if server is None:
        raise NotFoundError(f'no memory server is named "{name}"')
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


def buffer_detail(view: Moment, name: str) -> Json:
    """Return the details of one buffer, without its metadata. Raises NotFoundError."""
    record = view.state.find(Kind.BUFFER, name)
    if record is None:
        raise NotFoundError(f'no buffer is named "{name}"')
    segments = [
        {
            "index": index,
            "server": segment.server,
            "state": "lost" if segment.id in view.lost else view.server_state(segment.server),
            "size": segment.nbytes,
            "copy": segment.backup,
            "copying_to": segment.copying_to,
            "rate": round(view.busy.get((segment.server, segment.id), LoadRates()).bytes),
        }
        for index, segment in enumerate(record.segments)
    ]
    return {
        **_buffer(view, record),
        "now": view.now.wall,
        "parts": _parts(view, record),
        "copies": _copies(view, record),
        "chunk": record.chunk_bytes,
        "epoch": record.epoch,
        "segment_list": segments,
        **_tensors(record),
        **_who(view, record),
        "waits": [wait for wait in _waits(view) if wait["kind"] == "buffer" and wait["name"] == name],
    }


def training_detail(view: Moment, name: str, past: Rounds) -> Json:
    """Return the details of one training. Raises NotFoundError."""
    record = view.trainings.get(name)
    if record is None:
        raise NotFoundError(f'no training is named "{name}"')
    inside = [other for other in view.state.listed() if view.training_of(other.name) == name]
    workers = view.seen.workers.get(name, ())
    return {
        **_training(view, record),
        "now": view.now.wall,
        "settings": _settings(record.id, record.metadata).get("settings", {}),
        "worker_list": [_worker(view, seen) for seen in workers[:WORKERS_MAX]],
        "buffers": [_buffer(view, other) for other in _shown(view, inside)],
        "waits": [wait for wait in _waits(view) if wait["training"] == name][:WAITS_MAX],
        "history": {
            "step_s": past.step_s,
            "end": past.end,
            "started": view.seen.started_at,
            "rounds": past.rounds,
            "samples": [round(value, 1) for value in past.samples],
        },
    }


class OverviewJson:
    """Answers with JSON texts, for any thread."""

    def __init__(self, look: Look, watch: EventWatch, address: str, mirrors: Mirrors) -> None:
        self._look = look
        self._mirrors = mirrors
        self._watch = watch
        self._address = address
        self._salt = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._due = float("-inf")
        self._text = b""

    def all(self) -> bytes:
        """Return the JSON overview of the cluster, at most a second old."""
        with self._lock:
            state, now = self._look()
            if now.monotonic >= self._due:
                begun = time.perf_counter()
                view = Moment(state, self._watch.seen(now), now, self._salt)
                self._text = _text(overview(view, self._address))
                took_s = time.perf_counter() - begun
                self._due = now.monotonic + max(FRESH_S, SHARE * took_s)
            return self._text

    def server(self, name: str) -> bytes:
        """Return the JSON details of one server. Raises NotFoundError."""
        view = self._view()
        return _text(server_detail(view, name, self._watch.history_of(name, view.now)))

    def buffer(self, name: str) -> bytes:
        """Return the JSON details of one buffer. Raises NotFoundError."""
        view = self._view()
        detail = buffer_detail(view, name)
        record = view.state.find(Kind.BUFFER, name)
        found = self._mirrors.messages(view.state, record, view.now) if record is not None else []
        known = any(each.alive for each in found)  # only a live mirror has reported the latest generation
        return _text(detail | {"mirrors": [_mirror(each, detail["size"], known) for each in found]})

    def clients(self, after: str) -> bytes:
        """Return a page of the clients as JSON: those whose keys are greater than `after`."""
        view = self._view()
        return _text(client_page(view, _waits(view), after))

    def training(self, name: str) -> bytes:
        """Return the JSON details of one training. Raises NotFoundError."""
        view = self._view()
        return _text(training_detail(view, name, self._watch.trainings.rounds(name, view.now)))

    def _view(self) -> Moment:
        state, now = self._look()
        return Moment(state, self._watch.seen(now), now, self._salt)


def _mirror(mirror: pb.Mirror, nbytes: int, known: bool) -> Json:
    return {
        "name": mirror.name,
        "server": mirror.server,
        "zone": mirror.zone,
        "state": "alive" if mirror.alive else "away",
        "version": mirror.version,
        "behind": max(0, mirror.published - mirror.version) if known else None,
        "arrived": min(1.0, mirror.arrived_bytes / max(1, nbytes)),
        "feeds": {feed.name: feed.bytes_per_s for feed in mirror.feeds},
    }


def _text(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _totals(view: Moment, servers: list[Json], buffers: tuple[BufferRecord, ...]) -> Json:
    alive = [server for server in servers if server["alive"]]
    rates = [server["rates"] for server in alive if server["rates"]]
    return {
        "servers": len(servers),
        "alive": len(alive),
        "capacity": sum(server["capacity"] for server in alive),
        "used": sum(server["used"] for server in alive),
        "buffers": len(buffers),
        "buffer_bytes": sum(record.nbytes * record.versions for record in buffers),
        "clients": len(view.state.sessions),
        "rates": {key: sum(rate[key] for rate in rates) for key in ("operations", "in", "out", "within")},
        "connections": sum(server["connections"] for server in alive),
        "deferred": sum(server["deferred"] for server in alive),
        "waiting": sum(server["waiting"] for server in alive),
    }


def _server(view: Moment, server: ServerRecord) -> Json:
    watch = view.watch_of(server)
    current = watch if watch and view.state.alive(server.name, view.now) else None
    load = current.load if current else pb.ServerLoad()
    errors = current.errors_recently if current else {}
    return {
        "name": server.name,
        "state": view.server_state(server.name),
        "alive": view.server_state(server.name) in ("alive", "late"),
        "draining": server.draining,
        "address": server.data_address,
        "metrics": server.metrics_address,
        "capacity": server.capacity_bytes,
        "used": server.used_bytes,
        "segments": view.state.allocation(server.name).segments,
        "quarantined": sum(each.nbytes for each in view.state.unexplained.get(server.name, {}).values()),
        "weight": server.weight,
        "last_seen": view.seen.left.get(server.name, server.last_seen_at),
        "rates": _rates(current.rates) if current and current.rates else None,
        "connections": sum(load.connections.values()),
        "deferred": load.deferred_requests,
        "waiting": load.waiting_requests,
        "errors_recently": sum(count for reason, count in errors.items() if reason not in USUAL),
    }


def _rates(amounts: Amounts) -> Json:
    return {
        "operations": round(amounts.operations, 1),
        "in": round(amounts.in_bytes),
        "out": round(amounts.out_bytes),
        "within": round(amounts.within_bytes),
    }


def _shown(view: Moment, buffers: Sequence[BufferRecord]) -> list[BufferRecord]:
    """Return the buffers by traffic, then by name. If they are too many: the unhealthy ones, then those with most
    traffic, then the largest."""
    traffic = {record.key: view.load_of(record).bytes for record in buffers}
    if len(buffers) > BUFFERS_MAX:
        buffers = sorted(
            buffers, key=lambda record: (_health(view, record) == "ok", -traffic[record.key], -record.nbytes)
        )[:BUFFERS_MAX]
    return sorted(buffers, key=lambda record: (-traffic[record.key], record.name))


def _buffer(view: Moment, record: BufferRecord) -> Json:
    parts = _parts(view, record)
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
        "replicas": record.replicas,
        "degraded": sum(not segment.backup for segment in record.segments) if record.replicas > 1 else 0,
        "rates": _busy(view.load_of(record)),
        "skew": _skew(parts),
        "training": view.training_of(record.name),
    }


def _sum(amounts: Iterable[LoadRates | None]) -> LoadRates:
    total = LoadRates()
    for each in amounts:
        total = total.plus(each) if each else total
    return total


def _busy(busy: LoadRates) -> Json:
    return {"operations": round(busy.operations, 1), "bytes": round(busy.bytes)}


@lru_cache(maxsize=4096)
def _settings(_id: int, packed: bytes) -> Json:
    """Return a training's settings as its first worker stored them; empty if the buffer has none."""
    text = metadata.unpack(packed)
    found = json.loads(text).get(TRAINING) if f'"{TRAINING}"' in text else None
    return found if isinstance(found, dict) and isinstance(found.get("scheme"), str) else {}


def _first_trainings(view: Moment) -> list[BufferRecord]:
    """Return the trainings by name. If they are too many, those with workers come first."""
    records = sorted(view.trainings.values(), key=lambda record: record.name)
    if len(records) > TRAININGS_MAX:
        records = sorted(records, key=lambda record: record.name not in view.seen.workers)[:TRAININGS_MAX]
    return records


def _training(view: Moment, record: BufferRecord) -> Json:
    workers = [_worker(view, seen) for seen in view.seen.workers.get(record.name, ())]
    rates = [worker["samples_per_s"] for worker in workers if worker["samples_per_s"] is not None]
    fired = [worker["guard"] for worker in workers if worker["guard"]]
    times = [worker["time"] for worker in workers if worker["time"]]
    shares = {key: round(sum(each[key] for each in times) / len(times), 3) for key in times[0]} if times else None
    waited_for = _waited_for(workers)
    return {
        "name": record.name,
        "state": _health(view, record),
        "stage": _stage(_health(view, record), workers),
        "scheme": _settings(record.id, record.metadata).get("scheme", ""),
        "size": record.nbytes,
        "elements": record.nbytes // 4,
        "created": record.created_at,
        "round": max((worker["round"] for worker in workers), default=view.seen.furthest.get(record.name, 0)),
        "workers": len(workers),
        "samples_per_s": round(sum(rates), 1) if rates else None,
        "staleness": max((worker["staleness"] for worker in workers), default=0),
        "refused": sum(worker["refused"] for worker in workers),
        "guard": fired[-1] if fired else "",
        "time": shares,
        "waits_for": waited_for[:WAITED_FOR_MAX],
        "why": _why(shares, waited_for),
    }


def _waited_for(workers: Sequence[Json]) -> list[str]:
    """Return the clients for which the others wait: the workers that are furthest behind and do not wait themselves."""
    if not any(worker["waits"] for worker in workers):
        return []
    busy = [worker for worker in workers if not worker["waits"]]
    last = min((worker["round"] for worker in busy), default=0)
    return [worker["client"] for worker in busy if worker["round"] == last]


def _why(shares: Json | None, waited_for: Sequence[str]) -> str:
    """Return in words how the workers' time passes, and for whom they wait."""
    if shares is None:
        return ""
    text = ", ".join(f"{key} {share:.0%}" for key, share in shares.items())
    more = f" and {len(waited_for) - WAITED_FOR_MAX} more" if len(waited_for) > WAITED_FOR_MAX else ""
    return f"{text}; waits for {', '.join(waited_for[:WAITED_FOR_MAX])}{more}" if waited_for else text


def _stage(health: str, workers: Sequence[Json]) -> str:
    """Return a training's stage: by its memory (away, lost), or else by its workers (trains, idle)."""
    return {"gone": "away", "lost": "lost"}.get(health, "trains" if workers else "idle")


def _worker(view: Moment, seen: WorkerSeen) -> Json:
    report = seen.report
    return {
        "key": session_key(view.salt, seen.session_id),
        "client": view.state.client_name(seen.session_id),
        "slot": report.slot,
        "round": report.clock,
        "samples": report.samples or None,
        "samples_per_s": None if seen.samples_per_s is None else round(seen.samples_per_s, 1),
        "contributions": report.contributions,
        "staleness": report.staleness,
        "refused": report.refused,
        "guard": report.guard,
        "time": asdict(seen.shares) if seen.shares else None,
        "waits": report.waits,
        "silent_s": round(max(0.0, view.now.monotonic - seen.at), 1),
    }


def _first_states(view: Moment) -> list[BufferRecord]:
    """Return the published states by name. If they are too many, those with publishers or readers come first."""
    records = sorted(view.states.values(), key=lambda record: record.name)
    if len(records) > STATES_MAX:
        records = sorted(records, key=lambda record: record.name not in view.seen.states)[:STATES_MAX]
    return records


def _state(view: Moment, record: BufferRecord) -> Json:
    publishers, readers = _publishers_and_readers(view, record.name)
    generation = _generation(publishers, readers)
    last = max(publishers, key=lambda seen: seen.report.generation, default=None)
    behind = [generation - seen.report.generation for seen in readers]
    return {
        "name": record.name,
        "state": _health(view, record),
        "generation": generation,
        "publishers": len(publishers),
        "publisher": _client_of(view, last) if last else "",
        "published_by": _with_others(_client_of(view, last), len(publishers) - 1) if last else "",
        "readers": len(readers),
        "behind": max(behind, default=None),
        "size": record.nbytes,
        "created": record.created_at,
    }


def _with_others(name: str, others: int) -> str:
    return f"{name} + {others}" if others else name


def _who(view: Moment, record: BufferRecord) -> Json:
    """Return the publishers and the readers of a state, those furthest behind first."""
    publishers, readers = _publishers_and_readers(view, record.name)
    generation = _generation(publishers, readers)
    readers = sorted(readers, key=lambda seen: (seen.report.generation, _client_of(view, seen)))
    return {
        "generation": generation,
        "publishers": [_member(view, seen, generation) for seen in publishers[:READERS_MAX]],
        "readers": [_member(view, seen, generation) for seen in readers[:READERS_MAX]],
        "readers_left_out": max(0, len(readers) - READERS_MAX),
    }


def _publishers_and_readers(view: Moment, name: str) -> tuple[list[ClientReport], list[ClientReport]]:
    seen = view.seen.states.get(name, ())
    return [each for each in seen if each.report.publishes], [each for each in seen if not each.report.publishes]


def _generation(publishers: Sequence[ClientReport], readers: Sequence[ClientReport]) -> int:
    """Return the latest reported generation; 0: none was reported."""
    return max((seen.report.generation for seen in (*publishers, *readers)), default=0)


def _member(view: Moment, seen: ClientReport, generation: int) -> Json:
    return {
        "key": session_key(view.salt, seen.session_id),
        "client": _client_of(view, seen),
        "generation": seen.report.generation,
        "behind": generation - seen.report.generation,
        "from": seen.report.source,
        "silent_s": round(max(0.0, view.now.monotonic - seen.at), 1),
    }


def _client_of(view: Moment, seen: ClientReport) -> str:
    return view.state.client_name(seen.session_id)


def _tensors(record: BufferRecord) -> Json:
    """Return the first named tensors of a buffer."""
    text = metadata.unpack(record.metadata)
    found = json.loads(text).get(TENSORS) if f'"{TENSORS}"' in text else None
    table = found.items() if isinstance(found, dict) else ()
    tensors = [
        {"name": name, "dtype": str(entry.get("dtype", "")), "shape": _extents(entry.get("shape"))}
        for name, entry in table
        if isinstance(entry, dict)
    ]
    return {"tensors": tensors[:TENSORS_MAX], "tensors_left_out": max(0, len(tensors) - TENSORS_MAX)}


def _extents(shape: Any) -> list[int]:
    """Return a shape from metadata, whose contents are unchecked because any program may have stored them."""
    return [extent for extent in shape if isinstance(extent, int)] if isinstance(shape, list) else []


def _health(view: Moment, record: BufferRecord) -> str:
    """Return ok, unheard or gone (of a server), or lost (a server came back without the memory)."""
    if view.lost and any(segment.id in view.lost for segment in record.segments):
        return "lost"
    states = {view.server_state(segment.server) for segment in record.segments}
    return "ok" if states <= {"alive", "late"} else "unheard" if states <= {"alive", "late", "unheard"} else "gone"


def _parts(view: Moment, record: BufferRecord) -> list[Json]:
    """Return the buffer's part on each server, and the bytes per second that its users move there, in the layout's
    order."""
    sizes: dict[str, int] = defaultdict(int)
    rates: dict[str, float] = defaultdict(float)
    for segment in record.segments:
        sizes[segment.server] += segment.nbytes
        rates[segment.server] += view.busy.get((segment.server, segment.id), LoadRates()).bytes
    return [{"server": server, "size": size, "rate": round(rates[server])} for server, size in sizes.items()]


def _copies(view: Moment, record: BufferRecord) -> list[Json]:
    """Return where the second copies lie. `copying`: bytes of copies that are being made."""
    sizes: dict[str, int] = defaultdict(int)
    copying: dict[str, int] = defaultdict(int)
    for segment in record.segments:
        if segment.backup:
            sizes[segment.backup] += segment.nbytes
        if segment.copying_to:
            copying[segment.copying_to] += segment.nbytes
    return [
        {
            "server": server,
            "size": sizes.get(server, 0),
            "copying": copying.get(server, 0),
            "state": view.server_state(server),
        }
        for server in sorted({*sizes, *copying})
    ]


def _skew(parts: Sequence[Json]) -> float | None:
    """Return how uneven the servers of a buffer are used: the traffic of the busiest one, over the mean. 1: even. None
    for one server, or without traffic."""
    rates = [part["rate"] for part in parts]
    return round(max(rates) * len(rates) / sum(rates), 2) if len(rates) > 1 and sum(rates) else None


def _held(view: Moment, record: BufferRecord, server: str) -> Json:
    """Return the server's part of a buffer, lock or barrier; 0 segments if it has none."""
    sizes = [segment.nbytes for segment in record.segments if segment.server == server]
    return {
        "name": record.name,
        "kind": record.kind.value,
        "size": sum(sizes),
        "segments": len(sizes),
        "state": _health(view, record),
    }


def _waits(view: Moment) -> list[Json]:
    """Return the locks and waits, those with most waiters first; those of trainings come last."""
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
    return sorted(waits, key=lambda wait: (wait["training"] or "", -wait["waiting"], wait["kind"], wait["name"]))


def _wait(view: Moment, watch: ServerWatch, server: str, wait: pb.Wait, owner: BufferRecord) -> Json:
    age_s = view.now.monotonic - watch.at
    token = wait.token if wait.session_id else 0
    since = view.seen.held_since.get((wait.segment_id, wait.kind, token), view.now.monotonic)
    holder = view.state.client_name(wait.session_id) if wait.session_id else None
    return {
        "what": wait.kind,
        "kind": owner.kind.value,
        "name": owner.name,
        "title": _title(wait, owner),
        "training": view.training_of(owner.name),
        "server": server,
        "holder": holder,
        "holder_key": session_key(view.salt, wait.session_id) if wait.session_id else "",
        "left_s": round(max(0.0, wait.left_ms / 1000 - age_s), 1),
        "for_s": round(view.now.monotonic - since, 1),
        "waiting": wait.waiting,
        "arrived": wait.arrived,
        "parties": wait.parties,
    }


def _title(wait: pb.Wait, owner: BufferRecord) -> str:
    """Return in words what is held or waited for."""
    name = owner.name
    if wait.kind == "barrier":
        return f"barrier {name}: {wait.arrived} of {wait.parties} are there"
    if wait.kind == "version":
        return f"next version of {name}"
    if wait.kind == "publication":
        return f"publication of {name}"
    return f"lock of buffer {name}" if owner.kind is Kind.BUFFER else f"lock {name}"


def _waits_left_out(view: Moment) -> int:
    return sum(watch.load.waits_left_out for watch in view.seen.servers.values())


def _event(at: float, level: int, text: str) -> Json:
    return {"at": at, "level": logging.getLevelName(level).lower(), "text": text}


def _history(view: Moment, history: History) -> Json:
    return {
        "step_s": history.step_s,
        "end": history.end,
        "started": view.seen.started_at,
        "operations": [round(value, 1) for value in history.operations],
        "in": [round(value) for value in history.in_bytes],
        "out": [round(value) for value in history.out_bytes],
    }


def _first(rows: Iterable[Json], most: int, by: str) -> list[Json]:
    """Return the rows by name. If they are too many: the unhealthy ones, and the largest."""
    rows = list(rows)
    if len(rows) > most:
        rows = sorted(rows, key=lambda row: (row["state"] == "ok", -row[by]))[:most]
    return sorted(rows, key=lambda row: str(row["name"]))
