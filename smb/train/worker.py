"""One process's part in a training: `join` returns a Worker, whose `step` is called after every local step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from smb.buffer import Buffer
from smb.client import Client
from smb.config.pickling import refuse_pickle
from smb.errors import AlreadyExistsError
from smb.train import member_table as t
from smb.train.attempts import until_joined
from smb.train.group import Group
from smb.train.group_making import check_placement, clear, enter
from smb.train.guards import Guards
from smb.train.membership import Membership
from smb.train.parameters import ArrayParameters, Parameters, Values
from smb.train.progress import ExchangeEvent, ExchangeListeners, Progress, progress_of
from smb.train.scheme import Exchange, Scheme
from smb.train.steps import Steps, there
from smb.train.worker_status import WorkerStatus, worker_status


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
    Client.create. For later workers the present shared model is written into `values`; None adopts the group's setting.
    fresh=True begins anew: it deletes a training of this name in which nobody is alive, with its model.

    Blocks for a few calls, and does not hold up workers that train. If the cluster can't take it now, or all slots
    are taken, it tries again for up to the client's timeout, which is logged. Logs the join (smb.train, INFO), to
    standard error unless the program has set up logging.

    Raises AlreadyExistsError with fresh=True if other workers of the training are alive, InvalidArgumentError if the
    settings differ from the group's (the error says which), NotFoundError if there is no group and no scheme was given,
    OutOfMemoryError if there are as many members as the scheme takes (512, with R2SP 128, and 48 with rounds if an
    earlier release made the training), or no room for the scheme's footprint (docs/training.md). After an
    error nothing of this join remains.
    """
    check_placement(f"join of training {name!r}", placement)
    parameters = ArrayParameters(values, f"join of training {name!r}")

    def attempt() -> Worker:
        if fresh:
            clear(client, name, parameters, scheme, lease, placement.get("replicas"))
        worker = take_part(client, name, parameters, scheme, guards, lease, **placement)
        try:
            if fresh and not worker.made:
                raise AlreadyExistsError(
                    f"join of training {name!r} with fresh=True: another process has just made it; leave fresh= out to "
                    f"train with it, or take another name"
                )
            worker.membership.begin()
            worker.membership.announce()
        except BaseException:
            worker.membership.withdraw()
            raise
        return worker

    return until_joined(client, attempt)


def take_part(
    client: Client,
    name: str,
    parameters: Parameters,
    scheme: Scheme | None,
    guards: Guards | None,
    lease: float | None,
    **placement: Any,
) -> Worker:
    """Return a new member of the training of that name, which is made first if it does not exist. Afterwards call
    `begin` or `withdraw` of its membership. Raises as join; the parameters stay as they are.
    """
    made: list[Worker] = []

    def run(group: Group) -> Worker:
        made.append(Worker(group, parameters))
        return made[0]

    try:
        return enter(client, name, parameters, scheme, guards, lease, run, **placement)
    except BaseException:
        for worker in made:
            worker.membership.forget()
        raise


class Worker:
    """This process's membership in a training. Made by smb.train.join. Use it in one thread.

    ```python
    with smb.train.join(client, "run", values) as worker:
        worker.step(samples=32)
        worker.contributions  # 0: every=50, so the first exchange comes after 50 steps
    ```
    """

    def __init__(self, group: Group, parameters: Parameters) -> None:
        """The caller holds the group's setup lock: see take_part."""
        self.group = group  # other modules of smb use its buffers and table
        self._looking = t.Table(group.table.buffer)  # with rows of its own, because it is read while a step is running
        self._listeners = ExchangeListeners(group, self._looking.read)
        self._steps = Steps(group, parameters, self._listeners.tell)
        self.membership = Membership(group, parameters, self._steps)

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    @property
    def scheme(self) -> Scheme:
        """The group's scheme, with its settings."""
        return self.group.scheme

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
        return worker_status(self._looking.read(), self.group.member.slot)

    @property
    def contributions(self) -> int:
        """The number of contributions that this worker has sent. Asks no server."""
        return self.group.member.get(t.CONTRIBUTIONS)

    @property
    def progress(self) -> Progress:
        """The group's steps and samples so far. One small read."""
        found = progress_of(self._looking.read())
        steps = max(found.steps, self.group.member.get(t.STEPS))
        return dataclasses.replace(found, steps=steps, lost_steps=self._steps.lost_steps)

    def on_exchange(self, listener: Callable[[ExchangeEvent], object]) -> None:
        """Call `listener` after each exchange of this worker, in the thread that steps. Each exchange then takes one
        more small read.

        ```python
        with smb.train.join(client, "run", values) as worker:
            worker.on_exchange(lambda event: print(event.step, event.norm))
            worker.step(samples=32)
        ```
        """
        self._listeners.add(listener)

    @property
    def made(self) -> bool:
        """True if this worker made the training, as the first to join."""
        return self.group.made

    @property
    def deleted(self) -> bool:
        """True if the training was deleted or is being deleted. One small read."""
        return self.group.deleted()

    @property
    def members(self) -> int:
        """The number of members now, including this worker, and dead members until their death is noticed. One small
        read.
        """
        return max(1, len(self.group.live(self._looking.read())))

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
        and what it had not sent is dropped, counted and logged (Progress.lost_steps).

        ```python
        with smb.train.join(client, "run", values) as worker:
            values -= 0.1 * gradient(values)
            worker.step(samples=32)
        ```
        """
        self.steps.step(samples)

    @property
    def steps(self) -> Steps:
        """The steps, for other modules of smb. Raises InvalidArgumentError if this worker has left."""
        self.membership.check_open()
        return self._steps

    @property
    def weights(self) -> Buffer:
        """The group's weights."""
        return self.group.weights

    def flush(self) -> None:
        """Finish exchanges in the background, and wait for them.

        ```python
        with smb.train.join(client, "run", values) as worker:
            worker.step(samples=32)
            worker.flush()
        ```
        """
        self.steps.flush()

    def contribute_rest(self) -> None:
        """Contribute the local steps since the last exchange, if the scheme can do so without waiting for others: local
        SGD.

        close() does it, too. Raises as step() does.

        ```python
        with smb.train.join(client, "run", values) as worker:
            worker.step(samples=32)
            worker.contribute_rest()
            worker.contributions  # 1
        ```
        """
        self.steps.contribute_rest()

    def shared(self, out: Values | None = None) -> Values:
        """Return the present shared model, float32 (n,), in `out` if given. In schemes with rounds it is the model of
        one round.

        ```python
        with smb.train.join(client, "run", values) as worker:
            worker.shared().shape  # (1000,)
        ```
        """
        self.membership.check_open()
        result: Values = np.empty(self.group.weights.size, np.float32) if out is None else out
        with there(self.group):
            self.group.read(result)
        return result

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take no part while the block runs, so that nobody waits for this worker.

        Afterwards its values are the present shared model, and what it had not sent is lost.

        ```python
        with smb.train.join(client, "run", values) as worker:
            worker.step(samples=32)
            with worker.aside():
                loss = train(batches)  # something slow, such as an evaluation
        ```
        """
        self.steps.go()
        try:
            yield
        finally:
            self._steps.return_()

    def close(self, *, load: bool = False) -> None:
        """Leave the group. What was sent counts, and the others go on without this worker. A second call does nothing.

        Local steps since the last exchange are contributed (contribute_rest); if that fails, a warning is logged. Waits
        for no other worker. With load=True the values become the present shared model; if that fails, close() raises
        and the values stay as they are. If a daemon is away, a warning is logged; if it is a memory server, the others
        wait for this worker until its lease ends.

        ```python
        worker = smb.train.join(client, "run", values)
        worker.step(samples=32)
        worker.close(load=True)  # values is the shared model
        ```
        """
        self.membership.close(load=load)

    def abandon(self) -> None:
        """Leave at once. Local steps since the last exchange are lost. A second call does nothing.

        ```python
        worker = smb.train.join(client, "run", values)
        worker.step(samples=32)
        worker.abandon()  # the step is lost
        ```
        """
        self.membership.abandon()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def __reduce__(self) -> NoReturn:
        refuse_pickle(repr(self), f"call smb.train.join with training {self.name!r}")

    def __repr__(self) -> str:
        member = self.group.member
        state = ", closed" if self.membership.closed else ""
        return (
            f"<smb.train.Worker {member.slot} of training {self.name!r}: {self.scheme}, "
            f"{self.contributions} contributions{state}>"
        )
