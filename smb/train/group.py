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
these parts are deleted before a new group is made.

Here is the group of a member, and a look at one from outside. `group_making` has how it begins, `group_deletion` how it
ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import struct
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from smb.buffer import Buffer
from smb.client import Client
from smb.daemon.failpoint import failpoint
from smb.errors import (
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
)
from smb.lock import Lock
from smb.train import member_table as t
from smb.train import members, optimizers
from smb.train.exchange.at_once import is_remote
from smb.train.guards import Guards, Norm, RefusedContributionError, WorkerGuards
from smb.train.join_locks import keeping, setup_lock
from smb.train.members import Member
from smb.train.optimizers import OptimizerUsed
from smb.train.scheme import Json, Scheme, Span, Values, is_whole, scheme_of
from smb.train.time_spent import TimeSpent
from smb.train.traits import ROUNDS

METADATA = "smb.train"
# In the settings of a training with rounds: its number of slots. Releases that knew tables of t.SLOTS alone refuse a
# training with this setting; they would decide its rounds in other columns. Trainings that they made lack it.
_MEMBERS = "members"
BUILT, ATTEMPT = 1, 2  # flags in the table's word ROUND
# Bytes of an element.
WIRE_BYTES = {"exact": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 64}

# Names below a group's name that belong to its scheme, to smb.torch.join and to the group. Work units are not among
# them, because users choose their names.
PARTS = ("members", "tick", "next", "outer", "inbox", "host", "state")

_log = logging.getLogger("smb")


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
            self.scheme = scheme_in(settings)
            self.guards = Guards(**settings["guards"])
            self.lease = float(settings["lease"])
        except (KeyError, TypeError, ValueError) as error:  # other programs may store any metadata
            raise InvalidArgumentError(
                f"buffer {name!r} is not a group of this release of smb.train: its settings can't be read: {error!r}; "
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
                        return undo_making(self.client, self.name, setup, sorted(self._names))
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
            undo_making(self.client, self.name, setup)

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


def view(client: Client, name: str, *, deleted: bool = False) -> Group:
    """Return a group to look at, without joining it. Raises NotFoundError. With deleted=True a group whose deletion has
    begun is returned too, as long as enough of it exists.
    """
    group, ready = found_of(client, name)
    if group is None or not ready or (ready == t.DELETED and not deleted):
        raise missing(name)
    return group


def missing(name: str) -> NotFoundError:
    """Return the error that says that there is no such training."""
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


def own_buffers(name: str) -> list[str]:
    """Return the names of a group's own buffers, in the order in which they are deleted."""
    return [f"{name}/tick", f"{name}/members", name]


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


def slots_of(settings: dict[str, Json], scheme: Scheme) -> int:
    """Return the number of slots of a new group with these settings."""
    return int(settings["settings"].get(_MEMBERS, t.SLOTS)) if scheme.traits.way == ROUNDS else scheme.MEMBERS_MAX


def scheme_in(settings: dict[str, Json]) -> Scheme:
    """Return the scheme of a group with these settings. Raises InvalidArgumentError, and KeyError, TypeError or
    ValueError if these are no group's settings.
    """
    own = dict(settings["settings"])
    slots = own.pop(_MEMBERS, t.SLOTS)
    if not is_whole(slots, 1, t.SLOTS_MAX):
        raise InvalidArgumentError(f"it has {slots!r} slots, and this release takes up to {t.SLOTS_MAX}")
    return scheme_of(settings["scheme"], own)


def opened(client: Client, name: str) -> Group | None:
    """Return the group. None if there is none, or if the process that made or deleted it died half-way."""
    group, ready = found_of(client, name)
    return group if ready != t.DELETED and ready else None


def found_of(client: Client, name: str) -> tuple[Group | None, int]:
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


def undo_making(client: Client, name: str, setup: Lock, others: Iterable[str] = ()) -> bool:
    """Delete what a failed join made. Return True if it is gone. The caller holds the setup lock: if that was lost, the
    buffers may be another process's. A group without its table counts as half-made and without buffers of a scheme, so
    the scheme's buffers are deleted first.
    """
    try:
        for each in (*others, *own_buffers(name)):
            setup.check()
            client.delete(each, missing_ok=True)
    except Error as error:
        _log.debug("training %r: what a failed join has made may still be there: %s", name, error)
        return False
    return True
