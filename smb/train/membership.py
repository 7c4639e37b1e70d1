"""How a worker joins its training, what it reports to the coordinator, and how it leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np

from smb.config.at_exit import AtExit, at_exit
from smb.config.log import TRAINING
from smb.config.transports import REPORTED
from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.spi import TrainingReport, session_of
from smb.train import member_table as t
from smb.train.group import Group
from smb.train.parameters import Parameters, Values
from smb.train.steps import Steps, there

_log = logging.getLogger("smb")
_news = logging.getLogger(TRAINING)
# Left at the interpreter's exit.
_open: weakref.WeakSet[Membership] = weakref.WeakSet()
_leaving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of memberships that nobody held
_EXIT_S = 1.0  # timeout of each call at the interpreter's exit
_GUARD_MAX = 255  # characters of the guard's text in a report


class Membership:
    """One worker's membership. After its construction, call `begin`, or `withdraw` if the worker can't take part.

    Calls come from the worker's thread, but the session's thread reads the reports. A membership that is collected as
    garbage ends: its worker can't step any more, and others would wait for it. So nothing that lives longer than the
    worker refers to it.
    """

    def __init__(self, group: Group, parameters: Parameters, steps: Steps) -> None:
        self.closed = False
        self._group = group
        self._parameters = parameters
        self._steps = steps
        self._report = _WorkerReport(group, parameters)
        _open.add(self)
        session_of(group.client).reports[group] = self._report
        self._unheld = weakref.finalize(self, _leave_unheld, group, self._report, os.getpid())
        self._unheld.atexit = False  # _leave_all() does it

    def check_open(self) -> None:
        """Raise InvalidArgumentError if the worker has left."""
        if self.closed:
            raise InvalidArgumentError(
                f"this worker has left training {self._group.name!r}; call smb.train.join or smb.torch.join again"
            )

    # ---- joining

    def begin(self) -> None:
        """Make the parameters the shared model: the last part of joining. If this raises, the parameters are unchanged;
        call `withdraw` then.
        """
        self._steps.exchange.restart()
        self._report.transports = sum(REPORTED[each] for each in self._group.weights.transports)

    def announce(self) -> None:
        """Log what joining did. One small read; if the read fails, that is logged instead."""
        try:
            _news.info("%s", self.arrival())
        # The join is done and the values are the shared model's: a line of the log is no reason to leave.
        except Error as error:
            _log.warning("joined training %r; the number of its workers is not known now: %s", self._group.name, error)

    def arrival(self) -> str:
        """Return a line that says what joining did. One small read."""
        group = self._group
        rows = group.table.read()
        if group.made:
            return f"made training {group.name!r} ({group.scheme.NAME}); its weights are yours"
        round_ = int(rows[0, t.ROUND]) >> t.ROUND_SHIFT
        at = f"round {round_}, " if round_ else ""
        count = len(group.live(rows))
        return (
            f"joined training {group.name!r} ({group.scheme.NAME}, {at}{count} worker{'' if count == 1 else 's'}; its "
            f"weights replaced yours)"
        )

    def withdraw(self) -> bool:
        """Leave right after joining, for a worker that can't take part. If this worker made the group and no other has
        joined it, the group is deleted. Returns True if the group is gone.
        """
        self.forget()
        try:
            self._steps.exchange.close()
        except Error as error:
            _log.warning("training %r: could not end the exchange of a failed join: %s", self._group.name, error)
        return self._group.withdraw()

    def forget(self) -> None:
        """Stop the reports, and do nothing at the interpreter's exit."""
        self.closed = True
        _open.discard(self)
        self._unheld.detach()
        session_of(self._group.client).reports.pop(self._group, None)

    # ---- leaving

    def finish(self) -> None:
        """Finish exchanges in progress, and contribute the remaining local steps if the scheme can: the first part of
        leaving. Raises as Worker.flush; if the remaining steps can't be sent, that is logged as a warning.
        """
        self.check_open()
        self._steps.flush()
        try:
            self._steps.contribute_rest()
        except NotFoundError:
            raise
        except Error as error:
            _log.warning(
                "training %r: the local steps since the last exchange were not contributed: %s", self._group.name, error
            )

    def close(self, *, load: bool) -> None:
        """See Worker.close."""
        if self.closed:
            return
        try:
            self._tidy(self.finish)
        finally:
            self._leave(load=load)

    def abandon(self) -> None:
        """See Worker.abandon."""
        if not self.closed:
            self._leave(load=False)

    def _leave(self, *, load: bool) -> None:
        self.forget()
        self._steps.give_up()
        together = self._parameters.in_ranks
        try:
            if load and together:
                with there(self._group):
                    self._steps.exchange.restart()
            self._tidy(self._steps.exchange.close)
            if load and not together:
                del self._steps.exchange  # frees its arrays of the model's size
                shared: Values = np.empty(self._group.weights.size, np.float32)
                with there(self._group):
                    self._group.read(shared)
                self._parameters.fill(shared)
            if self._steps.unsent:
                _news.info("%s", self._left_out())
        finally:
            _report_last(self._group, self._report)
            self._tidy(self._group.leave)

    def _left_out(self) -> str:
        """Return a line that says which steps are in no exchange."""
        scheme, unsent = self._group.scheme, self._steps.unsent
        most, of = ("up to ", "each fragment's") if len(self._group.spans) > 1 else ("", "the")
        steps = f"{most}{unsent} local step{' is' if unsent == 1 else 's are'}"
        return (
            f"left training {self._group.name!r}: {steps} not in its model, those since {of} last exchange; "
            f"{scheme.NAME} exchanges whole rounds of {scheme.interval()} steps"
        )

    def _tidy(self, leave: Callable[[], None]) -> None:
        try:
            leave()
        except NotFoundError as error:
            _log.debug("training %r: %s", self._group.name, error)
        except Error as error:
            _log.warning("training %r: left it, but a part of leaving failed: %s", self._group.name, error)

    def leave_at_exit(self) -> None:
        """Leave as the interpreter ends. Each call takes at most _EXIT_S seconds. May raise Error."""
        session_of(self._group.client).hurry(_EXIT_S)
        self.abandon()


class _WorkerReport:
    """What a worker tells the coordinator of itself. The session keeps it, so it refers to no worker and no model."""

    def __init__(self, group: Group, parameters: Parameters) -> None:
        self.transports = 0  # the bits of those by which the weights are reached
        self._group = group
        self._parameters = weakref.ref(parameters)

    def __call__(self) -> TrainingReport:
        """Return the report. Makes no call. Any thread may call it."""
        member, spent, parameters = self._group.member, self._group.time_spent, self._parameters()
        waiting_s = spent.waiting.seconds
        copies = None if parameters is None else parameters.copies
        return TrainingReport(
            name=self._group.name,
            slot=member.slot,
            clock=member.clock,
            samples=member.get(t.SAMPLES),
            contributions=member.get(t.CONTRIBUTIONS),
            staleness=member.get(t.STALENESS),
            refused=member.get(t.REFUSED),
            guard=self._group.guard_fired[:_GUARD_MAX],
            member_ms=round(1000 * spent.seconds),
            blocked_ms=round(1000 * spent.blocked.seconds),
            exchanging_ms=round(1000 * max(0.0, spent.exchanging.seconds - waiting_s)),
            waiting_ms=round(1000 * waiting_s),
            waits=spent.waiting.runs,
            bytes=member.get(t.BYTES),
            copied_bytes=0 if copies is None else copies.total_bytes,
            placed=parameters is not None and parameters.placed,
            transports=self.transports,
        )


def _report_last(group: Group, report: _WorkerReport) -> None:
    """Report once more, that this worker has left."""
    last = report()
    last.left = True
    session_of(group.client).reports[object()] = lambda: last


def _leave_unheld(group: Group, report: _WorkerReport, pid: int) -> None:
    """Leave the training of a worker that nobody holds any more, in a thread: a garbage collection may come at any
    time, and its thread may hold any lock. A child of fork has no part in its parent's memberships.
    """
    session = session_of(group.client)
    if session.closed or os.getpid() != pid:
        return
    session.reports.pop(group, None)
    _report_last(group, report)
    thread = threading.Thread(target=_leave_for_good, args=(group,), name="smb-leave", daemon=True)
    try:
        thread.start()
        _leaving.add(thread)
    except RuntimeError:  # no thread can be started: the others go on once the leases have ended
        for each in filter(None, (group.nested, group)):
            each.member.lapse()


def _leave_for_good(group: Group) -> None:
    try:
        for each in filter(None, (group.nested, group)):
            each.leave()
    except Error as error:  # as of a client that is closed by now; the member's lease ends in any case
        _log.debug("training %r: nobody holds this worker any more, and it could not leave: %s", group.name, error)
        return
    _news.info(
        "left training %r: nothing refers to its worker any more; local steps since its last exchange are lost. Keep "
        "the result of join, and close() it",
        group.name,
    )


@at_exit(AtExit.TRAININGS)
def _leave_all() -> None:
    """Leave all trainings, so that the others need not wait.

    Does not wait for other workers, and sends nothing more.
    """
    for membership in list(_open):
        with contextlib.suppress(Error):  # in a child of fork every call raises
            membership.leave_at_exit()
    for thread in list(_leaving):
        thread.join(_EXIT_S)
