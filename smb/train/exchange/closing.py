"""Closing a round: what the member does that finds it complete. rounds.py has the phases, and why nothing counts twice.

Any member may close any round, and repeat what a dead closer has begun. All that a closer needs is its own, but for the
group's table and buffers: it knows nothing of what its member contributes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import struct
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from smb.buffer import Buffer
from smb.daemon.failpoint import failpoint
from smb.engine import SOURCES_MAX
from smb.errors import (
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
    UnavailableError,
)
from smb.lock import Lock
from smb.train import member_table as t
from smb.train.exchange.at_once import at_once, begin
from smb.train.group import ATTEMPT, BUILT, Group
from smb.train.members import taken
from smb.train.traits import EXACT

_log = logging.getLogger("smb")
COUNTED = t.EXTRA  # of a member: the last round in which its slot's contribution counted, plus 1; 0 for none
INBOX = "inbox"  # below it, under the group's name, each member's inbox by its incarnation
Term = tuple[Buffer, float, str]  # of a sum: a buffer, its scale, and how its elements are rounded


@dataclass(frozen=True)
class Outer:
    """The servers' step by Nesterov's rule, with the negative mean of the deltas as the gradient g: v' = mu v + g, and
    the weights change by - lr (g + mu v') = - lr mu^2 v - lr (1 + mu) g. So it takes sums alone, which buffers of two
    copies do, too, and both at one time."""

    lr: float
    mu: float


class Closer:
    """Closes rounds for one member. Made under the group's setup lock: it makes the buffers that closing needs."""

    def __init__(self, group: Group, outer: Outer | None, step_wire: str) -> None:
        self._group = group
        self._outer = outer
        self._step_wire = step_wire
        member = group.member
        for gone in _gone(group.table.read(), member.former):
            group.client.delete(f"{group.name}/{inbox_name(gone)}", missing_ok=True)
        self._next = group.buffer("next")
        self._momenta = [group.buffer(momentum_name(slot)) for slot in (0, 1)] if outer else []
        self.steps_made = [group.buffer(step_name(slot)) for slot in (0, 1)] if step_wire != EXACT else []
        # Last: it is nobody else's, so where there is no room for a further worker nothing of it stays.
        self.inbox = group.buffer(inbox_name(member.incarnation))
        self._inboxes = {member.incarnation: self.inbox}
        self._left: list[int] = []  # those of them whose owners have left
        self._over: list[int] = []  # of these, those that nobody needs any more
        self._ending: Future[None] | None = None  # of a round that we have closed: giving locks back, waking the others

    def died(self, incarnation: int) -> None:
        """Take note of a member that died without an inbox in a round: that goes later."""
        self._over.append(incarnation)

    def leave(self) -> list[str]:
        """Return the names of the buffers that should go once this member has left."""
        return [f"{self._group.name}/{inbox_name(incarnation)}" for incarnation in self._over]

    def close(self, target: int, rows: t.Rows) -> bool:
        """Close round `target`, which is as these rows say: they say that it is closed if it is. False: somebody else
        is at it, or we lost the locks over it. Independent calls go at one time.
        """
        group = self._group
        self.end()
        written = [group.weights, self._next]
        written += [self._turns(target, pair)[1] for pair in (self._momenta, self.steps_made) if pair]
        fences = {buffer.name: buffer.lock(ttl=group.lease, timeout=0.0) for buffer in written}
        releases = [functools.partial(_release, fence) for fence in fences.values()]
        with contextlib.ExitStack() as held:
            held.callback(at_once, releases, remote=group.remote)
            try:
                self._open_inboxes(target, rows)
                # First the one that all who would close must have: who lacks it must not claim.
                if not taken(fences[group.weights.name]) or not self._close_under(target, fences, rows):
                    return False
            except LockLostError:
                return False
            except (NotFoundError, UnavailableError, DeadlineError):
                if group.round == target:
                    raise
                # Others closed it while we were stopped: of those who have left since the inboxes are gone. Or while we
                # waited for the coordinator.
                return False
            held.pop_all()

        def wake() -> None:
            # Not before the locks are free: who is woken may have to close the next round.
            at_once(releases, remote=group.remote)
            group.wake()
            self._take_away()  # last: the coordinator may be away, and nobody shall wait for that

        if group.remote:
            self._ending = begin(wake)
        else:
            wake()
        return True

    def end(self) -> None:
        """Wait for what goes on in the background. If it failed, the others look by themselves, after a while."""
        ending, self._ending = self._ending, None
        if ending is not None and (error := ending.exception()) is not None:
            _log.warning("training %r: after a round: %s", self._group.name, error)

    def _close_under(self, number: int, fences: dict[str, Lock], rows: t.Rows) -> bool:
        """Close it under the first of the locks, and the others. False: one of those is another's."""
        group, table = self._group, self._group.table
        word = int(rows[0, t.ROUND])
        claim = word + ATTEMPT
        others = [fence for name, fence in fences.items() if name != group.weights.name]
        results = at_once(
            [
                lambda: table.swap(0, t.ROUND, word, claim),
                lambda: None if word & BUILT else self.decide(number, rows),
                *(functools.partial(taken, fence) for fence in others),
            ],
            remote=group.remote,
        )
        if not all(results[2:]):
            return False
        if results[0] != word:
            return True
        failpoint("train-claimed")
        if not claim & BUILT:
            chosen = self._chosen(number, rows)
            at_once(
                [lambda: self._build(number, chosen, fences), lambda: self._record(number, rows)], remote=group.remote
            )
            failpoint("train-computed")
            if table.swap(0, t.ROUND, claim, claim | BUILT) != claim:
                return True
            claim |= BUILT
        failpoint("train-built")
        if group.replace(self._next, claim, fences[group.weights.name]):
            rows[0, t.ROUND] = (number + 1) << t.ROUND_SHIFT
            self._over += self._left
            self._left = []
        return True

    def _take_away(self) -> None:
        """Delete the inboxes that counted in a round that we have closed, of those who have left: nobody else would.
        Those that can't be deleted now are deleted after a later round.
        """
        while self._over:
            incarnation = self._over[0]
            self._inboxes.pop(incarnation, None)
            try:
                self._group.client.delete(f"{self._group.name}/{inbox_name(incarnation)}", missing_ok=True)
            except Error as error:
                _log.debug("training %r: an inbox stays for now: %s", self._group.name, error)
                return
            self._over.pop(0)

    def _open_inboxes(self, number: int, rows: t.Rows) -> None:
        """Open what the round may need, before the locks are taken: while the coordinator is away another one,
        who has them, can close it.
        """
        if not int(rows[0, t.ROUND]) & BUILT:
            for slot in contributions(rows, number):
                incarnation = t.incarnation_of(rows[1 + slot, t.MARK])
                self._inboxes[incarnation] = self._inbox_of(incarnation)

    def _inbox_of(self, incarnation: int) -> Buffer:
        name = f"{self._group.name}/{inbox_name(incarnation)}"
        return self._inboxes.get(incarnation) or self._group.client.open(name)

    def decide(self, number: int, rows: t.Rows) -> None:
        """Decide whose contributions count in a round, once for all who would close it; `rows` say it, and are newer
        where somebody else was faster."""
        table, column = self._group.table, _decided(number)
        word = int(rows[0, column])
        while word >> t.SLOTS != _tag(number):
            chosen = _tag(number) << t.SLOTS | sum(1 << slot for slot in contributions(rows, number))
            if table.swap(0, column, word, chosen) == word:
                rows[0, column] = chosen
                return
            rows[:] = table.read()  # a former closer was faster, and may have seen more than we
            if round_of(rows) != number:
                return  # we were stopped: the column may be a later round's by now
            word = int(rows[0, column])

    def _chosen(self, number: int, rows: t.Rows) -> list[tuple[Buffer, float]]:
        """Return inboxes and weights, by slot, of the contributions that count in a round: every closer finds the same
        set."""
        group, word = self._group, int(rows[0, _decided(number)])
        failpoint("train-decided")
        counting = [slot for slot in range(t.SLOTS) if word >> slot & 1]
        weights = contributions(rows, number)
        if not weights.keys() >= set(counting):  # who decided had seen more
            rows[1:] = group.table.read()[1:]
            weights = contributions(rows, number)
        weights = {slot: weight for slot, weight in weights.items() if slot in counting}
        inboxes = {}
        for slot in weights:
            incarnation = t.incarnation_of(rows[1 + slot, t.MARK])
            inboxes[incarnation] = self._inbox_of(incarnation)  # a former closer may have counted more than we saw
        self._inboxes = inboxes
        self._left = [incarnation for incarnation in inboxes if incarnation not in rows[1:, t.INCARNATION]]
        return list(zip(inboxes.values(), weights.values(), strict=True))

    def _record(self, number: int, rows: t.Rows) -> None:
        """Tell those who count in a round that they do. Once decided that stays true, so any closer may do it again."""
        word = int(rows[0, _decided(number)])
        counting = [slot for slot in range(t.SLOTS) if word >> slot & 1]
        if counting:
            self._group.table.raise_all([1 + slot for slot in counting], COUNTED, number + 1)
            for slot in counting:
                rows[1 + slot, COUNTED] = max(number + 1, int(rows[1 + slot, COUNTED]))

    def _build(self, number: int, chosen: list[tuple[Buffer, float]], fences: dict[str, Lock]) -> None:
        """Make the next weights, and the next momentum, of sources that stay as they are."""
        offset, count = self._group.span(number)

        def combine(target: Buffer, *terms: Term) -> None:
            """Make it the sum of the terms, in as many calls as that takes."""
            left = list(terms)
            while left:
                now, left = left[:SOURCES_MAX], left[SOURCES_MAX:]
                buffers, scales, wires = zip(*now, strict=True)
                target.accumulate_from(
                    buffers, op="replace", scale=scales, wire=wires, offset=offset, count=count,
                    fence=fences[target.name],
                )  # fmt: skip
                failpoint("train-added")
                left = [(target, 1.0, EXACT), *left] if left else []

        weights, following, outer = self._group.weights, self._next, self._outer
        total = sum(weight for _, weight in chosen)
        shares = [(inbox, weight / total) for inbox, weight in chosen]
        if outer is None:
            combine(following, (weights, 1.0, EXACT), *((inbox, share, EXACT) for inbox, share in shares))
            return
        old, new = self._turns(number, self._momenta)
        momentum: list[Term] = [(old, outer.mu if shares else 1.0, EXACT)]
        momentum += [(inbox, -share, EXACT) for inbox, share in shares]
        moves: list[Term] = [(old, -outer.lr * outer.mu**2, EXACT)] if shares else []
        moves += [(inbox, outer.lr * (1 + outer.mu) * share, EXACT) for inbox, share in shares]
        if not self.steps_made:
            moved = functools.partial(combine, following, (weights, 1.0, EXACT), *moves)
            at_once([lambda: combine(new, *momentum), moved], remote=self._group.remote)
            return
        former, step = self._turns(number, self.steps_made)
        rest: tuple[Term, Term] = (former, 1.0, EXACT), (former, -1.0, self._step_wire)
        moved = functools.partial(combine, step, *rest, *moves)
        at_once([lambda: combine(new, *momentum), moved], remote=self._group.remote)
        combine(following, (weights, 1.0, EXACT), (step, 1.0, self._step_wire))

    def _turns(self, number: int, slots: list[Buffer]) -> tuple[Buffer, Buffer]:
        """Return of two slots that take turns the one as it is in that round, and where the next is made."""
        turn = state_slot(number, len(self._group.spans))
        return slots[turn], slots[1 - turn]


def state_slot(number: int, fragments: int) -> int:
    """Return which of the two slots of the outer state is good for round `number`, in that round's fragment: they take
    turns each time that the fragment is exchanged.
    """
    return number // fragments % 2


def momentum_name(slot: int) -> str:
    """Return how the buffer of that slot is named behind the group's name."""
    return f"outer/{slot}/0"


def step_name(slot: int) -> str:
    """Return how the buffer of that slot of the servers' step is named behind the group's name."""
    return f"outer/{slot}/step"


def inbox_name(incarnation: int) -> str:
    """Return how a member's inbox is named behind the group's name."""
    return f"{INBOX}/{incarnation}"


def _gone(rows: t.Rows, former: int) -> set[int]:
    """Return whose inboxes nobody needs: of the former holder of a slot, and of members that died, and whose slots are
    free, unless they have contributed to the open round. A member that left by itself has deleted its own.
    """
    counting = contributions(rows, round_of(rows))
    died = np.flatnonzero((rows[1:, t.INCARNATION] == 0) & (rows[1:, t.PID] > 0)).tolist()
    gone = {t.incarnation_of(rows[1 + slot, t.MARK]) for slot in died if slot not in counting}
    return (gone | {former}) - {0}


def round_of(rows: t.Rows) -> int:
    return int(rows[0, t.ROUND]) >> t.ROUND_SHIFT


def _decided(number: int) -> int:
    return t.DECIDED + number % t.DECIDED_KEPT


def _tag(number: int) -> int:
    """Fifteen bits by which a column says which round it is of; 0 was never written."""
    return (number + 1) & 0x7FFF


def contributions(rows: t.Rows, number: int) -> dict[int, float]:
    """Return slot: weight of the members that have marked for a round, present or not."""
    found = {}
    for slot in np.flatnonzero(rows[1:, t.MARK] & t.CLOCK_MASK == number + 1).tolist():
        mark, word = int(rows[1 + slot, t.MARK]), int(rows[1 + slot, t.WEIGHT])
        weight = struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0]
        if weight > 0 and word >> 32 == t.incarnation_of(mark):
            found[slot] = weight
    return found


def _release(fence: Lock) -> None:
    try:
        fence.release()
    except InvalidArgumentError:
        return  # it was not taken
    except Error as error:  # its lease ends it; the next lock is to be given back all the same, and the others woken
        _log.debug("after a round: %s", error)
