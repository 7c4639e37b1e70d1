"""Calls that wait for a buffer, a lock or a barrier: until it is there, or until it is known whether it was made.

Used in the coordinator's loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from smb.coordinator.call_places import without_place
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.records import BufferRecord, Kind, key_of
from smb.coordinator.steps.sessions import check_not_ended
from smb.errors import OutOfMemoryError
from smb.security.roles import caller

# Opens that may wait at once under one certificate: as many as it may have sessions. Each takes 10 KiB.
OPENS_WAITING_MAX = 32_768


class WaitingOpens:
    """Counts the calls that wait, by their certificates."""

    def __init__(self, commit_log: CommitLog) -> None:
        self._commit_log = commit_log
        self._waiting: Counter[str] = Counter()  # by the certificate's key

    async def until_known(
        self, kind: Kind, name: str, known_id: int, left_s: Callable[[], float], attempt_id: int = 0
    ) -> None:
        """Wait for as long as `left_s` says, while only servers that were not heard yet can say whether that buffer was
        made. Raises UnavailableError.
        """
        if self._commit_log.state.in_question(kind, name, known_id) is None:
            return
        end = self._commit_log.now().monotonic + left_s()
        while (record := self._commit_log.state.in_question(kind, name, known_id)) is not None:
            with self.counted(kind, name):
                if not await self._commit_log.wait(record.key, end - self._commit_log.now().monotonic):
                    self._commit_log.state.check_known(kind, name, known_id, attempt_id)

    async def until_there(self, kind: Kind, name: str, timeout_s: float, session_id: int) -> BufferRecord | None:
        """Wait for a record of that name; None if none has come after `timeout_s`. Raises what check_not_ended does."""
        with self.counted(kind, name) if timeout_s else nullcontext():
            deadline = self._commit_log.now().monotonic + timeout_s
            while True:
                if session_id:
                    check_not_ended(self._commit_log.state, session_id, "this client")
                record = self._commit_log.state.find(kind, name)
                if record is not None:
                    return record
                remaining_s = deadline - self._commit_log.now().monotonic
                if remaining_s <= 0 or not await self._commit_log.wait(key_of(kind, name), remaining_s):
                    return None

    @contextmanager
    def counted(self, kind: Kind, name: str) -> Iterator[None]:
        """Count a call that waits in the block. Raises OutOfMemoryError if the caller's certificate has too many."""
        key = caller().key
        if self._waiting[key] >= OPENS_WAITING_MAX:
            raise OutOfMemoryError(
                f'open of {kind.value} "{name}": {OPENS_WAITING_MAX} opens with this certificate are waiting already; '
                f"use timeout=0, or try again later"
            )
        self._waiting[key] += 1
        try:
            with without_place():
                yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def counted_if_room(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """Like `counted`, but a call beyond that number keeps its place and is not refused."""
        has_room = self._waiting[caller().key] < OPENS_WAITING_MAX
        return self.counted(kind, name) if has_room else nullcontext()
