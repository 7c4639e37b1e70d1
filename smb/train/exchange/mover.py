"""What moves a worker's changes to the group's buffers, and the group's values to the worker's parameters.

There are three carriers: an array or a model in one process (here), ranks of a mesh (smb/torch/mesh.py), and parts that
travel while the worker computes (parts.py). All keep the same books (smb/train/ledger.py), and a scheme moves values in
one of three ways, each with a few methods:

    ROUNDS    fetch, adopt; write: the contribution lies in an inbox until the next `adopt`, by when it counts
    FUSED     restart, exchange, read; finish: what a failed call has left is sent, each element once
    ELASTIC   fetch, form, pay; start, wait: the difference is added in a thread of the client's
"""

from __future__ import annotations

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.buffer import Buffer
from smb.errors import Error, InvalidArgumentError, UnavailableError
from smb.feedback import as_sent
from smb.train.guards import Check, Norm
from smb.train.ledger import Ledger, Run
from smb.train.parameters import Parameters, Values
from smb.train.traits import ELASTIC, EXACT, FUSED, ROUNDS

if TYPE_CHECKING:
    from smb.train.group import Group

_BLOCK = 1 << 16  # elements: two arrays of them stay in a core's cache between two operations
_log = logging.getLogger("smb")


class Mover(ABC):
    """Moves one worker's values. For one thread at a time. What a carrier has not is not there for its schemes."""

    def __init__(self, weights: Buffer, sent_bytes: int) -> None:
        """`sent_bytes`: what a contribution takes on its way, in the weights' wire."""
        self._weights = weights
        self._sent_bytes = sent_bytes
        self._moved_bytes = 0

    # ---- what each carrier does

    @abstractmethod
    def fetch(self, weights: Buffer) -> None:
        """Read the group's values, exact, for `adopt`. The parameters stay as they are."""

    @abstractmethod
    def adopt(self) -> None:
        """Make the parameters what was fetched, or came back. What was written counts."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is due, with what rounding has left."""

    def write(self, inbox: Buffer) -> Norm:  # noqa: ARG002 - a carrier's to use
        """Write what was done into an inbox; return what guards look at. Blocks until all is there. Until `adopt` it
        may be called again after any failure: it writes all of it.
        """
        raise self._absent()

    def take(self) -> Norm:
        """Make the present contribution; return what guards look at. Call `finish` before."""
        raise self._absent()

    def add(self, fetch: bool) -> None:  # noqa: ARG002 - a carrier's to use
        """Add what `take` has made to the shared weights; with `fetch` their new values are there for `adopt`."""
        raise self._absent()

    def add_missing(self) -> bool:
        """Add what an addition that failed has left; False if none did."""
        raise self._absent()

    def form(self, alpha: float) -> Norm:  # noqa: ARG002 - a carrier's to use
        """Make the difference alpha * (parameters - what was fetched); return what guards look at."""
        raise self._absent()

    def pay(self) -> None:
        """Take the difference from the parameters."""
        raise self._absent()

    def start(self) -> None:
        """Begin to add the difference to the shared weights. Does not block."""
        raise self._absent()

    def wait(self) -> None:
        """Wait until what was started has arrived, each element once. Blocks. Does nothing where nothing was.

        A call that failed is settled, and what it missed is sent again, once. If that fails too, the error is raised
        (TimeoutError, UnavailableError, NotFoundError, ...), and the rest stays: called again it goes on from there.
        """
        raise self._absent()

    def abandon(self) -> None:
        """Wait until nothing is under way, and forget what could not be sent: it counts at most once."""
        raise self._absent()

    def release(self) -> None:
        """Let go of the difference's memory, with nothing under way; nothing is formed any more."""
        raise self._absent()

    @property
    def under_way(self) -> bool:
        """Whether a difference was started that `wait` has not seen the end of."""
        raise self._absent()

    @property
    def fetched(self) -> Values:
        """What was fetched, or came back, (n,)."""
        raise self._absent()

    @property
    def by_parts(self) -> bool:
        """Whether what is fetched now is taken over by parts, as each comes."""
        return False

    @property
    def touched(self) -> bool:
        """Whether a part of a contribution that was refused, or was given up, is in the shared weights."""
        return False

    # ---- what these come to

    def restart(self) -> None:
        """Make the parameters the shared weights. Changes not sent are dropped. If it raises, the parameters stay."""
        self.forget()
        self.fetch(self._weights)
        self.adopt()

    def exchange(self, check: Check, *, fetch: bool) -> None:
        """Make the present contribution, `check` it, and add it. With `fetch` the parameters become the sums. Blocks.
        Call `finish` before. Raises UnavailableError, TimeoutError: `finish` it later; and what `check` raises.
        """
        check(self.take(), whole=True)
        self.send(fetch=fetch)

    def send(self, *, fetch: bool) -> None:
        """Add what `take` has made, and take over the sums if they are fetched."""
        self.add(fetch)
        self._moved_bytes += self._sent_bytes
        if fetch:
            self.adopt()
            self._moved_bytes += self._weights.nbytes

    def read(self) -> None:
        """Make the parameters the shared weights. Changes since the last exchange are dropped."""
        self.fetch(self._weights)
        self.adopt()
        self._moved_bytes += self._weights.nbytes

    def finish(self) -> bool:
        """Send what failed before; False if nothing did. Blocks. Raises as `exchange`: call it again."""
        failed = self.add_missing()
        if failed:
            self._moved_bytes += self._sent_bytes
        return failed

    def moved_bytes(self) -> int:
        """Return what exchanges have sent and received since the last call."""
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

    def _absent(self) -> Error:
        return Error(f"{type(self).__name__} does not move values in this way")


class ArrayMover(Mover):
    """Moves the values of one process, by blocks. Host memory of the model's size: a base in ROUNDS, and what is due
    if contributions travel in fewer bits; both in FUSED, and one more while it exchanges; the difference in ELASTIC.
    """

    def __init__(
        self,
        weights: Buffer,
        parameters: Parameters,
        way: str,
        sent_bytes: int = 0,
        arrived: Callable[[], object] | None = None,
    ) -> None:
        """`arrived` is called in the background once all of a difference was acknowledged; what it raises is logged."""
        super().__init__(weights, sent_bytes)
        self._parameters = parameters
        self._way = way
        self._arrived = arrived
        self._call: Future[None] | None = None  # of a difference that is being added
        size = parameters.size
        if way == ROUNDS:
            due = None if weights.wire == EXACT else np.zeros(size, np.float32)
            self.ledger = Ledger(np.empty(size, np.float32), due)
            parameters.hold(self.ledger.base)
        elif way == FUSED:
            self.ledger = Ledger(np.zeros(size, np.float32), np.zeros(size, np.float32))
        else:
            self.ledger = Ledger(due=np.empty(size, np.float32))
            parameters.hold(self.difference)

    @property
    def fetched(self) -> Values:
        """In ROUNDS the base, in FUSED what lands, in ELASTIC where the difference is formed."""
        if self._way == ELASTIC:
            return self.difference
        found = self.ledger.base if self._way == ROUNDS else self.ledger.landing
        assert found is not None
        return found

    @property
    def difference(self) -> Values:
        """The difference with the shared model, or what was fetched to form it."""
        assert self.ledger.due is not None
        return self.ledger.due

    def fetch(self, weights: Buffer) -> None:
        """In ROUNDS right into the base: a member that fetches then owes nothing, and fetches again if this fails."""
        if self._way == FUSED:
            self.ledger.landing = np.empty_like(self.ledger.base)
        self._parameters.read(weights, self.fetched)

    def adopt(self) -> None:
        self.ledger.count()
        self._parameters.fill(self.fetched)
        if self._way == FUSED:
            self.ledger.take_over()

    def forget(self) -> None:
        self.ledger.forget()

    # ---- ROUNDS

    def write(self, inbox: Buffer) -> Norm:
        """By blocks: one travels while the next is made."""
        ledger, parameters, found = self.ledger, self._parameters, Norm()
        written: deque[tuple[Buffer, Run]] = deque()  # what is this process's to write
        under_way: deque[list[Future[Any]]] = deque()
        try:
            for begin, done in parameters.deltas(ledger.base):
                block = ledger.note(begin, done)
                for part, run in parameters.parts(block, begin):
                    found.add(part)
                    written.append((inbox, run))
                if written and block.size == inbox.size == written[0][1].count:
                    inbox.write(block)
                    break
                under_way.append(parameters.write(inbox, block, begin))
                if len(under_way) > 1:
                    _end(under_way)
            while under_way:
                _end(under_way)
        finally:
            _wait_all(under_way)  # the memory is in use until then
        if ledger.due is not None:
            ledger.written = written  # and due still: only the caller knows when it is sure to count
        return found

    # ---- ROUNDS in two halves, for an exchange in the background that must not touch the parameters

    def fetch_step(self, step: Buffer, room: Values, wire: str) -> None:
        """Read what the group's values have changed by since the base, rounded as they were, into `room`, (n,)."""
        step.read(self._parameters.origin, self.ledger.base.size, out=room, wire=wire)

    def draw(self, out: Values) -> Norm:
        """Make what was done since the parameters were filled, and what rounding has left, in `out`, (n,)."""
        found = Norm()
        for begin, done in self._parameters.deltas(self.ledger.base):
            found.add(self.ledger.draw(begin, done, out[begin : begin + done.size]))
        return found

    def put(self, inbox: Buffer, drawn: Values) -> None:
        """Write what `draw` has made into an inbox. Blocks. If it raises, call it again. Touches no parameters."""
        inbox.write(drawn, self._parameters.origin)
        self.ledger.keep(drawn, inbox, self._parameters.origin)

    def merge(self, mix: float, room: Values) -> None:
        """Make the parameters mix * theirs + (1 - mix) * what was fetched. `room`, (n,), is overwritten."""
        if mix == 0.0:
            self.adopt()
            return
        np.multiply(self.ledger.base, np.float32(1 - mix), out=room)
        for begin, block in self._parameters.blocks():
            room[begin : begin + block.size] += np.float32(mix) * block
        self._parameters.fill(room)

    # ---- FUSED

    def take(self) -> Norm:
        """By blocks. What an exchange that was broken off before its first call has left is in it."""
        for begin, done in self._parameters.deltas(self.ledger.base):
            self.ledger.note(begin, done)
        return self._norm()

    def add(self, fetch: bool) -> None:
        """One call for each run that this process sends."""
        self.ledger.begin(self._parameters.runs, self._weights)
        self.ledger.landing = None
        self.ledger.add(lambda run: self._add(run, fetch=fetch))
        self.ledger.count()
        if fetch and self.ledger.landing is None:  # nothing here is this process's to send
            self.ledger.landing = np.empty_like(self.ledger.base)

    def add_missing(self) -> bool:
        if not self.ledger.under_way:
            return False
        self.ledger.ask(functools.partial(missed, self._weights))
        self.ledger.add(lambda run: self._add(run, fetch=False))
        self.ledger.count()
        return True

    def _add(self, run: Run, *, fetch: bool = False) -> None:
        ledger = self.ledger
        fetched = self._weights.accumulate(self.difference[run.indices], run.there, fetch=fetch)
        if fetched is None:
            return
        if run.count == ledger.base.size:
            ledger.landing = fetched
            return
        if ledger.landing is None:
            ledger.landing = np.empty_like(ledger.base)
        ledger.landing[run.indices] = fetched

    def _norm(self) -> Norm:
        found = Norm()
        for run in self._parameters.runs:
            for part in run.cut():
                found.add(self.difference[part.indices])
        return found

    # ---- ELASTIC

    def form(self, alpha: float) -> Norm:
        """By blocks. If it travels in fewer bits, both sides take it as it arrives."""
        for begin, values in self._parameters.blocks():
            take_difference(values, self.difference[begin : begin + values.size], alpha)
        if self._weights.wire != EXACT:
            for run in self._parameters.all_runs:
                for part in run.cut():
                    block = self.difference[part.indices]
                    block[:] = as_sent(self._weights, block, part.there)
        return self._norm()

    def pay(self) -> None:
        self._parameters.subtract(self.difference)

    @property
    def under_way(self) -> bool:
        return self._call is not None or self.ledger.under_way

    def start(self) -> None:
        """Leave the difference alone until `wait` has returned. Raises InvalidArgumentError where it has not."""
        if self.under_way:
            raise InvalidArgumentError(
                f"a contribution to buffer {self._weights.name!r}: the one before is not finished; wait for it first"
            )
        self.ledger.begin(self._parameters.runs)
        self._start()

    def wait(self) -> None:
        """A call's future is kept until its outcome is known: neither an error nor Ctrl-C while waiting makes a run
        count twice or not at all.
        """
        ledger, repeated = self.ledger, False
        while self.under_way:
            if self._call is None:
                ledger.ask(functools.partial(missed, self._weights))
                if not ledger.left:
                    break
                self._start()
                repeated = True
            assert self._call is not None
            error = _failure(self._call)
            self._call = None
            if error is not None:
                ledger.ask(functools.partial(missed, self._weights))
                if repeated:
                    raise error
                _log.warning("%s; what it missed is sent again", error)

    def abandon(self) -> None:
        """Blocks until the call in flight has ended."""
        if self._call is not None:
            _failure(self._call)
        self._call = None
        self.ledger.begin(())

    def release(self) -> None:
        self.ledger.due = np.empty(0, np.float32)

    def _start(self) -> None:
        self._call = self._weights.submit(self._add_all)

    def _add_all(self) -> None:
        """In a thread of the client's."""
        self.ledger.add(self._add)
        if self._arrived is not None:
            try:
                self._arrived()
            except Error as error:
                _log.warning("after a contribution to buffer %r: %s", self._weights.name, error)


def mover_of(group: Group, parameters: Parameters, way: str, arrived: Callable[[], object] | None = None) -> Mover:
    """Return what moves a worker's values: its parameters' own carrier, if they bring one."""
    found = parameters.mover(group, way, arrived)
    return found or ArrayMover(group.weights, parameters, way, group.sent_bytes, arrived)


def take_difference(values: Values, shared: Values, alpha: float) -> None:
    """Replace `shared`, float32 (n,), by d = alpha * (values - shared), rounded to float32 after each operation."""
    rate = np.float32(alpha)
    for at in range(0, values.size, _BLOCK):
        block = shared[at : at + _BLOCK]
        np.subtract(values[at : at + _BLOCK], block, out=block)
        block *= rate


def missed(buffer: Buffer, run: Run, error: BaseException) -> list[Run]:
    """Return what of a change by this run was not applied, and never will be. Blocks. Raises TimeoutError.

    `error`, or Ctrl-C, ended it. If that can't be known any more, nothing is sent: an element counts at most once.
    """
    try:
        missing = buffer.settle(error)
        return [Run(run.here + part.start - run.there, part.start, len(part)) for part in missing]
    except InvalidArgumentError:
        # An error: it was refused, or never sent: nothing is unknown. Ctrl-C: most likely it came as the call returned.
        return [run] if isinstance(error, Error) else []
    except UnavailableError as unknown:
        _log.warning("a contribution may have been lost in part: %s", unknown)
        return []


def _failure(call: Future[None]) -> Error | None:
    """Return how a call failed, None if it did not. Blocks."""
    try:
        error = call.exception()
    except CancelledError:
        return UnavailableError("the client was closed before the contribution was sent; nothing was applied")
    if error is not None and not isinstance(error, Error):
        raise error
    return error


def _end(under_way: deque[list[Future[Any]]]) -> None:
    for call in under_way[0]:
        call.result()
    under_way.popleft()


def _wait_all(under_way: deque[list[Future[Any]]]) -> None:
    for calls in under_way:
        for call in calls:
            with contextlib.suppress(Error):
                call.result()
