"""Members: slots in the table, each held by a lock with a lease.

A member holds the lock "GROUP/member/SLOT"; the client library renews it in the background. To check a member, another
one tries its lock. If it gets the lock, the member is dead or was stopped for longer than its lease, and the slot is
freed. No clocks of different hosts are compared.

Each joining gets an incarnation, a number never given before. The incarnation is part of every word by which a member
changes anything for others. A member may be stopped, and go on after its slot was freed. It is then either still alone
in its slot, and its words are true, or it changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
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


class MembershipLostError(Error):
    """This worker's lease ended, for example because its process was stopped, and the group went on without it.

    A Worker joins again by itself.
    """


class Member:
    """This process's slot. Its statistics are kept here and written to the table by `report`."""

    def __init__(self, table: t.Table, slot: int, incarnation: int, former: int, lock: Lock, clock: int) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.former = former  # who had the slot before; 0 for nobody
        self.row = 1 + slot
        self.stats = np.zeros(t.STATS_END - t.STATS, np.int64)
        self.mark = t.mark(incarnation, clock)
        self.reported_samples = 0  # as they stand in the table
        self._table = table
        self._lock = lock

    def set(self, column: int, value: int) -> None:
        """Set one statistic, by its column in the table; `report` writes it."""
        self.stats[column - t.STATS] = value

    def add(self, column: int, value: int) -> None:
        """Add to one statistic."""
        self.stats[column - t.STATS] += value

    def get(self, column: int) -> int:
        """Return one statistic."""
        return int(self.stats[column - t.STATS])

    def report(self) -> None:
        """Write the statistics. One small call."""
        self._table.write(self.row, t.STATS, self.stats)
        self.reported_samples = self.get(t.SAMPLES)

    @property
    def clock(self) -> int:
        """Where `advance` came to last."""
        return t.clock_of(self.mark)

    @property
    def held(self) -> bool:
        """Whether nobody can have freed the slot so far, as far as can be known without asking."""
        return self._lock.held

    def check(self) -> None:
        """Raise MembershipLostError if the slot was lost. Asks the server only if the lease looks run out."""
        if self._lock.held:
            return
        try:
            self._lock.check()  # a server that was away has renewed nothing, and may have us all the same
        except (LockLostError, InvalidArgumentError) as error:  # the latter: we have left
            raise self.lost() from error
        except UnavailableError as error:
            raise UnavailableError(
                f"member {self.slot} of training {self._table.buffer.name.removesuffix('/members')!r} can't renew its "
                f"lease: {error}. Start that server again, with the same --name, and go on; where it comes back by "
                f"itself, smb.connect(timeout=) says how long to wait for it"
            ) from error

    def advance(self, clock: int) -> None:
        """Tell all that this member has come to a clock. One small call. Raises MembershipLostError."""
        new = t.mark(self.incarnation, clock)
        found = self._table.swap(self.row, t.MARK, self.mark, new)
        if found not in (self.mark, new):
            raise self.lost()
        self.mark = new

    def advance_and_look(self, clock: int) -> t.Rows:
        """As advance, and return all rows as they are then: one small call for both.

        Marks only grow: with the clock, and, as the incarnation is above it, from one owner of the slot to the next.
        """
        new = t.mark(self.incarnation, clock)
        rows = self._table.raise_to(self.row, t.MARK, new)
        if rows[self.row, t.MARK] != new:
            raise self.lost()
        self.mark = new
        return rows

    def lost(self) -> MembershipLostError:
        """Return the error that says so."""
        return MembershipLostError(
            f"member {self.slot} (incarnation {self.incarnation}) of the group lost its lease; join again"
        )

    def leave(self) -> None:
        """Free the slot, and say that we did. Marks stay. Twice does nothing."""
        try:
            if self._table.swap(self.row, t.INCARNATION, self.incarnation, 0) == self.incarnation:
                self._table.swap(self.row, t.PID, self.get(t.PID), -self.get(t.PID))
        finally:
            self.release()  # else it would be renewed for ever, and the others wait for us

    def forward(self) -> None:
        """After leaving: this member goes on in another slot, so the row of this one is not shown any more."""
        if t.incarnation_of(self._table.get(self.row, t.MARK)) == self.incarnation:
            self._table.swap(self.row, t.PID, -self.get(t.PID), 0)
            self._table.swap(self.row, t.PID, self.get(t.PID), 0)  # its lease was lost

    def release(self) -> None:
        """Give the lock back, if it is still ours."""
        try:
            self._lock.release()
        except (LockLostError, InvalidArgumentError):
            _log.debug("the lock of member %d was lost before it left", self.slot)


def lock_name(group: str, slot: int) -> str:
    """Return the name of the lock that the holder of a slot holds."""
    return f"{group}/member/{slot}"


def lock_of(client: Client, group: str, slot: int, lease: float, replicas: int) -> Lock:
    """Return the lock that the holder of a slot holds, for one try. It has as many copies as the group's buffers."""
    return client.lock(lock_name(group, slot), ttl=lease, timeout=0.0, replicas=replicas)


def live(rows: t.Rows) -> Iterator[int]:
    """Return the slots that are taken, in order."""
    return (int(slot) for slot in np.flatnonzero(rows[1:, t.INCARNATION]))


def admit(
    client: Client, group: str, table: t.Table, lease: float, first_clock: Callable[[t.Rows], int], own: int = -1
) -> Member:
    """Take a slot, whose mark begins at `first_clock` of the table. Blocks nobody.

    Rather the slot `own`, which who comes back had before, than another one. Raises OutOfMemoryError if all slots are
    taken.
    """
    seen = table.read().copy()
    now = int(seen[0, t.ROUND]) >> t.ROUND_SHIFT
    taken = list(live(seen))
    free = [slot for slot in range(t.SLOTS) if slot not in taken]
    # Last, one whose former holder's contribution to the open round may still count.
    free.sort(key=lambda slot: (_may_count(seen[1 + slot], now), slot != own, slot))
    for slot in free + taken:
        lock = lock_of(client, group, slot, lease, table.buffer.info.replicas)
        try:
            lock.acquire()
        except DeadlineError:
            continue
        holder = int(seen[1 + slot, t.INCARNATION])
        try:
            member = _seated(table, slot, holder, lock, first_clock)
        except BaseException:
            # As long as somebody keeps the error the lock would be renewed, and the slot be nobody's.
            with contextlib.suppress(Error):
                lock.release()
            raise
        if member is not None:
            return member
        with contextlib.suppress(LockLostError):
            lock.release()
    raise OutOfMemoryError(
        f"join of training {group!r}: all of its {t.SLOTS} slots are taken; let a member leave first"
    )


def _may_count(row: NDArray[np.int64], number: int) -> bool:
    """Whether a member has contributed to the open round. One that joined in it has its mark, and no weight."""
    word, weight = int(row[t.MARK]), int(row[t.WEIGHT])
    return t.clock_of(word) == number + 1 and weight >> 32 == t.incarnation_of(word)


def reap(
    client: Client, group: str, table: t.Table, lease: float, slots: Iterable[int], level: int = logging.WARNING
) -> list[int]:
    """Free the slots whose holders are dead; return them. Asks about each one: for suspects only. Logged at `level`.

    While the coordinator is away a lock that was never asked for can't be found. Its holder counts as alive then.
    """
    dead = []
    # Those first that are found without the coordinator: while it is away we stop at the first that is not.
    for slot in sorted(slots, key=lambda slot: not is_located(client, lock_name(group, slot))):
        row = 1 + slot
        incarnation = table.get(row, t.INCARNATION)
        try:
            lock = lock_of(client, group, slot, lease, table.buffer.info.replicas)
        except (UnavailableError, DeadlineError) as error:
            _log.warning("training %r: whether worker %s lives is not known now: %s", group, _who(table, slot), error)
            break
        try:
            lock.acquire()
        except DeadlineError:  # alive, or another asks at this moment; but it is dead as one of its ranks is
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
    """Return the slots whose holders are dead. Frees none: for those who look on, who may be readers alone.

    None is dead whose lock can't be asked for.
    """
    dead = set()
    for slot in slots:
        try:
            lock = lock_of(client, group, slot, lease, replicas)
            free = taken(lock)
        except Error as error:  # TimeoutError too: the coordinator hangs
            _log.debug("nobody knows who of training %r is alive: %s", group, error)
            break
        if free:
            dead.add(slot)
            with contextlib.suppress(Error):
                lock.release()
    return dead


def taken(lock: Lock) -> bool:
    """Take a lock that is for one try, if nobody has it. Return whether it is ours."""
    try:
        lock.acquire()
    except DeadlineError:
        return False
    return True


def rank_lock(client: Client, member: str, rank: int, lease: float, replicas: int, patience: float = 0.0) -> Lock:
    """Return the lock that a rank of a member (`member_name`) holds, other than the one that speaks, for one try."""
    return client.lock(f"{member}/{rank}", ttl=lease, timeout=patience, replicas=replicas)


def member_name(group: str, slot: int, incarnation: int) -> str:
    """Return the name below which the locks of a member's ranks are."""
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
    row = table.read()[1 + slot]
    return f"{host_of(row)}:{abs(int(row[t.PID]))}"


def host_of(row: NDArray[np.int64]) -> str:
    """Return the name of a member's host."""
    return row[t.HOST : t.HOST_END].tobytes().rstrip(b"\0").decode(errors="replace")


def _host() -> NDArray[np.int64]:
    room = 8 * (t.HOST_END - t.HOST)
    return np.frombuffer(socket.gethostname().encode()[:room].ljust(room, b"\0"), np.int64)


def _seated(table: t.Table, slot: int, holder: int, lock: Lock, first_clock: Callable[[t.Rows], int]) -> Member | None:
    """Return the member that has taken a slot whose lock it holds, and whose holder (0: none), whom nobody missed, is
    gone from here on. None if we were stopped for so long that the slot is another's by now: we change nothing of
    it.
    """
    row = 1 + slot
    incarnation = table.add(0, t.INCARNATIONS, 1) + 1
    if holder:
        table.swap(row, t.INCARNATION, holder, 0)
    rows = table.read()
    if rows[row, t.INCARNATION]:
        return None
    former = int(rows[row, t.MARK])
    member = Member(table, slot, incarnation, t.incarnation_of(former), lock, first_clock(rows))
    # The mark before the incarnation: who is seen is seen with its own mark.
    if table.swap(row, t.MARK, former, member.mark) != former:
        return None
    member.set(t.STEPS, int(np.max(rows[1:, t.STEPS])))
    member.set(t.SAMPLES_BEFORE, int(rows[row, t.SAMPLES_BEFORE] + rows[row, t.SAMPLES]))
    member.set(t.JOINED_US, time.time_ns() // 1000)
    member.set(t.PID, os.getpid())
    member.report()
    table.write(row, t.HOST, _host())
    table.write(row, t.EXTRA, np.zeros(t.EXTRA_END - t.EXTRA, np.int64))
    return member if table.swap(row, t.INCARNATION, 0, incarnation) == 0 else None
