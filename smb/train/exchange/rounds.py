"""Rounds: what BSP, LocalSGD, DiLoCo and AsyncDiLoCo have in common. The member's side; closing.py has the closer's.

In round r each member writes its delta to an inbox of its own and then marks itself in the table; a half-written inbox
never counts. The round is complete when all live members have marked, or once at least `quorum` have and `grace`
seconds have passed since. The first member to see that it is complete closes it, usually the last to arrive:

    claim    ROUND: (r, attempt) -> (r, attempt + 1), under the locks of all that is written
    decide   DECIDED[r]: who counts, a set that is written once by compare_swap and adopted by every closer of r
    record   COUNTED[member] = r + 1 of each that counts: a word that only grows, so who closes r twice changes nothing
    build    next = weights + sum of w_i / total * inbox_i, in the order of the slots, on the servers; with an outer
             optimizer, whose momentum is v in round r: v' = mu v - that sum, next = weights + step, where
             step = lr mu v - lr (1 + mu) v' = - lr mu^2 v + lr (1 + mu) that sum;
             if steps travel in fewer bits, s' = s - rounded(s) + step, next = weights + rounded(s')
    built    ROUND: -> (r, attempt + 1, built)
    copy     weights = next
    commit   ROUND: -> (r + 1, 0), and everybody is woken

A scheme may cut the weights into fragments (streaming.py). Round r is then of fragment r modulo their number: of
weights, inboxes and momenta only that range is read and written.

No phase changes its sources. If a closer is dead, by its locks, another member repeats the phase and gets the same
result to the bit. A closer that was only stopped, and goes on, changes nothing any more: its locks are fences of all
that is written, and its claim is no longer the latest. So each contribution counts at most once.

COUNTED is written before `built`. So once a round is over, a member that marked for it finds in its own row whether it
counted. That holds until it marks for another round, however many rounds were closed meanwhile.

If a quorum closed the round without a contribution, that contribution is marked again for the open round, with weight
1/sqrt(1 + s). Its staleness s counts the rounds closed since the worker took over the weights that its delta starts
from. BSP drops it instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smb.daemon.failpoint import failpoint
from smb.errors import InvalidArgumentError
from smb.train import member_table as t
from smb.train.exchange.at_once import at_once
from smb.train.exchange.closing import Closer, Outer, contributions, round_of
from smb.train.exchange.completion import RoundCompletion
from smb.train.exchange.contribution import Contribution, drop
from smb.train.exchange.grace import AUTO, Grace
from smb.train.exchange.mover import mover_of
from smb.train.group import Group
from smb.train.guards import RefusedContributionError
from smb.train.parameters import Parameters
from smb.train.scheme import Exchange, Footprint, Scheme, is_number, is_whole
from smb.train.traits import EXACT, ROUNDS


@dataclass(frozen=True, kw_only=True)
class RoundScheme(Scheme):
    """Settings of all schemes of rounds.

    quorum: so many contributions close a round, `grace` seconds after they are there (None: all live members'). With
    grace="auto" a quantile of the times that the others have needed, bounded (exchange/grace.py).
    token_weights: a contribution weighs as many as the samples that it is of (False: all weigh the same).
    """

    quorum: int | None = None
    grace: float | str = 0.0
    token_weights: bool = False

    WAITS: ClassVar[bool] = True  # whether a worker waits for its round to close
    LATE: ClassVar[bool] = True  # whether a contribution that comes late may count in a later round

    def __post_init__(self) -> None:
        if self.quorum is not None and not is_whole(self.quorum, 1, t.SLOTS):
            raise InvalidArgumentError(f"{self.NAME}: quorum={self.quorum!r} is no whole number in 1 to {t.SLOTS}")
        if self.grace == AUTO and self.quorum is None:
            raise InvalidArgumentError(f"{self.NAME}: grace='auto' is of rounds with a quorum; give quorum=, too")
        if self.grace != AUTO and not (is_number(self.grace) and float(self.grace) >= 0):
            raise InvalidArgumentError(f"{self.NAME}: grace={self.grace!r} is neither a time in seconds nor 'auto'")
        if not is_whole(self.interval(), 1):
            raise InvalidArgumentError(f"{self.NAME}: every={self.interval()!r} is no number of steps from 1 on")
        if not isinstance(self.token_weights, bool):
            raise InvalidArgumentError(f"{self.NAME}: token_weights={self.token_weights!r} is neither True nor False")

    def interval(self) -> int:
        """Return after how many local steps a worker contributes."""
        return 1

    def outer(self) -> Outer | None:
        """Return the optimizer on the servers, None if the mean is just added."""
        return None

    def step_wires(self) -> str:
        """Return how the servers' step travels to the members; "exact": they read the weights."""
        return EXACT

    def footprint(self) -> Footprint:
        """The weights and the next ones; an outer optimizer's momentum, twice; its step, twice, if members read that;
        an inbox for each worker.
        """
        return Footprint(2 + 2 * bool(self.outer()) + 2 * (self.step_wires() != EXACT), 1)

    def first_clock(self, rows: t.Rows) -> int:
        """Nobody waits for who joins in the middle of a round, but for who is there before anybody's first one."""
        now = int(rows[0, t.ROUND]) >> t.ROUND_SHIFT
        fresh = now == 0 and not any(t.clock_of(word) for word in rows[1:, t.MARK])
        return now if fresh else now + 1

    def run(self, group: Group, parameters: Parameters) -> RoundExchange:
        """Return this worker's exchange. Makes its inbox, and what closing needs where it is not there yet."""
        return RoundExchange(group, parameters, self)


class RoundExchange(Exchange):
    """One worker's side. `mover` has the weights of round `base_round`, its base; the delta that it has sent lies in
    its inbox until it is known what became of it."""

    def __init__(self, group: Group, parameters: Parameters, scheme: RoundScheme) -> None:
        self._remember(parameters, group)
        self._group = group
        self._scheme = scheme
        self._stopping = False  # stop waiting for the outcome of the contribution
        self._interval = scheme.interval()
        self._outer = scheme.outer()
        self._base_round = 0
        self._steps = self._samples = 0  # since the last exchange
        self._kept = 0  # steps of whole intervals that are not sent, as the inbox was in use; not in _steps any more
        self._repeated = False
        self._owing = False  # a contribution was sent, and the weights have not been taken over yet
        self._word = 0  # ROUND, when the outcome of the contribution was seen
        # First: it fails if the training was deleted and made anew since this member joined. The Closer finds its
        # buffers by name, and must not find those of the new training.
        self._contribution = Contribution(group, late_counts=scheme.LATE)
        self._closer = Closer(group, self._outer, scheme.step_wires())
        self._inbox = self._closer.inbox
        self._completion = RoundCompletion(group, scheme.quorum, Grace(scheme.grace, group.lease), self._closer.died)

    # ---- the worker's side

    def _remember(self, parameters: Parameters, group: Group) -> None:
        """Make what remembers the weights that were taken over last."""
        self.mover = mover_of(group, parameters, ROUNDS)

    def step(self, samples: int) -> None:
        """Contribute at every interval; wait for the round to be closed, unless the scheme does not wait."""
        if not self._repeated:
            self._steps += 1
            self._samples += samples
        self._repeated = True  # as long as it has not returned: called again, it is the same step
        self._exchange()
        self._repeated = False

    def _exchange(self) -> None:
        if self._owing:  # an earlier call was interrupted: these local steps are lost
            self._finish()
        elif self._steps >= self._interval:
            if self._contribution.sent and not self._settle():
                # Nobody has closed its round yet: go on alone, and send all of it later.
                self._kept += self._steps
                self._steps = 0
                self._completion.reap(self._group.table.read(), self._contribution.target)
                return
            self._send()
            self._finish()
        elif self._contribution.sent and self._completion.grace_left(self._contribution.target) <= 0:
            self._settle()

    @property
    def rests_count(self) -> bool:
        """See Exchange: not with an outer optimizer."""
        return self._needed() and self._outer is None

    def contribute_rest(self) -> int:
        """Mark fewer local steps than `every` for the open round, with a weight that is less by as much. If all others
        have left, or have marked theirs, this worker closes the round.

        Without local steps it marks that there is nothing, if others have contributed to the round: of those that have
        left nobody else would close it. Not with an outer optimizer: it would move the model by all of its momentum for
        a few steps. Then only a contribution that came too late is marked again, and whole intervals that were kept
        back are sent if the inbox is free. Called again after an error, it goes on.
        """
        if not self._owing:
            if self._outer is not None:
                waits = self._contribution.sent and not self._settle_at_once()
                self._contribution.raise_refusal()
                if waits and self._kept:
                    drop(self._group, "the steps that it kept back, as its last contribution still waits for its round")
                    self._group.report()
                    self._kept = 0
                if waits or not self._kept:
                    return self._steps
                self._send()
            elif self._steps:
                self._send()
            elif contributions(self._group.table.read(), self._base_round):
                self._send_nothing()
            else:
                return 0
        if not self._contribution.sent or self._settle_at_once():
            self._finish()
            return 0
        self._group.count_samples(self._samples)
        self._group.member.add(t.BYTES, self._group.sent_bytes)
        self._steps = self._samples = self._kept = 0
        self._group.report()
        self._contribution.raise_refusal()
        return 0

    def restart(self) -> None:
        """Take the present weights over."""
        self.mover.forget()
        self._take_over()

    def flush(self) -> None:
        """Wait for what goes on in the background."""
        self._closer.end()

    def close(self) -> None:
        """End what is under way in the background. The inbox goes once the slot is given back, unless what is in it may
        still count.
        """
        self._closer.end()
        group = self._group
        outcome = self._contribution.counted_at_last(group.table.read()) if self._contribution.sent else True
        if outcome is not None:
            self._contribution.sent = False
            group.unneeded.append(self._inbox.name)
        if outcome is False:
            drop(self._group, "a contribution that came too late for its round, as it leaves")
            group.report()
        group.unneeded += self._closer.leave()

    def abandon(self) -> None:
        """Count what is lost with the membership. A contribution that is marked for the open round counts there."""
        if not self._owing and (self._steps or self._kept):
            drop(self._group, "the local steps that it had not sent when it lost its lease")
        self._steps = self._samples = self._kept = 0
        self._owing = False
        self._contribution.abandon()

    def _send(self) -> None:
        """Put the delta into the inbox. One that is refused has no weight, so that the others need not wait for it."""
        group, scheme, contribution = self._group, self._scheme, self._contribution
        contribution.origin = self._base_round
        # Whom the others wait for finds its round open; a delta that is dropped when it is late says so in the end.
        in_time = scheme.WAITS and (scheme.quorum is None or not contribution.late_counts)
        contribution.tokens = (
            float(self._samples) if scheme.token_weights else min(1.0, (self._steps + self._kept) / self._interval)
        )
        group.member.check()
        norm = self.mover.write(self._inbox)
        # After the writing, which may take as long as many rounds.
        contribution.target = contribution.origin if in_time else group.round
        try:
            group.check(norm, contribution.target - contribution.origin)
        except RefusedContributionError as error:
            contribution.refusal, contribution.tokens = error, 0.0
            self.mover.forget()
        failpoint("train-sent")
        contribution.sent = self._owing = True

    def _send_nothing(self) -> None:
        """Have the round marked without a weight, so that the others need not wait for this member."""
        contribution = self._contribution
        contribution.origin = contribution.target = self._base_round
        contribution.tokens = 0.0
        contribution.sent = self._owing = True

    def _finish(self) -> None:
        """After _send: settle, and go on from the present weights. May be called again where it was interrupted."""
        if self._contribution.sent:
            self._settle()
        samples, self._samples = self._samples, 0  # once, also where what follows fails and is repeated
        self._group.count_samples(samples)
        self._group.member.add(t.BYTES, self._group.sent_bytes + self._group.weights.nbytes)
        # The first is done in this thread, the only one that may touch the parameters.
        at_once([lambda: self._take_over(self._word), self._group.report], remote=self._group.remote)
        self._contribution.raise_refusal()

    def _take_over(self, known: int | None = None) -> None:
        fetch = self.mover.fetch
        if self.mover.by_parts:
            # Parts are taken over as they come. If a round is closed meanwhile they are a mix, which counts for
            # nothing: the next contribution is to the round that they began with, and is dropped.
            self._base_round = self._group.read_from(fetch, known=known)
        else:
            self._base_round = self._group.read_by(fetch, known=known, needs_us=self._needed())
        self.mover.adopt()
        self._completion.opened()
        self._steps = self._samples = self._kept = 0
        self._owing = self._repeated = False

    def _needed(self) -> bool:
        """Whether a round in which we have not contributed yet waits for us."""
        return self._scheme.WAITS and self._scheme.quorum is None

    def _settle_at_once(self) -> bool:
        """Settle without waiting for other members."""
        self._stopping = True
        try:
            return self._settle()
        finally:
            self._stopping = False

    def _settle(self) -> bool:
        """Find out what becomes of the contribution. Waits for its round to be closed. In a scheme that does not wait,
        or when we are to stop, it waits only while somebody is closing it. False: its fate is open still."""
        group, contribution, completion = self._group, self._contribution, self._completion
        rows: t.Rows | None = None
        while True:
            if (marked := contribution.mark()) is not None:
                rows = marked
            elif rows is None:
                rows = group.table.read()
            self._word = int(rows[0, t.ROUND])
            if rows[group.member.row, t.INCARNATION] != group.member.incarnation:
                raise group.member.lost()
            counted = contribution.counted(rows)
            if counted is not None:
                completion.ended(rows, contribution.target)
            else:
                ready = completion.complete(rows, contribution.target)
                if ready and self._closer.close(contribution.target, rows):
                    if round_of(rows) == contribution.target:  # not by us
                        rows = None
                    continue
                if not ready and (self._stopping or not self._scheme.WAITS):
                    return False
                if not group.wait(completion.patience(contribution.target)):
                    group.member.check()
                    if not ready:
                        completion.reap(rows, contribution.target)
                rows = None
                continue
            if counted or contribution.tokens == 0.0 or not contribution.retarget(rows):
                contribution.sent = False
                return True
