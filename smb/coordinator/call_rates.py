"""How much of the event loop's time the calls of one certificate may take while the loop is busy. What comes faster
waits for its time, or until the loop is idle.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator
from itertools import islice
from pathlib import Path
from typing import Any

from smb.coordinator.limits import CALLS_WAITING_MAX, has_room

SHARE = 0.5  # of the loop's time, for all certificates together that ask without pause while others ask, too
SHARE_OF_MANY = 0.25  # while more than MANY of its calls wait: then they are taken faster from gRPC's queue
MANY = 64
SAVED_S = 1.0  # of the loop's time, which such a certificate may take at once if it has asked little before
OTHERS_S = 60.0  # since the last call of another certificate: after that, a certificate is alone
_OUTSIDE_S = 0.0005  # of a call, outside its handler, until that is measured
_OUTSIDE_MAX_S = 0.005  # more is other work of the loop
_WINDOW_S = 1.0  # of a measurement, at least
_CALLS_PER_S_MIN = 20.0  # of a measurement: with fewer calls the loop's other work would count as theirs
_BEGIN_MAX = 64  # calls of a bucket in one round of the loop
_ROUND_S = 0.002  # from one look at the calls that wait to the next
_IDLE = 1 / 8  # of a round: with more, more calls begin in the next one, whatever their certificates have taken
_FREE = -1.0  # in place of what a call was charged: it began in time that nobody else wanted
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


class LoopTime(Generator[Any, Any, Any]):
    """Awaits a handler in its caller's place. `seconds`: how long its steps have held up the loop, without the time for
    which it waited between them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._handler: Generator[Any, Any, Any]

    def of(self, handler: Awaitable[Any]) -> LoopTime:
        """Return what to await in place of `handler`."""
        self._handler = handler.__await__()
        return self

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def send(self, value: Any) -> Any:
        """Carry out the handler's next step."""
        begun = time.monotonic()
        try:
            return self._handler.send(value)
        finally:
            self.seconds += time.monotonic() - begun

    def throw(self, *error: Any) -> Any:
        """Carry out the handler's next step, which begins with an error."""
        begun = time.monotonic()
        try:
            return self._handler.throw(*error)
        finally:
            self.seconds += time.monotonic() - begun


class _Bucket:
    """Seconds of the loop that a certificate may take. `full_at`: when it has SAVED_S again. `waiting` is in the order
    of arrival. `call_s`: what the handlers of its last calls took.
    """

    def __init__(self) -> None:
        self.full_at = self.call_s = 0.0
        self.waiting: dict[asyncio.Future[float], None] = {}

    def has_some(self, now: float) -> bool:
        """Return whether a call may begin. It may cost more than is left: later calls wait longer then."""
        return self.full_at - now < SAVED_S / SHARE

    def take(self, seconds: float, now: float, share: float) -> None:
        """Charge that much of the loop's time; less than 0: give back."""
        self.full_at = max(now, self.full_at) + seconds / share


class CallRates:
    """A bucket for each certificate, which its calls empty by the time that they take of the loop: what their handlers
    take, and what a call takes on average outside its handler. A call that finds its bucket empty waits until there is
    something in it, or, if few of its certificate wait, until the loop is idle. A certificate that asks alone has no
    limit. Used in the loop's thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, busy: Callable[[], float] = busy_s) -> None:
        self._clock, self._busy = clock, busy
        self._outside_s = _OUTSIDE_S
        self._since, self._busy_s, self._calls = clock(), busy(), 0  # at the beginning of a measurement, and its calls
        self._inside_s = 0.0  # in the handlers of these
        self._last = ""  # the certificate of the last call
        self._several_until = 0.0
        self._without_pause = 0  # certificates that asked without pause as of the last measurement
        self._buckets: dict[str, _Bucket] = {}
        self._waiting: Counter[str] = Counter()  # by certificate
        self._crowded: dict[_Bucket, None] = {}  # those of which calls wait; the first has its turn
        self._round: tuple[float, float] | None = None  # clock and busy time when the last round began, while any wait
        self._idle = 0.0  # the part of a round's time in which calls begin beside, since the loop would be idle
        self._idle_s = 0.0  # of that time: what is left; less than 0: the last call took more

    def ended(self) -> None:
        """Count a call that has ended, at any port."""
        self._calls += 1

    def refused(self, certificate: str, kind: str) -> None:
        """Charge a call that did not wait for its turn: its request was received and read all the same."""
        bucket, now = self._buckets.setdefault(f"{certificate} {kind}", _Bucket()), self._clock()
        bucket.take(self._outside_s, now, self._share(bucket))

    def begin(self, certificate: str, kind: str = "") -> asyncio.Future[float]:
        """Return a future that is done when a call that has just come may begin, perhaps already. Its result is for
        `took`. A caller that does not wait any more cancels it. Calls of another kind have a bucket of their own.
        Raises asyncio.QueueFull, which says why, if too many calls wait.
        """
        now = self._clock()
        if now >= self._since + _WINDOW_S:
            self._measure(now)
        if self._last and certificate != self._last:
            self._several_until = now + OTHERS_S
        self._last = certificate
        bucket = self._buckets.setdefault(f"{certificate} {kind}", _Bucket())
        turn: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if not bucket.waiting and self._may_begin(bucket, now):
            self._let_begin(bucket, turn, now)
            return turn
        own, all_waiting = self._waiting[certificate], self._waiting.total()
        if not has_room(own, CALLS_WAITING_MAX - all_waiting):
            raise asyncio.QueueFull(f"{all_waiting} calls wait already, {own} of the same certificate")
        bucket.waiting[turn] = None
        self._crowded[bucket] = None
        self._waiting[certificate] += 1
        turn.add_done_callback(lambda done: self._waits_no_more(certificate, bucket, done))
        if self._round is None:
            self._round, self._idle, self._idle_s = (now, self._busy()), 0.0, 0.0
            asyncio.get_running_loop().call_later(_ROUND_S, self._begin_round)
        return turn

    def _waits_no_more(self, certificate: str, bucket: _Bucket, turn: asyncio.Future[float]) -> None:
        bucket.waiting.pop(turn, None)
        self._waiting[certificate] -= 1
        if not self._waiting[certificate]:
            del self._waiting[certificate]

    def took(self, certificate: str, kind: str, charged_s: float, seconds: float) -> None:
        """Count what a call's handler has taken of the loop. `charged_s`: the result of `begin`."""
        now = self._clock()
        self._inside_s += seconds
        seconds = min(seconds, SAVED_S)  # the loop was held up by something else, e.g. the host stood still
        bucket = self._buckets.setdefault(f"{certificate} {kind}", _Bucket())
        bucket.call_s += (seconds - bucket.call_s) / 8
        if charged_s != _FREE:
            bucket.take(seconds - charged_s, now, self._share(bucket))

    def _share(self, bucket: _Bucket) -> float:
        """Return which part of the loop's time a certificate gets now."""
        return min(SHARE_OF_MANY if len(bucket.waiting) > MANY else SHARE, SHARE / max(self._without_pause, 1))

    def _may_begin(self, bucket: _Bucket, now: float) -> bool:
        return now >= self._several_until or bucket.has_some(now)

    def _let_begin(self, bucket: _Bucket, turn: asyncio.Future[float], now: float) -> None:
        """Charge a call by what its certificate's last ones took, until it is known what it takes. A certificate that
        asks alone is charged for nothing.
        """
        if now >= self._several_until:
            turn.set_result(_FREE)
        else:
            bucket.take(self._outside_s + bucket.call_s, now, self._share(bucket))
            turn.set_result(bucket.call_s)

    def _begin_round(self) -> None:
        """Let those calls begin for whose certificates there is time."""
        assert self._round is not None
        now, busy_s = self._clock(), self._busy()
        if now >= self._since + _WINDOW_S:
            self._measure(now)
        elapsed = now - self._round[0]
        idle = elapsed - (busy_s - self._round[1])
        if idle > _IDLE * elapsed:
            self._idle = min(self._idle + idle / elapsed / 2, 1.0)
        else:
            self._idle /= 2
        self._idle_s = min(self._idle_s, 0.0) + self._idle * elapsed
        for bucket in list(self._crowded):
            for turn in list(islice(bucket.waiting, _BEGIN_MAX)):
                if not turn.done():  # else its caller does not wait any more
                    if not self._may_begin(bucket, now):
                        break
                    self._let_begin(bucket, turn, now)
                bucket.waiting.pop(turn, None)
        self._begin_in_idle_time()
        self._crowded = {bucket: None for bucket in self._crowded if bucket.waiting}
        self._round = (now, busy_s) if self._crowded else None
        if self._crowded:
            asyncio.get_running_loop().call_later(_ROUND_S, self._begin_round)

    def _begin_in_idle_time(self) -> None:
        """Let calls begin which nobody is charged for, one of each certificate in turn. Those of which many wait have
        no part in this: while calls stand in gRPC's queue, the loop seems idle whenever another thread holds it up.
        """
        turns = deque(bucket for bucket in self._crowded if len(bucket.waiting) <= MANY)
        while self._idle_s > 0 and turns:
            bucket = turns.popleft()
            turn = next((each for each in bucket.waiting if not each.done()), None)
            if turn is None:
                continue
            self._idle_s -= self._outside_s + bucket.call_s
            turn.set_result(_FREE)
            del bucket.waiting[turn], self._crowded[bucket]
            self._crowded[bucket] = None  # the last in the next round
            turns.append(bucket)

    def _measure(self, now: float) -> None:
        busy_s = self._busy()
        if self._calls >= _CALLS_PER_S_MIN * (now - self._since):
            outside_s = (busy_s - self._busy_s - self._inside_s) / self._calls
            self._outside_s = min(max(outside_s, 0.0), _OUTSIDE_MAX_S)
        self._since, self._busy_s, self._calls, self._inside_s = now, busy_s, 0, 0.0
        self._buckets = {name: each for name, each in self._buckets.items() if each.waiting or each.full_at > now}
        # A certificate that asks now and then has nearly all of what it may save. Its two kinds count once.
        without_pause = (name for name, each in self._buckets.items() if each.full_at - now > SAVED_S / SHARE / 2)
        self._without_pause = len({name.rpartition(" ")[0] for name in without_pause})
