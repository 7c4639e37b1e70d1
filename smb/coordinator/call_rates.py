"""How much of the event loop's time the calls of one certificate may take. What comes faster waits for its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from smb.coordinator.limits import CALLS_WAITING_MAX

SHARE = 0.5  # of the loop's time, for a certificate that asks without pause while others ask, too
SHARE_OF_MANY = 0.25  # while more than MANY of its calls wait: then they are taken faster from gRPC's queue
MANY = 64
SAVED_S = 1.0  # of the loop's time, which such a certificate may take at once if it has asked little before
OTHERS_S = 60.0  # since the last call of another certificate: after that, a certificate is alone
_FIRST_COST_S = 0.0005  # of a call, until that is measured
_WINDOW_S = 1.0  # of a measurement, at least
_CALLS_PER_S_MIN = 20.0  # of a measurement: with fewer calls the loop's other work would count as theirs
_BEGIN_MAX = 64  # calls of a bucket in one round of the loop
_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # nanoseconds of work, nanoseconds of waiting for a processor, slices


def busy_s() -> float:
    """Return how long this thread has worked or waited for a processor, in seconds. Kernels that do not count the
    waiting leave it out.
    """
    try:
        worked, waited = map(int, _SCHEDSTAT.read_text().split()[:2])
    except (OSError, ValueError):
        return time.thread_time()
    return (worked + waited) / 1e9


class _Bucket:
    """Seconds of the loop that a certificate may take. `full_at`: when it has SAVED_S again. `waiting` is in the order
    of arrival; `timed`: a timer will let the next ones begin.
    """

    def __init__(self) -> None:
        self.full_at = 0.0
        self.waiting: dict[asyncio.Future[None], None] = {}
        self.timed = False


class CallRates:
    """A bucket for each certificate, which is emptied by calls. A call counts as much as all calls of the last second
    on average, so rates follow the machine, and are lower while others take its processors. A certificate that asks
    alone has no limit. Used in the loop's thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, busy: Callable[[], float] = busy_s) -> None:
        self._clock, self._busy = clock, busy
        self._cost_s = _FIRST_COST_S
        self._since, self._busy_s, self._calls = clock(), busy(), 0  # at the beginning of a measurement, and its calls
        self._last = ""  # the certificate of the last call
        self._several_until = 0.0
        self._buckets: dict[str, _Bucket] = {}

    def ended(self) -> None:
        """Count a call that has ended, at any port."""
        self._calls += 1

    def begin(self, certificate: str, kind: str = "") -> asyncio.Future[None] | None:
        """Return None if a call that has just come may begin, else a future that is done when it may. A caller that
        does not wait any more cancels the future. Calls of another kind have a bucket of their own. Raises
        asyncio.QueueFull if CALLS_WAITING_MAX calls wait.
        """
        now = self._clock()
        if now >= self._since + _WINDOW_S:
            self._measure(now)
        if self._last and certificate != self._last:
            self._several_until = now + OTHERS_S
        self._last = certificate
        bucket = self._buckets.setdefault(f"{certificate} {kind}", _Bucket())
        if not bucket.waiting and (now >= self._several_until or self._takes(bucket, now)):
            return None
        if len(bucket.waiting) >= CALLS_WAITING_MAX:
            raise asyncio.QueueFull
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        bucket.waiting[turn] = None
        turn.add_done_callback(lambda done: bucket.waiting.pop(done, None))
        self._time(bucket, now)
        return turn

    def _takes_s(self, bucket: _Bucket) -> float:
        """Return in how many seconds the bucket gets what a call takes of it."""
        return self._cost_s / (SHARE_OF_MANY if len(bucket.waiting) > MANY else SHARE)

    def _left_s(self, bucket: _Bucket, now: float) -> float:
        """Return in how many seconds the bucket has enough for a call; 0 or less: now."""
        return max(now, bucket.full_at) - now + self._takes_s(bucket) - SAVED_S / SHARE

    def _takes(self, bucket: _Bucket, now: float) -> bool:
        """Take a call's cost, if the bucket has it."""
        if self._left_s(bucket, now) > 0:
            return False
        bucket.full_at = max(now, bucket.full_at) + self._takes_s(bucket)
        return True

    def _time(self, bucket: _Bucket, now: float) -> None:
        if bucket.waiting and not bucket.timed:
            bucket.timed = True
            asyncio.get_running_loop().call_later(self._left_s(bucket, now), self._go_on, bucket)

    def _go_on(self, bucket: _Bucket) -> None:
        """Let those calls of a bucket begin for which it has enough now."""
        bucket.timed, now = False, self._clock()
        for turn in list(islice(bucket.waiting, _BEGIN_MAX)):
            if not turn.done():  # else its caller does not wait any more
                if not self._takes(bucket, now):
                    break
                turn.set_result(None)
            bucket.waiting.pop(turn, None)
        self._time(bucket, now)

    def _measure(self, now: float) -> None:
        busy_s = self._busy()
        if self._calls >= _CALLS_PER_S_MIN * (now - self._since):
            self._cost_s = (busy_s - self._busy_s) / self._calls
        self._since, self._busy_s, self._calls = now, busy_s, 0
        self._buckets = {name: each for name, each in self._buckets.items() if each.waiting or each.full_at > now}
