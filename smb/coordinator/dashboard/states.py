"""Clients' reports of the published states that they publish or read. They come with the renewals of sessions, and are
for people only. In memory, bounded.

Nothing is decided by it. One lock; the event loop writes, the pages' threads read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from smb.coordinator.events import Instant
from smb.rpc import control_pb2 as pb

REPORTS_MAX = 16  # of one session


@dataclass(frozen=True, slots=True)
class ClientReport:
    """One client's last report of one state."""

    session_id: int
    report: pb.StateReport
    at: float  # monotonic


class ReportedStates:
    """The last report of each session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[int, list[ClientReport]] = {}

    def record_reports(self, session_id: int, reports: Iterable[pb.StateReport], now: Instant) -> None:
        """Replace a session's reports by these."""
        seen = [ClientReport(session_id, report, now.monotonic) for report in list(reports)[:REPORTS_MAX]]
        with self._lock:
            if seen:
                self._reports[session_id] = seen
            else:
                self._reports.pop(session_id, None)

    def ended(self, session_ids: Iterable[int]) -> None:
        """Forget sessions that have ended."""
        with self._lock:
            for session_id in session_ids:
                self._reports.pop(session_id, None)

    def by_name(self) -> Mapping[str, list[ClientReport]]:
        found: dict[str, list[ClientReport]] = {}
        with self._lock:
            for reports in self._reports.values():
                for seen in reports:
                    found.setdefault(seen.report.name, []).append(seen)
        return found
