"""The bookkeeping of parts: what was done is sent once, whatever came and whatever failed. No cluster, one thread."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from smb.overlap.parts import ByParts, Cut, Part, PartFlow, _Sending
from smb.train.ledger import Run, Values

SIZE = 40


class Numbers(ByParts):
    """Parameters in an array."""

    def __init__(self) -> None:
        self.size = SIZE
        self.values = np.zeros(SIZE, np.float32)

    def delta(self, part: Part, base: Values, out: Values) -> None:
        """Subtract."""
        for run in part.runs:
            out[run.indices] = self.values[run.indices] - base[run.indices]

    def put(self, part: Part, values: Values) -> None:
        """Copy."""
        for run in part.runs:
            self.values[run.indices] = values[run.indices]

    def fill(self, values: Values) -> None:
        """Copy."""
        self.values[:] = values

    def deltas(self, base: Values, out: Values | None = None) -> Iterator[tuple[int, Values]]:
        raise AssertionError

    def blocks(self) -> Iterator[tuple[int, Values]]:
        raise AssertionError

    def subtract(self, difference: Values) -> None:
        raise AssertionError

    def keep_exact(self) -> None:
        raise AssertionError


def cut(random_: random.Random) -> Cut:
    places = sorted(random_.sample(range(1, SIZE), random_.randint(0, 6)))
    bounds = [0, *places, SIZE]
    runs = [Run(one, one, two - one) for one, two in itertools.pairwise(bounds)]
    random_.shuffle(runs)
    parts = tuple(Part(tuple(sorted(runs[at::3], key=lambda run: run.here)), -at) for at in range(min(3, len(runs))))
    return Cut(parts, parts)


def test_what_is_done_is_sent_once() -> None:
    """Steps by cuts that change, of which some fail before anything is sent, and some come back in part: at the end the
    shared values are the sum of all that was done here and elsewhere, and the parameters are those.
    """
    for seed in range(200):
        print("seed", seed)
        _train(seed)


def _train(seed: int) -> None:
    random_ = random.Random(seed)
    parameters, shared, done = Numbers(), np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    flow = PartFlow(parameters, cut(random_))
    flow.refill(shared)
    for number in range(12):
        mine = np.array([random_.randint(-3, 3) for _ in range(SIZE)], np.float32)
        theirs = np.array([random_.randint(-3, 3) for _ in range(SIZE)], np.float32)
        parameters.values += mine
        done += mine
        flow.begin(cut(random_) if random_.random() < 0.5 else None)
        order = [*range(len(flow.cut.push))]
        random_.shuffle(order)
        for part in order[: random_.randint(0, len(order))]:
            flow.make(part)
        flow.make_rest()
        last = number == 11
        if random_.random() < 0.4 and not last:  # it failed, and nothing was sent
            flow.over()
            continue
        shared += theirs
        done += theirs
        shared += flow.due
        flow.owes_delta = False
        for part in range(len(flow.cut.pull)):
            if last or random_.random() < 0.7:
                for run in flow.cut.pull[part].runs:
                    flow.landing[run.indices] = shared[run.indices]
                flow.came(part)
        flow.over()
        for part in range(len(flow.cut.pull)):
            if flow.wait(part):
                flow.adopt(part)
    assert np.array_equal(shared, done)
    assert np.array_equal(parameters.values, shared)


def test_what_comes_is_taken_over_by_parts() -> None:
    """A part that did not come leaves its parameters and base; the next delta has what was done since, no more."""
    parameters = Numbers()
    first, second = Part((Run(0, 0, 10),), 0), Part((Run(10, 10, 30),), -1)
    flow = PartFlow(parameters, Cut((first, second), (first, second)))
    parameters.values += 1
    flow.begin()
    flow.make_rest()
    flow.owes_delta = False
    flow.landing[:10] = 7
    flow.came(0)
    flow.over()
    assert (flow.wait(0), flow.wait(1)) == (True, False)
    flow.adopt(0)
    assert parameters.values.tolist() == [7] * 10 + [1] * 30
    parameters.values += 2
    flow.begin()
    flow.make_rest()
    assert flow.due.tolist() == [2] * SIZE


def test_a_step_is_over_when_its_parts_came() -> None:
    """A future is done before its callbacks are: a call counts as under way until what it brought is noted."""
    parameters = Numbers()
    part = Part((Run(0, 0, SIZE),), 0)
    flow = PartFlow(parameters, Cut((part,), (part,)))
    sending, future, seen = _Sending(flow, flow.pushed), Future[None](), list[tuple[bool, int]]()
    sending.add(part, lambda _: future, lambda: seen.append((future.done(), sending.open)))
    future.set_result(None)
    assert seen == [(True, 1)]
    assert sending.open == 0
    assert sending.finish() == []
