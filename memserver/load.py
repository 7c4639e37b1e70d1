"""The load report in a renewal, which is for people only, and log lines about a lack of file descriptors."""

from __future__ import annotations

import heapq
import logging
import os
import resource
from collections.abc import Mapping

from memserver.denials import DeniedRequests
from memserver.engine import Engine
from memserver.engine_figures import Share
from memserver.memory_dir import MemoryDirectory
from memserver.usage_by_client import Names
from smb.daemon.host_memory import HEADROOM_BYTES, MemoryLimit
from smb.rpc import control_pb2 as pb

WAITS_MAX = 256  # keeps a renewal small when many locks are held
BUSY_MAX = 256  # likewise for segments and sessions

_log = logging.getLogger("memserver")


class Shortage:
    """Logs that the daemon is out of file descriptors, once for all connections turned away since the last look."""

    def __init__(self) -> None:
        self._logged = 0

    def look(self, turned_away_total: int) -> None:
        """Write the log line if connections were turned away since the last look."""
        if turned_away_total > self._logged:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            _log.error(
                "out of file descriptors: %d connections were closed at once; the limit is %d (at most "
                "%d): raise it (ulimit -n, LimitNOFILE= of systemd), or find out which clients hold so many",
                turned_away_total - self._logged,
                soft,
                hard,
            )
            self._logged = turned_away_total


class BusiestMeter:
    """The load of the busiest segments or sessions since the last look."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}

    def look(self, shares: Mapping[int, Share]) -> list[pb.BusyLoad]:
        """Return at most BUSY_MAX loads. A segment or session seen for the first time has no load yet."""
        now = {number: _sums_of(share) for number, share in shares.items()}
        before, self._before = self._before, now
        done = [
            (count - before[number][0], nbytes - before[number][1], number)
            for number, (count, nbytes) in now.items()
            if number in before and count > before[number][0]
        ]
        return [
            pb.BusyLoad(id=number, count=count, bytes=max(0, nbytes))
            for count, nbytes, number in heapq.nlargest(BUSY_MAX, done, key=lambda each: each[1])
        ]


def _sums_of(share: Share) -> tuple[int, int]:
    return sum(count for count, _ in share.values()), sum(nbytes for _, nbytes in share.values())


class LastLook:
    """The counters at the last renewal, for comparison with the next, and the names for the log."""

    def __init__(self, clients: Names, buffers: Names) -> None:
        self.clients, self.buffers, self.denied = clients, buffers, DeniedRequests()
        self.shortage, self.segments, self.sessions = Shortage(), BusiestMeter(), BusiestMeter()


def load_of(
    engine: Engine, memory_dir: MemoryDirectory, last: LastLook, limit: MemoryLimit | None = None
) -> pb.ServerLoad:
    """Return the counters since the start, current locks and waits, and the busiest since the last renewal."""
    counters = engine.figures.counters()
    last.shortage.look(counters.turned_away_total)
    last.denied.look(*engine.figures.take_denials(), last.clients.known(), last.buffers.known())
    waits, found = engine.figures.waits(WAITS_MAX)
    sessions, connections = engine.figures.sessions()
    operations = [
        pb.OperationLoad(transport=transport, kind=kind, count=count, bytes=counters.transferred_bytes[transport, kind])
        for (transport, kind), count in counters.operations.items()
        if count
    ]
    return pb.ServerLoad(
        operations=operations,
        errors={reason: count for reason, count in counters.errors.items() if count},
        connections={name: count for name, count in counters.connections.items() if count},
        deferred_requests=counters.deferred,
        waiting_requests=counters.waits,
        replayed_requests=counters.replayed_total,
        recovered_locks=counters.recovered_locks,
        segment_count=counters.segments,
        memory_free_bytes=_free_bytes(memory_dir, limit),
        waits=[
            pb.Wait(
                segment_id=wait.segment_id,
                kind=wait.kind,
                session_id=wait.session,
                token=wait.token,
                left_ms=min(wait.left_ms, 0xFFFFFFFF),
                waiting=wait.waiting,
                arrived=wait.arrived,
                parties=wait.parties,
            )
            for wait in waits
        ],
        waits_left_out=found - len(waits),
        segments=last.segments.look(engine.figures.segment_shares()),
        sessions=last.sessions.look(sessions),
        connected=[
            pb.SessionConnections(session_id=number, connections=count)
            for number, count in heapq.nlargest(BUSY_MAX, connections.items(), key=lambda each: each[1])
            if count
        ],
    )


def _free_bytes(memory_dir: MemoryDirectory, limit: MemoryLimit | None) -> int:
    """Return how many bytes a create may take, at least 1, because 0 means unknown."""
    try:
        found = os.statvfs(memory_dir.directory)
    except OSError:  # the directory was removed, and a renewal must not fail for that
        return 0
    free = found.f_bavail * found.f_frsize
    room = limit.room_bytes() if limit is not None else None
    return max(1, free if room is None else min(free, room - HEADROOM_BYTES))
