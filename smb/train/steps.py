"""A worker's steps: in the caller's thread or in one of their own, how each ended, and how the worker goes on.

A step ends in one of four ways. It is done. Or the membership was lost: the worker joins again, and its values are the
shared model's. Or a guard refused the contribution: the shared model is taken over, and that is said. Or a call failed:
the step is called again, and goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.train import member_table as t
from smb.train.group import Group, room
from smb.train.guards import RefusedContributionError
from smb.train.members import MembershipLostError
from smb.train.parameters import Parameters
from smb.train.scheme import Exchange

_log = logging.getLogger("smb")


@dataclass
class _Job:
    """A step: how many samples it is of, when it began (time.perf_counter), and how it ended. `moved` and
    `contributions` are bytes and contributions that had been sent before it.
    """

    samples: int
    started: float
    moved: int
    contributions: int
    seconds: float = 0.0
    error: BaseException | None = None
    thread: threading.Thread | None = None


class Steps:
    """One worker's. Calls come from one thread."""

    def __init__(self, group: Group, parameters: Parameters, exchanged: Callable[[int, float], object]) -> None:
        """Under the group's setup lock. `exchanged` is called after a step that moved bytes: how many, in how long."""
        self._group = group
        self._parameters = parameters
        self._exchanged = exchanged
        self.away = False  # joining again was begun, and is not done
        self.unsent = 0  # local steps that the last contribute_rest() could not send
        self._seated = False  # away, but we have a slot again
        self._job: _Job | None = None  # a step in the background
        self._failed = False  # the last step in the background did, and may have left something unsent
        self._refusal: RefusedContributionError | None = None  # after it the shared model is not taken over yet
        parameters.seated(group)
        with room(group.name, group.scheme, 4 * parameters.size):
            self.exchange: Exchange = group.scheme.run(group, parameters)

    def step(self, samples: int | None) -> None:
        """Do one in the caller's thread: see Worker.step."""
        _check_samples(self._group.name, samples)
        with there(self._group):
            if self.away:
                self._rejoin()
                return
            self._start_over()
            job = self._noted(samples)
            self._run(job)
            self._ended(job)

    def flush(self) -> None:
        """Finish what is under way in the background, and wait for it."""
        self.finish()
        if self.away:
            return
        with there(self._group):
            try:
                self.exchange.flush()
            except MembershipLostError as error:
                self._lost_it(error)

    def contribute_rest(self) -> None:
        """Contribute the local steps since the last exchange, as far as the scheme can."""
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

    # ---- one in the background, for parameters that move by parts (smb/overlap/parts.py)

    def start(self, samples: int | None, over: Callable[[], object]) -> None:
        """Begin a step as `step` does, in a thread of its own, which calls `over` last. `finish` ends it: before that
        no other call but those that look (status, progress, members) is made. Call `recover` before.
        """
        _check_samples(self._group.name, samples)
        assert self._job is None
        assert not self._failed
        job = self._noted(samples)

        def run() -> None:
            self._run(job)
            over()

        job.thread = threading.Thread(target=run, name="smb-exchange", daemon=True)
        job.thread.start()
        self._job = job

    @property
    def under_way(self) -> bool:
        """Whether there is a step in the background that `finish` has not ended."""
        return self._job is not None

    @property
    def lost(self) -> bool:
        """Whether a step in the background has ended because this worker's membership was lost. No call."""
        return self._job is not None and isinstance(self._job.error, MembershipLostError)

    @property
    def failed(self) -> bool:
        """Whether a step in the background has failed, as far as is known now; `finish` says how. No call."""
        return self._job is not None and self._job.error is not None

    @property
    def refused(self) -> bool:
        """Whether a contribution was refused, and the shared model could not be taken over then; `recover` does. No
        call.
        """
        return self._refusal is not None

    @property
    def unfinished(self) -> bool:
        """Whether a step has failed, as `finish` said, and `recover` was not called. No call."""
        return self._failed or self.away or self._refusal is not None

    def wait(self) -> None:
        """Wait for a step in the background, and leave it to `finish` to say how it ended."""
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join()

    def finish(self) -> bool:
        """Wait for a step in the background. Raises what `step` raises, in the same cases, and joins again as that
        does: then True, and the parameters are the shared model's.
        """
        job, self._job = self._job, None
        if job is None:
            return False
        assert job.thread is not None
        try:
            job.thread.join()
        except BaseException:  # Ctrl-C: it is still under way
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
        """Finish what a step left that failed, so that the next one may begin. Blocks. May raise what `step` raises.

        True if this worker had to join again: the parameters are the shared model's.
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
        """End a step in the background before it is done. Parts that were sent count."""
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return
        self._group.given_up = True
        self._parameters.give_up()
        job.thread.join()
        self._group.given_up = False

    # ---- away, and back

    def go(self) -> None:
        """Take no part any more, until `return_`."""
        self.finish()
        with contextlib.suppress(MembershipLostError):  # then we are aside already
            self.exchange.close()
        self.away = True  # if leaving fails, too: the exchange is over
        self._group.leave()

    def return_(self) -> None:
        """Take part again after `go`."""
        self._back(self._group.return_)

    def come_back(self) -> None:
        """Take part again, where an earlier call could not: as it does, and may raise, in `step`."""
        if self.away:
            with there(self._group):
                self._rejoin()

    def _lost_it(self, error: MembershipLostError) -> None:
        _log.warning("training %r: %s", self._group.name, error)
        self._rejoin()

    def _rejoin(self) -> None:
        self.exchange.abandon()
        self._back(self._group.rejoin)

    def _back(self, join: Callable[[], None]) -> None:
        self.away = True
        with self._group.setting_up():  # first: nobody waits for us before we have a slot
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
        """Whether an earlier call has taken a slot that is ours still, and could not go on from there."""
        with contextlib.suppress(MembershipLostError):
            if self._seated:
                self._group.member.check()
                return True
        return False

    # ---- how a step goes

    def _noted(self, samples: int | None) -> _Job:
        """Take note of a step that begins."""
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
            self.exchange.step(job.samples)
        except BaseException as error:  # noqa: BLE001 - raised by _ended
            job.error = error
        job.seconds = time.perf_counter() - job.started

    def _ended(self, job: _Job) -> None:
        """Do what follows from how a step ended."""
        error = job.error
        if isinstance(error, MembershipLostError):
            if self.exchange.EACH_STEP and self._group.member.get(t.CONTRIBUTIONS) == job.contributions:
                self._group.member.add(t.DROPPED, 1)
            self._lost_it(error)
        elif isinstance(error, RefusedContributionError):
            self._refusal = error
            self._start_over()
        elif isinstance(error, Error):
            self._group.member.add(t.STEPS, -1)  # it is called again
            raise error
        elif error is not None:
            raise error
        moved = self._group.member.get(t.BYTES) - job.moved
        if moved > 0:
            self._exchanged(moved, job.seconds)

    def _start_over(self) -> None:
        """If a contribution was refused, take the shared model over, and raise that. If this fails it is repeated first
        of all: the exchange may have read a newer model by then, which the parameters are not.
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
        raise InvalidArgumentError(f"step of training {name!r}: samples={samples!r} is no number from 0 on")


@contextlib.contextmanager
def there(group: Group) -> Iterator[None]:
    """Say of what is not found in the block that the training was deleted, where that is why."""
    try:
        yield
    except NotFoundError as error:
        if not group.deleted():
            raise
        raise NotFoundError(f"training {group.name!r} was deleted") from error
