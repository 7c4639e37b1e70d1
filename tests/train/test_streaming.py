"""Streaming DiLoCo: what it computes, to the bit; who is waited for; what those leave behind who die in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.arrays.dtypes import WIRES
from smb.feedback import _rounded
from smb.train import DiLoCo, Guards, RefusedContributionError, fragments
from smb.train import member_table as t
from smb.train.exchange.mover import ArrayMover
from smb.train.exchange.rounds import RoundExchange
from smb.train.exchange.streaming import FragmentExchange
from smb.train.fragments import Span
from smb.train.parameters import Parameters
from smb.train.scheme import Values
from tests.fault.long import LONG, some, times
from tests.support.clients import in_process
from tests.support.daemons import wait_for
from tests.support.training import COUNT, LEASE_S, Crew, local_step, nesterov_round, start, take_part, together, waiting

Connect = Callable[..., smb.Client]


class Reference:
    """The rule in plain numpy, for workers in step."""

    def __init__(self, scheme: DiLoCo, workers: int, weights: smb.Buffer | None = None) -> None:
        """`weights` are the group's: where a step is rounded depends on their chunks."""
        self.scheme, self.buffer = scheme, weights
        self.made = np.zeros(COUNT, np.float32)  # the servers' latest step of each fragment
        bounds = [number * COUNT // scheme.fragments for number in range(scheme.fragments + 1)]
        self.spans = [slice(begin, end) for begin, end in pairwise(bounds)]
        self.weights, self.momentum = start(), np.zeros(COUNT, np.float32)
        self.values = [start() for _ in range(workers)]
        self.bases = [start() for _ in range(workers)]
        self.steps = self.rounds = 0
        self.sent: tuple[slice, int] | None = None  # and after which step it is taken over

    def step(self, contribute: Sequence[int] | None = None, present: Sequence[int] | None = None) -> None:
        """A step of all that are `present`; those of `contribute` count, where an exchange is due."""
        scheme = self.scheme
        everyone = range(len(self.values)) if present is None else present
        for worker in everyone:
            local_step(self.values[worker], worker, self.steps)
        self.steps += 1
        self._take(everyone)
        if self.steps >= (self.rounds + 1) * scheme.every // scheme.fragments:
            span = self.spans[self.rounds % scheme.fragments]
            counting = everyone if contribute is None else contribute
            deltas = [(self.values[worker][span] - self.bases[worker][span], 1.0) for worker in counting]
            before = self.weights[span].copy()
            if scheme.step_wire != "exact":  # what the rule adds to: what rounding has left of the former step
                before = self.made[span] - self._rounded(span)
            moved, self.momentum[span] = nesterov_round(
                before, self.momentum[span], deltas, scheme.outer_lr, scheme.outer_momentum
            )
            if scheme.step_wire != "exact":
                self.made[span] = moved
                moved = self.weights[span] + self._rounded(span)
            self.weights[span] = moved
            self.rounds += 1
            self.sent = span, self.steps + scheme.delay
            self._take(everyone)

    def _rounded(self, span: slice) -> Values:
        assert self.buffer is not None
        return _rounded(self.buffer, self.made[span].copy(), span.start, WIRES[self.scheme.step_wire])

    def _take(self, workers: Sequence[int]) -> None:
        if self.sent is None or self.steps < self.sent[1]:
            return
        span, _ = self.sent
        mix, rest = np.float32(self.scheme.mix), np.float32(1 - self.scheme.mix)
        for worker in workers:
            self.values[worker][span] = rest * self.weights[span] + mix * self.values[worker][span]
            self.bases[worker][span] = self.weights[span]
        self.sent = None


@pytest.mark.parametrize(
    "scheme",
    [
        DiLoCo(every=8, fragments=4, delay=1, mix=0.5),
        DiLoCo(every=7, fragments=3, delay=2, mix=0.25),
        DiLoCo(every=3, fragments=3),
        DiLoCo(every=4, fragments=1, delay=3, mix=0.5),
        DiLoCo(every=2, mix=0.75),
        DiLoCo(every=8, fragments=4, delay=1, mix=0.5, step_wire="int8"),
        DiLoCo(every=2, step_wire="int4"),
    ],
    ids=["4 late", "3 of 7", "3 at once", "1 late", "1 mixed", "4 late int8", "1 int4"],
)
def test_as_the_reference(connect: Connect, way: str, scheme: DiLoCo) -> None:
    """Three workers in step: after each step all have the values of the reference, and so has the group, to the bit."""
    crew = Crew(lambda: connect(way), 3, scheme)
    reference = Reference(scheme, 3, crew.clients[0].open("run"))
    for _ in range(4 * scheme.every + 2):
        crew.step_all()
        reference.step()
        for values, expected in zip(crew.values, reference.values, strict=True):
            assert np.array_equal(values, expected)
    wait_for(lambda: smb.train.status(crew.clients[0], "run").round == reference.rounds, "the last round")
    assert np.array_equal(crew.workers[0].shared(), reference.weights)
    for worker in crew.workers:
        worker.flush()
    done = reference.rounds
    wait_for(lambda: {w.status.contributions for w in crew.workers} <= {done, done - 1}, "their records")
    assert {type(worker.exchange) for worker in crew.workers} == {FragmentExchange}
    crew.close()


def test_the_model_is_read_once_and_then_by_its_steps(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """With step_wire a worker that misses no round reads a byte for each parameter, and has the model to the bit."""
    read: list[int] = []
    fetch = ArrayMover.fetch
    monkeypatch.setattr(
        ArrayMover, "fetch", lambda self, weights: (read.append(self.fetched.size), fetch(self, weights))[1]
    )
    values = start()
    with smb.train.join(client, "run", values, DiLoCo(every=1, step_wire="int8"), wire="int4") as worker:
        for step in range(5):
            local_step(values, 0, step)
            worker.step()
            assert np.array_equal(values, worker.shared())
        assert worker.group.member.get(t.BYTES) == 5 * round(COUNT * (0.5 + 4 / 64 + 1 + 4 / 256))
    assert read == [COUNT]


@pytest.mark.parametrize("meanwhile", [1, 2])
def test_rounds_that_close_while_a_step_is_read(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, meanwhile: int
) -> None:
    """By then that step is not all that the worker lacks, and its memory may be a later one's: it reads the model."""
    crew = Crew(connect, 2, DiLoCo(every=1, quorum=1, step_wire="int8"))
    for number in (0, 1):
        crew.step(number)
    fetch, slow = ArrayMover.fetch_step, crew.workers[1].exchange
    assert isinstance(slow, FragmentExchange)
    overtaken: list[ArrayMover] = []

    def overtake(mover: ArrayMover, *args: Any) -> None:
        if mover is slow._movers[0] and not overtaken:
            overtaken.append(mover)
            for _ in range(meanwhile):
                crew.step(0)
        fetch(mover, *args)

    monkeypatch.setattr(ArrayMover, "fetch_step", overtake)
    crew.step(1)
    assert overtaken
    assert smb.train.status(crew.clients[0], "run").round == 3 + meanwhile
    assert np.array_equal(crew.values[1], crew.workers[0].shared())
    crew.step(1)
    assert np.array_equal(crew.values[1], crew.workers[0].shared())
    crew.close()


def test_one_fragment_at_once_is_plain_diloco(client: smb.Client) -> None:
    """fragments=1, delay=0, mix=0 runs the exchange that test_rounds.py holds beside its reference."""
    assert DiLoCo(every=2, fragments=1, delay=0, mix=0.0) == DiLoCo(every=2)
    with smb.train.join(client, "run", start(), DiLoCo(every=2, fragments=1)) as worker:
        assert type(worker.exchange) is RoundExchange


def test_nobody_is_waited_for_until_it_is_taken_over(connect: Connect) -> None:
    """A worker whose fragment is on its way goes on while another one has not sent; it waits where it takes over."""
    scheme = DiLoCo(every=6, fragments=2, delay=2, mix=0.5)
    crew, reference = Crew(connect, 2, scheme), Reference(scheme, 2)
    for _ in range(4):
        crew.step(0)  # would not return
    with waiting(lambda: crew.step(0)):
        wait_for(lambda: crew.marked() == {0}, "its mark")
        for _ in range(5):
            crew.step(1)
    for _ in range(5):
        reference.step()
    for values, expected in zip(crew.values, reference.values, strict=True):
        assert np.array_equal(values, expected)
    crew.close()


@pytest.mark.parametrize("step_wire", ["exact", "int8"])
def test_who_falls_behind_skips_fragments(connect: Connect, step_wire: str) -> None:
    """Two of three close rounds without the third one; it takes over all that they closed, and counts again."""
    scheme = DiLoCo(every=3, fragments=3, mix=0.5, quorum=2, step_wire=step_wire)
    crew = Crew(connect, 3, scheme)
    reference = Reference(scheme, 3, crew.clients[0].open("run"))
    for _ in range(2):
        together(lambda: crew.step(0), lambda: crew.step(1))
        reference.step(present=(0, 1))
    assert smb.train.status(crew.clients[0], "run").round == 2
    third = crew.values[2].copy()
    local_step(third, 2, 0)
    with waiting(lambda: crew.step(2)):
        wait_for(lambda: 2 in crew.marked(), "the third one")
        crew.step(1)
    fragment = reference.spans[2]
    local_step(reference.values[1], 1, 2)
    deltas = [(reference.values[1][fragment] - start()[fragment], 1.0), (third[fragment] - start()[fragment], 1.0)]
    nothing = np.zeros_like(third[fragment])
    before = reference.weights[fragment] if step_wire == "exact" else nothing
    reference.weights[fragment], _ = _closed(reference, fragment, nesterov_round(before, nothing, deltas, 0.7, 0.9))
    half = np.float32(0.5)
    assert np.array_equal(crew.values[2], half * reference.weights + half * third)
    assert (crew.workers[2].status.dropped, crew.workers[2].contributions) == (0, 1)
    for worker in crew.workers:
        worker.close()


def _closed(reference: Reference, span: slice, made: tuple[Values, Values]) -> tuple[Values, Values]:
    """The weights and the momentum after a round, of what the rule makes of the weights, or of nothing."""
    if reference.scheme.step_wire == "exact":
        return made
    reference.made[span] = made[0]
    return reference.weights[span] + reference._rounded(span), made[1]


def test_who_comes_too_late_is_dropped(connect: Connect) -> None:
    """A delta that comes after its round was closed counts nowhere, and its worker takes over what they made."""
    scheme = DiLoCo(every=2, fragments=2, mix=0.5, quorum=2)
    crew = Crew(connect, 3, scheme)
    late = crew.workers[2].exchange
    assert isinstance(late, FragmentExchange)
    # It believes that round 0 is open, as if the others had closed it just then.
    looked = late._group.__class__.round
    together(lambda: crew.step(0), lambda: crew.step(1))
    shared = crew.workers[0].shared()
    mine = crew.values[2].copy()
    local_step(mine, 2, 0)
    try:
        late._group.__class__.round = property(lambda group: 0 if not late._put else looked.fget(group))  # type: ignore[assignment,misc,union-attr]
        crew.step(2)
    finally:
        late._group.__class__.round = looked  # type: ignore[misc]
    first = slice(0, COUNT // 2)
    half = np.float32(0.5)
    assert np.array_equal(crew.values[2][first], half * shared[first] + half * mine[first])
    assert np.array_equal(crew.values[2][COUNT // 2 :], mine[COUNT // 2 :])
    assert np.array_equal(crew.workers[0].shared(), shared)
    assert (crew.workers[2].status.dropped, crew.workers[2].contributions) == (1, 0)
    for worker in crew.workers:
        worker.close()


@pytest.mark.parametrize("step_wire", ["exact", "int8"])
def test_late_joiner(connect: Connect, step_wire: str) -> None:
    """Who joins in the middle gets the present weights of all fragments, and takes part from the next round on."""
    scheme = DiLoCo(every=2, fragments=2, mix=0.5, step_wire=step_wire)
    crew = Crew(connect, 2, scheme)
    reference = Reference(scheme, 2, crew.clients[0].open("run"))
    for _ in range(3):
        crew.step_all()
        reference.step()
    values = np.zeros(COUNT, np.float32)
    joiner = smb.train.join(connect(), "run", values)
    assert np.array_equal(values, reference.weights)
    crew.step_all()  # round 3, without it
    reference.step()
    assert np.array_equal(crew.values[0], reference.values[0])
    for contributions in range(1, 4):
        with waiting(crew.step_all):
            joiner.step()
        assert joiner.contributions == contributions
    exchange = joiner.exchange
    assert isinstance(exchange, FragmentExchange)
    assert np.array_equal(np.concatenate([mover.fetched for mover in exchange._movers]), joiner.shared())
    joiner.close()
    crew.close()


def test_who_joins_contributes_before_its_first_round_is_closed(connect: Connect) -> None:
    """Who joins in a round, and contributes before those whom it waits for, counts in that round, once."""
    scheme = DiLoCo(every=2, fragments=2, outer_lr=1.0, outer_momentum=0.0)
    clients = [connect(), connect()]
    values = [np.zeros(COUNT, np.float32) for _ in clients]
    first = smb.train.join(clients[0], "run", values[0], scheme)
    values[0] += 1
    first.step()
    second = smb.train.join(clients[1], "run", values[1])
    values[1] += 100
    with waiting(second.step):
        wait_for(lambda: _weighs(second), "its contribution")
        values[0] += 2  # of the second fragment: 3
        first.step()
    half = COUNT // 2
    assert (second.contributions, second.group.member.get(t.DROPPED)) == (1, 0)
    shared = first.shared()
    assert (shared[:half] == 1).all()
    assert (shared[half:] == np.float32((3 + 100) / 2)).all()
    for each in values:
        assert np.array_equal(each[half:], shared[half:])
    second.close()
    first.close()


def _weighs(worker: smb.train.Worker) -> bool:
    """Whether a contribution of its is in its inbox."""
    member = worker.group.member
    return int(t.Table(worker.group.table.buffer).read()[member.row, t.WEIGHT]) >> 32 == member.incarnation


def test_refused(connect: Connect) -> None:
    """One worker's values become NaN: it is told and has the shared model again; the round is the others' alone."""
    scheme = DiLoCo(every=2, fragments=2, mix=0.5)
    crew, reference = Crew(connect, 3, scheme, guards=Guards()), Reference(scheme, 3)
    crew.values[1][3] = np.nan

    def spoilt() -> None:
        with pytest.raises(RefusedContributionError, match="NaN"):
            crew.step(1)

    together(lambda: crew.step(0), spoilt, lambda: crew.step(2))
    reference.step(contribute=(0, 2))
    assert np.array_equal(crew.values[1], reference.weights)
    assert np.array_equal(crew.values[0], reference.values[0])
    assert [w.refused for w in smb.train.status(crew.clients[0], "run").workers] == [0, 1, 0]
    crew.step_all()
    crew.close()


@pytest.mark.parametrize(
    "point",
    some(
        [
            "train-sent",
            "train-marked",
            "train-claimed",
            "train-decided",
            "train-added:1",
            "train-added:3",
            "train-computed",
            "train-built",
            "train-copied",
            "train-committed",
        ]
    ),
)
def test_killed(cluster: smb.LocalCluster, connect: Connect, point: str) -> None:
    """The third member arrives last, so closes the round of the first fragment, and is killed at one step of that: the
    others finish it, with its contribution if it had been marked, and go on alone; no other fragment is touched."""
    scheme = DiLoCo(every=2, fragments=2, mix=0.5, step_wire="int8")
    crew = Crew(connect, 2, scheme, lease=LEASE_S)
    reference = Reference(scheme, 3, crew.clients[0].open("run"))
    name, _, count = point.partition(":")
    with in_process(take_part, cluster.address, 2, 1, name, int(count or 1)) as (process, messages):
        assert messages.get(timeout=60) == "joined"
        with waiting(lambda: crew.step(0)), waiting(lambda: crew.step(1)):
            wait_for(lambda: crew.marked() == {0, 1}, "the first two")
            crew.clients[0].create("go", 1)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    reference.step(contribute=(0, 1) if point == "train-sent" else (0, 1, 2))
    for _ in range(4):
        assert np.array_equal(crew.values[0], reference.values[0])
        assert np.array_equal(crew.values[1], reference.values[1])
        assert np.array_equal(crew.workers[0].shared(), reference.weights)
        crew.step_all()
        reference.step(present=(0, 1))
    assert [w.alive for w in smb.train.status(crew.clients[0], "run").workers] == [True, True, False]
    crew.close()


def test_close_leaves_what_is_marked_and_waits_for_nobody(connect: Connect) -> None:
    """A worker that closes with a fragment on its way: the delta counts when the others come, and close() waits for
    none of them. flush() in between does not either, and the exchange goes on."""
    scheme = DiLoCo(every=4, fragments=2, delay=1, mix=0.5)
    crew, reference = Crew(connect, 2, scheme), Reference(scheme, 2)
    for _ in range(2):
        crew.step(0)
    crew.workers[0].flush()
    assert crew.marked() == {0}
    crew.workers[0].close()
    for _ in range(3):
        crew.step(1)
        reference.step()
    assert np.array_equal(crew.workers[1].shared(), reference.weights)
    assert np.array_equal(crew.values[1], reference.values[1])
    assert np.array_equal(crew.values[0], start_after(2, 0))
    crew.workers[1].close()


@pytest.mark.parametrize(
    ("scheme", "steps", "told"),
    [
        (DiLoCo(every=5, step_wire="int8"), 7, "2 local steps are not in its model, those since"),
        (DiLoCo(every=6, fragments=2), 4, "up to 4 local steps are not in its model, those since each fragment's last"),
        (DiLoCo(every=6, fragments=2), 7, "up to 4 local steps are not in its model, those since each fragment's last"),
        (DiLoCo(every=5, step_wire="int8"), 5, ""),
    ],
    ids=["rest", "first", "later", "none"],
)
def test_close_says_what_is_not_sent(
    client: smb.Client, caplog: pytest.LogCaptureFixture, scheme: DiLoCo, steps: int, told: str
) -> None:
    """As plain DiLoCo does: of fragments the number is that of the one that was sent longest ago."""
    with smb.train.join(client, "run", start(), scheme) as worker, caplog.at_level("INFO", "smb.train"):
        for _ in range(steps):
            worker.step()
        worker.close()
    left = [message for message in caplog.messages if message.startswith("left training")]
    assert [told in message for message in left] == [True] * bool(told)


@pytest.mark.parametrize("settings", [{}, {"step_wire": "int8"}], ids=str)
def test_a_refused_worker_that_cant_read_the_model_reads_it_first_of_all(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """A round is closed while it reads after its refusal, and its last look at the table fails: what it has read is
    newer than it knows, and its values are older. Its next call reads again and says that it was refused."""
    crew = Crew(connect, 2, DiLoCo(every=1, quorum=1, **settings))
    for number in (0, 1):
        crew.step(number)
    refused, table = crew.workers[1].exchange, crew.workers[1].group.table
    restart, get = refused.restart, type(table).get
    looks, first = 0, threading.Event()

    def look(found: t.Table, row: int, field: int) -> int:
        nonlocal looks
        if found is not table or field != t.ROUND:
            return get(found, row, field)
        looks += 1
        if looks == 2:
            raise smb.UnavailableError("away, says the test")
        before = get(found, row, field)
        assert first.wait(60)
        crew.step(0)  # before the model is read
        return before

    def restart_once() -> None:
        monkeypatch.setattr(type(table), "get", look)
        try:
            restart()
        finally:
            monkeypatch.setattr(type(table), "get", get)
            monkeypatch.setattr(refused, "restart", restart)

    monkeypatch.setattr(refused, "restart", restart_once)

    def refuse() -> None:
        crew.values[1][0] = np.nan
        with pytest.raises(smb.UnavailableError, match="says the test"):
            crew.step(1)

    with waiting(refuse):
        wait_for(lambda: 1 in crew.marked(), "the one without weight")
        crew.step(0)
        first.set()
    assert looks == 2
    with pytest.raises(RefusedContributionError):
        crew.workers[1].step()
    for _ in range(3):
        assert np.array_equal(crew.values[1], crew.workers[0].shared())
        crew.step(1)
    crew.close()


def start_after(steps: int, worker: int) -> Values:
    """The first values after local steps alone."""
    values = start()
    for step in range(steps):
        local_step(values, worker, step)
    return values


@pytest.mark.parametrize(("done", "step_wire"), [(3, "exact"), (4, "exact"), (4, "int8"), (5, "int4")])
def test_a_run_resumes_where_it_was(client: smb.Client, tmp_path: Path, done: int, step_wire: str) -> None:
    """From a file it goes on to the bit as without it: every fragment has its own momentum again, and what rounding has
    left of its step."""
    scheme = DiLoCo(every=3, fragments=3, mix=0.5, step_wire=step_wire)

    def rounds(name: str, steps: range, values: Values) -> Values:
        with smb.train.join(client, name, values, scheme) as worker:
            for step in steps:
                local_step(values, 0, step)
                worker.step()
            return worker.shared()

    rounds("run", range(done), start())
    smb.train.save(client, "run", tmp_path / "run")
    assert smb.train.load(client, "again", tmp_path / "run") == done
    expected = rounds("run", range(done, done + 4), np.zeros(COUNT, np.float32))
    assert np.array_equal(rounds("again", range(done, done + 4), np.zeros(COUNT, np.float32)), expected)


@pytest.mark.parametrize(("wire", "rounding"), [("int8", 16), ("int4", 320)] if LONG else [("int8", 16)])
def test_error_feedback(client: smb.Client, wire: str, rounding: float) -> None:
    """What rounding leaves out of one contribution of a fragment goes along with the fragment's next one."""
    values, steps = np.zeros(COUNT, np.float32), times(80, 700)  # without feedback small values would stay at zero
    scheme = DiLoCo(every=2, fragments=2, outer_lr=1.0, outer_momentum=0.0)
    with smb.train.join(client, "run", values, scheme, wire=wire) as worker:
        for _ in range(steps):  # each fragment is exchanged every other time; the first one a step before the last
            values[::256] += 1000.0  # hides what lies beside it
            values[1::256] += 1.0
            worker.step()
        found = worker.shared()
    half = COUNT // 2
    first, second = found[1:half:256], found[half - half % 256 + 257 :: 256]
    assert abs(first - (steps - 1)).max() <= rounding
    assert abs(second - steps).max() <= rounding
    assert abs(found[2:half:256]).max() <= rounding


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10), nn.Linear(10, 5))


def test_torch(connect: Connect) -> None:
    """Two models train in turn, by fragments of whole tensors: both learn, state_dict() is the shared model, and after
    close() both are."""
    models = [_model() for _ in range(2)]
    joined = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        joined.append(
            (
                smb.torch.join(
                    model, optimizer, "run", client=connect(), scheme="diloco", every=6, fragments=3, delay=1, mix=0.5,
                    wire="int8",
                ),
                optimizer,
            )
        )  # fmt: skip
    exchange = joined[0][0].worker.exchange
    assert isinstance(exchange, FragmentExchange)
    assert [span.elements for span in exchange._group.spans] == [608, 416, 5]  # 600; 30, 300, 10 and 50; 5
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
    goals = inputs[:, :5] * 2
    losses = []
    for _ in range(25):
        for model, (_, optimizer) in zip(models, joined, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), goals)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    shared = joined[0][0].state_dict()
    for each, _ in joined:
        each.close()
    for model in models:
        for name, value in model.state_dict().items():
            assert torch.equal(value, shared[name])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DiLoCo(every=8, fragments=0), "fragments must be .* not 0"),
        (lambda: DiLoCo(every=8, fragments=2.0), "fragments must be .* not 2.0"),  # type: ignore[arg-type]
        (lambda: DiLoCo(every=8, fragments=9), "fragments must be .* not 9"),
        (lambda: DiLoCo(every=8, fragments=2, delay=4), "delay must be .* not 4"),
        (lambda: DiLoCo(every=8, fragments=2, delay=-1), "delay must be .* not -1"),
        (lambda: DiLoCo(every=8, mix=1.0), "mix must be .* not 1.0"),
        (lambda: DiLoCo(every=8, mix=-0.1), "mix must be .* not -0.1"),
        (lambda: smb.train.scheme_of("asyncdiloco", {"fragments": 2}), "has no setting fragments"),
        (lambda: smb.train.scheme_of("localsgd", {"every": 8, "fragments": 2}), "has no setting fragments"),
    ],
)
def test_settings(make: Callable[[], smb.train.Scheme], reason: str) -> None:
    """Settings that mean nothing, or are of another scheme, are refused by name; the largest that do are taken."""
    with pytest.raises(smb.InvalidArgumentError, match=reason):
        make()
    DiLoCo(every=8, fragments=2, delay=3, mix=0.99)
    DiLoCo(every=8, fragments=8)


def test_more_fragments_than_there_is_to_cut(client: smb.Client) -> None:
    """Refused where the model is known, by name, and nothing of the training stays; so for the ranks of a mesh."""
    with pytest.raises(smb.InvalidArgumentError, match="fragments must be at most 3, the model's elements, not 4"):
        smb.train.join(client, "run", np.zeros(3, np.float32), DiLoCo(every=4, fragments=4))
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(smb.InvalidArgumentError, match="fragments must be at most 6, the model's tensors, not 7"):
        smb.torch.join(model, optimizer, "run", client=client, scheme="diloco", every=7, fragments=7)
    assert client.list() == []

    class Ranks(Parameters):
        """Of a mesh, as far as it is asked."""

        size = 3
        in_ranks = True

    Ranks.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    with pytest.raises(smb.InvalidArgumentError, match="mesh="):
        DiLoCo(every=3, fragments=3).check("run", Ranks())  # type: ignore[abstract]
    DiLoCo(every=3).check("run", Ranks())  # type: ignore[abstract]


def test_fragments_are_whole_tensors_of_about_one_size() -> None:
    """The largest fragment is as small as any cut makes it; each has a tensor; all together are the vector."""
    seed = int(np.random.default_rng().integers(1 << 30))
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    for _ in range(200):
        sizes = [16 * int(size) for size in random.integers(1, 50, int(random.integers(1, 8)))]
        starts = np.cumsum([0, *sizes])[:-1].tolist()
        count = int(random.integers(1, len(sizes) + 1))
        spans = fragments.cut(sum(sizes), starts, count, "a test")
        assert [span.offset for span in spans] == np.cumsum([0, *(span.elements for span in spans)])[:-1].tolist()
        assert sum(span.elements for span in spans) == sum(sizes)
        assert len(spans) == count
        assert {span.offset for span in spans} <= set(starts)
        assert max(span.elements for span in spans) == _smallest(sizes, count)
    assert fragments.cut(10, [], 4, "a test") == (Span(0, 2), Span(2, 3), Span(5, 2), Span(7, 3))


def _smallest(sizes: list[int], count: int) -> int:
    """The largest of `count` parts, by trying every cut."""
    if count == 1:
        return sum(sizes)
    cuts = range(1, len(sizes) - count + 2)
    return min(max(sum(sizes[:at]), _smallest(sizes[at:], count - 1)) for at in cuts)
