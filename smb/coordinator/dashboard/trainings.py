"""Workers' reports of their trainings. They come with the renewals of sessions, and are for people only. In memory,
bounded.

Nothing is decided by it. One lock; the event loop writes, the pages' threads read.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from smb.coordinator.events import Instant
from smb.rpc import control_pb2 as pb

STEP_S = 2.0  # the interval of workers' reports
SPAN_S = 300.0
WINDOW_S = 30.0  # over which shares of time are shown; half of it at least, once so much has passed
REPORTS_MAX = 16  # of one session
TRAININGS_MAX = 256  # with a history


@dataclass(frozen=True, slots=True)
class TimeShares:
    """How a worker's last seconds passed, in parts of 1. With exchanges beside the computation they are more than 1."""

    computing: float
    exchanging: float
    waiting: float


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """One worker's last report. `samples_per_s` is the rate since its previous report; None: unknown. `marks`: the last
    one or two reports that are WINDOW_S / 2 apart."""

    session_id: int
    report: pb.TrainingReport
    at: float  # monotonic
    samples_per_s: float | None = None
    marks: tuple[WorkerSeen, ...] = ()

    @property
    def shares(self) -> TimeShares | None:
        """The shares since the older mark; None if they are not known."""
        if not self.marks:
            return None
        now, then = self.report, self.marks[0].report
        passed = now.member_ms - then.member_ms
        if passed <= 0:
            return None

        def share(after: int, before: int) -> float:
            return min(1.0, max(0.0, (after - before) / passed))

        return TimeShares(
            1 - share(now.blocked_ms, then.blocked_ms),
            share(now.exchanging_ms, then.exchanging_ms),
            share(now.waiting_ms, then.waiting_ms),
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """A training's progress per step of time, oldest first; the last step ends at `end` (seconds since 1970)."""

    step_s: float
    end: float
    rounds: Sequence[float]
    samples: Sequence[float]  # per second, of all workers


class _Past:
    """One training's last minutes: (step, furthest clock, samples per second)."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int, float]] = deque(maxlen=int(SPAN_S / STEP_S) + 2)
        self.furthest = 0


@dataclass(slots=True)
class _Rate:
    """The workers that report a training now, and the sum of their rates."""

    workers: int = 0
    samples_per_s: float = 0.0


class Trainings:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[int, dict[str, WorkerSeen]] = {}  # by session, by training and slot
        self._rates: dict[str, _Rate] = {}  # by training, so that a report does not visit those of other workers
        self._past: OrderedDict[str, _Past] = OrderedDict()  # the training reported last at the end

    def record_reports(self, session_id: int, reports: Iterable[pb.TrainingReport], now: Instant) -> None:
        """Store a session's reports. A training that the session no longer reports is removed."""
        with self._lock:
            known = self._workers.get(session_id, {})
            fresh: dict[str, WorkerSeen] = {}
            for report in list(reports)[:REPORTS_MAX]:
                key = f"{report.slot} {report.name}"
                fresh[key] = _continued(known.get(key), WorkerSeen(session_id, report, now.monotonic))
            self._replace_workers(session_id, fresh)
            for name in dict.fromkeys(seen.report.name for seen in fresh.values()):
                self._note(name, max(seen.report.clock for seen in fresh.values() if seen.report.name == name), now)
            self._replace_workers(session_id, {key: seen for key, seen in fresh.items() if not seen.report.left})

    def ended(self, session_ids: Iterable[int]) -> None:
        """Forget sessions that have ended."""
        with self._lock:
            for session_id in session_ids:
                self._replace_workers(session_id, {})

    def deleted(self, name: str) -> None:
        """Forget the history of a deleted training: the next one of its name is another one."""
        with self._lock:
            self._past.pop(name, None)

    def workers(self) -> Mapping[str, list[WorkerSeen]]:
        """Return the workers that reported, by training, each training's by slot."""
        found: dict[str, list[WorkerSeen]] = {}
        with self._lock:
            for by_slot in self._workers.values():
                for seen in by_slot.values():
                    found.setdefault(seen.report.name, []).append(seen)
        for workers in found.values():
            workers.sort(key=lambda seen: seen.report.slot)
        return found

    def furthest(self) -> Mapping[str, int]:
        """Return the furthest clock that a worker of each training reported, including trainings without workers
        now."""
        with self._lock:
            return {name: past.furthest for name, past in self._past.items()}

    def rounds(self, name: str, now: Instant) -> Rounds:
        """Return a training's history of the last minutes."""
        end = math.floor(now.monotonic / STEP_S)  # the first step that is not shown
        count = int(SPAN_S / STEP_S)
        rounds, samples = [0.0] * count, [0.0] * count
        with self._lock:
            past = self._past.get(name)
            steps = list(past.steps) if past is not None else []
        for i, (step, clock, per_s) in enumerate(steps):
            until = steps[i + 1][0] if i + 1 < len(steps) else end
            for at in range(max(0, step - (end - count)), min(count, until - (end - count))):
                rounds[at] = clock
                samples[at] = per_s if at == step - (end - count) or until - step <= 2 else 0.0
        return Rounds(STEP_S, now.wall - (now.monotonic - end * STEP_S), rounds, samples)

    def _replace_workers(self, session_id: int, fresh: dict[str, WorkerSeen]) -> None:
        """Replace a session's workers. Call with the lock held."""
        for seen in self._workers.pop(session_id, {}).values():
            rate = self._rates[seen.report.name]
            rate.workers -= 1
            rate.samples_per_s -= seen.samples_per_s or 0.0
            if not rate.workers:
                del self._rates[seen.report.name]
        for seen in fresh.values():
            rate = self._rates.setdefault(seen.report.name, _Rate())
            rate.workers += 1
            rate.samples_per_s += seen.samples_per_s or 0.0
        if fresh:
            self._workers[session_id] = fresh

    def _note(self, name: str, clock: int, now: Instant) -> None:
        """Add a report to a training's history. `clock`: of the worker that reported. Call with the lock held."""
        past = self._past.setdefault(name, _Past())
        self._past.move_to_end(name)
        if len(self._past) > TRAININGS_MAX:
            self._past.popitem(last=False)
        step = math.floor(now.monotonic / STEP_S)
        if past.steps and past.steps[-1][0] == step:
            past.steps.pop()
        past.furthest = max(past.furthest, clock)
        past.steps.append((step, past.furthest, max(0.0, self._rates[name].samples_per_s)))


def _continued(known: WorkerSeen | None, fresh: WorkerSeen) -> WorkerSeen:
    if known is None or fresh.at <= known.at or fresh.report.samples < known.report.samples:
        return fresh
    samples = fresh.report.samples - known.report.samples
    per_s = samples / (fresh.at - known.at) if fresh.report.samples else None
    marks = known.marks
    if not marks or known.at - marks[-1].at >= WINDOW_S / 2:
        marks = (*marks[-1:], replace(known, marks=()))
    return replace(fresh, samples_per_s=per_s, marks=marks)
