"""R2SP, round-robin synchronisation: workers update in strict rotation, evenly spread over time.

    wait for the turn;  W_global += W_local - base;  W_local = base = W_global        after every local step

Source: Chen et al. 2019, "Round-robin synchronization: mitigating communication bottlenecks in parameter servers".
Workers that take turns do not all load the servers' link at once. Let N workers send S bytes each over a link of
bandwidth W, and compute for C. Then an iteration takes max(C + 2 S/W, N S/W), while bulk synchronous training takes C +
2 N S/W.

Taxonomy: data parallel; central; asynchronous with a fixed staleness; each worker with the servers, one at a time.

Turns. One word in the group's table has the turn's owner, the number of updates so far, and whether the owner is
updating; it is changed by compare_swap alone. The owner adds its delta and gets the sums in the same round trip, then
passes the turn to the next live slot. Workers wait at the server, each for the version of the group's tick at which its
turn comes, so passing the turn wakes one worker.

Gaps. Worker 0 (the lowest live slot) measures T, the mean time of `warmup` iterations without waiting, and repeats the
measurement after as many iterations. A turn is passed on T / (1.2 N) after its update began, or at the update's end if
that is later; N is the number of live workers at that moment. The worker that has the turn keeps the gap by its own
clock, so the next one need not look at the time, and no clocks are compared.

Batches. With batch_size=b, worker.batch_size is b N v_i / sum(v), in proportion to the measured and smoothed samples
per second v_i, so that all workers compute for the same time. Multiply the gradient, or the loss, by
worker.gradient_scale, which is batch_size / b: a step then weighs as much as its samples.

Staleness: exactly N - 1, the others' updates between a worker's read and its own update. Each update is complete in the
model before the next one begins. Rotation enforces this, and tests/train/test_r2sp.py checks it on the contents of
every read. While members join, leave or die, the staleness is at most that of the larger N. A worker that is not ready
keeps the others waiting. With skip_after=seconds its turn is passed on once it is late by that time, at most `skips`
times in a row. The bound is then (skips + 1) (N - 1). If a worker dies in its turn, the others notice it by its lock
when its lease ends, and skip it; a part of its last update, whole chunks of it, may be in the model.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from smb.config.backoff import Backoff
from smb.errors import (
    DeadlineError,
    Error,
    InvalidArgumentError,
    NotFoundError,
)
from smb.train import member_table as t
from smb.train.exchange.mover import mover_of
from smb.train.group import wake
from smb.train.guards import RefusedContributionError
from smb.train.long_waits import LongWait
from smb.train.parameters import Parameters
from smb.train.rare import rotation
from smb.train.rare.rotation import Candidate, Pace, Turn, batch_sizes, gap_s, may_skip
from smb.train.scheme import Exchange, Scheme, is_number, is_whole
from smb.train.traits import FUSED, Traits

if TYPE_CHECKING:
    from smb.train.group import Group

# Columns of the group's row and of a member's: floats as their bits, in seconds and in samples per second.
_TURN = t.GROUP_EXTRA
_ITERATION = t.GROUP_EXTRA + 1
_SPEED = t.EXTRA
_SKIPPED = t.EXTRA + 1  # turns in a row that were passed on because their owner was late

_RETRY_FIRST_S, _RETRY_MAX_S = 0.1, 1.0

_log = logging.getLogger("smb")


@dataclass(frozen=True)
class R2SP(Scheme):
    """Round-robin synchronisation: workers add their changes in turn, evenly spread over time.

    - `batch_size`: samples per iteration, on average over the workers; each worker's number follows its speed. None:
      your program chooses.
    - `warmup`: number of iterations in a measurement.
    - `skip_after`: the turn of a worker that is this many seconds late is passed on (None: never), at most `skips`
      times in a row.
    """

    NAME: ClassVar[str] = "r2sp"
    TRAITS: ClassVar[Traits] = Traits(way=FUSED, calls=12, each_step=True, in_turn=True, no_overlap="")
    MEMBERS_MAX: ClassVar[int] = rotation.MEMBERS_MAX
    batch_size: int | None = None
    warmup: int = 10
    skip_after: float | None = None
    skips: int = 1

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("warmup", self.warmup), ("skips", self.skips)):
            if not (is_whole(value, 1) or (name == "batch_size" and value is None)):
                raise InvalidArgumentError(f"scheme 'r2sp': {name} must be a whole number from 1 on, not {value!r}")
        if self.skip_after is not None and not (is_number(self.skip_after) and self.skip_after > 0):
            raise InvalidArgumentError(
                f"scheme 'r2sp': skip_after must be a number of seconds above 0, or None, not {self.skip_after!r}"
            )

    @property
    def traits(self) -> Traits:
        """With batch_size= the scheme measures the computation, which overlap= would distort."""
        if self.batch_size is None:
            return self.TRAITS
        return replace(self.TRAITS, no_overlap="with batch_size= it measures the computation itself: leave one out")

    def check(self, name: str, parameters: Parameters) -> None:
        """Refuse the ranks of a mesh if speeds are measured."""
        if self.batch_size is not None and parameters.in_ranks:
            raise InvalidArgumentError(
                f"scheme 'r2sp' with mesh=: batch_size= measures single processes; leave it out, or join {name!r} "
                f"without a mesh"
            )

    def run(self, group: Group, parameters: Parameters) -> RoundRobin:
        """Return this worker's exchange."""
        return RoundRobin(group, parameters, self)


class RoundRobin(Exchange):
    """One worker's side. A step blocks until the worker's turn has come, and then for one accumulate."""

    EACH_STEP = True

    def __init__(self, group: Group, parameters: Parameters, scheme: R2SP) -> None:
        self._group = group
        self._long = LongWait(f"training {group.name!r}", group.table, group.lease)
        self._scheme = scheme
        self._me = Candidate(group.member.slot, group.member.incarnation)
        self._mover = mover_of(group, parameters, FUSED)
        self._pace = Pace(scheme.warmup)
        self._batch_size = scheme.batch_size
        self._turn: Turn | None = None  # this worker's turn, taken and not passed on
        self._began = 0.0  # when this worker took its turn
        self._unsent_samples = 0
        self._leads = False  # whether this worker is worker 0, which measures for all
        self._passer = Passer(group)
        self._swap(Turn(), Turn(slot=self._me.slot, incarnation=self._me.incarnation))  # the first member begins
        self._updates = 0  # number of updates at the read on which the next update builds
        self._ended = time.monotonic()

    @property
    def batch_size(self) -> int | None:
        """How many samples the next local step should have; None if the scheme has no batch_size."""
        return self._batch_size

    @property
    def gradient_scale(self) -> float:
        """The factor for the gradient of the next local step, batch_size over the scheme's batch_size; 1 if the scheme
        has none.
        """
        return self._batch_size / self._scheme.batch_size if self._batch_size and self._scheme.batch_size else 1.0

    def step(self, samples: int) -> None:
        """Wait for the turn, add the delta, take over the sums, and pass the turn on."""
        computed = time.monotonic()
        self._finish()
        self._passer.finish()
        turn = self._take_turn()
        group, mover = self._group, self._mover
        self._unsent_samples = samples
        try:
            mover.exchange(partial(group.check, staleness=max(0, turn.updates - self._updates)), fetch=True)
        except RefusedContributionError:
            self._pass_on(turn, updated=mover.touched)
            raise
        self._done(turn)
        ended = time.monotonic()
        measured = self._pace.count(samples, computed - self._ended, ended - self._began)
        self._ended = ended
        if self._scheme.batch_size is not None:
            group.table.write(group.member.row, _SPEED, _bits(self._pace.speed))
        if measured and self._leads:
            group.table.write(0, _ITERATION, _bits(self._pace.iteration_s))

    def restart(self) -> None:
        self._mover.restart()
        self._updates = self._look()[0].updates
        self._ended = time.monotonic()

    def flush(self) -> None:
        """Send what a failed call left unsent, and pass the turn on."""
        self._finish()
        self._passer.finish()

    def close(self) -> None:
        """Flush, and pass the turn on if this worker has it, so that the others go on."""
        try:
            self.flush()
            turn, live = self._look()
            others = [member for member in live if member != self._me]
            if turn.is_of(self._me) and others and self._swap(turn, turn.passed(others, updated=turn.taken)):
                self._group.wake()
        finally:
            self._passer.close()

    def abandon(self) -> int:
        """End without passing the turn on: the others have skipped this worker."""
        self._passer.close()
        return 0

    # ---- turns

    def _take_turn(self) -> Turn:
        """Wait until it is this worker's turn, and take the turn."""
        group, scheme = self._group, self._scheme
        seen, since = Turn(), time.monotonic()
        while True:
            group.go_on()
            # Read before the table: otherwise the wait would miss a pass between the two reads.
            version = group.tick.version
            turn, live = self._look()
            if turn.is_of(self._me):
                if turn.taken or self._swap(turn, turn.take()):
                    self._turn, self._began = turn.take(), time.monotonic()
                    return self._turn
                continue
            if self._me not in live:
                raise group.member.lost()
            if not any(turn.is_of(member) for member in live):
                self._pass_over(turn, live)
                continue
            now = time.monotonic()
            if turn != seen:
                seen, since = turn, now
            patience = group.lease / 4
            if scheme.skip_after is not None and not turn.taken:
                skipped = group.table.get(1 + turn.slot, _SKIPPED)
                if may_skip(now - since, scheme.skip_after, skipped, scheme.skips):
                    if self._pass_over(turn, live):
                        group.table.add(1 + turn.slot, _SKIPPED, 1)
                    continue
                if skipped < scheme.skips:
                    patience = min(patience, since + scheme.skip_after - now)
            try:
                with group.time_spent.waiting:
                    group.tick.wait(version + turn.away(self._me.slot, live), timeout=max(patience, 0.001))
            except DeadlineError:
                if time.monotonic() - since < group.lease / 4:
                    continue
                if not group.reap([turn.slot]):
                    self._long.tell(
                        group.table.read(), [turn.slot], turn.word(), "in its turn, which it has not passed on"
                    )
                    continue
                # If one worker died, others may have died too. Workers that wait for their turn count on one wake for
                # each.
                for _ in group.reap(member.slot for member in live):
                    group.wake()

    def _look(self) -> tuple[Turn, list[Candidate]]:
        """Return the turn and the live members. Also updates the batch size that follows from the speeds."""
        rows = self._group.table.read()
        live = live_members(rows)
        self._leads = not live or live[0].slot >= self._me.slot
        if self._scheme.batch_size is not None:
            speeds = {member.slot: _float(rows[1 + member.slot, _SPEED]) for member in live}
            if self._me.slot in speeds:
                sizes = batch_sizes(list(speeds.values()), self._scheme.batch_size)
                self._batch_size = sizes[list(speeds).index(self._me.slot)]
        return Turn.of(int(rows[0, _TURN])), live

    def _swap(self, old: Turn, new: Turn) -> bool:
        """Change the turn. Returns False if it was another one."""
        found = self._group.table.swap(0, _TURN, old.word(), new.word())
        return found in (old.word(), new.word())

    def _pass_over(self, turn: Turn, live: list[Candidate]) -> bool:
        """Give the turn of a dead or late owner to the next worker. Returns False if another call did, or if the turn
        was taken.

        A dead owner's update may have arrived in part, so it counts as an update.
        """
        following = turn.passed(live, updated=turn.taken)
        done = self._group.table.swap(0, _TURN, turn.word(), following.word()) == turn.word()
        if done:
            self._group.wake()
        return done

    def _finish(self) -> None:
        """Finish what a failed call left of this worker's turn."""
        if self._turn is not None:
            if self._mover.finish():
                self._done(self._turn)
            else:
                self._pass_on(self._turn, updated=self._mover.touched)

    def _done(self, turn: Turn) -> None:
        self._updates = turn.updates + 1
        self._pass_on(turn, updated=True)
        self._group.count(self._unsent_samples, self._mover.moved_bytes())
        if self._scheme.skip_after is not None:
            self._group.table.write(self._group.member.row, _SKIPPED, np.zeros(1, np.int64))

    def _pass_on(self, turn: Turn, updated: bool) -> None:
        self._passer.pass_on(turn, updated, self._began)
        self._turn = None


class Passer:
    """Passes a turn on when its gap is over: at once in the caller's thread if it is over already, otherwise in a
    thread of its own.

    That thread, smb-turn, uses only the turn's word and the tick, by calls that any thread may make.
    """

    def __init__(self, group: Group) -> None:
        self._name = group.name
        self._table = t.Table(group.table.buffer)  # with rows of its own
        self._tick = group.tick
        self._lease = group.lease
        self._changed = threading.Condition()
        self._due: tuple[Turn, bool, float] | None = None
        self._failure: Error | None = None  # error of the latest attempt, until it was raised
        self._closed = False
        self._thread: threading.Thread | None = None

    def pass_on(self, turn: Turn, updated: bool, began: float) -> None:
        """Give the turn, taken at `began` of time.monotonic(), to the next worker once its gap is over."""
        due = 0.0
        try:
            rows = self._table.read()
            due = began + gap_s(_float(rows[0, _ITERATION]), max(1, len(live_members(rows))))
            if due <= time.monotonic():
                self._pass(turn, updated)
                return
        except Error as error:
            _log.warning("training %r: could not pass the turn on, and tries again: %s", self._name, error)
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="smb-turn", daemon=True)
                thread.start()
                # Set, like _due, only once it runs: if no thread can be had, the turn is still this worker's.
                self._thread = thread
            self._due = turn, updated, due
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until no turn is left to pass on. Raises the error that keeps the turn here; passing it on is tried
        again all the while.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._due is None or self._closed or self._failure)
            failure, self._failure = self._failure, None
            if failure is not None and self._due is not None:
                raise failure

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due is not None or self._closed)
                if self._closed or self._due is None:
                    return
                turn, updated, due = self._due
                while not self._closed and (left := due - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._closed:
                    return
            try:
                self._pass(turn, updated)
            except NotFoundError as error:
                _log.debug("training %r is gone: %s", self._name, error)
            except Error as error:
                _log.warning("training %r: could not pass the turn on, and tries again: %s", self._name, error)
                with self._changed:
                    self._due, self._failure = (turn, updated, time.monotonic() + backoff.next_s()), error
                    self._changed.notify_all()
                continue
            backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
            with self._changed:
                self._due = None
                self._changed.notify_all()

    def _pass(self, turn: Turn, updated: bool) -> None:
        while True:
            following = turn.passed(
                live_members(self._table.read()) or [Candidate(turn.slot, turn.incarnation)], updated
            )
            found = self._table.swap(0, _TURN, turn.word(), following.word())
            if found not in (turn.word(), following.word()):
                return  # the others took this worker for dead
            wake(self._tick, self._lease)
            live = live_members(self._table.read())
            if not live or any(following.is_of(member) for member in live):
                return
            turn, updated = following, False  # the worker that got the turn left at this moment


def live_members(rows: t.Rows) -> list[Candidate]:
    slots = np.flatnonzero(rows[1:, t.INCARNATION]).tolist()
    return [Candidate(slot, int(rows[1 + slot, t.INCARNATION])) for slot in slots]


def _bits(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array([value], np.float64).view(np.int64)


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", int(bits)))[0])
