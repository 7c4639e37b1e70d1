"""EASGD, EAMSGD and SEASGD: what workers and shared model become, to the bit; what hides behind computing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.train.elastic import nesterov_step
from tests.support import elastic
from tests.support.elastic import Step, Trace, Values, gradient, sgd

Connect = Callable[..., smb.Client]
SIZE = 70_000  # more than a chunk, more than a block of the difference
WORKERS = 3
DEADLINE_S = 30.0


@pytest.fixture
def order() -> list[int]:
    """Turns of three workers, none in step with another."""
    seed = 20
    print(f"seed {seed}")
    return random.Random(seed).choices(range(WORKERS), k=24)


@pytest.fixture
def start() -> Values:
    return np.linspace(-1, 1, SIZE, dtype=np.float32)


def _trained(
    clients: Sequence[smb.Client], scheme: smb.train.Scheme, order: Sequence[int], start: Values, step: Step
) -> Trace:
    """Let workers take turns in that order, each one's addition there before the next turn."""
    values = [start.copy() for _ in clients]
    workers = [smb.train.join(c, "run", v, scheme) for c, v in zip(clients, values, strict=True)]
    trace = Trace()
    for number in order:
        step(number, values[number])
        workers[number].step(samples=2)
        workers[number].exchange._elastic._mover.wait()  # and no more than that: flush() would apply what EASGD owes
        trace.shared.append(workers[0].shared())
        trace.local.append(values[number].copy())
    assert sum(w.status.samples for w in workers) <= 2 * len(order)
    for worker in workers:
        worker.close()
    return trace


def _same(found: Trace, wanted: Trace) -> None:
    for turn, pair in enumerate(zip(found.shared, wanted.shared, strict=True)):
        np.testing.assert_array_equal(*pair, err_msg=f"shared model after turn {turn}")
    for turn, pair in enumerate(zip(found.local, wanted.local, strict=True)):
        np.testing.assert_array_equal(*pair, err_msg=f"worker's values after turn {turn}")
    assert not np.array_equal(wanted.shared[0], wanted.shared[-1])


@pytest.mark.parametrize(("alpha", "every", "rate"), [(0.25, 1, 0.25), (None, 2, 0.9 / WORKERS)])
def test_easgd(
    client: smb.Client, connect: Connect, order: list[int], start: Values, alpha: float, every: int, rate: float
) -> None:
    """Algorithm 1 in one process gives the same, to the bit; without alpha it is 0.9 by the number of workers."""
    found = _trained([client, connect(), connect()], smb.train.EASGD(alpha, every), order, start, sgd)
    _same(found, elastic.easgd(order, start, sgd, rate, every))


def test_eamsgd(client: smb.Client, connect: Connect, order: list[int], start: Values) -> None:
    """Algorithm 2: Nesterov's momentum as nesterov_step does it, and the difference taken before the look-ahead."""

    def stepping() -> Step:
        velocity = [np.zeros_like(start) for _ in range(WORKERS)]

        def by_hand(number: int, w: Values) -> None:
            v = velocity[number]
            v[:] = np.float32(0.9) * v
            w[:] = w + v
            change = np.float32(0.05) * gradient(number, w)
            w[:] = w - change
            v[:] = v - change

        return by_hand

    def stepping_ours() -> Step:
        velocity = [np.zeros_like(start) for _ in range(WORKERS)]
        return lambda number, w: nesterov_step(w, velocity[number], lambda at: gradient(number, at), 0.05, 0.9)

    scheme = smb.train.EAMSGD(alpha=0.25, every=2, momentum=0.9)
    found = _trained([client, connect(), connect()], scheme, order, start, stepping_ours())
    _same(found, elastic.easgd(order, start, stepping(), 0.25, 2))


@pytest.mark.parametrize("every", [1, 3])
def test_seasgd(client: smb.Client, connect: Connect, order: list[int], start: Values, every: int) -> None:
    """The published rule in one process gives the same, to the bit."""
    found = _trained([client, connect(), connect()], smb.train.SEASGD(0.2, every), order, start, sgd)
    _same(found, elastic.seasgd(order, start, sgd, 0.2, every))


@pytest.mark.parametrize("scheme", [smb.train.EASGD(0.5, 2), smb.train.EAMSGD(0.5, 2), smb.train.SEASGD(0.5, 2)])
def test_what_one_gives_the_other_takes(client: smb.Client, connect: Connect, scheme: smb.train.Scheme) -> None:
    """After a flush the sum over workers and shared model is what local steps made it; a late one adds its own."""
    values = [np.zeros(100, np.float32) for _ in range(2)]
    with smb.train.join(client, "run", values[0], scheme) as first:
        for _ in range(5):
            values[0] += 1
            first.step()
        with smb.train.join(connect(), "run", values[1]) as second:
            assert second.scheme == scheme
            brought = values[1].copy()
            assert (brought > 0).all()
            for _ in range(4):
                values[1] += 2
                second.step()
                second.flush()
            first.flush()
            np.testing.assert_allclose(values[0] + values[1] + first.shared(), 5 + brought + 8, rtol=1e-5)


@pytest.mark.parametrize("scheme", [smb.train.EASGD(0.5, 2), smb.train.EAMSGD(0.5, 2), smb.train.SEASGD(0.5, 2)])
def test_what_is_refused(client: smb.Client, scheme: smb.train.Scheme) -> None:
    """A difference that is not finite is not sent, the values are the shared model's, and training goes on."""
    values = np.zeros(100, np.float32)
    with smb.train.join(client, "run", values, scheme) as worker:
        for _ in range(2):
            values += 1
            worker.step()
        worker.flush()
        shared = worker.shared()
        assert (shared == 1).all()
        values[5] = np.nan
        worker.step()
        with pytest.raises(smb.train.RefusedContributionError, match="NaN"):
            worker.step()
        np.testing.assert_array_equal(values, shared)
        np.testing.assert_array_equal(worker.shared(), shared)
        for _ in range(2):
            values += 1
            worker.step()
        worker.flush()
        assert (worker.shared() == 2).all()
        assert (worker.status.contributions, worker.status.refused) == (2, 1)


@pytest.mark.parametrize(
    "settings", [{"alpha": 0.0}, {"alpha": 1.5}, {"every": 0}, {"every": 2.0}, {"alpha": float("nan")}]
)
@pytest.mark.parametrize("scheme", [smb.train.EASGD, smb.train.EAMSGD, smb.train.SEASGD])
def test_settings_that_mean_nothing(scheme: type[smb.train.Scheme], settings: dict[str, Any]) -> None:
    """They are refused by name; what is at the edge is not."""
    with pytest.raises(smb.InvalidArgumentError, match=scheme.NAME):
        scheme(**settings)
    with pytest.raises(smb.InvalidArgumentError, match="momentum"):
        smb.train.EAMSGD(momentum=1.0)
    assert scheme.from_settings(scheme(alpha=1.0, every=1).settings()) == scheme(alpha=1.0, every=1)


class Gate:
    """Holds back a worker's additions until they are let go, and notes what happens, in order."""

    def __init__(self, worker: smb.train.Worker) -> None:
        self.events: list[str] = []
        self._weights = worker.group.weights
        self._let_go = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)
        self._read, self._accumulate = self._weights.read, self._weights.accumulate
        self._weights.read = self._noted_read  # type: ignore[method-assign]
        self._weights.accumulate = self._held_accumulate  # type: ignore[method-assign]

    def _noted_read(self, *given: Any, **options: Any) -> Any:
        self.events.append("read")
        return self._read(*given, **options)

    def _held_accumulate(self, *given: Any, **options: Any) -> Any:
        self.events.append("addition begins")
        self._begun.release()
        assert self._let_go.acquire(timeout=DEADLINE_S)
        self._accumulate(*given, **options)
        self.events.append("addition ends")

    def await_begun(self) -> None:
        assert self._begun.acquire(timeout=DEADLINE_S)

    def let_go(self, additions: int = 1) -> None:
        self._let_go.release(additions)


@pytest.fixture
def values() -> Values:
    return np.zeros(100, np.float32)


@pytest.fixture
def worker(client: smb.Client, values: Values) -> Iterator[smb.train.Worker]:
    with smb.train.join(client, "run", values, smb.train.SEASGD(alpha=0.5)) as joined:
        yield joined


def test_the_addition_hides_behind_computing(worker: smb.train.Worker, values: Values) -> None:
    """step() returns and the worker computes while its addition is under way; the next step waits for its end before it
    reads. Known by events, not by times.
    """
    gate = Gate(worker)
    mover = worker.exchange._elastic._mover
    wait = mover.wait

    def noted_wait() -> None:
        gate.events.append("waiting")
        gate.let_go()
        wait()

    values += 2
    worker.step()
    gate.await_begun()
    gate.events.append("computing")
    values += 2
    mover.wait = noted_wait
    worker.step()
    worker.flush()
    assert gate.events[:6] == ["read", "addition begins", "computing", "waiting", "addition ends", "read"]
    assert sorted(gate.events[6:]) == ["addition begins", "addition ends", "waiting"]
    np.testing.assert_array_equal(values, 1 + 2 - 1)
    np.testing.assert_array_equal(worker.shared(), 2)


def test_staleness_is_what_came_in_between(worker: smb.train.Worker, values: Values, connect: Connect) -> None:
    """Two additions of another between our read and our own arrival are a staleness of 2, and are in the trace; the
    other's, which waits for nobody, is 0, then 1 for ours.
    """
    theirs = np.zeros(100, np.float32)
    with smb.train.join(connect(), "run", theirs) as other:
        gate = Gate(worker)
        values += 8
        worker.step()  # reads 0, adds 4
        gate.await_begun()
        for _ in range(2):
            theirs += 8
            other.step()
            other.flush()
        assert (other.status.staleness, other.status.staleness_max) == (0, 0)
        # 8 - 4 = 4; 4 + 8 = 12, less half of 12 - 4
        np.testing.assert_array_equal(theirs, 8)
        gate.let_go()
        worker.flush()
        np.testing.assert_array_equal(values, 4)
        np.testing.assert_array_equal(worker.shared(), 4 + 4 + 4)
        assert (worker.status.staleness, worker.status.staleness_max) == (2, 2)
        gate.let_go()
        worker.step()
        worker.flush()
        assert (worker.status.staleness, worker.status.staleness_max) == (0, 2)
        assert (worker.status.bytes, worker.status.contributions) == (2 * 2 * values.nbytes, 2)


def test_what_is_too_stale_is_not_sent(connect: Connect, client: smb.Client) -> None:
    """staleness_max, where another's addition comes between the read and the sending: refused, nothing sent."""
    ours, theirs = np.zeros(100, np.float32), np.zeros(100, np.float32)
    guards = smb.train.Guards(staleness_max=0)
    with (
        smb.train.join(client, "run", ours, smb.train.SEASGD(alpha=0.5), guards=guards) as worker,
        smb.train.join(connect(), "run", theirs) as other,
    ):
        ours += 2
        worker.step()
        worker.flush()
        weights, between = worker.group.weights, [8.0]
        read = weights.read

        def read_and_be_overtaken(*given: Any, **options: Any) -> Any:
            result = read(*given, **options)
            if between:
                theirs[:] += between.pop()
                other.step()
                other.flush()
            return result

        weights.read = read_and_be_overtaken  # type: ignore[method-assign]
        ours += 2
        with pytest.raises(smb.train.RefusedContributionError, match="staleness 1"):
            worker.step()
        np.testing.assert_array_equal(ours, worker.shared())
        np.testing.assert_array_equal(ours, 1 + 3.5)
        ours += 2
        worker.step()
        worker.flush()
        np.testing.assert_array_equal(worker.shared(), 1 + 3.5 + 1)


@pytest.mark.parametrize("scheme", [smb.train.EASGD(0.5, 1), smb.train.SEASGD(0.5, 1)])
def test_an_error_in_the_background_surfaces_and_is_made_good(client: smb.Client, scheme: smb.train.Scheme) -> None:
    """An addition that fails, and fails again when sent again, raises from step(), which then has done nothing: called
    again it goes on, and each contribution counts once.
    """
    values = np.zeros(100, np.float32)
    with smb.train.join(client, "run", values, scheme) as worker:
        weights = worker.group.weights
        accumulate, failures = weights.accumulate, 2

        def failing(*given: Any, **options: Any) -> Any:
            nonlocal failures
            if failures:
                failures -= 1
                raise smb.UnavailableError("no way there; nothing was applied")
            return accumulate(*given, **options)

        weights.accumulate = failing  # type: ignore[method-assign]
        raised = 0
        for _ in range(3):
            values += 2
            try:
                worker.step()
            except smb.UnavailableError:
                raised += 1
                worker.step()  # again, with no local step in between
        worker.flush()
        assert raised == 1
        assert worker.status.contributions == 3
        np.testing.assert_array_equal(values + worker.shared(), 6)
