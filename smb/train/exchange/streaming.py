"""Streaming: rounds of fragments, which are sent and taken over in the background while the worker goes on.

The rounds are those of rounds.py, one after the other, counted by the group's one counter: round r exchanges fragment r
modulo their number. So there is one open round, one inbox and one mark for each member, and one protocol for dead
members. A round ends before the next contribution is due, because `delay` is shorter than that.

There are two threads. The caller's thread computes the delta of a fragment in an array of its own, and takes over the
result; it alone touches the parameters. In between, a thread of this exchange writes the delta, marks it and waits for
the round; it closes the round if its member is the last one, and reads the fragment. In that time this thread alone
uses the round's state (of RoundExchange) and the bases of the fragments. Its error is raised at the step that takes
over; the next call goes on from there.

A contribution that arrives after a quorum has closed its round is dropped. All fragments that were closed without this
worker are taken over together with the fragment for which it waits, so a member that falls behind skips fragments.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable

import numpy as np

from smb.buffer import Buffer
from smb.daemon.failpoint import failpoint
from smb.errors import Error
from smb.train import member_table as t
from smb.train.exchange.contribution import drop
from smb.train.exchange.mover import ArrayMover
from smb.train.exchange.round_closing import state_slot
from smb.train.exchange.rounds import RoundExchange, RoundScheme
from smb.train.group import WIRE_BYTES, Group, wake
from smb.train.guards import RefusedContributionError
from smb.train.parameters import Parameters
from smb.train.traits import EXACT, ROUNDS

_log = logging.getLogger("smb")


class FragmentExchange(RoundExchange):
    """One worker's side. `_bases[f]` is the round for which fragment f's base is valid: the first round of the fragment
    that was not closed when the base was read.
    """

    def __init__(self, group: Group, parameters: Parameters, scheme: RoundScheme, delay: int, mix: float) -> None:
        """DiLoCo explains `delay` and `mix`."""
        super().__init__(group, parameters, scheme)
        self._contribution.late_counts = False
        self._delay, self._mix = delay, mix
        self._bases = [0] * len(self._movers)
        self._sent_at = [0] * len(self._movers)  # by fragment: the step after which it was last sent
        self._since = [0] * len(self._movers)  # by fragment: the number of samples when its base was taken over
        self._all_samples = 0
        self._round = 0  # the open round when the weights were last read
        self._exchanges = 0
        self._delta = np.empty(max(mover.fetched.size for mover in self._movers), np.float32)
        # State of the exchange in progress:
        self._job: _Background | None = None
        self._report: _Background | None = None
        self._index = 0
        self._take_at = 0  # the step after which its result is taken over
        self._put = False
        self._read: list[int] = []  # fragments to take over; empty until they are known
        self._received = 0.0  # bytes received for these fragments

    def _remember(self, parameters: Parameters, group: Group) -> None:
        self._movers = [ArrayMover(group.weights, parameters.part(*span), ROUNDS) for span in group.spans]

    # ---- the caller's thread

    def step(self, samples: int) -> None:
        """Begin to send a fragment, or take one over, when it is due. Waits for other members only if the result to
        take over has not arrived, and, with a quorum, for one small read before sending.
        """
        if not self._repeated:
            self._steps += 1
            self._samples += samples
            self._all_samples += samples
        self._repeated = True
        if self._job is not None and self._steps >= self._take_at:
            self._take()
        if self._steps >= (self._exchanges + 1) * self._interval // len(self._movers):
            self._begin()
            if self._steps >= self._take_at:
                self._take()
        self._repeated = False

    def restart(self) -> None:
        """Take over all of the present weights."""
        self._halt()
        self._job = None
        for mover in self._movers:
            mover.forget()
        number = self._group.read_by(lambda weights: self._fetch(weights, range(len(self._movers))))
        for mover in self._movers:
            mover.adopt()
        self._based(range(len(self._movers)), number)
        self._sent_at = [self._steps] * len(self._movers)
        self._samples = 0
        self._repeated = False

    def flush(self) -> None:
        """Wait until the delta that is being sent is in the inbox and marked. Waits for no other member. If the round
        is closed already, its result is taken over.
        """
        self._mark_at_least()
        if self._read:
            self._take()
        elif self._job is not None:
            self._job = _Background(self._exchange_fragment)

    def contribute_rest(self) -> int:
        """Contribute nothing, as in DiLoCo. Return the number of unsent steps of the fragment that was sent longest
        ago.
        """
        return self._steps - min(self._sent_at)

    def close(self) -> None:
        """Wait until the delta that is being sent is marked, and delete the inbox unless its contribution may still
        count.
        """
        try:
            self._mark_at_least()
        finally:
            super().close()

    def abandon(self) -> int:
        """Wait until the thread has ended: it must not act for the member's successor. Returns the number of lost steps
        of the fragment that lost most.
        """
        self._halt()
        job, self._job = self._job, None
        lost = self._steps - min(self._sent_at)
        self._sent_at = [self._steps] * len(self._movers)
        unsent = 0
        if job is not None and not self._put and self._contribution.tokens:
            drop(self._group, "a fragment's contribution that it had not sent when it lost its lease")
            unsent = self._contribution.steps
        return max(lost, unsent, self._contribution.abandon())

    def _begin(self) -> None:
        """Compute the delta of the fragment whose turn it is, and begin to send it. A refused delta has no weight, so
        the others need not wait for it, and its result is taken over at once.
        """
        group, scheme, count = self._group, self._scheme, len(self._movers)
        contribution = self._contribution
        group.member.check()
        # The open round is the last known one if that waits for this member, which it does not if the member has just
        # joined.
        waits = scheme.quorum is None and group.member.clock <= self._round
        target = self._round if waits else group.round
        self._index = target % count
        staleness = (target - self._bases[self._index]) // count
        mover = self._movers[self._index]
        contribution.target, contribution.origin = target, target - staleness  # counted in exchanges of this fragment
        samples = self._all_samples - self._since[self._index]
        contribution.tokens = float(samples) if scheme.token_weights else 1.0
        norm = mover.draw(self._delta[: mover.fetched.size])
        self._take_at = self._steps + self._delay
        try:
            group.check(norm, staleness)
        except RefusedContributionError as error:
            contribution.refusal, contribution.tokens = error, 0.0
            self._take_at = self._steps
        self._exchanges += 1
        contribution.steps = self._steps - self._sent_at[self._index]
        self._sent_at[self._index] = self._steps
        self._put, self._read = False, []
        self._job = _Background(self._exchange_fragment)

    def _take(self) -> None:
        """Take over the result of the exchange. Waits for it if needed."""
        assert self._job is not None
        if self._job.error is not None:  # the error was raised already; go on from there
            self._job = _Background(self._exchange_fragment)
        self._job.join()
        if self._job.error is not None:
            raise self._job.error
        sent = self._movers[self._index].fetched.size
        for index in self._read:
            mover = self._movers[index]
            mover.merge(self._mix, self._delta[: mover.fetched.size])
        self._based(self._read, self._round)
        self._job, self._read = None, []
        group = self._group
        group.count_samples(self._samples)
        self._samples = 0
        group.member.add(t.BYTES, round(sent * WIRE_BYTES[group.weights.wire] + self._received))
        self._report = _Background(group.report)
        self._contribution.raise_refusal()

    def _mark_at_least(self) -> None:
        """End the thread as soon as its delta is marked. If marking failed, it is tried again once; then the error is
        raised.
        """
        self._halt()
        if self._job is not None and self._job.error is not None:
            self._job = _Background(self._exchange_fragment)
            self._halt()
        if self._job is not None and self._job.error is not None:
            raise self._job.error

    def _based(self, indices: Iterable[int], number: int) -> None:
        """Note that these fragments' bases were read while round `number` was open."""
        self._round = number
        for index in indices:
            self._bases[index] = number + (index - number) % len(self._bases)
            self._since[index] = self._all_samples

    def _halt(self) -> None:
        """Stop the thread's waiting for other members, and wait until it has ended."""
        if self._job is not None and self._job.running:
            self._stopping = True
            try:
                # This does not call the group's wake(), because the thread would count that wake as already seen.
                with contextlib.suppress(Error):
                    wake(self._group.tick, self._group.lease)
                self._job.join()
            finally:
                self._stopping = False
        if self._report is not None:
            self._report.join()
            self._report = None

    # ---- the exchange's own thread

    def _exchange_fragment(self) -> None:
        """Contribute, and read the result. When repeated, it goes on where it stopped."""
        if not self._put:
            if self._contribution.tokens:
                mover = self._movers[self._index]
                mover.put(self._inbox, self._delta[: mover.fetched.size])
            failpoint("train-sent")
            self._put = self._contribution.sent = True
        if self._contribution.sent and not self._conclude():
            return  # stopped
        behind = [index for index, good_for in enumerate(self._bases) if good_for < self._word >> t.ROUND_SHIFT]
        stepped = self._is_step_all(behind) and self._read_by_step()
        if not stepped:
            self._round = self._group.read_by(
                lambda weights: self._fetch(weights, behind), known=self._word, needs_us=self._needed()
            )
        self._received = (
            sum(self._movers[index].fetched.size for index in behind)
            * WIRE_BYTES[self._scheme.step_wires() if stepped else EXACT]
        )
        self._completion.opened()
        self._closer.end()
        self._read = behind

    def _fetch(self, weights: Buffer, indices: Iterable[int]) -> None:
        for index in indices:
            self._movers[index].fetch(weights)

    def _is_step_all(self, behind: list[int]) -> bool:
        """Return True if this worker lacks only the servers' latest step."""
        index = self._index
        one_behind = behind == [index] and self._bases[index] == self._closed_before(self._word)
        return bool(self._closer.steps_made) and one_behind

    def _read_by_step(self) -> bool:
        """Update the base by the servers' step instead of reading it anew. Returns False, with an unchanged base, if a
        later round of this fragment was closed meanwhile.
        """
        index, mover = self._index, self._movers[self._index]
        made = 1 - state_slot(self._bases[index], len(self._movers))
        room = self._delta[: mover.fetched.size]  # the delta in it was written already

        def read(_: Buffer) -> None:
            mover.fetch_step(self._closer.steps_made[made], room, self._scheme.step_wires())

        number = self._group.read_by(read, known=self._word, needs_us=self._needed())
        if self._bases[index] != self._closed_before(number << t.ROUND_SHIFT):
            self._word = number << t.ROUND_SHIFT
            return False
        base = mover.fetched
        base += room
        self._round = number
        return True

    def _closed_before(self, word: int) -> int:
        """Return the last round of the current fragment that was closed before the open round of `word`."""
        last = (word >> t.ROUND_SHIFT) - 1
        return last - (last - self._index) % len(self._movers)


class _Background:
    """A call in a daemon thread, for which the interpreter's exit does not wait."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="smb-fragment", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self.error = error
