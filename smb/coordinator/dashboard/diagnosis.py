"""Finds problems in the coordinator's state and observations, and says what to do about each. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from smb.config.limits import RENEWALS_PER_LEASE
from smb.config.parse import format_bytes
from smb.coordinator.bundles import Bundles
from smb.coordinator.dashboard.history import Seen, held_key
from smb.coordinator.events import Instant
from smb.coordinator.records import BufferRecord, ServerRecord
from smb.coordinator.room_to_drain import without_room
from smb.coordinator.state import ARRIVED, State
from smb.published import state_of

_LATE_AFTER = 1.75  # renewals after which a server is late: one was lost
NEARLY_FULL, FULL = 0.9, 0.98  # of a server's capacity
DEFERRED_S = 4.0  # longer than a healthy process holds a chunk's lock
HELD_S = 60.0  # a lock that others wait for is reported after this time
PENDING_S = 30.0
STATE_LOW_BYTES = 64 << 20  # of the coordinator's disk; deploy/prometheus/alerts.yml has the same
OTHER_ERRORS = 30  # in a minute; more suggest that a client repeats a wrong call in a loop
NAMES_MAX = 4
GROUPED_FROM = 5  # problems of one kind are one row from this number on
MEMBERS_MAX = 20  # of such a row, shown one by one

CRITICAL, WARNING, NOTE = "critical", "warning", "note"
_ORDER = (CRITICAL, WARNING, NOTE)
# Errors that occur in normal use: a wait for the next round that ends is a "timeout", and a call whose segment has
# moved, or was taken over by the other copy, is a "stale_epoch".
USUAL = frozenset({"timeout", "busy", "disconnected", "broken", "session_ended", "lock_lost", "apart", "stale_epoch"})
_STRANGE = {
    "protocol": (
        "were not in our protocol",
        "A program that is not a client of this cluster connects to the server's port: find out which one.",
    ),
    "version": ("used another version of the protocol", "Install the same release of smb on clients and servers."),
    "denied": ("were refused for lack of rights", "The server's log says which client asked for what."),
    "checksum": (
        "arrived damaged",
        "A network card or link on the way changes bytes: compare the hosts that are affected.",
    ),
    "system": (
        "failed in the operating system",
        "Read the server's log. The likely cause is a limit on file descriptors or memory.",
    ),
    "out_of_memory": ("were refused for lack of memory", "Delete buffers, or give the server's host more memory."),
}


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """The title and the action of many problems alike; `{n}` in the title is their number."""

    title: str
    action: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, and what to do about it. `smb top` shows the title and the action without the detail.

    `about` is ("server" or "buffer", its name), or ("", ""). `since` is seconds since 1970; 0: unknown. `count` is the
    number of problems of this kind that this one stands for, of which `members` has the first.
    """

    severity: str
    title: str
    detail: str
    action: str
    about: tuple[str, str] = ("", "")
    since: float = 0.0
    kind: ProblemKind | None = None  # None: there is at most one
    count: int = 1
    members: tuple[Problem, ...] = ()


_GONE = ProblemKind(
    "{n} memory servers are gone",
    "On the host of each, run: smb-memserver --name NAME, with the same --memory-dir as before. If hosts were lost, "
    "delete the buffers whose data was there (smb rm NAME) and create them again.",
)
_EMPTY_GONE = ProblemKind("{n} memory servers are gone on which no data had its only copy", "")
_LATE = ProblemKind(
    "{n} memory servers are late", "Find out whether their hosts, or the coordinator's host, are overloaded."
)
_DRAINED = ProblemKind("{n} memory servers are being drained", "smb drain SERVER shows the progress of one.")
_FULL = ProblemKind(
    "{n} memory servers are full, or nearly",
    "Delete buffers that are not needed (smb ls lists them, smb rm deletes), start further servers, or restart these "
    "with a larger --capacity.",
)
_PROMISING = ProblemKind(
    "{n} memory servers promise more memory than their hosts have",
    "Remove other files from the file systems of their --memory-dir, raise the memory limits of their containers or "
    "services, or restart the servers with a smaller --capacity.",
)
_REPEATING = ProblemKind(
    "{n} memory servers refuse many requests", "Look for the errors in the logs of the clients' programs."
)
_DEFERRED = ProblemKind(
    "{n} memory servers have requests that wait for a chunk's lock",
    "On their hosts, look for stopped processes (state T in ps) that use buffers. Continue them (kill -CONT PID) or "
    "kill them.",
)
_QUARANTINED = ProblemKind(
    "{n} memory servers keep memory that no record accounts for",
    "smb status lists the segments with the reasons. Restore newer records of the coordinator, or free the memory for "
    "good: smb forget SERVER --all",
)
_CAME_BACK_EMPTY = ProblemKind(
    "{n} memory servers came back without memory",
    "Delete the buffers that smb status calls lost (smb rm NAME), and create them again.",
)
_HELD_LONG = ProblemKind(
    "{n} locks are held for long while others wait",
    "If the programs should not hold them for so long, the processes that hold them probably hang, although they still "
    "renew their sessions: end these processes.",
)
_IN_CREATION = ProblemKind("{n} buffers have been in creation for long", "Read the logs of their servers.")
_DEGRADED = ProblemKind("{n} buffers are degraded", "Wait: smb stat NAME shows the progress of one.")
_DEGRADED_FULL = ProblemKind(
    "{n} buffers are degraded", "Start another memory server: the running ones have no room for the copies."
)


@dataclass(frozen=True, slots=True)
class _BuffersThere:
    """The buffers on a server: the titles of those that are not mirrors, and the names of the mirrors' sources."""

    titles: list[str] = field(default_factory=list)
    mirrored: list[str] = field(default_factory=list)


def problems(state: State, seen: Seen, now: Instant) -> list[Problem]:
    """Return the problems, the worst first; many of one kind as one."""
    found: list[Problem] = list(_of_coordinator(seen))
    gone = {name for name in state.servers if not state.alive(name, now)}
    held = _buffers_on(state, gone)
    for server in sorted(state.servers.values(), key=lambda server: server.name):
        if server.name in gone:
            found.append(_of_gone_server(seen, server, held[server.name]))
        else:
            found += _of_live_server(state, seen, server, now)
    found += _of_records(state, now)
    found += _of_memory(state, state.lost_segments(now))
    found += _of_waits(state, seen, now)
    found += _of_clients(seen)
    found += _of_creations(state, now)
    found += _of_copies(state, now)
    return sorted(_grouped(found), key=lambda problem: _ORDER.index(problem.severity))


def _grouped(found: Iterable[Problem]) -> list[Problem]:
    """Return the problems with many of one kind and severity as one, in the place of its first."""
    alike: dict[object, list[Problem]] = {}
    for number, problem in enumerate(found):
        alike.setdefault((problem.severity, problem.kind) if problem.kind else number, []).append(problem)
    grouped: list[Problem] = []
    for row in alike.values():
        kind = row[0].kind
        if kind is None or len(row) < GROUPED_FROM:
            grouped += row
            continue
        since = min((problem.since for problem in row if problem.since), default=0.0)
        title = kind.title.format(n=f"{len(row):,}")
        members = tuple(row[:MEMBERS_MAX])
        grouped.append(Problem(row[0].severity, title, "", kind.action, since=since, count=len(row), members=members))
    return grouped


def _of_coordinator(seen: Seen) -> Iterator[Problem]:
    if seen.store_error:
        detail = (
            f"{seen.store_error}. Nothing can be created. Once the disk's reserve is used up, new clients cannot "
            f"connect either. Work on open buffers goes on."
        )
        action = (
            "Make room on the disk of the coordinator's --state, or find out why the coordinator cannot write there. "
            "The coordinator tries again by itself."
        )
        yield Problem(CRITICAL, "The coordinator cannot store anything", detail, action)
    elif seen.state_free_bytes is not None and seen.state_free_bytes < STATE_LOW_BYTES:
        detail = f"{format_bytes(seen.state_free_bytes)} are left. When the disk is full, nothing can be created."
        action = "Make room on the disk of the coordinator's --state."
        yield Problem(WARNING, "The coordinator's disk is nearly full", detail, action)
    if seen.failed_calls:
        count = sum(seen.failed_calls.values())
        title = f"{count} {'call' if count == 1 else 'calls'} failed inside the coordinator"
        detail = f"In the last minute: {_listed(sorted(seen.failed_calls))}."
        yield Problem(WARNING, title, detail, "Read the coordinator's log.")


def _of_gone_server(seen: Seen, server: ServerRecord, held: _BuffersThere) -> Problem:
    left = seen.left.get(server.name)
    what = f"{server.name} was stopped" if left else f"{server.name} is gone"
    if not held.titles and not held.mirrored:
        return Problem(
            NOTE,
            what,
            "No data has its only copy on this server.",
            "",
            ("server", server.name),
            left or server.last_seen_at,
            _EMPTY_GONE,
        )
    details = [f"Its last address was {server.data_address}."]
    lost = []
    if held.titles:
        details.append(
            f"It holds a part of {_listed(held.titles)}. Calls that need this part over TCP wait for the server, and "
            f"fail at the client's timeout. Unless the host was restarted, its memory has all acknowledged changes."
        )
        lost.append(f"delete these buffers (smb rm NAME) and create them again: {_listed(held.titles)}")
    if held.mirrored:
        details.append(f"It has mirrors of {_listed(held.mirrored)}: readers use other copies.")
        lost.append(f"stop the server's mirrors: {_stops(held.mirrored, server.name)}")
    action = (
        f"On the server's host, run: smb-memserver --name {server.name}, with the same --memory-dir as before. If the "
        f"host itself was lost, {'; '.join(lost)}."
    )
    severity = CRITICAL if held.titles else WARNING
    since = left or server.last_seen_at
    return Problem(severity, what, " ".join(details), action, ("server", server.name), since, _GONE)


def late_s(state: State) -> float:
    """Return after how many seconds of silence a server is late."""
    return _LATE_AFTER * state.server_leases.duration_s / RENEWALS_PER_LEASE


def _of_live_server(state: State, seen: Seen, server: ServerRecord, now: Instant) -> Iterator[Problem]:
    about = ("server", server.name)
    silent_s = now.wall - server.last_seen_at
    if silent_s > late_s(state):
        detail = (
            f"A server reports to the coordinator at each third of its lease. This one has been silent for "
            f"{silent_s:.0f} s, and counts as gone after {state.server_leases.duration_s:.0f} s."
        )
        action = "Find out whether the server's host is overloaded."
        yield Problem(WARNING, f"{server.name} is late", detail, action, about, kind=_LATE)
    if server.draining:
        held = state.allocation(server.name).segments
        detail = f"{held} segments are left." if held else "It holds no segments any more."
        shows = f"smb drain {server.name} shows the progress, and which buffers cannot leave the server."
        action = shows if held else f"Stop the server, or use it again: smb undrain {server.name}"
        yield Problem(NOTE, f"{server.name} is being drained", detail, action, about, kind=_DRAINED)
    yield from _of_capacity(seen, server)
    watch = seen.servers.get(server.name)
    if watch is None or watch.instance_id != server.instance_id:
        return
    for reason, count in sorted(watch.errors_recently.items()):
        if reason in _STRANGE:
            what, action = _STRANGE[reason]
            kind = ProblemKind(f"{{n}} memory servers had requests that {what}", action)
            title = f"{server.name}: {count} requests {what}"
            yield Problem(WARNING, title, "In the last minute.", action, about, kind=kind)
        elif reason not in USUAL and count >= OTHER_ERRORS:
            title = f"{server.name} refused {count} requests: {reason.replace('_', ' ')}"
            action = "A program repeats a call that fails. Look for the error in the logs of the clients' programs."
            yield Problem(WARNING, title, "In the last minute.", action, about, kind=_REPEATING)
    if watch.load.deferred_requests and now.monotonic - watch.deferred_since >= DEFERRED_S:
        title = f"{server.name}: {watch.load.deferred_requests} requests wait for a chunk's lock"
        detail = "For some seconds now. A local client was stopped, or hangs, in the middle of a change."
        action = (
            "On the server's host, look for a stopped process (state T in ps) that uses buffers. Continue it "
            "(kill -CONT PID) or kill it."
        )
        since = now.wall - (now.monotonic - watch.deferred_since)
        yield Problem(WARNING, title, detail, action, about, since, _DEFERRED)


def _of_capacity(seen: Seen, server: ServerRecord) -> Iterator[Problem]:
    about = ("server", server.name)
    used = server.used_bytes / server.capacity_bytes
    free_bytes = max(0, server.capacity_bytes - server.used_bytes)
    if used >= NEARLY_FULL:
        detail = f"{format_bytes(free_bytes)} of {format_bytes(server.capacity_bytes)} are free."
        action = (
            "Delete buffers that are not needed (smb ls lists them, smb rm deletes), start another server, or restart "
            "this one with a larger --capacity."
        )
        title = f"{server.name} is full" if used >= FULL else f"{server.name} is nearly full"
        yield Problem(CRITICAL if used >= FULL else WARNING, title, detail, action, about, kind=_FULL)
    watch = seen.servers.get(server.name)
    host_free_bytes = free_bytes if watch is None or not watch.load.memory_free_bytes else watch.load.memory_free_bytes
    if host_free_bytes < free_bytes:
        title = f"{server.name} promises more memory than its host has"
        detail = (
            f"{format_bytes(free_bytes)} of the server's --capacity are unused, but its host can give only "
            f"{format_bytes(host_free_bytes)}: the file system of --memory-dir has no more room, or the memory limit "
            f"of the server's container or service allows no more."
        )
        action = (
            "Remove other files from the file system of the server's --memory-dir, enlarge this file system (a "
            "container's /dev/shm), raise the memory limit of the server's container or service, or restart the server "
            "with a smaller --capacity."
        )
        yield Problem(WARNING, title, detail, action, about, kind=_PROMISING)


def _of_records(state: State, now: Instant) -> Iterator[Problem]:
    unheard = sorted(name for name in state.servers if state.alive(name, now) and not state.heard(name, now))
    if unheard:
        detail = (
            f"This coordinator was started, or took over from another one, a short time ago. It does not know yet what "
            f"the memory of {_listed(unheard)} contains."
        )
        title = f"{len(unheard)} memory {'server was' if len(unheard) == 1 else 'servers were'} not heard of yet"
        action = "Wait: a running server registers within seconds. Otherwise the server counts as gone after its lease."
        yield Problem(NOTE, title, detail, action)
    if state.copies_held(now):
        ends = ", ".join(
            f"{name or 'all memory servers'} for {planned.until - now.monotonic:.0f} s more"
            for name, planned in sorted(state.maintenance.items())
        )
        yield Problem(
            NOTE,
            "Lost copies are not made anew: maintenance",
            f"An operator has planned work: {ends}. A buffer that has lost a copy keeps one until then.",
            "When the work is done: smb maintenance SERVER --end, or smb maintenance --all --end.",
        )
    if state.overdue:
        count = len(state.overdue)
        yield Problem(
            WARNING,
            f"{count} memory {'server is' if count == 1 else 'servers are'} late, and not believed to be gone yet",
            f"Most memory servers were late at once, or the coordinator could not take renewals for a while. So it "
            f"waits a lease more for {_listed(sorted(state.overdue))} before their copies are made elsewhere.",
            "Look at the coordinator's host and network first: no processor left, a slow disk or etcd "
            "(smb_coordinator_held_up_seconds_total). For planned work: smb maintenance.",
        )
    for server, held in sorted(state.unexplained.items()):
        if not held:
            continue
        nbytes = format_bytes(sum(each.nbytes for each in held.values()))
        title = f"{server} keeps {nbytes} that no record accounts for"
        detail = (
            f"{len(held)} {'segment is' if len(held) == 1 else 'segments are'} in quarantine. If the coordinator's "
            f"records are too old, this may be the last copy of data."
        )
        action = (
            f"smb status lists the segments with the reasons. Restore newer records of the coordinator, or free the "
            f"memory for good: smb forget {server} SEGMENT for one segment, smb forget {server} --all for all of them"
        )
        yield Problem(WARNING, title, detail, action, ("server", server), kind=_QUARANTINED)


def _of_memory(state: State, lost_segments: Collection[int]) -> Iterator[Problem]:
    if not lost_segments:
        return
    lost: dict[str, list[BufferRecord]] = defaultdict(list)
    for record in state.buffers.values():
        for server in {segment.server for segment in record.segments if segment.id in lost_segments}:
            lost[server].append(record)
    for server, held in _held(state, lost).items():
        if not held.titles and not held.mirrored:  # only `.arrived` buffers of mirrors, which the relay makes again
            continue
        unusable, actions = [], []
        if held.titles:
            unusable.append(_listed(held.titles))
            actions.append(f"Delete these buffers (smb rm NAME) and create them again: {_listed(held.titles)}.")
        if held.mirrored:
            unusable.append(f"mirrors of {_listed(held.mirrored)}")
            commands = [f"smb relay {name} --to {server}" for name in held.mirrored]
            actions.append(f"Make the server's mirrors anew: {_listed(commands)}.")
        detail = f"Its host was restarted, or its files were removed: {' and '.join(unusable)} cannot be used."
        action = f"{' '.join(actions)} Servers and clients go on with all other buffers."
        severity = CRITICAL if held.titles else WARNING
        title = f"{server} came back without memory"
        yield Problem(severity, title, detail, action, ("server", server), kind=_CAME_BACK_EMPTY)


def _of_waits(state: State, seen: Seen, now: Instant) -> Iterator[Problem]:
    owners = owners_of(state, seen)
    for watch in seen.servers.values():
        for wait in watch.load.waits:
            record = owners.get(wait.segment_id)
            since = seen.held_since.get(held_key(wait), now.monotonic)
            held_s = now.monotonic - since
            if record is None or not wait.session_id or not wait.waiting or held_s < HELD_S:
                continue
            holder = state.client_name(wait.session_id, "an unknown client")
            what = "right to publish" if wait.kind == "publication" else "lock"
            waiting = f"{wait.waiting} {'client waits' if wait.waiting == 1 else 'clients wait'}"
            title = f"{record.title}: {holder} has held the {what} for {held_s:.0f} s, and {waiting} for it"
            action = (
                f"If the program should not hold the {what} for this long, the process of {holder} probably hangs, "
                f"although it still renews its session: end this process."
            )
            about = ("buffer", record.name) if record.kind.value == "buffer" else ("", "")
            yield Problem(WARNING, title, "", action, about, now.wall - held_s, _HELD_LONG)


def _of_clients(seen: Seen) -> Iterator[Problem]:
    if not seen.lost_clients:
        return
    names = [name for _, name in seen.lost_clients]
    title = f"{len(names)} {'client was' if len(names) == 1 else 'clients were'} lost in the last 5 minutes"
    detail = (
        f"The coordinator heard nothing from {_listed(names)} for the time of --session-lease. The locks and "
        f"memberships of lost clients have ended."
    )
    action = (
        "Nothing, if these programs were ended on purpose. Otherwise they were stopped or cut off from the "
        "coordinator, and must connect again."
    )
    yield Problem(NOTE, title, detail, action, since=seen.lost_clients[-1][0])


def _of_creations(state: State, now: Instant) -> Iterator[Problem]:
    for record in state.buffers.values():
        if not record.ready and now.wall - record.created_at > PENDING_S:
            servers = _listed(list(dict.fromkeys(segment.server for segment in record.segments)))
            detail = f"The coordinator asked these servers to create its segments: {servers}."
            title = f"{record.title} has been in creation for {now.wall - record.created_at:.0f} s"
            action = f"Read the logs of {servers}."
            yield Problem(WARNING, title, detail, action, since=record.created_at, kind=_IN_CREATION)


def _of_copies(state: State, now: Instant) -> Iterator[Problem]:
    degraded = [record for record in state.listed() if record.degraded]
    pool = state.pool(now) if degraded else None
    bundles = Bundles(state.buffers.values() if degraded else ())
    for record in degraded:
        lost = [segment for segment in record.segments if not segment.backup]
        copying = sum(bool(segment.copying_to) for segment in lost)
        full = pool is not None and without_room(record, pool, bundles)
        detail = (
            f"{len(lost)} of its {len(record.segments)} segments have one copy instead of two, and {copying} second "
            f"copies are being made. If the server with an only copy is lost, the segment's data is lost."
        )
        wait = f"Wait: smb stat {record.name} shows the progress."
        action = "Start another memory server: the running ones have no room for the copies." if full else wait
        title = f"{record.title} is degraded"
        kind = _DEGRADED_FULL if full else _DEGRADED
        yield Problem(WARNING if full else NOTE, title, detail, action, ("buffer", record.name), kind=kind)


def owners_of(state: State, seen: Seen) -> dict[int, BufferRecord]:
    """Return, by segment, the record of each segment at which a lock or wait was reported."""
    wanted = {wait.segment_id for watch in seen.servers.values() for wait in watch.load.waits}
    if not wanted:
        return {}
    return {
        segment.id: record for record in state.buffers.values() for segment in record.segments if segment.id in wanted
    }


def _buffers_on(state: State, servers: set[str]) -> dict[str, _BuffersThere]:
    """Return the buffers on each of the servers."""
    found: dict[str, list[BufferRecord]] = {server: [] for server in servers}
    for record in state.buffers.values() if servers else ():
        if record.ready:  # only segments without a second copy elsewhere
            for server in {segment.server for segment in record.segments if not segment.backup} & servers:
                found[server].append(record)
    return _held(state, found)


def _held(state: State, found: dict[str, list[BufferRecord]]) -> dict[str, _BuffersThere]:
    """Return the titles and mirrors on each server, sorted. A mirror is listed by the name of its source. Its
    `.arrived` buffer, which records the bytes that the mirror has, is not listed."""
    sources = {each.id: each.name for each in state.buffers.values()} if found else {}
    held = {server: _BuffersThere() for server in sorted(found)}
    for server, records in found.items():
        for record in sorted(records, key=lambda each: each.title):
            mirror = state.buffers.get(record.name.removesuffix(ARRIVED))
            if record.mirror_of in sources:
                held[server].mirrored.append(sources[record.mirror_of])
            elif mirror is None or mirror is record or not mirror.mirror_of:
                held[server].titles.append(record.title)
        names = held[server].mirrored
        names[:] = [name for name in names if state_of(name) not in names]
    return held


def _stops(mirrored: list[str], server: str) -> str:
    return _listed([f"smb relay {name} --stop --to {server}" for name in mirrored])


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_MAX])
    return f"{shown} and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else shown
