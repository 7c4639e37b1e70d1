"""A worker's changes and the shared values in parts, each sent and taken over separately, while the worker computes.

There are two threads, with separate tasks and data:

    computing    uses the parameters. It makes a part (`make`), and takes over a part that has arrived (`adopt`).
    exchanging   runs the scheme's step, in Worker's thread: it sends parts when they are made, and notes arrivals.

The arrays are the ledger's, and have the model's size. A part's elements of `due` belong to the computing thread until
the part is made, and then to the exchanging thread until the step is over. Its elements of `landing` belong to the
computing thread once the part has arrived. `base` belongs to the computing thread, except between steps. `changed`
guards `_made`, `_came`, `_over` and the figures. Worker ensures that a step is over before the next one begins.

Exactly once: the calls of a part that failed are settled, and what did not arrive is sent again before anything else is
sent (`Mover.finish`). So each element of each delta counts once, whichever parts have arrived.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.buffer import Buffer
from smb.daemon.failpoint import failpoint
from smb.errors import Error, UnavailableError
from smb.train.exchange.mover import Mover, missed
from smb.train.group import GivenUpError
from smb.train.guards import Check, Norm, RefusedContributionError
from smb.train.ledger import Ledger, Run, Values
from smb.train.members import MembershipLostError
from smb.train.parameters import Parameters
from smb.train.traits import EXACT

if TYPE_CHECKING:
    from smb.client import Client
    from smb.queue import Queue


@dataclass(frozen=True)
class Part:
    """Runs of the vector that are sent together. Among waiting parts the one with the largest
    `urgency` is sent first.
    """

    runs: tuple[Run, ...]
    urgency: int

    @property
    def nbytes(self) -> int:
        """Number of bytes, as float32."""
        return 4 * sum(run.count for run in self.runs)


@dataclass(frozen=True)
class Cut:
    """How a model is divided into pushed and pulled parts. The two are the same if a message brings the new values
    back. `credit_bytes` is the most that may be in flight, but at least one part; 0: as many as the queue takes.
    """

    push: tuple[Part, ...]
    pull: tuple[Part, ...]
    credit_bytes: int = 0


@dataclass
class StepMessages:
    """A step's messages in one direction. `busy_s`: seconds with a message in flight. `first`, `last`: when the first
    one began and the last one ended, by time.perf_counter().
    """

    nbytes: int = 0
    messages: int = 0
    busy_s: float = 0.0
    first: float = 0.0
    last: float = 0.0


class ByParts(Parameters):
    """Parameters whose parts can be made and set separately. For the computing thread only."""

    @abstractmethod
    def delta(self, part: Part, base: Values, out: Values) -> None:
        """Put a part's changes since `base` into the part's place in `out`; both are (n,)."""

    @abstractmethod
    def put(self, part: Part, values: Values) -> None:
        """Set a part from its place in `values`, (n,)."""


class PartFlow:
    """The arrays of a worker's parts, and which parts are made and have arrived. One flow serves a membership and its
    successors.
    """

    def __init__(self, parameters: ByParts, cut: Cut) -> None:
        self.parameters = parameters
        self.cut = cut
        self.client: Client | None = None  # the client that sends the parts
        self.ledger = Ledger(np.zeros(parameters.size, np.float32), np.zeros(parameters.size, np.float32))
        self.ledger.landing = np.zeros(parameters.size, np.float32)
        # Whether `due` may have to be sent again; the computing thread's between steps, then the other's.
        self.owes_delta = False
        self._on_top = False  # `owes_delta` when this step began: then later changes are added to `due`
        self.running = False  # whether a step is in progress; written by the computing thread between steps
        self.pushed = StepMessages()
        self.pulled = StepMessages()
        self._queue: Queue | None = None
        self.changed = threading.Condition()
        self._norms: list[Norm] = [Norm() for _ in cut.push]
        self._made: list[int] = []  # parts of this step, in the order in which they were made
        self._came: set[int] = set()
        self._adopted: set[int] = set()  # the computing thread's
        self._over = True
        self._given_up = False
        self._under_way = 0
        self._busy_since = 0.0
        for array in (self.ledger.base, self.landing):
            parameters.hold(array)

    @property
    def due(self) -> Values:
        """The delta, as far as it is made."""
        assert self.ledger.due is not None
        return self.ledger.due

    @property
    def landing(self) -> Values:
        """The values that arrived."""
        assert self.ledger.landing is not None
        return self.ledger.landing

    # ---- the computing thread

    def begin(self, cut: Cut | None = None) -> None:
        """Begin a step, with another cut if one is given. The last step is over."""
        self.adopt_base()
        if cut is not None and cut is not self.cut:
            self.cut = cut
            if self._queue is not None:
                self._queue.close()
                self._queue = None
        self._norms = [Norm() for _ in self.cut.push]
        self._on_top, self.owes_delta = self.owes_delta, True
        with self.changed:
            self._made, self._came, self._adopted = [], set(), set()
            self._over = self._given_up = False
            self.pushed, self.pulled = StepMessages(), StepMessages()
        self.running = True

    def cancel(self) -> None:
        """Undo the beginning of a step of which no part is made: `due` is as it was before."""
        self.owes_delta = self._on_top
        self.over()

    def adopt_base(self) -> None:
        """Make the values that were taken over in the last step, which is over, the base of the next step."""
        ledger = self.ledger
        if len(self._adopted) == len(self.cut.pull):
            ledger.base, ledger.landing = self.landing, ledger.base
        else:
            for number in self._adopted:
                for run in self.cut.pull[number].runs:
                    ledger.base[run.indices] = self.landing[run.indices]
        self._adopted = set()

    def make(self, number: int) -> None:
        """Make a part of the delta, which the scheme may send from now on. Later changes belong to the next delta."""
        part, ledger = self.cut.push[number], self.ledger
        before = ledger.due if self._on_top else ledger.rest
        kept = [None if before is None else before[run.indices].copy() for run in part.runs]
        self.parameters.delta(part, ledger.base, self.due)
        found = Norm()
        for run, due in zip(part.runs, kept, strict=True):
            ledger.noted(run, due)
            for block in run.cut():
                found.add(self.due[block.indices])
        self._norms[number] = found
        with self.changed:
            self._made.append(number)
            self.changed.notify_all()

    def make_rest(self) -> None:
        """Make all parts that are not made."""
        for number in sorted(set(range(len(self.cut.push))) - set(self._made)):
            self.make(number)

    def wait(self, number: int) -> bool:
        """Wait until a part has arrived. Returns False if the step is over without it."""
        with self.changed:
            self.changed.wait_for(lambda: number in self._came or self._over)
            return number in self._came

    def adopt(self, number: int) -> None:
        """Set the parameters of a part to the values that arrived."""
        if number not in self._adopted:
            self.parameters.put(self.cut.pull[number], self.landing)
            self._adopted.add(number)

    def refill(self, values: Values) -> None:
        """Set the parameters and the base to these values, all at once, between steps. The delta
        counts or was dropped.
        """
        self.parameters.fill(values)
        self.ledger.base[:] = values
        self.owes_delta = False

    def forget(self) -> None:
        """Drop what was not sent."""
        self.owes_delta = False
        self.ledger.forget()

    def give_up(self) -> None:
        """Let the exchanging thread wait for no further part."""
        with self.changed:
            self._given_up = True
            self.changed.notify_all()

    # ---- the exchanging thread

    def over(self) -> None:
        """Note that the step is over."""
        with self.changed:
            self._over = True
            self.running = False
            self.changed.notify_all()

    def as_made(self, go_on: Callable[[], None]) -> Iterator[tuple[list[int], Norm, bool]]:
        """Yield the parts that were made since the last time, the figures for guards of all parts so far, and whether
        these are all parts. Waits. `go_on` raises an error if the step was given up.
        """
        seen, found, count = 0, Norm(), len(self.cut.push)
        while seen < count:
            with self.changed:
                self.changed.wait_for(lambda seen=seen: len(self._made) > seen or self._given_up)  # type: ignore[misc]
                fresh = self._made[seen:]
            if not fresh:
                go_on()
                return
            seen += len(fresh)
            for number in fresh:
                found.join(self._norms[number])
            yield fresh, found, seen == count

    def came(self, number: int) -> None:
        """Note that a part is in `landing`."""
        with self.changed:
            self._came.add(number)
            self.changed.notify_all()

    def is_made(self, number: int) -> bool:
        """Return True if a part of this step, or of the last one, is made."""
        with self.changed:
            return number in self._made

    def sent(self, buffer: Buffer) -> None:
        """Account for a delta that was sent, or is sure to be."""
        self.owes_delta = False
        self.keep_rounding(buffer)

    def keep_rounding(self, buffer: Buffer) -> None:
        """Keep what rounding leaves of `due`, for when the delta is sure to count. Until then all of it is due."""
        if self.ledger.rest is not None:
            runs = (run for part in self.cut.push for run in part.runs)
            self.ledger.written.extend((buffer, block) for run in runs for block in run.cut())
            self.ledger.count()

    def queue(self) -> Queue:
        """Return the queue that sends the parts."""
        if self._queue is None:
            assert self.client is not None
            self._queue = self.client.queue(self.cut.credit_bytes or None)
        return self._queue

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def began(self, traffic: StepMessages, nbytes: int) -> None:
        """Note that a message begins."""
        now = time.perf_counter()
        with self.changed:
            if not traffic.messages:
                traffic.first = now
            if not self._under_way:
                self._busy_since = now
            self._under_way += 1
            traffic.messages += 1
            traffic.nbytes += nbytes

    def ended(self, traffic: StepMessages) -> None:
        """Note that a message has ended."""
        now = time.perf_counter()
        with self.changed:
            self._under_way -= 1
            traffic.last = now
            if not self._under_way:
                traffic.busy_s += now - self._busy_since


@dataclass
class _Sending:
    """The calls of a step in progress: run and future of each."""

    flow: PartFlow
    traffic: StepMessages
    calls: list[tuple[Run, Future[Any]]] = field(default_factory=list)
    failed: bool = False
    open: int = 0  # calls that are not finished, including their callbacks; under `changed`

    def add(self, part: Part, call: Callable[[Run], Future[Any]], came: Callable[[], None] | None) -> None:
        """Begin a part's calls. `came` is called, in any thread, when all of them have succeeded."""
        left = set(range(len(part.runs)))
        failpoint("train-part")
        for index, run in enumerate(part.runs):
            future = call(run)
            self.calls.append((run, future))
            self.flow.began(self.traffic, 4 * run.count)
            with self.flow.changed:
                self.open += 1
            future.add_done_callback(lambda done, index=index: self._ended(done, index, left, came))  # type: ignore[misc]

    def _ended(self, done: Future[Any], index: int, left: set[int], came: Callable[[], None] | None) -> None:
        self.flow.ended(self.traffic)
        if done.cancelled() or done.exception() is not None:
            self.failed = True
        else:
            with self.flow.changed:
                left.discard(index)
                whole = not left
            if whole and came is not None:
                came()
        with self.flow.changed:
            self.open -= 1
            self.flow.changed.notify_all()

    def finish(self) -> list[tuple[Run, Error]]:
        """Wait for all calls. Return the runs that failed, with their errors. Raises an exception
        that is not an Error.
        """
        with self.flow.changed:  # a future is done before its callbacks are
            self.flow.changed.wait_for(lambda: self.open == 0)
        failures = []
        for run, future in self.calls:
            if future.cancelled():
                error: BaseException | None = UnavailableError("the client was closed before a part was sent")
            else:
                error = future.exception()
            if isinstance(error, Error):
                failures.append((run, error))
            elif error is not None:
                raise error
        return failures


class PartsMover(Mover):
    """Moves parts when they are made, and in the order in which the forward pass needs them. Used by the exchanging
    thread during a step.
    """

    def __init__(self, flow: PartFlow, weights: Buffer, sent_bytes: int, go_on: Callable[[], None]) -> None:
        super().__init__(weights, sent_bytes)
        self._flow = flow
        self._ledger = flow.ledger
        self._go_on = go_on
        self._parts_left: list[int] = []  # parts that were not begun
        self._touched = False
        if weights.wire != EXACT and flow.ledger.rest is None:
            flow.ledger.rest = np.zeros(flow.ledger.base.size, np.float32)

    @property
    def by_parts(self) -> bool:
        """True during a step."""
        return self._flow.running

    def fetch(self, weights: Buffer) -> None:
        """During a step this reads in parts, the most urgent part first."""
        if self.by_parts:
            read_parts(self._flow, weights)
        else:
            self._flow.adopt_base()
            self._flow.parameters.read(weights, self._flow.landing)

    def adopt(self) -> None:
        """Takes over all values. During a step the computing thread does so, part by part."""
        if not self.by_parts:
            self._flow.refill(self._flow.landing)

    def forget(self) -> None:
        self._flow.forget()
        self._parts_left = []

    # ---- ROUNDS

    def write(self, inbox: Buffer) -> Norm:
        """Write all parts. They do not count before the member has marked, so the delta is accounted for only when the
        values are taken over. If the caller fails before that, the next step sends this delta, too.
        """
        flow, queue = self._flow, self._flow.queue()
        sending = _Sending(flow, flow.pushed)
        found = Norm()

        def write(run: Run, part: Part) -> Future[Any]:
            return queue.write(inbox, flow.due[run.indices], run.there, priority=part.urgency)

        try:
            for fresh, found, _ in flow.as_made(self._go_on):  # noqa: B007 - the last `found` is of all parts
                if sending.failed:
                    break
                for number in fresh:
                    part = flow.cut.push[number]
                    sending.add(part, lambda run, part=part: write(run, part), None)  # type: ignore[misc]
        except BaseException:
            sending.finish()
            raise
        failures = sending.finish()
        if failures:
            raise failures[0][1]
        if not found.bad:
            flow.keep_rounding(inbox)
        return found

    # ---- FUSED

    @property
    def touched(self) -> bool:
        """True if parts of a delta were sent and its rest was refused or given up."""
        return self._touched

    def exchange(self, check: Check, *, fetch: bool) -> None:
        """Send the parts when they are made, each after `check` has seen all parts up to it."""
        flow, weights, queue = self._flow, self._weights, self._flow.queue()
        sending, begun = _Sending(flow, flow.pushed), set[int]()
        self._touched = False
        try:
            for fresh, found, whole in flow.as_made(self._go_on):
                check(found, whole=whole)
                if sending.failed:
                    break
                for number in fresh:
                    self._touched = True
                    begun.add(number)
                    self._begin(queue, sending, number, fetch)
        except (RefusedContributionError, MembershipLostError, GivenUpError):
            sending.finish()  # until then the calls use the memory
            raise
        except Error:
            self._note_left(sending, begun)
            raise
        self._note_left(sending, begun)
        if self._ledger.failed:
            raise self._ledger.failed[0][1]
        flow.sent(weights)
        self._moved_bytes += self._sent_bytes + (weights.nbytes if fetch else 0)

    def _begin(self, queue: Queue, sending: _Sending, number: int, fetch: bool) -> None:
        flow, weights = self._flow, self._weights
        part = flow.cut.push[number]

        def call(run: Run) -> Future[Any]:
            out = flow.landing[run.indices] if fetch else None
            return queue.accumulate(
                weights, flow.due[run.indices], run.there, fetch=fetch, out=out, priority=part.urgency
            )

        sending.add(part, call, (lambda: flow.came(number)) if fetch else None)

    def _note_left(self, sending: _Sending, begun: set[int]) -> None:
        """Wait for the calls in flight. If any part was begun, record what is left to be sent."""
        failures = sending.finish()
        tried = {run.here for run, _ in sending.calls}
        left = [run for number in begun for run in self._flow.cut.push[number].runs if run.here not in tried]
        self._ledger.begin(left)
        self._ledger.failed.extend(failures)
        # If no part was begun, the whole delta is left, and is sent together with the changes until the next exchange.
        self._parts_left = [number for number in range(len(self._flow.cut.push)) if begun and number not in begun]

    def read(self) -> None:
        """Read the shared weights in parts, the most urgent part first."""
        read_parts(self._flow, self._weights)
        self._moved_bytes += self._weights.nbytes

    def add_missing(self) -> bool:
        """See Mover. Called between steps."""
        ledger = self._ledger
        if not ledger.under_way and not self._parts_left:
            return False
        while self._parts_left:
            number = self._parts_left[-1]
            if self._flow.is_made(number):  # otherwise the worker leaves in the middle of a step
                ledger.left += self._flow.cut.push[number].runs
            self._parts_left.pop()
        ledger.ask(lambda run, error: missed(self._weights, run, error))
        self._flow.sent(self._weights)  # before the last call: if Ctrl-C came after it, everything would be sent again
        ledger.add(self._add)
        return True

    def _add(self, run: Run) -> None:
        self._weights.accumulate(self._flow.due[run.indices], run.there)


def read_parts(flow: PartFlow, weights: Buffer) -> None:
    """Read the weights in parts, exactly, the most urgent part first. Raises the error of a call that failed."""
    queue, sending = flow.queue(), _Sending(flow, flow.pulled)
    for number, part in enumerate(flow.cut.pull):

        def call(run: Run, part: Part = part) -> Future[Any]:
            out = flow.landing[run.indices]
            return queue.read(weights, run.there, run.count, out=out, wire="exact", priority=part.urgency)

        sending.add(part, call, lambda number=number: flow.came(number))  # type: ignore[misc]
    failures = sending.finish()
    if failures:
        raise failures[0][1]
    flow.owes_delta = False
