"""Moves a worker's changes to the group's buffers, and the group's values to the worker's parameters.

There are three movers: for an array or a model in one process (here), for the ranks of a mesh (smb/torch/meshes), and
for parts that travel while the worker computes (parts.py). All use the same ledger (smb/train/ledger.py). A scheme
moves values in one of three ways, each with its own methods:

    ROUNDS    fetch, adopt; write: the contribution lies in an inbox, and counts by the time of the next `adopt`
    FUSED     restart, exchange, read; finish: sends what a failed call has left, each element once
    ELASTIC   fetch, form, pay; start, wait: a thread of the client's adds the difference
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
from smb.train.ledger import BLOCK_ELEMENTS, NOTHING, Ledger, Run
from smb.train.parameters import Parameters, Values
from smb.train.traits import ELASTIC, EXACT, FUSED, ROUNDS

if TYPE_CHECKING:
    from smb.train.group import Group

_BLOCK = 1 << 16  # elements; two arrays of this size stay in a core's cache between two operations
_log = logging.getLogger("smb")


class Mover(ABC):
    """Moves one worker's values. For one thread at a time. A mover for some schemes lacks the methods of the others."""

    def __init__(self, weights: Buffer, sent_bytes: int) -> None:
        """`sent_bytes` is the size of a contribution as it is sent, in the weights' wire."""
        self._weights = weights
        self._sent_bytes = sent_bytes
        self._moved_bytes = 0

    # ---- methods of each mover

    @abstractmethod
    def fetch(self, weights: Buffer) -> None:
        """Read the group's values exactly, for `adopt`. The parameters stay as they are."""

    @abstractmethod
    def adopt(self) -> None:
        """Set the parameters to the values that were fetched or came back. What was written counts."""

    @abstractmethod
    def forget(self) -> None:
        """Drop changes that are due, and what rounding left."""

    def write(self, inbox: Buffer) -> Norm:  # noqa: ARG002 - a carrier's to use
        """Write the changes into an inbox, and return the figures that guards check. Blocks until all is written. Until
        `adopt` it may be repeated after any failure: it writes everything again.
        """
        raise self._absent()

    def take(self) -> Norm:
        """Compute the present contribution, and return the figures that guards check. Call `finish` before."""
        raise self._absent()

    def add(self, fetch: bool) -> None:  # noqa: ARG002 - a carrier's to use
        """Add the contribution of `take` to the shared weights. With `fetch` their new values are ready for `adopt`."""
        raise self._absent()

    def add_missing(self) -> bool:
        """Add what a failed addition has left. Returns False if no addition failed."""
        raise self._absent()

    def form(self, alpha: float) -> Norm:  # noqa: ARG002 - a carrier's to use
        """Compute the difference alpha * (parameters - what was fetched), and return the figures that guards check."""
        raise self._absent()

    def pay(self) -> None:
        """Subtract the difference from the parameters."""
        raise self._absent()

    def start(self) -> None:
        """Begin to add the difference to the shared weights. Does not block."""
        raise self._absent()

    def wait(self) -> None:
        """Wait until what was started has arrived, each element once. Blocks. Does nothing if nothing was started.

        A failed call is settled, and the part that did not arrive is sent again, once. If that fails too, the error is
        raised (TimeoutError, UnavailableError, NotFoundError, ...), and the next call goes on with the rest.
        """
        raise self._absent()

    def abandon(self) -> None:
        """Wait until no call is in flight, and drop what could not be sent: each element counts at most once."""
        raise self._absent()

    def release(self) -> None:
        """Release the difference's memory, when no call is in flight. form() must not be called afterwards."""
        raise self._absent()

    @property
    def under_way(self) -> bool:
        """True if a difference was started and `wait` has not seen its end."""
        raise self._absent()

    @property
    def fetched(self) -> Values:
        """The values that were fetched or came back, (n,)."""
        raise self._absent()

    @property
    def by_parts(self) -> bool:
        """True if fetched values are taken over part by part, as each arrives."""
        return False

    @property
    def touched(self) -> bool:
        """True if a part of a contribution that was refused or given up is in the shared weights."""
        return False

    # ---- methods made of these

    def restart(self) -> None:
        """Set the parameters to the shared weights. Unsent changes are dropped. If it raises, the parameters are
        unchanged.
        """
        self.forget()
        self.fetch(self._weights)
        self.adopt()

    def exchange(self, check: Check, *, fetch: bool) -> None:
        """Compute the present contribution, `check` it, and add it. With `fetch` the parameters become the sums.
        Blocks. Call `finish` before. Raises what `check` raises, and UnavailableError and TimeoutError, after which
        `finish` goes on.
        """
        check(self.take(), whole=True)
        self.send(fetch=fetch)

    def send(self, *, fetch: bool) -> None:
        """Add the contribution of `take`, and take over the sums if they are fetched."""
        self.add(fetch)
        self._moved_bytes += self._sent_bytes
        if fetch:
            self.adopt()
            self._moved_bytes += self._weights.nbytes

    def read(self) -> None:
        """Set the parameters to the shared weights. Changes since the last exchange are dropped."""
        self.fetch(self._weights)
        self.adopt()
        self._moved_bytes += self._weights.nbytes

    def finish(self) -> bool:
        """Send what an earlier call failed to send. Returns False if no call failed. Blocks. Raises as `exchange`;
        repeat it then.
        """
        failed = self.add_missing()
        if failed:
            self._moved_bytes += self._sent_bytes
        return failed

    def moved_bytes(self) -> int:
        """Return the number of bytes that exchanges have sent and received since the last call."""
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

    def _absent(self) -> Error:
        return Error("a scheme moved values in a way that this kind of parameters does not have; report this as a bug")


class ArrayMover(Mover):
    """Moves the values of one process, block by block. It keeps arrays of the model's size in host memory. In ROUNDS: a
    base, and the changes that are due if contributions are sent in fewer bits. In FUSED: a base, and an array for the
    values that come back, unless the parameters are one array that takes them itself; if contributions are sent in
    fewer bits, or after a failed call, also the changes that are due. In ELASTIC: the difference.
    """

    def __init__(
        self,
        weights: Buffer,
        parameters: Parameters,
        way: str,
        sent_bytes: int = 0,
        arrived: Callable[[], object] | None = None,
    ) -> None:
        """`arrived` is called in the background once a whole difference was acknowledged. Its errors are logged."""
        super().__init__(weights, sent_bytes)
        self._parameters = parameters
        self._way = way
        self._arrived = arrived
        self._call: Future[None] | None = None  # adds a difference in the background
        self._spare: Values | None = None  # receives the values of the next exchange in place
        size = parameters.size
        if way == ROUNDS:
            due = None if weights.wire == EXACT else np.zeros(size, np.float32)
            self.ledger = Ledger(np.empty(size, np.float32), due)
            parameters.hold(self.ledger.base)
        elif way == FUSED:
            self.ledger = Ledger(np.zeros(size, np.float32))
        else:
            self.ledger = Ledger(due=np.empty(size, np.float32))
            parameters.hold(self.difference)

    @property
    def fetched(self) -> Values:
        """In ROUNDS the base, in FUSED the values that landed, in ELASTIC the array in which the
        difference is formed.
        """
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
        """In ROUNDS this reads into the base: a member that fetches then has nothing due, and repeats the fetch if it
        fails.
        """
        if self._way == FUSED:
            self.ledger.landing = self._room()
        self._parameters.read(weights, self.fetched)

    def adopt(self) -> None:
        self.ledger.count()
        self._fill(self.fetched)
        if self._way == FUSED:
            self.ledger.take_over()

    def forget(self) -> None:
        self.ledger.forget()
        self._nothing_is_due()

    # ---- ROUNDS

    def write(self, inbox: Buffer) -> Norm:
        """Write block by block: one block is sent while the next is computed."""
        ledger, parameters, found = self.ledger, self._parameters, Norm()
        written: deque[tuple[Buffer, Run]] = deque()  # the runs that this process writes
        under_way: deque[list[Future[Any]]] = deque()
        try:
            for begin, done in parameters.deltas(ledger.base):
                parameters.count_copy(done)
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
            _wait_all(under_way)  # until then the calls use the memory
        if ledger.due is not None:
            # The amounts stay due as well: only the caller knows when the contribution is sure to count.
            ledger.written = written
        return found

    # ---- ROUNDS in two halves, for an exchange in the background that must not touch the parameters

    def fetch_step(self, step: Buffer, room: Values, wire: str) -> None:
        """Read by how much the group's values have changed since the base, rounded as the servers rounded it, into
        `room`, (n,).
        """
        step.read(self._parameters.origin, self.ledger.base.size, out=room, wire=wire)

    def draw(self, out: Values) -> Norm:
        """Compute the changes since the parameters were filled, plus what rounding left, in `out`, (n,)."""
        found = Norm()
        for begin, done in self._parameters.deltas(self.ledger.base):
            found.add(self.ledger.draw(begin, done, out[begin : begin + done.size]))
        return found

    def put(self, inbox: Buffer, drawn: Values) -> None:
        """Write the result of `draw` into an inbox. Blocks. If it raises, repeat it. Does not touch the parameters."""
        inbox.write(drawn, self._parameters.origin)
        self.ledger.keep(drawn, inbox, self._parameters.origin)

    def merge(self, mix: float, room: Values) -> None:
        """Set the parameters to mix * parameters + (1 - mix) * what was fetched. `room`, (n,), is overwritten."""
        if mix == 0.0:
            self.adopt()
            return
        np.multiply(self.ledger.base, np.float32(1 - mix), out=room)
        for begin, block in self._parameters.blocks():
            room[begin : begin + block.size] += np.float32(mix) * block
        self._fill(room)

    # ---- FUSED

    def exchange(self, check: Check, *, fetch: bool) -> None:
        """As Mover.exchange. If contributions are sent exactly, in one call, and nothing of an earlier one is due, the
        exchange is made in place: the changes replace the base in its memory, and what comes back is the next base. So
        no change is copied, and no array is made.
        """
        if self.ledger.base.size != self._parameters.size:
            _log.warning(
                "training %r: what the optimizer has done since the last exchange is dropped, because that was "
                "interrupted twice",
                self._weights.name,
            )
            self.ledger.base = self._copy_of_values()
        whole = tuple(self._parameters.runs) == (Run(0, self._parameters.origin, self._parameters.size),)
        if whole and self._weights.wire == EXACT and self.ledger.due is None:
            self._exchange_in_place(check, fetch=fetch)
            return
        super().exchange(check, fetch=fetch)
        if whole:
            self._nothing_is_due()

    def _exchange_in_place(self, check: Check, *, fetch: bool) -> None:
        """Until it is over, the ledger has no base: whatever ends it, changes are never taken for values."""
        ledger, parameters, found = self.ledger, self._parameters, Norm()
        base, array = ledger.base, parameters.array if fetch else None
        noted: int | None = 0  # so many elements of the base's memory are changes
        try:
            ledger.base = NOTHING
            for begin, done in parameters.deltas(base, out=base):
                noted = begin + done.size
                found.add(done)
            ledger.due, noted = base, None
            check(found, whole=True)
            ledger.begin(parameters.runs, self._weights)
            ledger.landing = None if not fetch else self._room() if array is None else array
            ledger.add(lambda run: self._add(run, fetch=fetch))
            # All of it counts. If this is interrupted, `finish` finds `written`, and has nothing to send.
            ledger.due = None
            ledger.written.clear()
            self._moved_bytes += self._sent_bytes + (self._weights.nbytes if fetch else 0)
            landing, ledger.landing = ledger.landing, None
            if landing is not None and landing is not array:
                self._fill(landing)
                ledger.base, self._spare = landing, base
            else:  # the parameters have the values already
                ledger.base = copied(parameters, base)
        except BaseException as error:
            ledger.landing = None
            if noted == 0 and isinstance(error, Error):  # the parameters were refused before a block was replaced
                ledger.base = base
            elif not ledger.base.size:
                self._leave_place(base, noted)
            raise

    def _leave_place(self, former: Values, noted: int | None) -> None:
        """After a failure give the base an array of its own again. The first `noted` elements of `former`, its memory
        until now, are changes; None: all of them, or none that are due. If this fails, too, the next exchange makes a
        base.
        """
        base = self._copy_of_values()
        if noted is not None:
            # Ctrl-C while the changes were computed. It is unknown whether the block after `noted` was replaced
            # already, so its changes are dropped.
            base[noted + BLOCK_ELEMENTS :] = former[noted + BLOCK_ELEMENTS :]
            former[noted:] = 0
            self.ledger.due = former
        self.ledger.base = base

    def _copy_of_values(self) -> Values:
        return copied(self._parameters, np.empty(self._parameters.size, np.float32))

    def _fill(self, values: Values) -> None:
        self._parameters.fill(values)
        self._parameters.count_copy(values)

    def _room(self) -> Values:
        """Return an array for values that arrive. It is the caller's: no later call receives into it."""
        spare, self._spare = self._spare, None
        return np.empty(self._parameters.size, np.float32) if spare is None else spare

    def _nothing_is_due(self) -> None:
        """Free the memory of changes that are due, if nothing can remain there: exact contributions count whole."""
        if self._way == FUSED and self._weights.wire == EXACT:
            self.ledger.due = None

    def take(self) -> Norm:
        """Compute block by block. Includes what is left of an exchange that ended before its first call."""
        if self.ledger.due is None:
            self.ledger.due = np.zeros_like(self.ledger.base)
        for begin, done in self._parameters.deltas(self.ledger.base):
            self._parameters.count_copy(done)
            self.ledger.note(begin, done)
        return self._norm()

    def add(self, fetch: bool) -> None:
        """Make one call for each run that this process sends."""
        self.ledger.begin(self._parameters.runs, self._weights)
        self.ledger.landing = self._room() if fetch else None
        self.ledger.add(lambda run: self._add(run, fetch=fetch))
        self.ledger.count()

    def add_missing(self) -> bool:
        if not self.ledger.under_way:
            return False
        self.ledger.ask(functools.partial(missed, self._weights))
        self.ledger.add(lambda run: self._add(run, fetch=False))
        self.ledger.count()
        self._nothing_is_due()
        return True

    def _add(self, run: Run, *, fetch: bool = False) -> None:
        landing = self.ledger.landing
        out = landing[run.indices] if fetch and landing is not None else None
        self._weights.accumulate(self.difference[run.indices], run.there, fetch=fetch, out=out)

    def _norm(self) -> Norm:
        found = Norm()
        for run in self._parameters.runs:
            for part in run.cut():
                found.add(self.difference[part.indices])
        return found

    # ---- ELASTIC

    def form(self, alpha: float) -> Norm:
        """Compute block by block. If the difference is sent in fewer bits, both sides use it as it arrives."""
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
        """Send the difference, which must stay as it is until `wait` has returned. Raises InvalidArgumentError before
        that.
        """
        if self.under_way:
            raise InvalidArgumentError(
                f"a contribution to buffer {self._weights.name!r}: the previous one is not finished; wait for it first"
            )
        self.ledger.begin(self._parameters.runs)
        self._start()

    def wait(self) -> None:
        """The call's future is kept until its outcome is known, so neither an error nor Ctrl-C while waiting makes a
        run count twice or not at all.
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
                _log.warning("%s; what did not arrive is sent again", error)

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
        """Runs in a thread of the client's."""
        self.ledger.add(self._add)
        if self._arrived is not None:
            try:
                self._arrived()
            except Error as error:
                _log.warning("a contribution to buffer %r arrived, but was not counted: %s", self._weights.name, error)


def mover_of(group: Group, parameters: Parameters, way: str, arrived: Callable[[], object] | None = None) -> Mover:
    """Return the object that moves a worker's values: the parameters' own, if they have one."""
    found = parameters.mover(group, way, arrived)
    return found or ArrayMover(group.weights, parameters, way, group.sent_bytes, arrived)


def copied(parameters: Parameters, out: Values) -> Values:
    """Copy the present values into `out`, (n,), and return it."""
    for begin, block in parameters.blocks():
        out[begin : begin + block.size] = block
    parameters.count_copy(out)
    return out


def take_difference(values: Values, shared: Values, alpha: float) -> None:
    """Replace `shared`, float32 (n,), by d = alpha * (values - shared), rounded to float32 after each operation."""
    rate = np.float32(alpha)
    for at in range(0, values.size, _BLOCK):
        block = shared[at : at + _BLOCK]
        np.subtract(values[at : at + _BLOCK], block, out=block)
        block *= rate


def missed(buffer: Buffer, run: Run, error: BaseException) -> list[Run]:
    """Return the parts of a run that were not applied and never will be. Blocks. Raises TimeoutError.

    `error`, or Ctrl-C, ended the call that sent the run. If the outcome can't be found out any more, returns [], so
    that an element counts at most once.
    """
    try:
        missing = buffer.settle(error)
        return [Run(run.here + part.start - run.there, part.start, len(part)) for part in missing]
    except InvalidArgumentError:
        # After an error the call was refused or never sent, so its outcome is known. After Ctrl-C it most likely had
        # returned.
        return [run] if isinstance(error, Error) else []
    except UnavailableError as unknown:
        _log.warning("the outcome of a contribution is unknown; a part of it may be lost: %s", unknown)
        return []


def _failure(call: Future[None]) -> Error | None:
    """Return the error of a call, None if it succeeded. Blocks."""
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
