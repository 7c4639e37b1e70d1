"""A worker's steps: in the caller's thread or in a background thread, how each step ends, and how the worker goes on.

A step ends in one of four ways. It succeeds. Or the membership was lost: the worker joins again, and its values are the
shared model's. Or a guard refused the contribution: the worker takes over the shared model, and the refusal is raised.
Or a call failed: the caller repeats the step, which goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from smb.config import tracing
from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.train import member_table as t
from smb.train.group import Group
from smb.train.group_making import room
from smb.train.guards import RefusedContributionError
from smb.train.members import MembershipLostError
from smb.train.parameters import Parameters
from smb.train.scheme import Exchange

_log = logging.getLogger("smb")


@dataclass
class _Job:
    """A step: its number of samples, when it began (time.perf_counter), and how it ended. `moved` and `contributions`
    are the bytes and contributions that had been sent before it.
    """

    samples: int
    started: float
    moved: int
    contributions: int
    seconds: float = 0.0
    error: BaseException | None = None
    thread: threading.Thread | None = None


class Steps:
    """The steps of one worker. Calls come from one thread."""

    def __init__(self, group: Group, parameters: Parameters, exchanged: Callable[[int, float], object]) -> None:
        """The caller holds the group's setup lock. `exchanged` is called after a step that moved bytes, with the number
        of bytes and the seconds.
        """
        self._group = group
        self._parameters = parameters
        self._exchanged = exchanged
        self.away = False  # joining again has begun and is not done
        self.unsent = 0  # local steps that the last contribute_rest() could not send
        self.lost_steps = 0  # of all losses of the membership
        self._lost_now = 0  # since the membership was lost, until this worker is back
        self._seated = False  # `away`, but this worker has a slot again
        self._job: _Job | None = None  # a step in the background
        self._failed = False  # the last background step failed, and may have left something unsent
        # A refusal after which the shared model is not taken over yet.
        self._refusal: RefusedContributionError | None = None
        parameters.seated(group)
        with room(group.name, group.scheme, 4 * parameters.size):
            self.exchange: Exchange = group.scheme.run(group, parameters)

    def step(self, samples: int | None) -> None:
        """Take one step in the caller's thread: see Worker.step."""
        _check_samples(self._group.name, samples)
        with there(self._group), self._span():
            if self.away:
                self._rejoin()
                return
            self._start_over()
            job = self._noted(samples)
            with self._group.time_spent.blocked:
                self._run(job)
            self._ended(job)

    def _span(self) -> contextlib.AbstractContextManager[None]:
        group = self._group
        return tracing.span("smb.step", {"smb.training": group.name, "smb.scheme": group.scheme.NAME})

    def flush(self) -> None:
        """Finish the exchanges in the background, and wait for them."""
        self.finish()
        if self.away:
            return
        with there(self._group):
            try:
                self.exchange.flush()
            except MembershipLostError as error:
                self._lost_it(error)

    def contribute_rest(self) -> None:
        """Contribute the local steps since the last exchange, if the scheme can."""
        if self.away or self._failed or self._job is not None:  # in the background each step is exchanged
            return
        with there(self._group):
            self._start_over()
            try:
                self.unsent = max(self.unsent, self.exchange.contribute_rest())
            except MembershipLostError as error:
                self._lost_it(error)
            except RefusedContributionError as error:
                self._refusal = error
                self._start_over()

    # ---- one step in the background, for parameters that move in parts (smb/overlap/parts.py)

    def start(self, samples: int | None, over: Callable[[], object]) -> None:
        """Begin a step like `step`, but in a thread of its own, which calls `over` last. `finish` ends the step; until
        then only status, progress and members may be used. Call `recover` before.
        """
        _check_samples(self._group.name, samples)
        assert self._job is None
        assert not self._failed
        job = self._noted(samples)

        def run() -> None:
            with self._span():
                self._run(job)
            over()

        job.thread = threading.Thread(target=tracing.carried(run), name="smb-exchange", daemon=True)
        job.thread.start()
        self._job = job

    @property
    def under_way(self) -> bool:
        """True if there is a background step that `finish` has not ended."""
        return self._job is not None

    @property
    def lost(self) -> bool:
        """True if a background step has ended because this worker's membership was lost. Makes no call."""
        return self._job is not None and isinstance(self._job.error, MembershipLostError)

    @property
    def failed(self) -> bool:
        """True if a background step has failed so far; `finish` raises the error. Makes no call."""
        return self._job is not None and self._job.error is not None

    @property
    def refused(self) -> bool:
        """True if a contribution was refused and the shared model could not be taken over; `recover` does that. Makes
        no call.
        """
        return self._refusal is not None

    @property
    def unfinished(self) -> bool:
        """True if `finish` has raised a step's failure and `recover` was not called. Makes no call."""
        return self._failed or self.away or self._refusal is not None

    def wait(self) -> None:
        """Wait for a background step, and let `finish` say how it ended."""
        if self._job is not None and self._job.thread is not None:
            with self._group.time_spent.blocked:
                self._job.thread.join()

    def finish(self) -> bool:
        """Wait for a background step. Raises what `step` raises, and joins again in the same cases: then it returns
        True, and the parameters are the shared model's.
        """
        job, self._job = self._job, None
        if job is None:
            return False
        assert job.thread is not None
        try:
            with self._group.time_spent.blocked:
                job.thread.join()
        except BaseException:  # Ctrl-C: the step is still running
            self._job = job
            raise
        rejoins = self._group.member.get(t.REJOINS)
        self._failed = isinstance(job.error, Error) and not isinstance(
            job.error, (MembershipLostError, RefusedContributionError)
        )
        with there(self._group):
            self._ended(job)
        return self._group.member.get(t.REJOINS) != rejoins

    def recover(self) -> bool:
        """Finish what a failed step left, so that the next step may begin. Blocks. May raise what `step` raises.

        Returns True if this worker had to join again: then the parameters are the shared model's.
        """
        with there(self._group):
            if self.away:
                self._rejoin()
                self._failed = False
                return True
            self._start_over()
            if self._failed:
                try:
                    self.exchange.flush()
                except MembershipLostError as error:
                    self._lost_it(error)
                    self._failed = False
                    return True
                self._failed = False
        return False

    def give_up(self) -> None:
        """End a background step before it is done. Parts that were sent count."""
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return
        self._group.given_up = True
        self._parameters.give_up()
        job.thread.join()
        self._group.given_up = False

    # ---- away, and back

    def go(self) -> None:
        """Take no part in the training until `return_`."""
        self.finish()
        with contextlib.suppress(MembershipLostError):  # the membership was lost, so this worker is away already
            self.exchange.close()
        self.away = True  # also if leaving fails: the exchange has ended
        self._group.leave()

    def return_(self) -> None:
        """Take part again after `go`."""
        self._back(self._group.return_)

    def come_back(self) -> None:
        """Take part again if an earlier call failed to. Acts and may raise as `step` does."""
        if self.away:
            with there(self._group):
                self._rejoin()

    def _lost_it(self, error: MembershipLostError) -> None:
        _log.warning("training %r: %s", self._group.name, error)
        self._rejoin()

    def _rejoin(self) -> None:
        self._lost_now += self.exchange.abandon()
        self._back(lambda: self._group.rejoin(self._lost_now))
        self.lost_steps += self._lost_now
        self._lost_now = 0

    def _back(self, join: Callable[[], None]) -> None:
        self.away = True
        with self._group.setting_up():  # first, so that no member waits for this worker before it has a slot
            if not self._sits():
                self._seated = False
                join()
                self._parameters.seated(self._group)
                self._seated = True
            self.exchange = self._group.scheme.run(self._group, self._parameters)
        self.exchange.restart()
        self.away = self._seated = False
        self._refusal = None

    def _sits(self) -> bool:
        """Return True if an earlier call has taken a slot that is still ours, but failed afterwards."""
        with contextlib.suppress(MembershipLostError):
            if self._seated:
                self._group.member.check()
                return True
        return False

    # ---- how a step goes

    def _noted(self, samples: int | None) -> _Job:
        self.unsent = 0
        member = self._group.member
        member.add(t.STEPS, 1)
        for group in filter(None, (self._group, self._group.nested)):
            group.samples_known = samples is not None
        return _Job(
            1 if samples is None else samples, time.perf_counter(), member.get(t.BYTES), member.get(t.CONTRIBUTIONS)
        )

    def _run(self, job: _Job) -> None:
        try:
            with self._group.time_spent.exchanging:
                self.exchange.step(job.samples)
        except BaseException as error:  # noqa: BLE001 - raised by _ended
            job.error = error
        job.seconds = time.perf_counter() - job.started

    def _ended(self, job: _Job) -> None:
        error = job.error
        if isinstance(error, MembershipLostError):
            if self.exchange.EACH_STEP and self._group.member.get(t.CONTRIBUTIONS) == job.contributions:
                self._group.member.add(t.DROPPED, 1)
                self._lost_now += 1
            self._lost_it(error)
        elif isinstance(error, RefusedContributionError):
            self._refusal = error
            self._start_over()
        elif isinstance(error, Error):
            self._group.member.add(t.STEPS, -1)  # the step is called again
            raise error
        elif error is not None:
            raise error
        moved = self._group.member.get(t.BYTES) - job.moved
        if moved > 0:
            self._exchanged(moved, job.seconds)

    def _start_over(self) -> None:
        """If a contribution was refused, take over the shared model and raise the refusal. If taking over fails, the
        next call repeats it before anything else: the exchange may have read a newer model by then, which the
        parameters do not have.
        """
        if self._refusal is not None:
            self.exchange.restart()
            refusal, self._refusal = self._refusal, None
            raise refusal


def _check_samples(name: str, samples: int | None) -> None:
    try:
        known = samples is None or operator.index(samples) >= 0
    except TypeError:
        known = False
    if not known:
        raise InvalidArgumentError(
            f"step of training {name!r}: samples must be a whole number from 0 on, not {samples!r}"
        )


@contextlib.contextmanager
def there(group: Group) -> Iterator[None]:
    """If the block raises NotFoundError because the training was deleted, the error says that."""
    try:
        yield
    except NotFoundError as error:
        if not group.deleted():
            raise
        raise NotFoundError(f"training {group.name!r} was deleted") from error
