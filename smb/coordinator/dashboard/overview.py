"""The state of the cluster for people, as JSON: the one view model of the page at / and of `smb top`. docs/run.md has
the units, and the meaning of `form` and `left_out`; this module and buffer_rows.py define the other fields. Conclusions
from the facts are made here (a training's stage, a wait's title, the buffers of a training); the page and `smb top`
only format and arrange them.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from smb.config.transports import REPORTED
from smb.coordinator.dashboard.buffer_rows import (
    BUFFERS_MAX,
    buffer_row,
    copies_of,
    first_buffers,
    health_of,
    held_row,
    parts_of,
    tensors_of,
)
from smb.coordinator.dashboard.clients import client_page, client_rows, session_key
from smb.coordinator.dashboard.diagnosis import USUAL, Problem, owners_of, problems
from smb.coordinator.dashboard.history import Amounts, EventWatch, History, LoadRates, ServerWatch, held_key
from smb.coordinator.dashboard.moment import Json, Moment, settings_of
from smb.coordinator.dashboard.states import ClientReport
from smb.coordinator.dashboard.trainings import Rounds, WorkerSeen
from smb.coordinator.events import Instant
from smb.coordinator.published import published_as
from smb.coordinator.records import BufferRecord, Kind, ServerRecord
from smb.coordinator.state import State
from smb.errors import NotFoundError
from smb.rpc import control_pb2 as pb

if TYPE_CHECKING:
    from smb.coordinator.mirrors.filling import Mirrors

FORM = 1  # version of the JSON; grows when a field is removed or changes its meaning
CLIENTS_MAX = 500
WAITS_MAX = 200
TRAININGS_MAX = 200
WORKERS_MAX = 64  # of one training
WAITED_FOR_MAX = 3  # clients named for which a training waits
STATES_MAX = 200
READERS_MAX = 64  # of one published state
FRESH_S = 1.0
SHARE = 10  # in a huge cluster, at most one tenth of the coordinator's time goes into this view

Look = Callable[[], tuple[State, Instant]]


def overview(view: Moment, address: str) -> Json:
    state = view.state
    servers = [_server(view, server) for _, server in sorted(state.servers.items())]
    buffers = state.listed()
    waits = _waits(view)
    shown_buffers = first_buffers(view, buffers)
    clients = client_rows(view, waits)
    states = _first_states(view)
    rows = [buffer_row(view, record) for record in shown_buffers]
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
    on_it = [held_row(view, record, name) for record in view.state.buffers.values() if record.ready]
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
        **buffer_row(view, record),
        "now": view.now.wall,
        "parts": parts_of(view, record),
        "copies": copies_of(view, record),
        "chunk": record.chunk_bytes,
        "epoch": record.epoch,
        "segment_list": segments,
        **tensors_of(record),
        "published": _published(record) if name in view.states else None,
        **_who(view, record),
        "waits": [wait for wait in _waits(view) if wait["kind"] == "buffer" and wait["name"] == name],
    }


def _shown_settings(settings: Json) -> Json:
    """Return a scheme's settings without the size of the members' table, which is beside them (smb/train/group.py)."""
    return {key: value for key, value in settings.items() if key != "members"}


def _published(record: BufferRecord) -> Json:
    return {"deltas": bool((published_as(record.metadata) or {}).get("deltas"))}


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
        "settings": _shown_settings(settings_of(record.id, record.metadata).get("settings", {})),
        "worker_list": [_worker(view, seen) for seen in workers[:WORKERS_MAX]],
        "buffers": [buffer_row(view, other) for other in first_buffers(view, inside)],
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
        "state": health_of(view, record),
        "stage": _stage(health_of(view, record), workers),
        "scheme": settings_of(record.id, record.metadata).get("scheme", ""),
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
        "bytes": report.bytes,
        "copied": report.copied_bytes,
        "placed": report.placed,
        "transports": [name for name, bit in REPORTED.items() if report.transports & bit],
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
        "state": health_of(view, record),
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
        "times": seen.report.times,
        "bytes": seen.report.bytes,
        "copied": seen.report.copied_bytes,
        "seconds": seen.report.busy_ms / 1000,
        "age_s": seen.report.age_ms / 1000,
        "transports": [name for name, bit in REPORTED.items() if seen.report.transports & bit],
        "silent_s": round(max(0.0, view.now.monotonic - seen.at), 1),
    }


def _client_of(view: Moment, seen: ClientReport) -> str:
    return view.state.client_name(seen.session_id)


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
    since = view.seen.held_since.get(held_key(wait), view.now.monotonic)
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
    shared = " (shared)" if wait.kind == "shared" else ""
    return (f"lock of buffer {name}" if owner.kind is Kind.BUFFER else f"lock {name}") + shared


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
