"""A group: the buffers that workers of one training share, and what every scheme needs of them.

    NAME           the shared weights, float32 (n,); the group's settings are its metadata
    NAME/members   the table (member_table.py)
    NAME/tick      published to wake all that wait for anything
    NAME/...       the scheme's own, made with like=NAME, so that servers can combine them

The first to join makes them. All that a training has is made under the lock NAME/setup, by joiners and by those that
come back, too, and a deletion holds it. So nothing is made after a deletion has listed the buffers. Buffers are deleted
by name, so who deletes asks right before whether it holds that lock still: if not, another may have made the group anew
by now.

A group is there once its word READY says so. If there is none, but parts of one, then its maker or deleter died: these
parts go before another one is made (`leftovers`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from smb.buffer import Buffer
from smb.buffer_info import check_replicas
from smb.client import Client
from smb.config.parse import format_bytes
from smb.daemon.failpoint import failpoint
from smb.errors import (
    AlreadyExistsError,
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
    OutOfMemoryError,
    UnavailableError,
)
from smb.lock import Lock
from smb.spi import session_of
from smb.train import member_table as t
from smb.train import members
from smb.train.exchange.at_once import is_remote
from smb.train.guards import Guards, Norm, RefusedContributionError, WorkerGuards
from smb.train.members import Member
from smb.train.parameters import Parameters
from smb.train.scheme import Json, Scheme, Span, Values, scheme_of

METADATA = "smb.train"
LEASE_S = 10.0
BUILT, ATTEMPT = 1, 2  # of the group's word ROUND
_PLACEMENT = {"servers", "stripe", "wire", "replicas"}
_SETUP_S = 30.0
_HOLDER_S = 3.0
_NAMED = 4  # buffers, in a line of the log
WIRE_BYTES = {"exact": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 64}  # of an element

# Under a group's name, what a scheme, smb.torch.join and the group make. Work units have names that their users choose.
_PARTS = ("members", "tick", "next", "outer", "inbox", "host", "state")

_log = logging.getLogger("smb")
Made = TypeVar("Made")


class GivenUpError(Error):
    """A step in the background was given up, as its worker was closed. Nobody but the worker sees it."""


class Group:
    """A worker's view of its group. Made by `enter`. For the thread of the Exchange that it is for, and for one that an
    Exchange starts: guards are the former's, `wait` is the latter's as long as it runs.

    weights: the shared weights. table: who is there. member: our slot. scheme, guards, lease: the group's settings.
    patience: seconds to wait before one looks whether others are dead. sent_bytes: of a contribution, as it travels;
    what is read of the model is exact, whatever the wire.
    """

    def __init__(self, client: Client, name: str, weights: Buffer, settings: dict[str, Json]) -> None:
        self.client = client
        self.name = name
        self.weights = weights
        try:
            self.scheme = scheme_of(settings["scheme"], settings["settings"])
            self.guards = Guards(**settings["guards"])
            self.lease = float(settings["lease"])
        except (KeyError, TypeError, ValueError) as error:  # other programs may store anything there
            raise InvalidArgumentError(
                f"buffer {name!r} is no group of this version of smb.train: its settings can't be read: {error!r}; "
                f"choose another name"
            ) from error
        self.table = t.Table(client.open(f"{name}/members"))
        self.tick = client.open(f"{name}/tick")
        self.member: Member
        self.made = False  # by this worker
        self.samples_known = False  # step got the number of its samples; else none are counted
        self.nested: Group | None = None  # a group under this one's name that the scheme has joined
        self.unneeded: list[str] = []  # buffers that nobody needs once we have left
        self._names: set[str] = set()  # names of buffers
        self._guard = WorkerGuards(self.guards)
        self.guard_fired = ""  # what the last refusal said
        self._seen = 0  # the tick's version, as far as we have looked
        self.given_up = False  # written by the thread that closes the worker, read by the one that exchanges
        self._rejoins = 0
        self._former: Member | None = None  # whom `return_` goes on for, until it has succeeded
        self.patience = max(0.05, self.lease / 4)
        self.sent_bytes = round(weights.size * WIRE_BYTES[weights.wire])

    # ---- membership

    def admit(self, own: int = -1) -> None:
        """Take a slot, `own` if it can be: `member` is this worker's from now on."""
        self._seen = self.tick.version
        self.member = members.admit(self.client, self.name, self.table, self.lease, self.scheme.first_clock, own)
        self.member.set(t.REJOINS, self._rejoins)
        self.wake()

    def rejoin(self) -> None:
        """Take a slot again, after MembershipLostError; counted and logged."""
        if self._former is None:
            self._rejoins += 1
        self.member.leave()
        slot = (self._former or self.member).slot
        self.return_()
        _log.warning(
            "training %r: member %d lost its lease and is back as member %d", self.name, slot, self.member.slot
        )

    def return_(self) -> None:
        """Take a slot again, with the statistics so far. Call it again where it fails."""
        # An earlier call may have taken a slot before it failed: the statistics are with the member before that.
        former = self._former = self._former or self.member
        self.admit(former.slot)
        for column in (t.CONTRIBUTIONS, t.REFUSED, t.DROPPED, t.STALENESS_MAX, t.SAMPLES, t.BYTES):
            self.member.set(column, former.get(column))
        self.member.set(t.STEPS, max(former.get(t.STEPS), self.member.get(t.STEPS)))
        self.member.add(t.SAMPLES_BEFORE, -former.reported_samples)  # they are in the former row, or ours, already
        self.member.report()
        if self.member.slot != former.slot:
            former.forward()
        self._former = None

    def leave(self) -> None:
        """Give the slot back and wake those who wait for it; then delete what is not needed any more.

        If that fails, as the coordinator is away, who takes the slot next deletes the inbox.
        """
        self.member.leave()
        self.wake()
        unneeded, self.unneeded = self.unneeded, []
        try:
            for name in unneeded:
                self.client.delete(name, missing_ok=True)
        except Error as error:
            _log.warning("training %r: could not leave it tidily: %s", self.name, error)

    def withdraw(self) -> bool:
        """Leave after a join that failed, and take away what it made: all of the group, where nobody else has come.

        Returns whether the group is gone. Failures here are only logged: the reason of the failed join matters more.
        """
        if self.nested is not None:
            self.nested.withdraw()
        try:
            with contextlib.suppress(InvalidArgumentError):  # left already
                self.leave()
            if self.made:
                with setup_lock(self.client, self.name, self.weights.info.replicas) as setup:
                    if self.table.get(0, t.INCARNATIONS) == 1:
                        return _undo(self.client, self.name, setup, sorted(self._names))
        except Error as error:
            _log.warning("training %r: could not take away what a join that failed has made: %s", self.name, error)
        return False

    def undo(self, setup: Lock) -> None:
        """Take away what `enter` has made, and the slot, as taking it failed. Under the setup lock: nobody else has
        come. Failures are only logged, as in withdraw.
        """
        if hasattr(self, "member"):  # but the others could not be woken; they look by themselves, after a while
            try:
                self.member.leave()
            except Error as error:
                _log.warning("training %r: could not leave after a join that failed: %s", self.name, error)
        if self.made:
            _undo(self.client, self.name, setup)

    def live(self, rows: t.Rows) -> list[int]:
        """Return the slots that are taken, in order."""
        return list(members.live(rows))

    def reap(self, slots: Iterable[int]) -> list[int]:
        """Free the slots, of these, whose holders are dead, and wake all if there are any. Asks about each one."""
        dead = members.reap(
            self.client, self.name, self.table, self.lease, (slot for slot in slots if slot != self.member.slot)
        )
        if dead:
            self.wake()
        return dead

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[None]:
        """Make buffers of the group in the block: it is not deleted meanwhile. Blocks while others join or delete it.

        Raises NotFoundError if it was deleted, TimeoutError.
        """
        with keeping(setup_lock(self.client, self.name, self.weights.info.replicas)):
            if self.deleted():
                raise NotFoundError(f"training {self.name!r} was deleted")
            yield

    def deleted(self) -> bool:
        """Whether the group was deleted, or somebody is at it. One small read."""
        try:
            return self.table.get(0, t.READY) == t.DELETED
        except NotFoundError:
            return True

    # ---- waking and waiting

    def wake(self) -> None:
        """Wake every member that waits. Look at the table before you wait yourself."""
        new = wake(self.tick, self.lease)
        # Another thread of ours may wait. A wake of others, which came before, stays news to it.
        if self._seen == new - 1:
            self._seen = new

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until somebody calls wake(); False after `timeout` seconds (default: a quarter of the lease).

        A wake() since the last wait counts: look at the table, then wait, and nothing is missed. On False look for dead
        members: reap(). Raises GivenUpError.
        """
        self.go_on()
        try:
            self._seen = self.tick.wait(self._seen + 1, timeout=self.patience if timeout is None else timeout)
        except DeadlineError:
            return False
        return True

    def go_on(self) -> None:
        """Raise GivenUpError if this worker's step in the background was given up."""
        if self.given_up:
            raise GivenUpError(f"training {self.name!r}: the exchange under way was given up: the worker is closed")

    # ---- weights

    @property
    def round(self) -> int:
        """The group's open round; 0 for ever in schemes without rounds."""
        return self.table.get(0, t.ROUND) >> t.ROUND_SHIFT

    def read(self, out: Values) -> int:
        """Read the shared weights into `out`, exact, never a mix of two rounds; return the round."""
        return self.read_by(lambda weights: weights.read(out=out, wire="exact"))

    def read_by(self, read: Callable[[Buffer], object], *, known: int | None = None, needs_us: bool = False) -> int:
        """Call `read` with the weights, again while rounds are closed meanwhile; return the round that it has read.

        `known` is the word ROUND, if it was read just before. needs_us: the round that is open is closed only with our
        mark, as long as we hold our slot: then nobody need look afterwards.
        """
        while True:
            before = self.table.get(0, t.ROUND) if known is None else known
            known = None
            if before & BUILT:  # the weights are being replaced
                if not self.wait():
                    self._finish_round()
                continue
            read(self.weights)
            if needs_us and before >> t.ROUND_SHIFT == self.member.clock and self.member.held:
                return before >> t.ROUND_SHIFT
            after = self.table.get(0, t.ROUND)
            if after >> t.ROUND_SHIFT == before >> t.ROUND_SHIFT and not after & BUILT:
                return before >> t.ROUND_SHIFT

    def read_from(self, read: Callable[[Buffer], object], *, known: int | None = None) -> int:
        """Call `read` with the weights once; return the round that they were of when it began. `known`: as in read_by.

        A round that is closed meanwhile makes it a mix. For those whose contribution to the former round is dropped
        then.
        """
        before = self.table.get(0, t.ROUND) if known is None else known
        while before & BUILT:
            if not self.wait():
                self._finish_round()
            before = self.table.get(0, t.ROUND)
        read(self.weights)
        return before >> t.ROUND_SHIFT

    @functools.cached_property
    def remote(self) -> bool:
        """Whether the group's buffers are reached over a network."""
        return is_remote(self.weights)

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """The parts of the weights that are exchanged at times of their own; one where all are exchanged together."""
        return self.scheme.spans(self.weights)

    def span(self, number: int) -> Span:
        """Return the part that a round is of."""
        return self.spans[number % len(self.spans)]

    def replace(self, following: Buffer, claim: int, fence: Lock) -> bool:
        """Do the second half of closing a round (rounds.py): these are the weights, and the round's number says so.
        False: another one has claimed it.
        """
        offset, count = self.span(claim >> t.ROUND_SHIFT)
        self.weights.accumulate_from(following, op="replace", offset=offset, count=count, fence=fence)
        failpoint("train-copied")
        found = self.table.swap(0, t.ROUND, claim, (claim >> t.ROUND_SHIFT) + 1 << t.ROUND_SHIFT)
        failpoint("train-committed")
        return found == claim

    def _finish_round(self) -> None:
        """Do that half for a closer that died, if it did: there may be no member left who would."""
        lock = self.weights.lock(ttl=self.lease, timeout=0.0)
        try:
            lock.acquire()
        except DeadlineError:
            return  # somebody is at it
        with contextlib.suppress(LockLostError):
            try:
                word = self.table.get(0, t.ROUND)
                if not word & BUILT or self.table.swap(0, t.ROUND, word, word + ATTEMPT) != word:
                    return
                self.replace(self.client.open(f"{self.name}/next"), word + ATTEMPT, lock)
            finally:
                lock.release()
            self.wake()

    def buffer(self, suffix: str) -> Buffer:
        """Open the group's buffer NAME/suffix, or make it like the weights. Under the setup lock."""
        self._names.add(f"{self.name}/{suffix}")
        name, replicas = f"{self.name}/{suffix}", self.weights.info.replicas
        return self.client.create(name, like=self.weights, replicas=replicas, exist_ok=True)

    # ---- contributions

    def check(self, contribution: Norm, staleness: int = 0, *, whole: bool = True) -> None:
        """Call it before a contribution counts: looks at the guards and at our membership. If the lease looks run out
        it asks the server; else no call, but to tell that a guard has refused.

        Without `whole` before a part of it does, with all parts so far: what is sent keeps to the guards.
        Raises RefusedContributionError (counted), MembershipLostError, UnavailableError.
        """
        self.member.check()
        try:
            norm = self._guard.check(contribution, staleness, whole=whole)
        except RefusedContributionError as error:
            self.guard_fired = str(error)
            self.member.add(t.REFUSED, 1)
            self.report()
            raise
        if not whole:
            return
        self.member.set(t.NORM, struct.unpack("<q", struct.pack("<d", norm))[0])
        self.member.set(t.STALENESS, staleness)
        self.member.set(t.STALENESS_MAX, max(staleness, self.member.get(t.STALENESS_MAX)))

    def count_samples(self, samples: int) -> None:
        """Count a contribution's samples, if `step` got their number. No call."""
        if self.samples_known:
            self.member.add(t.SAMPLES, samples)

    def count(self, samples: int, nbytes: int, contributions: int = 1) -> None:
        """Call it once a contribution was sent: counts it, in the table too. One small call."""
        self.member.add(t.CONTRIBUTIONS, contributions)
        self.count_samples(samples)
        self.member.add(t.BYTES, nbytes)
        self.report()

    def report(self) -> None:
        """Write the member's statistics into the table. Where that fails the next report has them: what was sent, or
        refused, is not to be done again for that. One small call.
        """
        try:
            self.member.report()
        except Error as error:
            _log.debug("training %r: %s", self.name, error)


def wake(tick: Buffer, lease: float) -> int:
    """Wake all who wait for the next version of a tick; return that. One killed in the middle holds up the next for a
    lease, as in all else."""
    while True:
        with contextlib.suppress(LockLostError):  # we were stopped for so long; nobody was woken
            return tick.publish(np.zeros(tick.size, np.int64), ttl=lease)


def enter(
    client: Client,
    name: str,
    parameters: Parameters,
    scheme: Scheme | None,
    guards: Guards | None,
    lease: float | None,
    run: Callable[[Group], Made],
    **placement: Any,
) -> Made:
    """Take a slot in the group of that name, made first, with the present values, if there is none. Return what `run`
    makes of it, under the setup lock: all buffers that the member needs.

    None adopts what the group has. The values stay as they are. Raises InvalidArgumentError, NotFoundError,
    OutOfMemoryError; after an error nothing of this join stays.
    """
    _check_scheme(name, scheme)
    replicas: int | None = placement.get("replicas")
    copies = copies_of(client, name, replicas)
    if scheme is None and copies is None:
        raise _nobody(name)
    with contextlib.ExitStack() as on_failure:
        with keeping(setup_lock(client, name, copies)) as setup:
            group = _opened(client, name)
            if group is None:
                if scheme is None:
                    raise _nobody(name)
                scheme.check(name, parameters)
                check_lease(f"join of training {name!r}", lease)
                settings = settings_of(scheme, guards or Guards(), LEASE_S if lease is None else lease)
                group = _made(client, name, parameters, settings, placement, setup)
            else:
                _compare(group, scheme, guards, lease, replicas, placement.get("wire"))
            if group.weights.size != parameters.size:
                raise InvalidArgumentError(
                    f"join of training {name!r}: {parameters.size} values, and the shared model has "
                    f"{group.weights.size}"
                )
            group.scheme.check(name, parameters)
            try:
                group.admit()
            except BaseException:
                group.undo(setup)
                raise
            on_failure.callback(group.withdraw)  # after the lock is given back: it takes that
            made = run(group)
        on_failure.pop_all()
    return made


@contextlib.contextmanager
def keeping(lock: Lock) -> Iterator[Lock]:
    """Hold a lock of joining while the block runs. If it was lost, or can't be given back, that is only logged.

    The block is done then, and counts: members' locks keep their slots, and the lease of this one ends it.
    """
    lock.acquire()
    with _giving_back(lock, "joining"):
        yield lock


@contextlib.contextmanager
def _giving_back(lock: Lock, doing: str) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            lock.release()
        except Error as error:
            _log.warning("%s: %s", doing, error)


def setup_lock(client: Client, name: str, copies: int | None) -> Lock:
    """Return the lock under which what is called `name` is made, joined and deleted. It is not waited for without
    end.
    """
    return client.lock(f"{name}/setup", timeout=_SETUP_S, replicas=copies or 1)


@contextlib.contextmanager
def deleting(client: Client, asked: str, name: str) -> Iterator[Callable[[], object]]:
    """Keep those away who would make, or join, what is called `name` while the block deletes it. Gives what to call
    right before each deletion by name: it raises LockLostError if others may have made it anew by now.

    Raises TimeoutError, which says who holds the lock, if it can't be had: nothing was deleted.
    """
    setup = setup_lock(client, name, copies_of(client, name, None))
    with contextlib.ExitStack() as last:
        check: Callable[[], object] = setup.check
        try:
            setup.acquire()
        except DeadlineError as error:
            raise DeadlineError(
                f"{asked}: nothing was deleted: {_holder(client, f'{name}/setup')} makes, joins or deletes it at this "
                f"moment ({error}); try again"
            ) from error
        except UnavailableError as error:
            # A training with a part on a server that is gone for good must be deleted all the same. Joiners need this
            # lock, too, and get it no more than we do.
            _log.warning("%s: going on without its lock, whose server is away: %s", asked, error)
            check = _nothing_to_ask
        else:
            last.enter_context(_giving_back(setup, asked))
        try:
            yield check
        except LockLostError as error:
            raise LockLostError(f"{asked} was broken off; call it again: {error}") from error


def _nothing_to_ask() -> None:
    """The check where there is no lock."""


def _holder(client: Client, lock: str) -> str:
    """Return who holds a lock, HOST:PID, as far as the coordinator knows."""
    holder = ""
    with contextlib.suppress(Error):  # it is away, or of a release that does not tell
        holder = session_of(client).coordinator.lock_holder(lock, _HOLDER_S)
    return holder or "another client"


@contextlib.contextmanager
def room(name: str, scheme: Scheme, model_bytes: int) -> Iterator[None]:
    """If servers have no room for the buffers made in the block, say how much memory the scheme takes."""
    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"join of training {name!r}: scheme {scheme.NAME!r} keeps copies of the model on the memory servers, "
            f"{scheme.footprint()}, of {format_bytes(model_bytes)} each; {error}"
        ) from error


def view(client: Client, name: str, *, deleted: bool = False) -> Group:
    """Return a group to look at, without joining. Raises NotFoundError; with `deleted` not for one whose deletion was
    begun, as long as enough of it is there.
    """
    group, ready = _found(client, name)
    if group is None or not ready or (ready == t.DELETED and not deleted):
        raise _none(name)
    return group


def _none(name: str) -> NotFoundError:
    return NotFoundError(f"there is no training {name!r}; see what there is with: smb train ls")


def shared(client: Client, name: str, out: Values | None = None) -> Values:
    """Return the present shared model of a group, float32 (n,), in `out` if given, without joining.

    The model is of one round in schemes with rounds. Blocks for a few calls. Raises NotFoundError,
    InvalidArgumentError.
    """
    group = view(client, name)
    values: Values = np.empty(group.weights.size, np.float32) if out is None else out
    group.read(values)
    return values


def delete(client: Client, name: str) -> None:
    """Delete a training: its group, all buffers under its name, and its work units.

    Also deletes what is left of a training whose creation, load or deletion was interrupted. The next step() of its
    workers raises NotFoundError ("training 'x' was deleted"), and their close() succeeds. Blocks for at most 30 s while
    a process is joining. Raises NotFoundError and TimeoutError. Raises LockLostError if this process was stopped for so
    long that another one may have made the training anew: call it again.
    """
    if not leftovers(client, name):  # no lock is made for what is not there
        view(client, name)
    with deleting(client, f"delete of training {name!r}", name) as check:
        group, ready = _found(client, name)
        if group is not None and ready:
            _delete(client, group, check)
        elif not remove_leftovers(client, name, check):
            raise _none(name)


def _delete(client: Client, group: Group, check: Callable[[], object]) -> None:
    """Delete a group. Under the setup lock, which `check` asks about."""
    check()
    group.table.write(0, t.READY, np.array([t.DELETED]))  # so that the error about a missing buffer says why
    for each in _all_of(client, group.name):
        check()
        client.delete(each, missing_ok=True)


def _own(name: str) -> list[str]:
    return [f"{name}/tick", f"{name}/members", name]


def _all_of(client: Client, name: str) -> list[str]:
    """Return a group's buffers in the order in which they are deleted: the group's own last, as they say that there is
    something to be deleted, if this breaks off.
    """
    own = _own(name)
    return [info.name for info in client.list() if info.name.startswith(f"{name}/") and info.name not in own] + own


def clear(
    client: Client,
    name: str,
    parameters: Parameters,
    scheme: Scheme | None,
    lease: float | None,
    replicas: int | None = None,
) -> None:
    """Delete a group in which nobody is alive any more, if there is one; the rest is what it is to be begun anew with.

    Raises AlreadyExistsError if somebody is alive, or died so recently that nobody can tell, and InvalidArgumentError
    if it could not be begun so.
    """
    if scheme is None:
        raise InvalidArgumentError(f"join of training {name!r} with fresh=True: say which scheme; nothing was deleted")
    _check_scheme(name, scheme)
    scheme.check(name, parameters)
    check_lease(f"join of training {name!r}", lease)
    with setup_lock(client, name, copies_of(client, name, replicas)) as setup:
        group = _opened(client, name)
        if group is None:
            return
        rows = group.table.read().copy()
        slots = list(members.live(rows))
        dead = members.reap(client, name, group.table, group.lease, slots)
        if alive := [slot for slot in slots if slot not in dead]:
            row = rows[1 + alive[0]]
            raise AlreadyExistsError(
                f"join of training {name!r} with fresh=True: {len(alive)} of its workers are alive, or died less than "
                f"{group.lease:g} s ago, one on {members.host_of(row)} (pid {int(row[t.PID])}); leave fresh= out to "
                f"train with them, or take another name"
            )
        _delete(client, group, setup.check)


def copies_of(client: Client, name: str, asked: int | None) -> int | None:
    """Return how many copies a group's buffers and locks have, or are to have; None if there is no group, and nobody
    says. Locks that were idle are made anew, by the next one that asks: they must not have fewer then.
    """
    if asked is not None:
        return asked
    try:
        return client.open(name).info.replicas
    except NotFoundError:
        return None


def settings_of(scheme: Scheme, guards: Guards, lease: float) -> dict[str, Json]:
    """Return what a group keeps as metadata."""
    return {"scheme": scheme.NAME, "settings": scheme.settings(), "guards": guards.settings(), "lease": lease}


def leftovers(client: Client, name: str) -> list[str]:
    """Return the buffers of a training of which no group is ready, in the order in which they are deleted: its maker,
    loader or deleter died. [] if there is nothing of it. Where a group is ready it is not asked for.

    If the group's own are there, at least in part, all that is under its name goes with them, as when a training is
    deleted; but for other trainings that have names under it. If they are not, there may never have been a training:
    then these are only the buffers with names that a training's have.
    """
    names = {info.name for info in client.list()}
    own = [each for each in _own(name) if each in names]
    under = [each for each in sorted(names) if each.startswith(f"{name}/") and each not in own]
    if not own:
        return [each for each in under if each.removeprefix(f"{name}/").split("/")[0] in _PARTS]
    others = [
        each
        for each in under
        if {f"{each}/members", f"{each}/tick"} <= names
        and not each.startswith(f"{name}/host/")
        and _may_be_group(client, each)
    ]
    kept = tuple(f"{each}/" for each in others)
    return [each for each in under if each not in others and not each.startswith(kept)] + own


def _may_be_group(client: Client, name: str) -> bool:
    try:
        return METADATA in client.open(name).metadata
    except NotFoundError:
        return False
    except Error:  # nobody knows, so it stays
        return True


def remove_leftovers(client: Client, name: str, check: Callable[[], object]) -> int:
    """Delete what is left of a training of which no group is ready; return how many buffers. Under the setup lock,
    which `check` asks about: who was stopped since it looked must not delete what another has made.
    """
    left = leftovers(client, name)
    for each in left:
        check()
        client.delete(each, missing_ok=True)
    if left:
        _log.warning(
            "training %r: %d buffers of one that was not made, loaded or deleted to the end are deleted: %s",
            name,
            len(left),
            ", ".join(left[:_NAMED]) + (", ..." if len(left) > _NAMED else ""),
        )
    return len(left)


def _opened(client: Client, name: str) -> Group | None:
    """Return the group, None if there is none, or who made or deleted it died half-way."""
    group, ready = _found(client, name)
    return group if ready != t.DELETED and ready else None


def _found(client: Client, name: str) -> tuple[Group | None, int]:
    """Return the group, if all of its own buffers are there, and its word READY."""
    try:
        weights = client.open(name)
    except NotFoundError:
        return None, 0
    settings = weights.metadata.get(METADATA)
    if not isinstance(settings, dict):
        raise InvalidArgumentError(f"buffer {name!r} is no group of smb.train; choose another name")
    try:
        group = Group(client, name, weights, settings)
        return group, group.table.get(0, t.READY)
    except NotFoundError:
        return None, 0


def _check_scheme(name: str, scheme: object) -> None:
    if scheme is not None and not isinstance(scheme, Scheme):
        raise InvalidArgumentError(
            f"join of training {name!r}: {scheme!r} is no scheme: pass one with its settings, such as "
            f"smb.train.DiLoCo(every=500); smb.torch.join also takes a name"
        )


def check_placement(asked: str, placement: dict[str, Any]) -> None:
    """Raise InvalidArgumentError for what says nothing of where a training's buffers lie."""
    if foreign := placement.keys() - _PLACEMENT:
        hint = "; overlap= is smb.torch.join's" if "overlap" in foreign else ""
        raise InvalidArgumentError(
            f"{asked}: there is no {', '.join(sorted(foreign))}=; there are {', '.join(sorted(_PLACEMENT))}{hint}"
        )
    check_replicas(asked, placement.get("replicas"))


def check_lease(asked: str, lease: float | None) -> None:
    """Raise InvalidArgumentError for a lease that is too short to be renewed, or too long to wait for."""
    if lease is not None and not (math.isfinite(lease) and 0.05 <= lease <= 3600):
        raise InvalidArgumentError(f"{asked}: lease={lease!r} s is not in 0.05 to 3600")


def _made(
    client: Client, name: str, parameters: Parameters, settings: dict[str, Json], placement: dict[str, Any], setup: Lock
) -> Group:
    """Make the group. Under the setup lock, so what there is of it was left by one that died."""
    remove_leftovers(client, name, setup.check)
    metadata = {**placement.pop("metadata", {}), METADATA: settings}
    scheme = scheme_of(settings["scheme"], settings["settings"])
    with room(name, scheme, 4 * parameters.size), contextlib.ExitStack() as on_failure:
        on_failure.callback(_undo, client, name, setup)
        weights = client.create(name, parameters.size, "float32", metadata=metadata, **placement)
        copies = weights.info.replicas
        client.create(f"{name}/tick", 1, "int64", servers=1, replicas=copies)
        shape = (1 + t.SLOTS, t.FIELDS)
        table = t.Table(client.create(f"{name}/members", shape, "int64", servers=1, replicas=copies))
        parameters.store(weights)
        table.add(0, t.READY, 1)
        group = Group(client, name, weights, settings)
        on_failure.pop_all()
    group.made = True
    return group


def _undo(client: Client, name: str, setup: Lock, others: Iterable[str] = ()) -> bool:
    """Delete what a join that fails has made; return whether it is gone. Under the setup lock: if that was lost, what
    is there may be another's. A group without its table is taken for half-made, in which a scheme left nothing: so the
    scheme's buffers go first.
    """
    try:
        for each in (*others, *_own(name)):
            setup.check()
            client.delete(each, missing_ok=True)
    except Error as error:
        _log.debug("training %r: what a join that failed has made may be there still: %s", name, error)
        return False
    return True


def _nobody(name: str) -> NotFoundError:
    return NotFoundError(
        f"join of training {name!r}: there is none; who joins first says which scheme, as smb.train.DiLoCo(every=500), "
        f'or scheme="diloco", every=500 for smb.torch.join; those that there are: smb train ls'
    )


def _compare(
    group: Group,
    scheme: Scheme | None,
    guards: Guards | None,
    lease: float | None,
    replicas: int | None,
    wire: str | None,
) -> None:
    """Raise InvalidArgumentError if a joiner wants other settings than the group has."""
    wanted: dict[str, Json] = {}
    if scheme is not None:
        wanted |= {"scheme": scheme.NAME} | {f"{scheme.NAME}.{key}": value for key, value in scheme.settings().items()}
    if guards is not None:
        wanted |= {f"guards.{key}": value for key, value in guards.settings().items()}
    if lease is not None:
        wanted["lease"] = float(lease)
    if replicas is not None:
        wanted["replicas"] = replicas
    if wire is not None:
        wanted["wire"] = wire
    has: dict[str, Json] = {"scheme": group.scheme.NAME, "lease": group.lease}
    has |= {"replicas": group.weights.info.replicas, "wire": group.weights.wire}
    has |= {f"{group.scheme.NAME}.{key}": value for key, value in group.scheme.settings().items()}
    has |= {f"guards.{key}": value for key, value in group.guards.settings().items()}
    if wanted.get("scheme", has["scheme"]) != has["scheme"]:
        wanted = {"scheme": wanted["scheme"]}
    differing = [f"{key} is {has.get(key)!r}, not {value!r}" for key, value in wanted.items() if has.get(key) != value]
    if differing:
        raise InvalidArgumentError(
            f"join of training {group.name!r}: it runs with other settings: {'; '.join(differing)}; "
            f"leave these settings out to adopt the group's, or take another name"
        )
