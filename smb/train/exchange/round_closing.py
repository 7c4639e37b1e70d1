"""Closing a round, by a member that finds it complete. rounds.py describes the phases, and why nothing counts twice.

Any member may close any round, and repeat what a dead closer has begun. A closer shares only the group's table and
buffers with other code. It knows nothing of its own member's contribution.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import struct
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from smb.buffer import Buffer
from smb.daemon.failpoint import failpoint
from smb.errors import (
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
    UnavailableError,
)
from smb.lock import Lock
from smb.spi import SOURCES_MAX
from smb.train import member_table as t
from smb.train.exchange.at_once import at_once, begin
from smb.train.group import ATTEMPT, BUILT, Group
from smb.train.members import taken
from smb.train.traits import EXACT

_log = logging.getLogger("smb")
COUNTED = t.EXTRA  # in a member's row: the last round in which its slot's contribution counted, plus 1; 0 for none
INBOX = "inbox"  # NAME/inbox/INCARNATION is a member's inbox
_CLOSERS = 8  # members that try to close a round at once, as a mean, if any member may
_OPENED = 16  # inboxes that a closer opens before it looks whether the round is still open
_random = random.SystemRandom()  # not the program's own, which it may have seeded
Term = tuple[Buffer, float, str]  # a term of a sum: a buffer, its scale, and the wire to which its elements are rounded


@dataclass(frozen=True)
class Outer:
    """The servers' step by Nesterov's rule, with the negative mean of the deltas as the gradient g: v' = mu v + g, and
    the weights change by - lr (g + mu v') = - lr mu^2 v - lr (1 + mu) g. So the step takes only sums. Buffers with two
    copies can compute them too, and v' and the step can be computed at the same time.
    """

    lr: float
    mu: float


class Closer:
    """Closes rounds for one member. Made under the group's setup lock, because it makes the
    buffers that closing needs.
    """

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
        # The inbox is made last: it belongs to this member alone, so if there is no room for a further worker, no
        # buffer remains.
        self.inbox = group.buffer(inbox_name(member.incarnation))
        self._inboxes = {member.incarnation: self.inbox}
        self._left: list[int] = []  # incarnations in `_inboxes` whose members have left
        self._over: list[int] = []  # incarnations whose inboxes are not needed any more
        # Releases locks and wakes the others after a round that this member closed.
        self._ending: Future[None] | None = None

    def died(self, incarnation: int) -> None:
        """Take note of a member that died with its inbox in no round; the inbox is deleted later."""
        self._over.append(incarnation)

    def leave(self) -> list[str]:
        """Return the names of the buffers to delete once this member has left."""
        return [f"{self._group.name}/{inbox_name(incarnation)}" for incarnation in self._over]

    def should_try(self, number: int, rows: t.Rows, looks: int) -> bool:
        """Return True if this member should try to close a round that all waiting members may have found complete at
        the same time. A member that has the round's inboxes open always should. Of the others a few at random: each
        opens all inboxes, by a call of the coordinator's each, and the calls of all would hold up the one that closes.

        A member that should not looks again after its patience, for the `looks`-th time, with four times the chance:
        those that would close the round may be dead.
        """
        if int(rows[0, t.ROUND]) & BUILT:  # no inbox is needed
            return True
        counting = contributions(rows, number)
        closed = [slot for slot in counting if t.incarnation_of(rows[1 + slot, t.MARK]) not in self._inboxes]
        return not closed or _random.random() * len(counting) < _CLOSERS << 2 * looks

    def close(self, target: int, rows: t.Rows) -> bool:
        """Close round `target`, if `rows` show it as open. On success `rows` show it as closed. Returns False if
        another member is closing it, or this member lost its locks. Independent calls run at the same time.
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
                if not self._open_inboxes(target, rows):
                    return False
                # The weights' lock is taken first. Every closer needs it, and a member without it must not claim the
                # round.
                if not taken(fences[group.weights.name]) or not self._close_under(target, fences, rows):
                    return False
            except LockLostError:
                return False
            except (NotFoundError, UnavailableError, DeadlineError):
                if group.round == target:
                    raise
                # Others closed the round while this member was stopped, and the inboxes of members that have left are
                # gone; or they closed it while this member waited for the coordinator.
                return False
            held.pop_all()

        def wake() -> None:
            # After the locks are free, because a woken member may have to close the next round.
            at_once(releases, remote=group.remote)
            group.wake()
            self._take_away()  # last, because the coordinator may be away and nobody should wait for that

        if group.remote:
            self._ending = begin(wake)
        else:
            wake()
        return True

    def end(self) -> None:
        """Wait for the background work of the last round. If it failed, the others look by themselves after a while."""
        ending, self._ending = self._ending, None
        if ending is not None and (error := ending.exception()) is not None:
            _log.warning("training %r: after a round, other workers may be woken late: %s", self._group.name, error)

    def _close_under(self, number: int, fences: dict[str, Lock], rows: t.Rows) -> bool:
        """Close the round, holding the weights' lock. Takes the other locks; returns False if another process has one
        of them.
        """
        group, table = self._group, self._group.table
        word = int(rows[0, t.ROUND])
        claim = word + ATTEMPT
        others = [fence for name, fence in fences.items() if name != group.weights.name]
        results = at_once(
            [
                lambda: table.swap(0, t.ROUND, word, claim),
                lambda: [] if word & BUILT else self.decide(number, rows),
                *(functools.partial(taken, fence) for fence in others),
            ],
            remote=group.remote,
        )
        if not all(results[2:]):
            return False
        counting: list[int] | None = results[1]
        if results[0] != word or counting is None:
            return True
        failpoint("train-claimed")
        if not claim & BUILT:
            chosen = self._chosen(number, rows, counting)
            at_once(
                [lambda: self._build(number, chosen, fences), lambda: self._record(number, rows, counting)],
                remote=group.remote,
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
        """Delete inboxes of members that have left, once they counted in a round that this member closed: no other
        member deletes them. An inbox that can't be deleted now is deleted after a later round.
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

    def _open_inboxes(self, number: int, rows: t.Rows) -> bool:
        """Open the inboxes that the round may need before the locks are taken: if the coordinator is away, a member
        that has them open can close the round. Returns False if others have closed the round meanwhile.
        """
        if int(rows[0, t.ROUND]) & BUILT:
            return True
        opened, needed = 0, [t.incarnation_of(rows[1 + slot, t.MARK]) for slot in contributions(rows, number)]
        kept = {*needed, self._group.member.incarnation, *self._left}
        self._inboxes = {each: inbox for each, inbox in self._inboxes.items() if each in kept}
        for incarnation in needed:
            if incarnation not in self._inboxes:
                self._inboxes[incarnation] = self._inbox_of(incarnation)
                opened += 1
                # Where there are hundreds this takes so long that the next round would wait for this member.
                if opened % _OPENED == 0 and self._group.round != number:
                    return False
        return True

    def _inbox_of(self, incarnation: int) -> Buffer:
        name = f"{self._group.name}/{inbox_name(incarnation)}"
        return self._inboxes.get(incarnation) or self._group.client.open(name)

    def decide(self, number: int, rows: t.Rows) -> list[int] | None:
        """Decide once for all closers whose contributions count in a round, and return their slots, in order. `rows`
        are read again if another member was faster. Returns None if the round is over: this process was stopped.

        Each word is decided by itself, perhaps by another closer, so a word that is decided later may have
        contributions that were not there when an earlier one was decided. Each of them counts or does not for all
        closers alike. `rows` must have been read before the claim, as the number of words is theirs: whoever claims the
        round later has read the table after that, and so has these words, too, and perhaps more.
        """
        table, counting = self._group.table, list[int]()
        tag = table.tag(number)
        for part, column in enumerate(table.decision(number, rows)):
            word, first = int(rows[0, column]), part * t.SLOTS
            while word >> t.SLOTS != tag:
                here = (slot - first for slot in contributions(rows, number) if 0 <= slot - first < t.SLOTS)
                chosen = tag << t.SLOTS | sum(1 << bit for bit in here)
                if table.swap(0, column, word, chosen) == word:
                    word = chosen
                    failpoint("train-word-decided")
                    break
                rows[:] = table.read()  # another closer was faster, and may have seen more contributions
                if round_of(rows) != number:
                    return None  # the column may belong to a later round by now
                word = int(rows[0, column])
            counting += [first + bit for bit in range(t.SLOTS) if word >> bit & 1]
        return counting

    def _chosen(self, number: int, rows: t.Rows, counting: list[int]) -> list[tuple[Buffer, float]]:
        """Return inboxes and weights, by slot, of the contributions that count in a round. Every closer gets the same
        set.
        """
        group = self._group
        failpoint("train-decided")
        weights = contributions(rows, number)
        if not weights.keys() >= set(counting):  # the member that decided had seen more contributions
            rows[1:] = group.table.read()[1:]
            weights = contributions(rows, number)
        weights = {slot: weight for slot, weight in weights.items() if slot in counting}
        inboxes = {}
        for slot in weights:
            incarnation = t.incarnation_of(rows[1 + slot, t.MARK])
            # A former closer may have counted more contributions than this one saw.
            inboxes[incarnation] = self._inbox_of(incarnation)
        self._inboxes = inboxes
        self._left = [incarnation for incarnation in inboxes if incarnation not in rows[1:, t.INCARNATION]]
        return list(zip(inboxes.values(), weights.values(), strict=True))

    def _record(self, number: int, rows: t.Rows, counting: list[int]) -> None:
        """Tell the members whose contributions count that they do. A decision never changes, so any closer may repeat
        this.
        """
        if counting:
            self._group.table.raise_all([1 + slot for slot in counting], COUNTED, number + 1)
            for slot in counting:
                rows[1 + slot, COUNTED] = max(number + 1, int(rows[1 + slot, COUNTED]))

    def _build(self, number: int, chosen: list[tuple[Buffer, float]], fences: dict[str, Lock]) -> None:
        """Compute the next weights and the next momentum. Their sources stay as they are."""
        offset, count = self._group.span(number)

        def combine(target: Buffer, *terms: Term) -> None:
            """Set `target` to the sum of the terms, in as many calls as that takes."""
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
        """Return the slot that is valid in this round and the slot that the round writes, of two
        that are used in turn.
        """
        turn = state_slot(number, len(self._group.spans))
        return slots[turn], slots[1 - turn]


def state_slot(number: int, fragments: int) -> int:
    """Return which of the two slots of the outer state is valid in round `number`, for that round's fragment. The slots
    alternate each time that the fragment is exchanged.
    """
    return number // fragments % 2


def momentum_name(slot: int) -> str:
    """Return the name of the momentum's buffer of that slot, behind the group's name."""
    return f"outer/{slot}/0"


def step_name(slot: int) -> str:
    """Return the name of the servers' step's buffer of that slot, behind the group's name."""
    return f"outer/{slot}/step"


def inbox_name(incarnation: int) -> str:
    """Return the name of a member's inbox, behind the group's name."""
    return f"{INBOX}/{incarnation}"


def _gone(rows: t.Rows, former: int) -> set[int]:
    """Return the incarnations whose inboxes are not needed: that of a slot's former holder, and those of dead members
    whose slots are free, unless they have contributed to the open round. A member that left by itself has deleted its
    inbox.
    """
    counting = contributions(rows, round_of(rows))
    died = np.flatnonzero((rows[1:, t.INCARNATION] == 0) & (rows[1:, t.PID] > 0)).tolist()
    gone = {t.incarnation_of(rows[1 + slot, t.MARK]) for slot in died if slot not in counting}
    return (gone | {former}) - {0}


def round_of(rows: t.Rows) -> int:
    return int(rows[0, t.ROUND]) >> t.ROUND_SHIFT


def contributions(rows: t.Rows, number: int) -> dict[int, float]:
    """Return slot: weight of the members that have marked for a round, whether they are still present or not."""
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
        return  # the lock was not taken
    except Error as error:  # the lock ends with its lease; the next lock must still be released, and the others woken
        _log.debug("after a round: %s", error)
