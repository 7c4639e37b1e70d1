"""One step's exchange in the background, from its beginning until all of its parts are taken
over, and after a failure.
"""

from __future__ import annotations

from collections.abc import Callable

import smb.train
from smb.overlap.part_parameters import PartParameters
from smb.overlap.parts import Cut
from smb.overlap.step_by_parameter import refused
from smb.train.steps import Steps


class StepExchange:
    """Exchanges a worker's steps, one after the other. For the computing thread; the worker's own thread sends.

    `pending` are the pulled parts that are not taken over yet. `in_backward` is True from the beginning of an exchange
    in a backward pass to the end of that pass.
    """

    def __init__(self, trained: PartParameters, done: Callable[[], None]) -> None:
        """`done` is called after each exchange that succeeded."""
        self.pending: set[int] = set()
        self.in_backward = False
        self._trained = trained
        self._flow = trained.flow
        self._done = done
        self._worker: smb.train.Worker
        self._samples: Callable[[], int | None]

    def attach(self, worker: smb.train.Worker, samples: Callable[[], int | None]) -> None:
        """Exchange through this worker from now on. `samples` returns the number of samples of a step."""
        self._worker = worker
        self._samples = samples

    @property
    def steps(self) -> Steps:
        """The worker's steps, which say how an exchange ended."""
        return self._worker.steps

    def begin(self, cut: Cut | None) -> None:
        """Begin a step's exchange with these parts (None: with those of the last step). No part is made yet."""
        if self._trained.verify is not None:
            self._trained.verify()
        self._flow.begin(cut)
        self.pending = set(range(len(self._flow.cut.pull)))
        try:
            self.steps.start(self._samples(), self._flow.over)
        except BaseException:
            self._flow.cancel()
            self.pending.clear()
            raise

    def begin_again(self, cut: Cut | None) -> None:
        """Exchange again after a failure, with all parts, before any of them is used."""
        if not self.recover():
            self.begin(cut)
            self._flow.make_rest()

    def take(self, number: int) -> None:
        """Wait for a part and take it over. Raises if the exchange failed; then a second call
        leaves the part as it is.
        """
        if self.in_backward and number in self.pending:
            raise refused("the parameters were read between backward() and optimizer.step()")
        while number in self.pending:
            if self._flow.wait(number):
                self._flow.adopt(number)
                self.pending.discard(number)
            elif self.steps.lost:
                # The next step joins again. That changes all parameters, and a graph may need some of them now.
                self.pending.clear()
            elif self.steps.under_way:
                self.finish()
            else:  # local changes are kept, and sent with the next step
                self.pending.clear()

    def take_all(self) -> None:
        """Take over all pending parts."""
        for number in sorted(self.pending):
            self.take(number)

    def wait(self) -> None:
        """Wait for the exchange in progress, and take over all of it. Raises the errors of the exchange."""
        self.raise_refusal()
        self.take_all()
        self.finish()

    def end_backward(self) -> None:
        """End the part of the exchange that began in the backward pass: make the remaining parts."""
        self.in_backward = False
        self._flow.make_rest()

    def finish(self) -> bool:
        """Wait for the exchange in progress. Returns True if this worker joined again and took
        over the shared model.
        """
        if not self.steps.under_way:
            return False
        try:
            rejoined = self.steps.finish()
        except smb.train.RefusedContributionError:
            self.pending.clear()
            raise
        if rejoined:
            self.pending.clear()
        else:
            self._done()
        return rejoined

    def raise_refusal(self) -> None:
        """If a contribution was refused and the shared model could not be taken over at that time, take it over now,
        and raise the refusal.
        """
        if self.steps.refused:
            self.recover()

    def recover(self) -> bool:
        """Finish what a failed exchange has left. Returns True if this worker joined again."""
        try:
            if not self.steps.recover():
                return False
        except smb.train.RefusedContributionError:
            self.pending.clear()
            raise
        self.pending.clear()
        return True
