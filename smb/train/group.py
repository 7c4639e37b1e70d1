"""A group: the buffers that the workers of one training share, and the operations on them that every scheme needs.

    NAME           the shared weights, float32 (n,); the group's settings are its metadata
    NAME/members   the table (member_table.py)
    NAME/tick      published to wake all members that wait
    NAME/...       buffers of the scheme, made with like=NAME, so that servers can combine them

The first worker that joins makes these buffers. Every buffer of a training is made under the lock NAME/setup, also by
workers that join again, and a deletion holds the same lock. So no buffer is made after a deletion has listed the
buffers. Buffers are deleted by name. A process that deletes therefore checks right before each deletion that it still
holds the lock: if it lost the lock, another process may have made the group anew.

A group exists once the word READY of its table says so. If only parts of a group exist, its maker or deleter died:
these parts are deleted before a new group is made (`leftovers`).
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
from smb.train import member_table as t
from smb.train import members, optimizers
from smb.train.exchange.at_once import is_remote
from smb.train.guards import Guards, Norm, RefusedContributionError, WorkerGuards
from smb.train.join_locks import giving_back, keeping, setup_lock
from smb.train.members import Member
from smb.train.optimizers import OptimizerUsed
from smb.train.parameters import Parameters
from smb.train.scheme import Json, Scheme, Span, Values, is_whole, scheme_of
from smb.train.time_spent import TimeSpent
from smb.train.traits import ROUNDS

METADATA = "smb.train"
# In the settings of a training with rounds: its number of slots. Releases that knew tables of t.SLOTS alone refuse a
# training with this setting; they would decide its rounds in other columns. Trainings that they made lack it.
_MEMBERS = "members"
LEASE_S = 10.0
BUILT, ATTEMPT = 1, 2  # flags in the table's word ROUND
_PLACEMENT = {"servers", "stripe", "wire", "replicas"}
_NAMED = 4  # buffers that a line of the log names at most
# Bytes of an element.
WIRE_BYTES = {"exact": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 64}

# Names below a group's name that belong to its scheme, to smb.torch.join and to the group. Work units are not among
# them, because users choose their names.
PARTS = ("members", "tick", "next", "outer", "inbox", "host", "state")

_log = logging.getLogger("smb")
Made = TypeVar("Made")


class GivenUpError(Error):
    """A step in the background was given up because its worker was closed. Users never see this error."""


class Group:
    """A worker's view of its group, made by `enter`.

    It is used by the thread of its Exchange, and by one thread that an Exchange may start. Only the former uses the
    guards. Only the latter calls `wait` as long as it runs.

    weights: the shared weights. table: the table of members. member: this worker's slot. scheme, guards, lease: the
    group's settings. patience: seconds to wait before looking for dead members. sent_bytes: size of a contribution as
    it is sent. The model is always read exactly, whatever the wire.
    """

    def __init__(self, client: Client, name: str, weights: Buffer, settings: dict[str, Json]) -> None:
        self.client = client
        self.name = name
        self.weights = weights
        try:
            self.scheme = _scheme_in(settings)
            self.guards = Guards(**settings["guards"])
            self.lease = float(settings["lease"])
        except (KeyError, TypeError, ValueError) as error:  # other programs may store any metadata
            raise InvalidArgumentError(
                f"buffer {name!r} is not a group of this version of smb.train: its settings can't be read: {error!r}; "
                f"choose another name"
            ) from error
        self.table = t.Table(client.open(f"{name}/members"))
        self.tick = client.open(f"{name}/tick")
        self.member: Member
        self.made = False  # whether this worker made the group
        self.samples_known = False  # whether step() got the number of samples; otherwise no samples are counted
        self.nested: Group | None = None  # a group under this one's name that the scheme has joined
        self.time_spent = TimeSpent()
        self.unneeded: list[str] = []  # buffers to delete after this worker has left
        self._names: set[str] = set()  # names of the scheme's buffers that this worker opened or made
        self._guard = WorkerGuards(self.guards)
        self.guard_fired = ""  # text of the last refusal
        self._seen = 0  # the last version of the tick that this worker has seen
        self.given_up = False  # written by the thread that closes the worker, read by the one that exchanges
        self._rejoins = 0
        self.optimizer: OptimizerUsed | None = None  # this member's, once `compare_optimizers` was called
        # The member whose statistics `return_` carries over, until return_ has succeeded.
        self._former: Member | None = None
        self.patience = max(0.05, self.lease / 4)
        self.sent_bytes = round(weights.size * WIRE_BYTES[weights.wire])

    # ---- membership

    def admit(self, own: int = -1) -> None:
        """Take a slot, if possible the slot `own`. Afterwards `member` is this worker's."""
        self._seen = self.tick.version
        self.member = members.admit(self.client, self.name, self.table, self.lease, self.scheme.first_clock, own)
        self.member.set(t.REJOINS, self._rejoins)
        if self.optimizer is not None:
            with contextlib.suppress(Error):  # others are only told of it
                optimizers.write(self.table, self.member.row, self.optimizer)
        self.wake()

    def rejoin(self, lost_steps: int) -> None:
        """Take a slot again after MembershipLostError. Rejoins are counted and logged, with the number of local steps
        that are lost.
        """
        if self._former is None:
            self._rejoins += 1
        self.member.leave()
        slot = (self._former or self.member).slot
        self.return_()
        _log.warning(
            "training %r: member %d lost its lease and is back as member %d; %d of its local steps %s lost",
            self.name,
            slot,
            self.member.slot,
            lost_steps,
            "is" if lost_steps == 1 else "are",
        )

    def return_(self) -> None:
        """Take a slot again, and keep the statistics. If this fails, call it again."""
        # An earlier call may have taken a slot before it failed. The statistics are those of the member before that
        # slot.
        former = self._former = self._former or self.member
        self.admit(former.slot)
        kept = (t.CONTRIBUTIONS, t.REFUSED, t.DROPPED, t.STALENESS_MAX, t.SAMPLES, t.BYTES, t.JOINED_US)
        for column in kept:
            self.member.set(column, former.get(column))
        self.member.set(t.STEPS, max(former.get(t.STEPS), self.member.get(t.STEPS)))
        # The former row, or this worker's new row, has these samples already.
        self.member.add(t.SAMPLES_BEFORE, -former.reported_samples)
        self.member.report()
        if self.member.slot != former.slot:
            former.forward()
        self._former = None

    def compare_optimizers(self, used: OptimizerUsed) -> None:
        """Tell the others this member's optimizer, and log a warning if another member has another one. Two small
        calls. If they fail, nothing is compared.
        """
        self.optimizer = used
        try:
            optimizers.write(self.table, self.member.row, used)
            rows = self.table.read()
        except Error as error:
            _log.debug("training %r: optimizers are not compared: %s", self.name, error)
            return
        differing = optimizers.differing(rows, self.member.row, [1 + slot for slot in self.live(rows)])
        if differing:
            _log.warning("training %r: %s", self.name, differing)

    def leave(self) -> None:
        """Free the slot, wake the members that wait, and delete the buffers that are not needed any more.

        If a deletion fails because the coordinator is away, the next member in this slot deletes the inbox.
        """
        self.member.leave()
        self.wake()
        unneeded, self.unneeded = self.unneeded, []
        try:
            for name in unneeded:
                self.client.delete(name, missing_ok=True)
        except Error as error:
            _log.warning("training %r: left it, but some of its buffers could not be deleted: %s", self.name, error)

    def withdraw(self) -> bool:
        """Leave after a failed join, and delete what the join made. If no other worker has come, that is the whole
        group.

        Returns True if the group is gone. Failures here are only logged, because the reason of the failed join matters
        more.
        """
        if self.nested is not None:
            self.nested.withdraw()
        try:
            with contextlib.suppress(InvalidArgumentError):  # this worker has left already
                self.leave()
            if self.made:
                with setup_lock(self.client, self.name, self.weights.info.replicas) as setup:
                    if self.table.get(0, t.INCARNATIONS) == 1:
                        return _undo(self.client, self.name, setup, sorted(self._names))
        except Error as error:
            _log.warning("training %r: could not delete what a failed join has made: %s", self.name, error)
        return False

    def undo(self, setup: Lock) -> None:
        """Delete what `enter` made, after taking a slot has failed. The caller holds the setup lock, so no other worker
        has come. Failures are only logged, as in withdraw.
        """
        # The slot was taken, but waking the others failed; they look by themselves after a while.
        if hasattr(self, "member"):
            try:
                self.member.leave()
            except Error as error:
                _log.warning("training %r: could not leave it after a failed join: %s", self.name, error)
        if self.made:
            _undo(self.client, self.name, setup)

    def live(self, rows: t.Rows) -> list[int]:
        """Return the slots that are taken, in order."""
        return list(members.live(rows))

    def reap(self, slots: Iterable[int]) -> list[int]:
        """Free those of these slots whose holders are dead, and wake all members if there are any. Makes a call for
        each slot.
        """
        dead = members.reap(
            self.client, self.name, self.table, self.lease, (slot for slot in slots if slot != self.member.slot)
        )
        if dead:
            self.wake()
        return dead

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[None]:
        """Keep the group from being deleted while the block makes buffers. Blocks while others join or delete the
        group.

        Raises TimeoutError, and NotFoundError if the group was deleted.
        """
        with keeping(self.client, f"{self.name}/setup", self.weights.info.replicas):
            if self.deleted():
                raise NotFoundError(f"training {self.name!r} was deleted")
            yield

    def deleted(self) -> bool:
        """Return True if the group was deleted or is being deleted. One small read."""
        try:
            return self.table.get(0, t.READY) == t.DELETED
        except NotFoundError:
            return True

    # ---- waking and waiting

    def wake(self) -> None:
        """Wake every member that waits. Before this worker waits itself, it must look at the table."""
        new = wake(self.tick, self.lease)
        # Another thread of this process may be waiting. A wake that others sent before this one must still end its
        # wait.
        if self._seen == new - 1:
            self._seen = new

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a member calls wake(). Returns False after `timeout` seconds (default: a quarter of the lease).

        A wake() since the last wait counts: a caller that looks at the table and then waits misses nothing. After
        False, call reap() to look for dead members. Raises GivenUpError.
        """
        self.go_on()
        try:
            with self.time_spent.waiting:
                self._seen = self.tick.wait(self._seen + 1, timeout=self.patience if timeout is None else timeout)
        except DeadlineError:
            return False
        return True

    def go_on(self) -> None:
        """Raise GivenUpError if this worker's step in the background was given up."""
        if self.given_up:
            raise GivenUpError(f"training {self.name!r}: the exchange was given up because its worker was closed")

    # ---- weights

    @property
    def round(self) -> int:
        """The number of the group's open round; always 0 in schemes without rounds."""
        return self.table.get(0, t.ROUND) >> t.ROUND_SHIFT

    def read(self, out: Values) -> int:
        """Read the shared weights exactly into `out`, never a mix of two rounds. Return the round."""
        return self.read_by(lambda weights: weights.read(out=out, wire="exact"))

    def read_by(self, read: Callable[[Buffer], object], *, known: int | None = None, needs_us: bool = False) -> int:
        """Call `read` with the weights, and repeat the call if a round was closed meanwhile. Return the round that was
        read.

        `known` is the word ROUND if the caller has just read it. `needs_us` means that the open round can't be closed
        without this worker's mark while it holds its slot; then the round need not be checked after the read.
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
        """Call `read` with the weights once. Return the round that was open when the read began. `known` is as in
        read_by.

        If a round is closed meanwhile, the values are a mix of two rounds. Callers accept that when their contribution
        to the former round is dropped in this case.
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
        """The parts of the weights that are exchanged at times of their own, or one part if all
        are exchanged together.
        """
        return self.scheme.spans(self.weights)

    def span(self, number: int) -> Span:
        """Return the part of the weights that this round exchanges."""
        return self.spans[number % len(self.spans)]

    def replace(self, following: Buffer, claim: int, fence: Lock) -> bool:
        """Do the second half of closing a round (rounds.py): replace the weights and advance the round's number.
        Returns False if another worker has claimed the round.
        """
        offset, count = self.span(claim >> t.ROUND_SHIFT)
        self.weights.accumulate_from(following, op="replace", offset=offset, count=count, fence=fence)
        failpoint("train-copied")
        found = self.table.swap(0, t.ROUND, claim, (claim >> t.ROUND_SHIFT) + 1 << t.ROUND_SHIFT)
        failpoint("train-committed")
        return found == claim

    def _finish_round(self) -> None:
        """Do the second half of closing for a worker that died in the middle of it: perhaps no other member is left."""
        lock = self.weights.lock(ttl=self.lease, timeout=0.0)
        try:
            lock.acquire()
        except DeadlineError:
            return  # another worker is closing the round
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
        """Open the group's buffer NAME/suffix, or make it like the weights. The caller holds the setup lock."""
        self._names.add(f"{self.name}/{suffix}")
        name, replicas = f"{self.name}/{suffix}", self.weights.info.replicas
        return self.client.create(name, like=self.weights, replicas=replicas, exist_ok=True)

    # ---- contributions

    def check(self, contribution: Norm, staleness: int = 0, *, whole: bool = True) -> None:
        """Check a contribution before it counts, against the guards and this worker's membership. Makes a call only if
        the lease may have run out, or to report that a guard has refused.

        With whole=False, check all parts so far before the next part is sent, so that every part sent keeps to the
        guards. Raises RefusedContributionError (counted), MembershipLostError, UnavailableError.
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
        """Count a contribution's samples if `step` got their number. Makes no call."""
        if self.samples_known:
            self.member.add(t.SAMPLES, samples)

    def count(self, samples: int, nbytes: int, contributions: int = 1) -> None:
        """Count a contribution that was sent, in the table too. One small call."""
        self.member.add(t.CONTRIBUTIONS, contributions)
        self.count_samples(samples)
        self.member.add(t.BYTES, nbytes)
        self.report()

    def report(self) -> None:
        """Write the member's statistics into the table. A failure is not raised, since the contribution that was sent
        or refused must not be repeated; the next report has the statistics. One small call.
        """
        try:
            self.member.report()
        except Error as error:
            _log.debug("training %r: %s", self.name, error)


def wake(tick: Buffer, lease: float) -> int:
    """Wake all members that wait for the next version of a tick. Return that version. If a process is killed in the
    middle of this call, the next one waits until the dead process's lease ends.
    """
    while True:
        with contextlib.suppress(LockLostError):  # this process was stopped for longer than the lease, and woke nobody
            return tick.publish(np.zeros(tick.size, np.int64), ttl=lease)


def enter(
    client: Client,
    name: str,
    parameters: Parameters,
    scheme: Scheme | None,
    guards: Guards | None,
    lease: float | None,
    run: Callable[[Group], Made],
    *,
    members: int | None = None,
    **placement: Any,
) -> Made:
    """Take a slot in the group of that name, which is made from the present values if it does not exist. Return what
    `run` returns for the group; run() is called under the setup lock and makes or opens all buffers that the member
    needs. `members` is the number of slots of a group that is made; None: as many as the scheme takes.

    scheme=None adopts the group's settings. The values stay as they are. Raises InvalidArgumentError, NotFoundError,
    OutOfMemoryError; after an error nothing of this join remains.
    """
    _check_scheme(name, scheme)
    replicas: int | None = placement.get("replicas")
    copies = copies_of(client, name, replicas)
    if scheme is None and copies is None:
        raise _nobody(name)
    with contextlib.ExitStack() as on_failure:
        with keeping(client, f"{name}/setup", copies) as setup:
            group = _opened(client, name)
            if group is None:
                if scheme is None:
                    raise _nobody(name)
                scheme.check(name, parameters)
                check_lease(f"join of training {name!r}", lease)
                settings = settings_of(scheme, guards or Guards(), LEASE_S if lease is None else lease, members)
                group = _made(client, name, parameters, settings, placement, setup)
            else:
                _compare(group, scheme, guards, lease, replicas, placement.get("wire"))
            if group.weights.size != parameters.size:
                raise InvalidArgumentError(
                    f"join of training {name!r}: this worker has {parameters.size} values, and the shared model "
                    f"has {group.weights.size}; join with a model of that size, or take another name"
                )
            group.scheme.check(name, parameters)
            try:
                group.admit()
            except BaseException:
                group.undo(setup)
                raise
            # Called after the setup lock is released, because withdraw takes that lock.
            on_failure.callback(group.withdraw)
            made = run(group)
        on_failure.pop_all()
    return made


@contextlib.contextmanager
def deleting(client: Client, asked: str, name: str) -> Iterator[Callable[[], object]]:
    """Keep other processes from making or joining the training or work units `name` while the block deletes them.

    Yields a function to call right before each deletion by name: it raises LockLostError if another process may have
    made them anew. Raises TimeoutError, which names the holder of the lock, if the lock can't be acquired: nothing was
    deleted.
    """
    setup = setup_lock(client, name, copies_of(client, name, None))
    with contextlib.ExitStack() as last:
        check: Callable[[], object] = setup.check
        try:
            setup.acquire()
        except DeadlineError as error:
            raise DeadlineError(
                f"{asked}: nothing was deleted, because another process is making, joining or deleting it; try again: "
                f"{error}"
            ) from error
        except UnavailableError as error:
            # A training with a part on a server that is gone for good must still be deletable. Joiners need the same
            # lock, and can't get it either.
            _log.warning("%s: deleting without its lock, because the lock's server is away: %s", asked, error)
            check = _nothing_to_ask
        else:
            last.enter_context(giving_back(setup, asked))
        try:
            yield check
        except LockLostError as error:
            raise LockLostError(f"{asked} stopped half-way; call it again if it still exists: {error}") from error


def _nothing_to_ask() -> None:
    """The check of a deletion that has no lock."""


@contextlib.contextmanager
def room(name: str, scheme: Scheme, model_bytes: int) -> Iterator[None]:
    """If servers have no room for buffers that the block makes, the error says how much memory the scheme takes."""
    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"join of training {name!r}: scheme {scheme.NAME!r} keeps copies of the model on the memory servers, "
            f"{scheme.footprint()}, of {format_bytes(model_bytes)} each; {error}"
        ) from error


def view(client: Client, name: str, *, deleted: bool = False) -> Group:
    """Return a group to look at, without joining it. Raises NotFoundError. With deleted=True a group whose deletion has
    begun is returned too, as long as enough of it exists.
    """
    group, ready = _found(client, name)
    if group is None or not ready or (ready == t.DELETED and not deleted):
        raise _none(name)
    return group


def _none(name: str) -> NotFoundError:
    return NotFoundError(f"there is no training {name!r}; list the trainings with: smb train ls")


def shared(client: Client, name: str, out: Values | None = None) -> Values:
    """Return the present shared model of a group, float32 (n,), in `out` if given, without joining.

    In schemes with rounds the model is that of one round. Blocks for a few calls. Raises NotFoundError,
    InvalidArgumentError.

    ```python
    smb.train.shared(client, "run").shape  # (1000,)
    ```
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

    ```python
    smb.train.delete(client, "run")
    ```
    """
    if not leftovers(client, name):  # nothing exists, so no lock is made
        view(client, name)
    with deleting(client, f"delete of training {name!r}", name) as check:
        group, ready = _found(client, name)
        if group is not None and ready:
            _delete(client, group, check)
        elif not remove_leftovers(client, name, check):
            raise _none(name)


def _delete(client: Client, group: Group, check: Callable[[], object]) -> None:
    """Delete a group. The caller holds the setup lock; `check` raises if it was lost."""
    check()
    # So that later errors about a missing buffer say that the training was deleted.
    group.table.write(0, t.READY, np.array([t.DELETED]))
    for each in _all_of(client, group.name):
        check()
        client.delete(each, missing_ok=True)


def _own(name: str) -> list[str]:
    return [f"{name}/tick", f"{name}/members", name]


def _all_of(client: Client, name: str) -> list[str]:
    """Return a group's buffers in the order in which they are deleted. The group's own buffers come last: if the
    deletion stops half-way, they show that there is something to delete.
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
    """Delete a group whose members are all dead, if it exists. The arguments are those with which it will be made anew.

    Raises AlreadyExistsError if a member is alive, or died too recently to tell, and InvalidArgumentError if the group
    could not be made anew with these arguments. Then nothing was deleted.
    """
    if scheme is None:
        raise InvalidArgumentError(
            f"join of training {name!r} with fresh=True needs a scheme; pass one, such as smb.train.DiLoCo(every=500); "
            f"nothing was deleted"
        )
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
    """Return how many copies a group's buffers and locks have or are to have; None if there is no group and the caller
    does not say. A lock that was idle is made anew by the next process that acquires it, and must then have as many
    copies.
    """
    if asked is not None:
        return asked
    try:
        return client.open(name).info.replicas
    except NotFoundError:
        return None


def settings_of(scheme: Scheme, guards: Guards, lease: float, members: int | None = None) -> dict[str, Json]:
    """Return a new group's settings as its metadata has them. `members` is the number of its slots; None: as many as
    the scheme takes.
    """
    own, slots = scheme.settings(), members or scheme.MEMBERS_MAX
    if scheme.traits.way == ROUNDS and slots > t.SLOTS:
        own |= {_MEMBERS: slots}
    return {"scheme": scheme.NAME, "settings": own, "guards": guards.settings(), "lease": lease}


def _slots_of(settings: dict[str, Json], scheme: Scheme) -> int:
    """Return the number of slots of a new group with these settings."""
    return int(settings["settings"].get(_MEMBERS, t.SLOTS)) if scheme.traits.way == ROUNDS else scheme.MEMBERS_MAX


def _scheme_in(settings: dict[str, Json]) -> Scheme:
    """Return the scheme of a group with these settings. Raises InvalidArgumentError, and KeyError, TypeError or
    ValueError if these are no group's settings.
    """
    own = dict(settings["settings"])
    slots = own.pop(_MEMBERS, t.SLOTS)
    if not is_whole(slots, 1, t.SLOTS_MAX):
        raise InvalidArgumentError(f"it has {slots!r} slots, and this version takes up to {t.SLOTS_MAX}")
    return scheme_of(settings["scheme"], own)


def leftovers(client: Client, name: str) -> list[str]:
    """Return the buffers that remain of a training whose maker, loader or deleter died, in the order of their deletion;
    [] if there are none. Call it only if no group of this name is ready.

    If the group's own buffers exist, at least in part, all buffers below its name are returned, as when a training is
    deleted, except those of other trainings below that name. If none of them exists, there may never have been a
    training: then only buffers with the names of a training's parts are returned.
    """
    names = {info.name for info in client.list()}
    own = [each for each in _own(name) if each in names]
    under = [each for each in sorted(names) if each.startswith(f"{name}/") and each not in own]
    if not own:
        return [each for each in under if each.removeprefix(f"{name}/").split("/")[0] in PARTS]
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
    except Error:  # unknown, so the buffer is kept
        return True


def remove_leftovers(client: Client, name: str, check: Callable[[], object]) -> int:
    """Delete what remains of a training of which no group is ready. Return the number of buffers. The caller holds the
    setup lock. `check` raises if it was lost, because a process that was stopped meanwhile must not delete another's
    new buffers.
    """
    left = leftovers(client, name)
    for each in left:
        check()
        client.delete(each, missing_ok=True)
    if left:
        _log.warning(
            "training %r: deleted %d buffers of a training whose creation, load or deletion was interrupted: %s",
            name,
            len(left),
            ", ".join(left[:_NAMED]) + (", ..." if len(left) > _NAMED else ""),
        )
    return len(left)


def _opened(client: Client, name: str) -> Group | None:
    """Return the group. None if there is none, or if the process that made or deleted it died half-way."""
    group, ready = _found(client, name)
    return group if ready != t.DELETED and ready else None


def _found(client: Client, name: str) -> tuple[Group | None, int]:
    """Return the group if all of its own buffers exist, and its word READY."""
    try:
        weights = client.open(name)
    except NotFoundError:
        return None, 0
    settings = weights.metadata.get(METADATA)
    if not isinstance(settings, dict):
        raise InvalidArgumentError(f"buffer {name!r} is not a group of smb.train; choose another name")
    try:
        group = Group(client, name, weights, settings)
        return group, group.table.get(0, t.READY)
    except NotFoundError:
        return None, 0


def _check_scheme(name: str, scheme: object) -> None:
    if scheme is not None and not isinstance(scheme, Scheme):
        raise InvalidArgumentError(
            f"join of training {name!r}: scheme must be an object with its settings, such as "
            f"smb.train.DiLoCo(every=500), not {scheme!r}; only smb.torch.join also takes a name"
        )


def check_placement(asked: str, placement: dict[str, Any]) -> None:
    """Raise InvalidArgumentError for an option that does not say where a training's buffers lie."""
    if foreign := placement.keys() - _PLACEMENT:
        hint = "; overlap= is an option of smb.torch.join" if "overlap" in foreign else ""
        raise InvalidArgumentError(
            f"{asked}: unknown option {', '.join(sorted(foreign))}=; the options are "
            f"{', '.join(sorted(_PLACEMENT))}{hint}"
        )
    check_replicas(asked, placement.get("replicas"))


def check_lease(asked: str, lease: float | None) -> None:
    """Raise InvalidArgumentError for a lease that is too short to be renewed, or too long to wait for."""
    if lease is not None and not (math.isfinite(lease) and 0.05 <= lease <= 3600):
        raise InvalidArgumentError(f"{asked}: lease must be from 0.05 to 3600 seconds, not {lease!r}")


def _made(
    client: Client, name: str, parameters: Parameters, settings: dict[str, Json], placement: dict[str, Any], setup: Lock
) -> Group:
    """Make the group. The caller holds the setup lock, so existing parts of the group were left
    by a process that died.
    """
    remove_leftovers(client, name, setup.check)
    metadata = {**placement.pop("metadata", {}), METADATA: settings}
    scheme = _scheme_in(settings)
    with room(name, scheme, 4 * parameters.size), contextlib.ExitStack() as on_failure:
        on_failure.callback(_undo, client, name, setup)
        weights = client.create(name, parameters.size, "float32", metadata=metadata, **placement)
        copies = weights.info.replicas
        client.create(f"{name}/tick", 1, "int64", servers=1, replicas=copies)
        shape = (1 + _slots_of(settings, scheme), t.FIELDS)
        rows = client.create(f"{name}/members", shape, "int64", servers=1, stripe=t.STRIPE, replicas=copies)
        table = t.Table(rows)
        parameters.store(weights)
        table.add(0, t.READY, 1)
        group = Group(client, name, weights, settings)
        on_failure.pop_all()
    group.made = True
    return group


def _undo(client: Client, name: str, setup: Lock, others: Iterable[str] = ()) -> bool:
    """Delete what a failed join made. Return True if it is gone. The caller holds the setup lock: if that was lost, the
    buffers may be another process's. A group without its table counts as half-made and without buffers of a scheme, so
    the scheme's buffers are deleted first.
    """
    try:
        for each in (*others, *_own(name)):
            setup.check()
            client.delete(each, missing_ok=True)
    except Error as error:
        _log.debug("training %r: what a failed join has made may still be there: %s", name, error)
        return False
    return True


def _nobody(name: str) -> NotFoundError:
    return NotFoundError(
        f"join of training {name!r}: there is no such training; the first worker must pass a scheme, as "
        f'smb.train.DiLoCo(every=500), or scheme="diloco", every=500 for smb.torch.join; list the trainings with: '
        f"smb train ls"
    )


def _compare(
    group: Group,
    scheme: Scheme | None,
    guards: Guards | None,
    lease: float | None,
    replicas: int | None,
    wire: str | None,
) -> None:
    """Raise InvalidArgumentError if a joiner asks for other settings than the group has."""
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
