"""Schemes of rounds: what they compute, to the bit; who is waited for, and what becomes of those who come late."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import smb
import smb.train
from smb.train import BSP, AsyncDiLoCo, DiLoCo, Guards, LocalSGD, RefusedContributionError
from smb.train import member_table as t
from smb.train.exchange.rounds import RoundExchange
from smb.train.scheme import Values
from tests.support.daemons import wait_for
from tests.support.training import (
    COUNT,
    Crew,
    delta_of,
    local_step,
    mean_round,
    nesterov_round,
    start,
    together,
    waiting,
)

Connect = Callable[..., smb.Client]


@pytest.fixture
def links(way: str, connect: Connect) -> Connect:
    """Connect over one transport."""
    return lambda: connect(way)


def _all_equal(crew: Crew, expected: Values) -> None:
    for worker, values in zip(crew.workers, crew.values, strict=True):
        assert np.array_equal(values, expected)
        assert np.array_equal(worker.shared(), expected)


@pytest.mark.parametrize(("scheme", "every"), [(BSP(), 1), (LocalSGD(every=3), 3)], ids=["bsp", "localsgd"])
def test_mean(links: Connect, scheme: smb.train.Scheme, every: int) -> None:
    """Four workers, several rounds: after each one all have the same weights, those of the reference, to the bit."""
    crew, weights = Crew(links, 4, scheme), start()
    for number in range(3):
        for _ in range(every):
            crew.step_all()
        steps = range(every * number, every * (number + 1))
        weights = mean_round(weights, [(delta_of(weights, worker, steps), 1.0) for worker in range(4)])
        _all_equal(crew, weights)
    status = smb.train.status(crew.clients[0], "run")
    assert status.round == 3
    assert [(w.contributions, w.samples, w.staleness_max) for w in status.workers] == [(3, 3 * every, 0)] * 4
    assert [w.bytes for w in status.workers] == [3 * 2 * 4 * COUNT] * 4
    crew.close()


def test_diloco(links: Connect) -> None:
    """DiLoCo: Nesterov on the mean, momentum kept from round to round, equal to the reference to the bit."""
    crew = Crew(links, 3, DiLoCo(every=2, outer_lr=0.7, outer_momentum=0.9))
    weights, momentum = start(), np.zeros(COUNT, np.float32)
    for number in range(4):
        for _ in range(2):
            crew.step_all()
        deltas = [(delta_of(weights, worker, range(2 * number, 2 * number + 2)), 1.0) for worker in range(3)]
        weights, momentum = nesterov_round(weights, momentum, deltas, 0.7, 0.9)
        _all_equal(crew, weights)
    crew.close()


def test_token_weights(connect: Connect) -> None:
    """With token_weights a contribution weighs as many as its samples."""
    crew, weights, samples = Crew(connect, 3, LocalSGD(every=2, token_weights=True)), start(), [1, 5, 10]
    for _ in range(2):
        crew.step_all(samples)
    deltas = [(delta_of(weights, worker, range(2)), 2.0 * samples[worker]) for worker in range(3)]
    _all_equal(crew, mean_round(weights, deltas))
    crew.close()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bsp_is_one_process(connect: Connect, momentum: float) -> None:
    """BSP over 4 workers with shards of unequal size is one process with the whole batch, with momentum too."""
    random = np.random.default_rng(11)
    inputs, goals = random.standard_normal((64, 20)).astype(np.float32), random.standard_normal(64).astype(np.float32)
    shards = [slice(0, 8), slice(8, 24), slice(24, 40), slice(40, 64)]

    class Sgd:
        def __init__(self) -> None:
            self.velocity = np.zeros(20, np.float32)

        def step(self, weights: Values, part: slice) -> None:
            error = inputs[part] @ weights - goals[part]
            gradient = inputs[part].T @ error / len(error) + 0.01 * weights
            self.velocity = (momentum * self.velocity + gradient).astype(np.float32)
            weights -= 0.05 * self.velocity

    alone, optimizer = np.ones(20, np.float32), Sgd()
    for _ in range(20):
        optimizer.step(alone, slice(0, 64))

    values = [np.ones(20, np.float32) for _ in shards]
    workers = [smb.train.join(connect(), "run", own, BSP(token_weights=True)) for own in values]

    def train(worker: smb.train.Worker, own: Values, part: slice) -> None:
        optimizer = Sgd()
        for _ in range(20):
            optimizer.step(own, part)
            worker.step(samples=part.stop - part.start)

    together(*(lambda job=job: train(*job) for job in zip(workers, values, shards, strict=True)))
    for worker, own in zip(workers, values, strict=True):
        np.testing.assert_allclose(own, alone, rtol=2e-5, atol=2e-6)
        worker.close()


class _Async:
    """AsyncDiLoCo in plain numpy, as its docstring says it."""

    def __init__(self, workers: int, scheme: AsyncDiLoCo) -> None:
        self.scheme = scheme
        self.weights, self.momentum, self.round = start(), np.zeros(COUNT, np.float32), 0
        self.values = [self.weights.copy() for _ in range(workers)]
        self.base = [self.weights.copy() for _ in range(workers)]
        self.base_round = [0] * workers
        self.inbox: dict[int, tuple[Values, int]] = {}  # of the open round: delta, round that it starts from
        self.steps = [0] * workers
        self.staleness_max = [0] * workers

    def step(self, worker: int) -> None:
        local_step(self.values[worker], worker, self.steps[worker])
        self.steps[worker] += 1
        if self.steps[worker] % self.scheme.every or worker in self.inbox:
            return
        self.inbox[worker] = (self.values[worker] - self.base[worker], self.base_round[worker])
        self.staleness_max[worker] = max(self.staleness_max[worker], self.round - self.base_round[worker])
        if len(self.inbox) >= min(self.scheme.quorum or len(self.values), len(self.values)):
            deltas = [
                (delta, float(np.float32(1 / np.sqrt(1 + self.round - since))))
                for _, (delta, since) in sorted(self.inbox.items())
            ]
            self.weights, self.momentum = nesterov_round(
                self.weights, self.momentum, deltas, self.scheme.outer_lr, self.scheme.outer_momentum
            )
            self.inbox.clear()
            self.round += 1
        self.values[worker] = self.weights.copy()
        self.base[worker] = self.weights.copy()
        self.base_round[worker] = self.round


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_asyncdiloco(links: Connect, quorum: int) -> None:
    """Workers of very different speed, in an order drawn by chance: weights, momentum and staleness are the
    reference's, and nobody ever waits for another (one thread drives them all)."""
    scheme = AsyncDiLoCo(every=2, outer_lr=0.3, quorum=quorum)
    crew, reference = Crew(links, 3, scheme), _Async(3, scheme)
    for worker in np.random.default_rng(3).choice(3, size=80, p=[0.5, 0.3, 0.2]):
        crew.step(int(worker))
        reference.step(int(worker))
        assert np.array_equal(crew.values[worker], reference.values[worker])
    status = smb.train.status(crew.clients[0], "run")
    assert status.round == reference.round > 2
    assert [w.staleness_max for w in status.workers] == reference.staleness_max
    assert max(reference.staleness_max) >= (1 if quorum == 3 else 2)
    crew.close()


def test_async_too_stale(connect: Connect) -> None:
    """A contribution that is staler than staleness_max is refused, counted, and its worker goes on from the model."""
    crew = Crew(connect, 2, AsyncDiLoCo(every=1), guards=Guards(staleness_max=2))
    for number in range(3):
        local_step(crew.values[1], 1, number)
    for _ in range(3):
        crew.step(0)
    with pytest.raises(RefusedContributionError, match="staleness 3 exceeds staleness_max=2"):
        crew.workers[1].step()
    assert np.array_equal(crew.values[1], crew.values[0])
    assert crew.workers[1].status.refused == 1
    crew.step(0)
    crew.step(0)
    crew.step(1)
    assert (crew.workers[1].status.contributions, crew.workers[1].status.staleness) == (1, 2)
    crew.close()


def test_refused(connect: Connect) -> None:
    """One worker's values become NaN: it is told, its round is the mean of the others, and nobody waits for it."""
    crew, weights = Crew(connect, 3, LocalSGD(every=1)), start()
    crew.values[1][3] = np.nan

    def spoilt() -> None:
        with pytest.raises(RefusedContributionError, match="NaN"):
            crew.step(1)

    together(lambda: crew.step(0), spoilt, lambda: crew.step(2))
    weights = mean_round(weights, [(delta_of(weights, worker, [0]), 1.0) for worker in (0, 2)])
    _all_equal(crew, weights)
    crew.step_all()
    _all_equal(crew, mean_round(weights, [(delta_of(weights, worker, [1]), 1.0) for worker in range(3)]))
    assert [w.refused for w in smb.train.status(crew.clients[0], "run").workers] == [0, 1, 0]
    crew.close()


@pytest.mark.parametrize("wire", ["exact", "float16"])
def test_a_look_at_the_lease_that_fails(connect: Connect, monkeypatch: pytest.MonkeyPatch, wire: str) -> None:
    """It fails after the inbox was written: the step called again contributes all of it, in fewer bits too."""
    crew, weights = Crew(connect, 1, BSP(), wire=wire), start()
    member, looks = crew.workers[0].group.member, 0
    check = member.check

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:  # the first one is before the writing
            raise smb.UnavailableError("away, says the test")
        check()

    monkeypatch.setattr(member, "check", look)
    with pytest.raises(smb.UnavailableError, match="says the test"):
        crew.step(0)
    crew.workers[0].step()
    mean = mean_round(weights, [(delta_of(weights, 0, [0]), 1.0)])
    assert np.allclose(crew.values[0], mean, rtol=0, atol=0 if wire == "exact" else 1e-3)
    crew.workers[0].step()  # what rounding had left
    assert np.allclose(crew.values[0], mean, rtol=0, atol=1e-6)
    crew.close()


def test_a_refusal_that_could_not_be_told(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is away as a guard refuses: the refusal is raised all the same, and nothing of the contribution counts.
    The next report counts it.
    """
    crew, weights = Crew(connect, 1, BSP(), guards=Guards(norm_max=1.0), wire="float16"), start()
    member, reports = crew.workers[0].group.member, 0
    report = member.report

    def tell() -> None:
        nonlocal reports
        reports += 1
        if reports == 1:
            raise smb.UnavailableError("away, says the test")
        report()

    monkeypatch.setattr(member, "report", tell)
    with pytest.raises(RefusedContributionError, match="norm_max"):
        crew.step(0)
    _all_equal(crew, weights)
    crew.workers[0].step()
    _all_equal(crew, weights)
    assert smb.train.status(crew.clients[0], "run").workers[0].refused == 1
    crew.close()


def test_quorum(connect: Connect) -> None:
    """Two of three close the round; the third one's delta counts in the next, staler and lighter."""
    crew, weights = Crew(connect, 3, LocalSGD(every=1, quorum=2)), start()
    together(lambda: crew.step(0), lambda: crew.step(1))
    second = mean_round(weights, [(delta_of(weights, worker, [0]), 1.0) for worker in (0, 1)])
    assert np.array_equal(crew.workers[2].shared(), second)
    with waiting(lambda: crew.step(2)):
        wait_for(lambda: 2 in crew.marked(), "the late one in the second round")
        crew.step(1)
    light = float(np.float32(1 / np.sqrt(2)))
    third = mean_round(second, [(delta_of(second, 1, [1]), 1.0), (delta_of(weights, 2, [0]), light)])
    assert np.array_equal(crew.values[1], third)
    assert np.array_equal(crew.values[2], third)
    assert crew.workers[2].status.staleness == 1
    for worker in crew.workers:
        worker.close()


def test_late_is_dropped(connect: Connect) -> None:
    """BSP with backup workers: what comes after the quorum is dropped and counted, and its worker goes on with all."""
    crew, weights = Crew(connect, 3, BSP(quorum=2)), start()
    together(lambda: crew.step(0), lambda: crew.step(1))
    weights = mean_round(weights, [(delta_of(weights, worker, [0]), 1.0) for worker in (0, 1)])
    crew.step(2)
    _all_equal(crew, weights)
    assert (crew.workers[2].status.dropped, crew.workers[2].status.contributions) == (1, 0)
    crew.close()


def test_grace(connect: Connect) -> None:
    """With grace a round that has its quorum stays open for that long, and one who comes in time counts."""
    crew, weights = Crew(connect, 3, LocalSGD(every=1, quorum=2, grace=600.0)), start()
    with waiting(lambda: crew.step(0)), waiting(lambda: crew.step(1)):
        wait_for(lambda: crew.marked() == {0, 1}, "the quorum")
        crew.step(2)
    _all_equal(crew, mean_round(weights, [(delta_of(weights, worker, [0]), 1.0) for worker in range(3)]))
    crew.close()


def test_grace_ends(connect: Connect) -> None:
    """When the grace is over the quorum goes on without the third."""
    crew, weights = Crew(connect, 3, LocalSGD(every=1, quorum=2, grace=0.3)), start()
    together(lambda: crew.step(0), lambda: crew.step(1))
    weights = mean_round(weights, [(delta_of(weights, worker, [0]), 1.0) for worker in (0, 1)])
    assert np.array_equal(crew.values[0], weights)
    crew.close()


def test_grace_that_measures(connect: Connect) -> None:
    """grace="auto" is the lease until rounds were measured: one who comes in time counts; then it is what was seen."""
    crew, weights = Crew(connect, 3, BSP(quorum=2, grace="auto"), lease=600.0), start()  # who is late need not wait
    for step in range(6):
        with waiting(lambda: crew.step(0)), waiting(lambda: crew.step(1)):
            if step == 0:
                wait_for(lambda: crew.marked() == {0, 1}, "the quorum")
            crew.step(2)
        if step == 0:
            weights = mean_round(weights, [(delta_of(weights, worker, [0]), 1.0) for worker in range(3)])
            _all_equal(crew, weights)
    graces = [worker.exchange._completion.grace.seconds() for worker in crew.workers]  # type: ignore[attr-defined]
    assert max(graces) < 600.0
    for worker in crew.workers:
        worker.close()


def test_late_joiner(connect: Connect) -> None:
    """Who joins in the middle of a round gets the present weights, holds nobody up, and is there in the next one."""
    crew, weights = Crew(connect, 2, LocalSGD(every=1)), start()
    crew.step_all()
    weights = mean_round(weights, [(delta_of(weights, worker, [0]), 1.0) for worker in (0, 1)])
    values = np.zeros(COUNT, np.float32)
    with waiting(lambda: crew.step(0)):
        wait_for(lambda: 0 in crew.marked(), "the first one")
        joiner = smb.train.join(connect(), "run", values)
        assert np.array_equal(values, weights)
        crew.step(1)
    after = mean_round(weights, [(delta_of(weights, worker, [1]), 1.0) for worker in (0, 1)])
    assert np.array_equal(crew.values[0], after)

    def joined() -> None:
        local_step(values, 7, 0)
        joiner.step()

    together(lambda: crew.step(0), lambda: crew.step(1), joined)
    light = float(np.float32(1 / np.sqrt(2)))  # it began a round ago
    deltas = [(delta_of(after, worker, [2]), 1.0) for worker in (0, 1)]
    assert np.array_equal(values, mean_round(after, [*deltas, (delta_of(weights, 7, [0]), light)]))
    joiner.close()
    crew.close()


def test_who_was_stopped_before_it_decided_changes_no_later_round(connect: Connect) -> None:
    """A closer that looked at a round and was stopped for so long that a later one has its column of the table: it
    leaves that as it is."""
    crew = Crew(connect, 1, BSP())
    exchange, table = crew.workers[0].exchange, crew.workers[0].group.table
    assert isinstance(exchange, RoundExchange)
    seen = table.read()
    for _ in range(t.DECIDED_KEPT + 1):
        crew.step(0)
    before = table.read()[0, t.DECIDED :]
    exchange._closer.decide(0, seen)
    assert np.array_equal(table.read()[0, t.DECIDED :], before)
    crew.close()


def test_leaver(connect: Connect) -> None:
    """The round does not wait for who has left; its slot and inbox are free."""
    crew, weights = Crew(connect, 2, LocalSGD(every=1)), start()
    with waiting(lambda: crew.step(0)):
        wait_for(lambda: 0 in crew.marked(), "the first one")
        crew.workers[1].close()
    assert np.array_equal(crew.values[0], mean_round(weights, [(delta_of(weights, 0, [0]), 1.0)]))
    crew.workers[0].close()
    assert [info.name for info in crew.clients[0].list()] == ["run", "run/members", "run/next", "run/tick"]
    again = np.zeros(COUNT, np.float32)
    with smb.train.join(connect(), "run", again) as worker:
        assert np.array_equal(again, crew.values[0])
        local_step(again, 0, 1)
        worker.step()
        assert worker.status.slot == 0
    with pytest.raises(smb.InvalidArgumentError, match="has left training"):
        worker.step()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: LocalSGD(every=0), "every must be .* not 0"),
        (lambda: LocalSGD(every=2.5), "every must be .* not 2.5"),  # type: ignore[arg-type]
        (lambda: DiLoCo(every="5"), "every must be .* not '5'"),  # type: ignore[arg-type]
        (lambda: BSP(quorum=2.5), "quorum must be .* not 2.5"),  # type: ignore[arg-type]
        (lambda: BSP(quorum=0), "quorum must be .* not 0"),
        (lambda: BSP(grace=-1.0), "grace must be .* not -1.0"),
        (lambda: BSP(grace="long"), "grace must be .* not 'long'"),
        (lambda: BSP(grace="auto"), "pass quorum="),
        (lambda: DiLoCo(outer_lr=0.0), "outer_lr must be .*it is 0.0"),
        (lambda: DiLoCo(outer_momentum=1.0), "outer_momentum a .*it is 1.0"),
    ],
)
def test_settings(make: Callable[[], smb.train.Scheme], reason: str) -> None:
    """Settings that mean nothing are refused by name."""
    with pytest.raises(smb.InvalidArgumentError, match=reason):
        make()
