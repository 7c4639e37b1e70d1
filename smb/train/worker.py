"""One process's part in a training: `join` gives a Worker, whose `step` is called after every local step."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import operator
import struct
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import numpy as np

from smb.buffer import Buffer
from smb.client import Client
from smb.config.log import TRAINING
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError
from smb.rpc import control_pb2 as pb
from smb.spi import session_of
from smb.train import member_table as t
from smb.train.group import Group, check_placement, clear, enter
from smb.train.guards import Guards
from smb.train.parameters import ArrayParameters, Parameters, Values
from smb.train.progress import ExchangeEvent, Progress, progress_of
from smb.train.scheme import Exchange, Scheme
from smb.train.status import WorkerStatus, worker_status
from smb.train.steps import Steps, there

_log = logging.getLogger("smb")
_news = logging.getLogger(TRAINING)
# Those whose programs forget them.
_open: weakref.WeakSet[Worker] = weakref.WeakSet()
_EXIT_S = 1.0  # for each call, at the interpreter's exit
_GUARD_MAX = 255  # characters, of what a report tells


def join(
    client: Client,
    name: str,
    values: Values,
    scheme: Scheme | None = None,
    *,
    guards: Guards | None = None,
    lease: float | None = None,
    fresh: bool = False,
    **placement: Any,
) -> Worker:
    """Join the training of that name, at any time. Return the worker, a context manager.

    ```python
    values = np.zeros(1000, np.float32)
    with smb.train.join(client, "run", values, smb.train.LocalSGD(every=50)) as worker:
        values -= 0.1 * gradient(values)
        worker.step(samples=32)
    ```

    `values` are this worker's parameters: a contiguous float32 numpy array (n,) that stays in its place in memory. The
    first worker makes the group, with its values, scheme, guards (default: Guards()), lease (seconds, default 10: how
    long a dead or stopped member keeps the others waiting) and `placement`: servers=, stripe=, wire=, replicas= of
    Client.create. Later ones get the present shared model into `values`; None adopts what the group has. fresh=True
    begins anew: it deletes a training of this name in which nobody is alive, with its model.

    Blocks for a few calls, and holds up nobody who trains. Logs the join (smb.train, INFO), to standard error unless
    the program has set up logging.

    Raises AlreadyExistsError with fresh=True if others are alive in it, InvalidArgumentError if the settings differ
    from the group's (it says which), NotFoundError if there is no group and no scheme was given, OutOfMemoryError if
    there are 48 members already, or no room for the scheme's copies of the model (docs/training.md). After an error
    nothing of this join stays.
    """
    check_placement(f"join of training {name!r}", placement)
    parameters = ArrayParameters(values, f"join of training {name!r}")
    if fresh:
        clear(client, name, parameters, scheme, lease, placement.get("replicas"))
    worker = take_part(client, name, parameters, scheme, guards, lease, **placement)
    try:
        if fresh and not worker.made:
            raise AlreadyExistsError(f"join of training {name!r} with fresh=True: another has made it at this moment")
        worker.begin()
        worker.announce()
    except BaseException:
        worker.withdraw()
        raise
    return worker


def take_part(
    client: Client,
    name: str,
    parameters: Parameters,
    scheme: Scheme | None,
    guards: Guards | None,
    lease: float | None,
    **placement: Any,
) -> Worker:
    """Return a member of the training of that name, made first if there is none: `begin` it, or `withdraw`. Raises as
    join; the parameters stay as they are.
    """
    made: list[Worker] = []

    def run(group: Group) -> Worker:
        made.append(Worker(group, parameters))
        return made[0]

    try:
        return enter(client, name, parameters, scheme, guards, lease, run, **placement)
    except BaseException:
        for worker in made:
            worker._forget()
        raise


class Worker:
    """This process's membership in a training. Made by smb.train.join. Use it in one thread."""

    def __init__(self, group: Group, parameters: Parameters) -> None:
        """Under the group's setup lock: see take_part."""
        self._group = group
        self._parameters = parameters
        self._closed = False
        self._listeners: list[Callable[[ExchangeEvent], object]] = []
        self._looking = t.Table(group.table.buffer)  # with rows of its own: others look while a step is under way
        self._steps = Steps(group, parameters, self._tell)
        _open.add(self)
        session_of(group.client).reports[id(self)] = self._report

    def begin(self) -> None:
        """Make the parameters the shared model: the last part of joining. If it fails, they are unchanged; then
        withdraw().
        """
        self._steps.exchange.restart()

    @property
    def name(self) -> str:
        """The group's name."""
        return self._group.name

    @property
    def scheme(self) -> Scheme:
        """The group's scheme, with its settings."""
        return self._group.scheme

    @property
    def exchange(self) -> Exchange:
        """The scheme's side of this worker, for what a single scheme offers beyond step(). See the scheme's
        documentation.
        """
        return self._steps.exchange

    @property
    def batch_size(self) -> int | None:
        """How many samples the next local step should have; None if the scheme leaves that to you."""
        return self._steps.exchange.batch_size

    @property
    def gradient_scale(self) -> float:
        """The factor for the gradient, or the loss, of the next local step; 1.0 unless batch_size differs."""
        return self._steps.exchange.gradient_scale

    @property
    def status(self) -> WorkerStatus:
        """The group's record of this worker."""
        return worker_status(self._looking.read(), self._group.member.slot)

    @property
    def contributions(self) -> int:
        """The number of contributions that this worker has sent. Asks no server."""
        return self._group.member.get(t.CONTRIBUTIONS)

    @property
    def progress(self) -> Progress:
        """The group's steps and samples so far. One small read."""
        found = progress_of(self._looking.read())
        return dataclasses.replace(found, steps=max(found.steps, self._group.member.get(t.STEPS)))

    def on_exchange(self, listener: Callable[[ExchangeEvent], object]) -> None:
        """Call `listener` after each exchange of this worker, in the thread that steps. Each exchange then costs a
        small read more.
        """
        self._listeners.append(listener)

    @property
    def made(self) -> bool:
        """True if this worker made the training, as the first to join."""
        return self._group.made

    @property
    def deleted(self) -> bool:
        """True if the training was deleted. One small read."""
        return self._group.deleted()

    @property
    def members(self) -> int:
        """The number of members now, including this worker and dead ones that nobody has noticed yet. One
        small read.
        """
        return max(1, len(self._group.live(self._looking.read())))

    def step(self, samples: int | None = None) -> None:
        """Report a local step over `samples` samples, and exchange when the scheme says so. Call it after every local
        step.

        Changes the values in place. Blocks as the scheme says, otherwise as long as its calls take. Without samples=
        none are counted, and a step weighs as one.

        Raises UnavailableError and TimeoutError if a server was away for longer than the client's timeout: call it
        again later, and nothing counts twice. Raises RefusedContributionError if a guard refused the contribution:
        nothing was sent, and the values are the shared model's. Raises NotFoundError if the training was deleted;
        close() succeeds then.

        A worker that was stopped for longer than its lease joins again by itself: its values are the shared model's,
        and what it had not sent is dropped, counted and logged.
        """
        self._check_open()
        self._check_samples(samples)
        self._steps.step(samples)

    @property
    def steps(self) -> Steps:
        """The steps, for what steps in the background (smb/overlap/hooks.py). Raises where this worker has left."""
        self._check_open()
        return self._steps

    def start(self, samples: int | None, over: Callable[[], object]) -> None:
        """Begin a step as `step` does, in a thread of its own, which calls `over` last: see Steps.start."""
        steps = self.steps
        self._check_samples(samples)
        steps.start(samples, over)

    @property
    def weights(self) -> Buffer:
        """The group's weights."""
        return self._group.weights

    def _tell(self, moved: int, seconds: float) -> None:
        if not self._listeners:
            return
        member, progress = self._group.member, self.progress
        norm = struct.unpack("<d", struct.pack("<q", member.get(t.NORM)))[0]
        event = ExchangeEvent(member.get(t.STEPS), progress.round, norm, member.get(t.STALENESS), moved, seconds)
        for listener in self._listeners:
            listener(event)

    def flush(self) -> None:
        """Finish exchanges in the background, and wait for them."""
        self.steps.flush()

    def contribute_rest(self) -> None:
        """Contribute the local steps since the last exchange, if the scheme can do so without waiting for others: local
        SGD.

        close() does it, too. Raises as step() does.
        """
        self.steps.contribute_rest()

    def finish(self) -> None:
        """Finish exchanges in the background and contribute the rest, as far as the scheme can: the first part of
        close().

        Raises as flush(). A rest that cannot be sent is only a warning.
        """
        self.flush()
        try:
            self.contribute_rest()
        except NotFoundError:
            raise
        except Error as error:
            _log.warning("training %r: the local steps since the last exchange are not in it: %s", self.name, error)

    def shared(self, out: Values | None = None) -> Values:
        """Return the present shared model, float32 (n,), in `out` if given. It is of one round in schemes
        with rounds.
        """
        self._check_open()
        result: Values = np.empty(self._group.weights.size, np.float32) if out is None else out
        with self.there():
            self._group.read(result)
        return result

    def setting_up(self) -> contextlib.AbstractContextManager[None]:
        """Make buffers under the training's name in the block: see Group.setting_up."""
        return self._group.setting_up()

    def look(self, read: Callable[[Buffer], object]) -> None:
        """Call `read` with the shared weights until it has read them of one round."""
        self._check_open()
        with self.there():
            self._group.read_by(read)

    def there(self) -> contextlib.AbstractContextManager[None]:
        """Say of what is not found in the block that the training was deleted, where that is why."""
        return there(self._group)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take no part while the block runs, so that nobody waits for this worker.

        Afterwards its values are the present shared model, and what it had not sent is lost.
        """
        self.steps.go()
        try:
            yield
        finally:
            self._steps.return_()

    def close(self, *, load: bool = False) -> None:
        """Leave the group. What was sent counts, and the others go on without this worker. A second call does nothing.

        Local steps since the last exchange are contributed (contribute_rest); a failure of that is logged. Waits for no
        other worker. With load=True the values become the present shared model; if that fails it raises, and they stay.
        If a daemon is away, a warning is logged; if it is a memory server, the others wait for this worker until its
        lease ends.
        """
        if self._closed:
            return
        try:
            self._tidy(self.finish)
        finally:
            self._leave(load=load)

    def abandon(self) -> None:
        """Leave at once. Local steps since the last exchange are lost. A second call does nothing."""
        if not self._closed:
            self._leave(load=False)

    def _leave(self, *, load: bool) -> None:
        self._forget()
        self._steps.give_up()
        together = self._parameters.in_ranks
        try:
            if load and together:
                with self.there():
                    self._steps.exchange.restart()
            self._tidy(self._steps.exchange.close)
            if load and not together:
                del self._steps.exchange  # its memory has the model's size
                shared: Values = np.empty(self._group.weights.size, np.float32)
                with self.there():
                    self._group.read(shared)
                self._parameters.fill(shared)
            if self._steps.unsent:
                _news.info("%s", self._left_out())
        finally:
            last = self._report()
            last.left = True
            session_of(self._group.client).reports[object()] = lambda: last
            self._tidy(self._group.leave)

    def _left_out(self) -> str:
        """Return which steps are in no exchange, in a line."""
        scheme, unsent = self.scheme, self._steps.unsent
        most, of = ("up to ", "each fragment's") if len(self._group.spans) > 1 else ("", "the")
        steps = f"{most}{unsent} local step{' is' if unsent == 1 else 's are'}"
        return (
            f"left training {self.name!r}: {steps} not in its model, those since {of} last exchange; {scheme.NAME} "
            f"exchanges whole rounds of {scheme.interval()} steps"
        )

    def _tidy(self, leave: Callable[[], None]) -> None:
        try:
            leave()
        except NotFoundError as error:
            _log.debug("training %r: %s", self.name, error)
        except Error as error:
            _log.warning("training %r: could not leave it tidily: %s", self.name, error)

    def _forget(self) -> None:
        self._closed = True
        _open.discard(self)
        session_of(self._group.client).reports.pop(id(self), None)

    def withdraw(self) -> bool:
        """Leave right after joining: close(), and if this worker made the group and nobody else has joined, delete the
        group.

        Returns whether the group is gone.
        """
        self._forget()
        try:
            self._steps.exchange.close()
        except Error as error:
            _log.warning("training %r: %s", self.name, error)
        return self._group.withdraw()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def __repr__(self) -> str:
        member = self._group.member
        state = ", closed" if self._closed else ""
        return (
            f"<smb.train.Worker {member.slot} of training {self.name!r}: {self.scheme}, "
            f"{self.contributions} contributions{state}>"
        )

    def announce(self) -> None:
        """Log what joining did. One small read; if that fails, this is logged."""
        try:
            _news.info("%s", self.arrival())
        except Error as error:  # the join is done, and the values are the shared model's: a line is no reason to leave
            _log.warning("joined training %r; how many train there is not known now: %s", self.name, error)

    def arrival(self) -> str:
        """Return what joining did, in a line. One small read."""
        group = self._group
        rows = group.table.read()
        if group.made:
            return f"made training {self.name!r} ({self.scheme.NAME}); its weights are yours"
        round_ = int(rows[0, t.ROUND]) >> t.ROUND_SHIFT
        at = f"round {round_}, " if round_ else ""
        count = len(group.live(rows))
        return (
            f"joined training {self.name!r} ({self.scheme.NAME}, {at}{count} worker{'' if count == 1 else 's'}; its "
            f"weights replaced yours)"
        )

    def _report(self) -> pb.TrainingReport:
        """Return the report for the coordinator, for people. No call; from another thread."""
        member = self._group.member
        return pb.TrainingReport(
            name=self.name,
            slot=member.slot,
            clock=member.clock,
            samples=member.get(t.SAMPLES),
            contributions=member.get(t.CONTRIBUTIONS),
            staleness=member.get(t.STALENESS),
            refused=member.get(t.REFUSED),
            guard=self._group.guard_fired[:_GUARD_MAX],
        )

    def _check_samples(self, samples: int | None) -> None:
        try:
            known = samples is None or operator.index(samples) >= 0
        except TypeError:
            known = False
        if not known:
            raise InvalidArgumentError(f"step of training {self.name!r}: samples={samples!r} is no number from 0 on")

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError(f"the worker has left training {self.name!r}; join again")


@atexit.register
def _leave_all() -> None:
    """Leave trainings before the clients are closed (smb.client), so that the others wait for nobody.

    Waits for no other worker: what was not sent stays so.
    """
    for worker in list(_open):
        with contextlib.suppress(Error):  # a child of fork, too
            session_of(worker._group.client).hurry(_EXIT_S)
            worker.abandon()
