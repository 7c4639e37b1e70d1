"""Members: slots in the table, each held by a lock with a lease.

A member holds the lock "GROUP/member/SLOT"; the client library renews it in the background. To check a member, another
one tries its lock. If it gets the lock, the member is dead or was stopped for longer than its lease, and the slot is
freed. No clocks of different hosts are compared.

Each time a member joins, it gets an incarnation, a number that was never given before. Every word by which a member
changes anything for others contains its incarnation. A member may be stopped and continue after its slot was freed.
Then either no other member has taken the slot and its words are still true, or it changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smb.errors import (
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
    OutOfMemoryError,
    UnavailableError,
)
from smb.lock import Lock
from smb.spi import is_located
from smb.train import member_table as t

if TYPE_CHECKING:
    from smb.client import Client

_log = logging.getLogger("smb")
_GOING_ON = "going on without it"
# Members of this process.
_here: weakref.WeakSet[Member] = weakref.WeakSet()


class MembershipLostError(Error):
    """This worker's lease ended, for example because its process was stopped, and the group went on without this
    worker.

    A Worker joins again by itself.
    """


class NoSlotError(OutOfMemoryError):
    """All slots of a training are taken. A slot is free again when a member leaves, or a dead member's lease ends."""


class Member:
    """This process's slot. Its statistics are kept here and written to the table by `report`."""

    def __init__(self, table: t.Table, slot: int, incarnation: int, former: int, lock: Lock, clock: int) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.former = former  # incarnation of the former holder of the slot; 0 if there was none
        self.row = 1 + slot
        self.stats = np.zeros(t.STATS_END - t.STATS, np.int64)
        self.mark = t.mark(incarnation, clock)
        self.reported_samples = 0  # number of samples that the table has
        self._table = table
        self._lock = lock

    @property
    def training_id(self) -> int:
        """The id of the training's table."""
        return self._table.buffer.info.id

    def set(self, column: int, value: int) -> None:
        """Set one statistic, given by its column in the table; `report` writes it."""
        self.stats[column - t.STATS] = value

    def add(self, column: int, value: int) -> None:
        """Add to one statistic."""
        self.stats[column - t.STATS] += value

    def get(self, column: int) -> int:
        """Return one statistic."""
        return int(self.stats[column - t.STATS])

    def report(self) -> None:
        """Write the statistics into the table. One small call."""
        self._table.write(self.row, t.STATS, self.stats)
        self.reported_samples = self.get(t.SAMPLES)

    @property
    def clock(self) -> int:
        """The clock that the last `advance` wrote."""
        return t.clock_of(self.mark)

    @property
    def held(self) -> bool:
        """True if the slot can't have been freed yet, as far as this is known without a call."""
        return self._lock.held

    def check(self) -> None:
        """Raise MembershipLostError if the slot was lost. Makes a call only if the lease may have run out."""
        if self._lock.held:
            return
        try:
            self._lock.check()  # while its server was away the lock was not renewed, but may still be ours
        except (LockLostError, InvalidArgumentError) as error:  # InvalidArgumentError: this member has left
            raise self.lost() from error
        except UnavailableError as error:
            raise UnavailableError(
                f"member {self.slot} of training {self._table.buffer.name.removesuffix('/members')!r} can't renew its "
                f"lease: {error}. Start that server again with the same --name, and repeat the call; if the server "
                f"comes back by itself, smb.connect(timeout=) says how long to wait for it"
            ) from error

    def advance(self, clock: int) -> None:
        """Write into the table that this member has come to a clock. One small call. Raises MembershipLostError."""
        new = t.mark(self.incarnation, clock)
        found = self._table.swap(self.row, t.MARK, self.mark, new)
        if found not in (self.mark, new):
            raise self.lost()
        self.mark = new

    def advance_and_look(self, clock: int) -> t.Rows:
        """Advance as `advance` does, and return all rows as they are afterwards: one small call for both.

        Marks only grow: with the clock, and from one owner of the slot to the next because the incarnation is in the
        high bits.
        """
        new = t.mark(self.incarnation, clock)
        rows = self._table.raise_to(self.row, t.MARK, new)
        if rows[self.row, t.MARK] != new:
            raise self.lost()
        self.mark = new
        return rows

    def lost(self) -> MembershipLostError:
        """Return the error for a lost membership."""
        return MembershipLostError(
            f"member {self.slot} (incarnation {self.incarnation}) lost its lease, for example because its process was "
            f"stopped, and the group went on without it; a worker joins again by itself"
        )

    def leave(self) -> None:
        """Free the slot, and record that this member left by itself. Marks stay. A second call does nothing."""
        try:
            if self._table.swap(self.row, t.INCARNATION, self.incarnation, 0) == self.incarnation:
                self._table.swap(self.row, t.PID, self.get(t.PID), -self.get(t.PID))
        finally:
            # Otherwise the client would renew the lock for ever, and the others would wait for this member.
            self.release()

    def forward(self) -> None:
        """After leaving, when this member goes on in another slot: the row of this slot is not shown any more."""
        if t.incarnation_of(self._table.get(self.row, t.MARK)) == self.incarnation:
            self._table.swap(self.row, t.PID, -self.get(t.PID), 0)
            self._table.swap(self.row, t.PID, self.get(t.PID), 0)  # after a lost lease the sign was not changed

    def release(self) -> None:
        """Release the lock, if this member still holds it."""
        try:
            self._lock.release()
        except (LockLostError, InvalidArgumentError):
            _log.debug("the lock of member %d was lost before it left", self.slot)

    def lapse(self) -> None:
        """Let the lease end. Makes no call and takes no lock of threads, so a finalizer may call it."""
        self._lock.lapse()


def lock_name(group: str, slot: int) -> str:
    """Return the name of the lock that the holder of a slot holds."""
    return f"{group}/member/{slot}"


def lock_of(client: Client, group: str, slot: int, lease: float, replicas: int) -> Lock:
    """Return the lock of a slot's holder, with no waiting time. It has as many copies as the group's buffers."""
    return client.lock(lock_name(group, slot), ttl=lease, timeout=0.0, replicas=replicas)


def live(rows: t.Rows) -> Iterator[int]:
    """Return the slots that are taken, in order."""
    return (int(slot) for slot in np.flatnonzero(rows[1:, t.INCARNATION]))


def admit(
    client: Client, group: str, table: t.Table, lease: float, first_clock: Callable[[t.Rows], int], own: int = -1
) -> Member:
    """Take a slot. Its mark begins at `first_clock` of the table. Blocks no other member.

    Prefers the slot `own`, for a member that comes back. Raises OutOfMemoryError if all slots are taken, and as
    Client.lock does.
    """
    seen = table.read().copy()
    now = int(seen[0, t.ROUND]) >> t.ROUND_SHIFT
    taken = list(live(seen))
    free = [slot for slot in range(table.slots) if slot not in taken]
    # A slot whose former holder's contribution to the open round may still count is taken last.
    free.sort(key=lambda slot: (_may_count(seen[1 + slot], now), slot != own, slot))
    for slot in free + taken:
        # Finds the lock's server within the client's timeout; `lock_of`, which has no waiting time, gives up earlier.
        client.lock(lock_name(group, slot), ttl=lease, replicas=table.buffer.info.replicas)
        lock = lock_of(client, group, slot, lease, table.buffer.info.replicas)
        try:
            lock.acquire()
        except DeadlineError:
            continue
        holder = int(seen[1 + slot, t.INCARNATION])
        try:
            member = _seated(table, slot, holder, lock, first_clock)
        except BaseException:
            # Otherwise the client would renew the lock as long as the error object lives, and the slot would stay
            # unusable.
            with contextlib.suppress(Error):
                lock.release()
            raise
        if member is not None:
            return member
        with contextlib.suppress(LockLostError):
            lock.release()
    raise NoSlotError(
        f"join of training {group!r}: all of its {table.slots} slots are taken; try again when a member has left"
    )


def _may_count(row: NDArray[np.int64], number: int) -> bool:
    """True if a member has contributed to the open round. A member that joined in this round has its mark, but no
    weight.
    """
    word, weight = int(row[t.MARK]), int(row[t.WEIGHT])
    return t.clock_of(word) == number + 1 and weight >> 32 == t.incarnation_of(word)


def reap(
    client: Client, group: str, table: t.Table, lease: float, slots: Iterable[int], level: int = logging.WARNING
) -> list[int]:
    """Free the slots whose holders are dead, and return these slots. Makes a call for each slot, so pass suspects only.
    Deaths are logged at `level`.

    While the coordinator is away, a lock that this client never used can't be found. Its holder counts as alive then.
    """
    dead = []
    # First the locks that are found without the coordinator: while it is away, the loop ends at the first other one.
    for slot in sorted(slots, key=lambda slot: not is_located(client, lock_name(group, slot))):
        row = 1 + slot
        incarnation = table.get(row, t.INCARNATION)
        try:
            lock = lock_of(client, group, slot, lease, table.buffer.info.replicas)
        except (UnavailableError, DeadlineError) as error:
            _log.warning("training %r: it is unknown whether worker %s is alive: %s", group, _who(table, slot), error)
            break
        try:
            lock.acquire()
        # Alive, or another process tries the lock at this moment; but it is dead if one of its ranks is.
        except DeadlineError:
            gone = incarnation and _rank_is_dead(client, group, table, slot, incarnation, lease)
            if gone and table.swap(row, t.INCARNATION, incarnation, 0) == incarnation:
                _log.log(
                    level, "worker %s of training %r lost one of its ranks; %s", _who(table, slot), group, _GOING_ON
                )
                dead.append(slot)
            continue
        try:
            if incarnation and table.swap(row, t.INCARNATION, incarnation, 0) == incarnation:
                _log.log(level, "worker %s of training %r died; %s", _who(table, slot), group, _GOING_ON)
                dead.append(slot)
        finally:
            try:
                lock.release()
            except (LockLostError, NotFoundError):
                _log.debug("slot %d was found dead by another", slot)
    return dead


def lapsed(client: Client, group: str, lease: float, slots: Iterable[int], replicas: int) -> set[int]:
    """Return the slots whose holders are dead, without freeing them, for processes that may be readers alone.

    A holder whose lock can't be reached does not count as dead.
    """
    dead = set()
    for slot in slots:
        try:
            lock = lock_of(client, group, slot, lease, replicas)
            free = taken(lock)
        except Error as error:  # also TimeoutError: the coordinator hangs
            _log.debug("it is not known which workers of training %r are alive: %s", group, error)
            break
        if free:
            dead.add(slot)
            with contextlib.suppress(Error):
                lock.release()
    return dead


def taken(lock: Lock) -> bool:
    """Try to take a lock that has no waiting time. Return True if it is ours now."""
    try:
        lock.acquire()
    except DeadlineError:
        return False
    return True


def rank_lock(client: Client, member: str, rank: int, lease: float, replicas: int, patience: float = 0.0) -> Lock:
    """Return the lock of a rank of a member (`member_name`), with no waiting time. The rank that speaks has no such
    lock.
    """
    return client.lock(f"{member}/{rank}", ttl=lease, timeout=patience, replicas=replicas)


def member_name(group: str, slot: int, incarnation: int) -> str:
    """Return the name below which the locks of a member's ranks lie."""
    return f"{group}/member/{slot}/{incarnation}"


def _rank_is_dead(client: Client, group: str, table: t.Table, slot: int, incarnation: int, lease: float) -> bool:
    for rank in range(1, table.get(1 + slot, t.RANKS)):
        try:
            lock = rank_lock(client, member_name(group, slot, incarnation), rank, lease, table.buffer.info.replicas)
        except (UnavailableError, DeadlineError):  # the coordinator is away
            return False
        try:
            lock.acquire()
        except DeadlineError:
            continue
        with contextlib.suppress(LockLostError):
            lock.release()
        return True
    return False


def _who(table: t.Table, slot: int) -> str:
    """Return a worker's HOST:PID."""
    return name_of(table.read()[1 + slot])


def name_of(row: NDArray[np.int64]) -> str:
    """Return a member's HOST:PID."""
    return f"{host_of(row)}:{abs(int(row[t.PID]))}"


def is_here(table: t.Table, row: NDArray[np.int64]) -> bool:
    """Return True if the member is of this process. Makes no call."""
    key = (table.buffer.info.id, int(row[t.INCARNATION]))
    return any((member.training_id, member.incarnation) == key for member in list(_here))


def host_of(row: NDArray[np.int64]) -> str:
    """Return the name of a member's host."""
    return row[t.HOST : t.HOST_END].tobytes().rstrip(b"\0").decode(errors="replace")


def _host() -> NDArray[np.int64]:
    room = 8 * (t.HOST_END - t.HOST)
    return np.frombuffer(socket.gethostname().encode()[:room].ljust(room, b"\0"), np.int64)


def _seated(table: t.Table, slot: int, holder: int, lock: Lock, first_clock: Callable[[t.Rows], int]) -> Member | None:
    """Take a slot whose lock the caller holds, and return the new member. `holder` is the incarnation that had the slot
    (0: none); it is dead, and not a member from here on. Returns None, without changing anything for others, if this
    process was stopped for so long that the slot belongs to another member.
    """
    row = 1 + slot
    table.show(slot)
    incarnation = table.add(0, t.INCARNATIONS, 1) + 1
    if holder:
        table.swap(row, t.INCARNATION, holder, 0)
    rows = table.read()
    if rows[row, t.INCARNATION]:
        return None
    former = int(rows[row, t.MARK])
    member = Member(table, slot, incarnation, t.incarnation_of(former), lock, first_clock(rows))
    # The mark before the incarnation: members that see the incarnation see its own mark.
    if table.swap(row, t.MARK, former, member.mark) != former:
        return None
    member.set(t.STEPS, int(np.max(rows[1:, t.STEPS])))
    member.set(t.SAMPLES_BEFORE, int(rows[row, t.SAMPLES_BEFORE] + rows[row, t.SAMPLES]))
    member.set(t.JOINED_US, time.time_ns() // 1000)
    member.set(t.PID, os.getpid())
    member.report()
    table.write(row, t.HOST, _host())
    table.write(row, t.EXTRA, np.zeros(t.EXTRA_END - t.EXTRA, np.int64))
    if table.swap(row, t.INCARNATION, 0, incarnation) != 0:
        return None
    _here.add(member)
    return member
