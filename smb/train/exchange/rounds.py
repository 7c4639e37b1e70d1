"""Rounds: the exchange of BSP, LocalSGD, DiLoCo and AsyncDiLoCo. This file has the member's side, round_closing.py the
closer's.

In round r each member writes its delta to an inbox of its own and then marks itself in the table; a half-written inbox
never counts. The round is complete when all live members have marked, or once at least `quorum` have and `grace`
seconds have passed since. The first member that sees that it is complete closes it; usually that is the last one to
arrive:

    claim    ROUND: (r, attempt) -> (r, attempt + 1), under the locks of all that is written
    decide   the members that count in r: words of a set, each written once by compare_swap and adopted by every closer
    record   COUNTED[member] = r + 1 for each of them: a word that only grows, so a second closer changes nothing
    build    next = weights + sum of w_i / total * inbox_i, in the order of the slots, on the servers; with an outer
             optimizer, whose momentum is v in round r: v' = mu v - that sum, next = weights + step, where
             step = lr mu v - lr (1 + mu) v' = - lr mu^2 v + lr (1 + mu) that sum;
             if steps travel in fewer bits, s' = s - rounded(s) + step, next = weights + rounded(s')
    built    ROUND: -> (r, attempt + 1, built)
    copy     weights = next
    commit   ROUND: -> (r + 1, 0), and everybody is woken

A scheme may cut the weights into fragments (streaming.py). Round r then exchanges fragment r modulo their number: only
that range of the weights, inboxes and momenta is read and written.

No phase changes its sources. If a closer's locks show that it is dead, another member repeats the phase and gets the
same result bit for bit. A closer that was only stopped, and goes on, changes nothing any more: its locks fence
everything that it writes, and its claim is no longer the latest. So each contribution counts at most once.

COUNTED is written before `built`. So when a round is over, a member that marked for it finds in its own row whether its
contribution counted, until it marks for another round, however many rounds are closed meanwhile.

If a quorum closed the round without a contribution, that contribution is marked again for the open round, with weight
1/sqrt(1 + s). Its staleness s is the number of rounds that were closed since the worker took over the weights from
which its delta starts. BSP drops it instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smb.daemon.failpoint import failpoint
from smb.errors import InvalidArgumentError
from smb.train import member_table as t
from smb.train.exchange.at_once import at_once
from smb.train.exchange.contribution import Contribution, drop
from smb.train.exchange.grace import AUTO, Grace
from smb.train.exchange.mover import mover_of
from smb.train.exchange.round_closing import Closer, Outer, contributions, round_of
from smb.train.exchange.round_completion import RoundCompletion
from smb.train.group import Group
from smb.train.guards import RefusedContributionError
from smb.train.parameters import Parameters
from smb.train.scheme import Exchange, Footprint, Scheme, is_number, is_whole
from smb.train.traits import EXACT, ROUNDS


@dataclass(frozen=True, kw_only=True)
class RoundScheme(Scheme):
    """Settings of all schemes with rounds.

    quorum: this many contributions close a round, `grace` seconds after they arrived (None: the contributions of all
    live members). With grace="auto" the grace is a bounded quantile of the delays of earlier contributions
    (exchange/grace.py). token_weights: a contribution weighs as much as its number of samples (False: all contributions
    weigh the same).
    """

    quorum: int | None = None
    grace: float | str = 0.0
    token_weights: bool = False

    WAITS: ClassVar[bool] = True  # whether a worker waits for its round to close
    LATE: ClassVar[bool] = True  # whether a contribution that arrives late may count in a later round

    def __post_init__(self) -> None:
        if self.quorum is not None and not is_whole(self.quorum, 1, self.MEMBERS_MAX):
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: quorum must be a whole number from 1 to {self.MEMBERS_MAX}, not {self.quorum!r}"
            )
        if self.grace == AUTO and self.quorum is None:
            raise InvalidArgumentError(f"scheme {self.NAME!r}: grace='auto' needs a quorum; pass quorum=, too")
        if self.grace != AUTO and not (is_number(self.grace) and float(self.grace) >= 0):
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: grace must be a number of seconds from 0 on, or 'auto', not {self.grace!r}"
            )
        if not is_whole(self.interval(), 1):
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: every must be a whole number of steps from 1 on, not {self.interval()!r}"
            )
        if not isinstance(self.token_weights, bool):
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: token_weights must be True or False, not {self.token_weights!r}"
            )

    def interval(self) -> int:
        """Return after how many local steps a worker contributes."""
        return 1

    def outer(self) -> Outer | None:
        """Return the optimizer on the servers; None if the mean is just added."""
        return None

    def step_wires(self) -> str:
        """Return the wire of the servers' step to the members; "exact" if they read the weights instead."""
        return EXACT

    def footprint(self) -> Footprint:
        """Counts the weights and the next weights, an outer optimizer's momentum twice, its step twice if members read
        it, and an inbox for each worker.
        """
        return Footprint(2 + 2 * bool(self.outer()) + 2 * (self.step_wires() != EXACT), 1)

    def first_clock(self, rows: t.Rows) -> int:
        """A round does not wait for a member that joins in the middle of it, unless no member has contributed anything
        yet.
        """
        now = int(rows[0, t.ROUND]) >> t.ROUND_SHIFT
        fresh = now == 0 and not any(t.clock_of(word) for word in rows[1:, t.MARK])
        return now if fresh else now + 1

    def run(self, group: Group, parameters: Parameters) -> RoundExchange:
        """Return this worker's exchange. Makes its inbox, and the buffers for closing if they do not exist yet."""
        return RoundExchange(group, parameters, self)


class RoundExchange(Exchange):
    """One worker's side. The mover's base is the weights of round `base_round`. The delta that was sent lies in the
    inbox until it is known whether it counted.
    """

    def __init__(self, group: Group, parameters: Parameters, scheme: RoundScheme) -> None:
        self._remember(parameters, group)
        self._group = group
        self._scheme = scheme
        self._stopping = False  # stop waiting for the outcome of the contribution
        self._interval = scheme.interval()
        self._outer = scheme.outer()
        self._base_round = 0
        self._steps = self._samples = 0  # since the last exchange
        # Steps of whole intervals that are not sent because the inbox was in use; not in _steps any more.
        self._kept = 0
        self._repeated = False
        self._owing = False  # a contribution was sent, and the weights have not been taken over yet
        self._word = 0  # ROUND when the outcome of the contribution was seen
        # This comes first, because it fails if the training was deleted and made anew since this member joined. The
        # Closer finds its buffers by name, and must not find those of the new training.
        self._contribution = Contribution(group, late_counts=scheme.LATE)
        self._closer = Closer(group, self._outer, scheme.step_wires())
        self._inbox = self._closer.inbox
        self._completion = RoundCompletion(group, scheme.quorum, Grace(scheme.grace, group.lease), self._closer.died)

    # ---- the worker's side

    def _remember(self, parameters: Parameters, group: Group) -> None:
        """Make the mover, which keeps the weights that were taken over last."""
        self.mover = mover_of(group, parameters, ROUNDS)

    def step(self, samples: int) -> None:
        """Contribute at every interval; wait for the round to be closed, unless the scheme does not wait."""
        if not self._repeated:
            self._steps += 1
            self._samples += samples
        self._repeated = True  # until this call returns: if it fails, the next call repeats the same step
        self._exchange()
        self._repeated = False

    def _exchange(self) -> None:
        if self._owing:  # an earlier call was interrupted: these local steps are lost
            self._finish()
        elif self._steps >= self._interval:
            if self._contribution.sent and not self._conclude():
                # No member has closed its round yet, so this worker goes on alone and sends all steps later.
                self._kept += self._steps
                self._steps = 0
                self._completion.reap(self._group.table.read(), self._contribution.target)
                return
            self._send()
            self._finish()
        elif self._contribution.sent and self._completion.grace_left(self._contribution.target) <= 0:
            self._conclude()

    @property
    def rests_count(self) -> bool:
        """See Exchange. False with an outer optimizer."""
        return self._needed() and self._outer is None

    def contribute_rest(self) -> int:
        """Mark fewer local steps than `every` for the open round, with a weight that is smaller in proportion. If all
        others have left or have marked, this worker closes the round.

        A worker without local steps marks an empty contribution if others have contributed to the round, because if
        they have left, no other member would close it. With an outer optimizer nothing is contributed, since it would
        move the model by its whole momentum for a few steps. Then only a contribution that came too late is marked
        again, and whole intervals that were kept back are sent if the inbox is free. Repeat the call after an error; it
        goes on.
        """
        if not self._owing:
            if self._outer is not None:
                waits = self._contribution.sent and not self._conclude_at_once()
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
        if not self._contribution.sent or self._conclude_at_once():
            self._finish()
            return 0
        self._group.count_samples(self._samples)
        self._group.member.add(t.BYTES, self._group.sent_bytes)
        self._steps = self._samples = self._kept = 0
        self._group.report()
        self._contribution.raise_refusal()
        return 0

    def restart(self) -> None:
        """Take over the present weights."""
        self.mover.forget()
        self._take_over()

    def flush(self) -> None:
        """Wait for work in the background."""
        self._closer.end()

    def close(self) -> None:
        """Finish work in the background. The inbox is deleted after the slot is freed, unless its contribution may
        still count.
        """
        self._closer.end()
        group = self._group
        outcome = self._contribution.counted_at_last(group.table.read()) if self._contribution.sent else True
        if outcome is not None:
            self._contribution.sent = False
            group.unneeded.append(self._inbox.name)
        if outcome is False:
            drop(self._group, "a contribution that was too late for its round when the worker left")
            group.report()
        group.unneeded += self._closer.leave()

    def abandon(self) -> int:
        """Count what is lost with the membership. A contribution that is marked for the open
        round still counts there.
        """
        lost = 0 if self._owing else self._steps + self._kept
        if lost:
            drop(self._group, "the local steps that it had not sent when it lost its lease")
        self._steps = self._samples = self._kept = 0
        self._owing = False
        return lost + self._contribution.abandon()

    def _send(self) -> None:
        """Write the delta into the inbox. A refused delta has no weight, so that the others need not wait for it."""
        group, scheme, contribution = self._group, self._scheme, self._contribution
        contribution.origin = self._base_round
        # If the others wait for this worker, its round is still open. A late delta that the scheme drops is found to be
        # late in the end.
        in_time = scheme.WAITS and (scheme.quorum is None or not contribution.late_counts)
        contribution.tokens = (
            float(self._samples) if scheme.token_weights else min(1.0, (self._steps + self._kept) / self._interval)
        )
        contribution.steps = self._steps + self._kept
        group.member.check()
        norm = self.mover.write(self._inbox)
        # The target is chosen after the write, which may take as long as many rounds.
        contribution.target = contribution.origin if in_time else group.round
        try:
            group.check(norm, contribution.target - contribution.origin)
        except RefusedContributionError as error:
            contribution.refusal, contribution.tokens = error, 0.0
            self.mover.forget()
        failpoint("train-sent")
        contribution.sent = self._owing = True

    def _send_nothing(self) -> None:
        """Mark the round without a weight, so that the others need not wait for this member."""
        contribution = self._contribution
        contribution.origin = contribution.target = self._base_round
        contribution.tokens, contribution.steps = 0.0, 0
        contribution.sent = self._owing = True

    def _finish(self) -> None:
        """After _send: conclude the contribution, and go on from the present weights. May be repeated if it was
        interrupted.
        """
        if self._contribution.sent:
            self._conclude()
        samples, self._samples = self._samples, 0  # counted once, even if the rest fails and is repeated
        self._group.count_samples(samples)
        self._group.member.add(t.BYTES, self._group.sent_bytes + self._group.weights.nbytes)
        # The first call runs in this thread, the only one that may touch the parameters.
        at_once([lambda: self._take_over(self._word), self._group.report], remote=self._group.remote)
        self._contribution.raise_refusal()

    def _take_over(self, known: int | None = None) -> None:
        fetch = self.mover.fetch
        if self.mover.by_parts:
            # Parts are taken over as they arrive. If a round is closed meanwhile, they are a mix of two rounds, which
            # does no harm: the next contribution is for the round that was open when the read began, and is dropped.
            self._base_round = self._group.read_from(fetch, known=known)
        else:
            self._base_round = self._group.read_by(fetch, known=known, needs_us=self._needed())
        self.mover.adopt()
        self._completion.opened()
        self._steps = self._samples = self._kept = 0
        self._owing = self._repeated = False

    def _needed(self) -> bool:
        """Return True if a round to which this worker has not contributed yet waits for it."""
        return self._scheme.WAITS and self._scheme.quorum is None

    def _conclude_at_once(self) -> bool:
        """Conclude the contribution without waiting for other members."""
        self._stopping = True
        try:
            return self._conclude()
        finally:
            self._stopping = False

    def _conclude(self) -> bool:
        """Find out whether the contribution counted. Waits until its round is closed. In a scheme that does not wait,
        or when stopping, it waits only while a member is closing the round. Returns False if the outcome is still open.
        """
        group, contribution, completion = self._group, self._contribution, self._completion
        rows: t.Rows | None = None
        looks = 0  # in vain, at a round that is ready and that others should close
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
                # After its own mark this member may be the only one to know that the round is complete. One that waits
                # for no other member does not wait for another to close either.
                alone = marked is not None or self._stopping or not self._scheme.WAITS
                may = ready and (alone or self._closer.should_try(contribution.target, rows, looks))
                if may and self._closer.close(contribution.target, rows):
                    if round_of(rows) == contribution.target:  # another member closed it
                        rows = None
                    continue
                if not ready and (self._stopping or not self._scheme.WAITS):
                    return False
                if not group.wait(completion.patience(contribution.target)):
                    group.member.check()
                    if ready:
                        looks += 1
                    else:
                        completion.reap(rows, contribution.target)
                        completion.tell(rows, contribution.target)
                rows = None
                continue
            if counted or contribution.tokens == 0.0 or not contribution.retarget(rows):
                contribution.sent = False
                return True
