"""smb.torch.join(overlap=): what is exchanged behind the passes comes to the same; what that would spoil is refused."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import smb
import smb.torch
import smb.train
from smb.overlap import planner
from smb.overlap.plan import Measured
from tests.conftest import Connect
from tests.support.clients import in_process
from tests.support.daemons import wait_for
from tests.support.marking_workers import in_threads, members
from tests.support.overlapped_workers import SIZES, mark_behind_passes, plan_by
from tests.support.training_judges import check_bound, check_own, check_rotation

DEADLINE_S = 60.0
SCHEMES = ("bsp", "asp", "ssp", "r2sp")
LONG = bool(os.environ.get("SMB_LONG"))
# What follows from the scheme's side and what from the passes' side are tried together; SMB_LONG tries all pairs.
PAIRS = [(how, scheme) for how in ("forward", "both") for scheme in SCHEMES
         if LONG or (how == "both") == (scheme in ("bsp", "ssp"))]  # fmt: skip
# Likewise what a plan is compared with.
FASTER = [(how, faster) for how in ("forward", "both") for faster in ("overlap", "none")
          if LONG or (how == "both") == (faster == "overlap")]  # fmt: skip


class Attention(nn.Module):
    """A block whose inner module is not called: its weight is used by the one around it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.out = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return them, changed."""
        return self.norm(values + nn.functional.linear(values, self.out.weight, self.out.bias))


class Network(nn.Module):
    """Modules in another order than they are called in, tied weights, an uncalled module, one that is not used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(24, 40, bias=False)
        self.first = nn.Embedding(40, 24)
        self.middle = nn.Sequential(Attention(24), nn.Tanh(), Attention(24))
        self.unused = nn.Linear(5, 5)
        self.head.weight = self.first.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.middle(self.first(tokens)))


def loss_of(model: nn.Module, worker: int, number: int) -> torch.Tensor:
    tokens = torch.randint(40, (6, 9), generator=torch.Generator().manual_seed(100 * worker + number))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, number: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, worker, number)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small models: PyTorch's other threads would spin beside the workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def force(monkeypatch: pytest.MonkeyPatch, kind: str, slice_bytes: int = 2000) -> None:
    """Have the planner pick a schedule, after two steps."""
    monkeypatch.setattr(planner, "LEARNING_STEPS", 2)
    monkeypatch.setattr(planner, "plan_of", plan_by(kind, slice_bytes))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def together(*calls: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive() or errors, "a worker hangs"
    if errors:
        raise errors[0]
    return results


def trace(connect: Connect, name: str, overlap: str, scheme: str, steps: int = 8) -> tuple[list[list[float]], Any]:
    """Two workers' losses by step, and the shared model."""
    models = [Network(1), Network(2)]
    optimizers = [adam(model) for model in models]
    members = [
        smb.torch.join(model, optimizer, name, scheme=scheme, client=connect(), overlap=overlap, token_weights=True)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]

    def train(which: int) -> list[float]:
        losses = []
        with members[which] as shared:
            for number in range(steps):
                shared.samples = 1 + (2 * number + which) % 3  # of this step: it weighs in this step's round
                losses.append(step(models[which], optimizers[which], which, number))
        return losses

    losses = together(lambda: train(0), lambda: train(1))
    return losses, smb.torch.shared_state_dict(connect(), name)


@pytest.mark.parametrize("kind", ["slices", "runs"])
def test_bsp_comes_to_the_same_to_the_bit(connect: Connect, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two workers' losses and model are those of overlap="none", to the bit: servers add the inboxes in one order."""
    force(monkeypatch, kind)
    expected, model = trace(connect, "none", "none", "bsp")
    for overlap in ("forward", "both"):
        losses, found = trace(connect, overlap, overlap, "bsp")
        assert losses == expected
        assert all(torch.equal(found[key], model[key]) for key in model)
    assert expected[0][-1] < expected[0][0]


@pytest.mark.parametrize(("overlap", "faster"), FASTER)
def test_the_faster_way_stays_and_plans_are_made_anew(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overlap: str, faster: str
) -> None:
    """After steps by a plan and steps without overlap; after twice as many steps anew, where measurements have moved.
    Losses are those of "none" all the while."""
    monkeypatch.setattr(planner, "COMPARED_STEPS", 4)
    force(monkeypatch, "slices")
    expected, _ = trace(connect, "none", "none", "bsp", steps=36)
    times = {True: 1.0, False: 2.0} if faster == "overlap" else {True: 2.0, False: 1.0}
    monkeypatch.setattr(Measured, "step_s", lambda _, *, overlapped: times[overlapped])
    monkeypatch.setattr(Measured, "outdated", lambda *_: True)
    caplog.set_level("INFO", "smb.train")
    losses, _ = trace(connect, overlap, overlap, "bsp", steps=36)
    assert losses == expected
    said = [message.removeprefix(f"training {overlap!r}: ") for message in caplog.messages if " overlap " in message]
    stays = overlap if faster == "overlap" else "none"
    decided = (
        f"a step took {1000 * times[True]:.1f} ms with overlap {overlap!r} and {1000 * times[False]:.1f} ms without: "
        f"overlap {stays!r} from here on"
    )
    assert said.count(decided) == 2 * 2  # workers, plans
    assert sum(message.startswith(f"overlap {overlap!r}, slices") for message in said) == 2 * 2


def test_overlap_that_costs_more_than_it_hides_ends(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the steps' own times; the optimizer's time for each parameter counts in a step of "both"."""
    monkeypatch.setattr(planner, "COMPARED_STEPS", 6)
    force(monkeypatch, "slices")
    model = Network(1)

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            """Take a millisecond for each parameter."""
            time.sleep(0.001 * sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    optimizer = Slow(model.parameters(), lr=0.01)
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=connect(), overlap="both") as shared:
        found: Any = shared._exchanges
        used = found._gradients.used

        def costly(*arguments: Any, **words: Any) -> Any:
            if found.plan is not None and found.plan.chosen.overlap == "both":
                time.sleep(0.1)
            return used(*arguments, **words)

        # In each step with overlap: of fast and slow ones the median would be of the fast ones.
        monkeypatch.setattr(found._gradients, "used", costly)
        for number in range(8):
            step(model, optimizer, 0, number)
        assert found.plan.chosen.overlap == "both"
        count = sum(parameter.grad is not None for parameter in model.parameters())
        assert sum(layer.backward_s for layer in found._meter.measured.layers()) >= 0.001 * count
        for number in range(8, 16):
            step(model, optimizer, 0, number)
        assert (found.plan.chosen.overlap, found._planner.comparing) == ("none", False)


WORKERS = 3


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the planner pick slices. It is put back afterwards, as marking workers in threads replace it, too."""
    force(monkeypatch, "slices")


@pytest.fixture(params=["forward", "both"])
def overlap(request: pytest.FixtureRequest, sliced: None) -> str:
    """Each overlap, with slices."""
    return str(request.param)


MARKED = [(scheme, how) for scheme in (smb.train.ASP(), smb.train.SSP(staleness=1), smb.train.R2SP())
          for how in ("forward", "both") if LONG or (how == "forward") == (scheme.NAME == "ssp")]  # fmt: skip


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize(("scheme", "overlap"), MARKED)
def test_every_update_counts_once_and_the_scheme_holds(
    cluster: smb.LocalCluster, connect: Connect, scheme: smb.train.Scheme, overlap: str
) -> None:
    """Three workers: every forward pass computes with all of its own updates, and with others' as the scheme promises;
    the bound of SSP, the rotation of R2SP, in which no part of an update is seen without the rest.
    """
    steps = 12
    rotates = isinstance(scheme, smb.train.R2SP)
    tasks = [
        partial(mark_behind_passes, address=cluster.address, scheme=scheme, worker=number, workers=WORKERS,
                overlap=overlap, steps=steps, whole=rotates)
        for number in range(WORKERS)
    ]  # fmt: skip
    history = in_threads(tasks)
    assert len(history) == WORKERS * steps
    check_own(history)
    if isinstance(scheme, smb.train.SSP):
        check_bound(history, 1)
    if rotates:  # who is done leaves
        check_rotation([read for read in history if read.clock < steps], WORKERS)
    shared = smb.train.shared(connect(), "run")
    assert shared.sum() == sum(SIZES) * steps
    assert [worker.contributions for worker in members(connect())] == [steps] * WORKERS


POINTS = ("train-sent", "train-marked", "train-claimed", "train-decided", "train-computed", "train-built",
          "train-copied", "train-committed")  # fmt: skip
KILLS = [("asp", "both", "train-part", 12), ("bsp", "both", "train-part", 12)]
if LONG:
    KILLS = [(scheme, how, "train-part", count) for scheme in SCHEMES for how in ("forward", "both")
             for count in (1, 2, 3, 12, 27, 40)]  # fmt: skip
    KILLS += [("bsp", how, point, count) for how in ("forward", "both") for point in POINTS for count in (1, 4)]


LEASE_S = 1.5  # who lives must not lose it on a machine that does other things, too


@pytest.mark.parametrize(("scheme", "how", "point", "count"), KILLS)
def test_killed_in_the_middle(
    cluster: smb.LocalCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch, scheme: str, how: str, point: str,
    count: int,
) -> None:  # fmt: skip
    """A worker is killed at a place of its exchange. The other goes on, its own updates count once; of the dead one
    each element has all updates that were seen, and at most one more; in rounds no part of an update without the rest.
    """
    force(monkeypatch, "slices")
    made, halt, told = smb.train.SCHEMES[scheme](), threading.Event(), queue.Queue[Any]()
    judged = scheme != "bsp"
    with ExitStack() as stack:
        killed, _ = stack.enter_context(
            in_process(mark_behind_passes, cluster.address, made, 0, 2, how, lease=LEASE_S, judged=judged, point=point,
                       count=count)
        )  # fmt: skip
        client = connect()
        wait_for(lambda: members(client), "the first member", 60)
        survivor = partial(mark_behind_passes, address=cluster.address, scheme=made, worker=1, workers=2, overlap=how,
                           halt=halt, judged=judged, lease=LEASE_S)  # fmt: skip

        def watch(_: Any) -> None:
            wait_for(lambda: not killed.is_alive(), "the kill", 60)
            before = told.qsize()
            wait_for(lambda: told.qsize() > before + 5, "the other going on", 60)
            halt.set()

        in_threads([lambda _: survivor(told), watch])
    reads = list(told.queue)[:-1]
    found = smb.torch.shared_state_dict(connect(), "run")
    final = np.concatenate([found[f"layers.{layer}.weight"].numpy() for layer in range(len(SIZES))])
    if judged:
        check_own(reads)
        dead, own = final[np.arange(final.size) % 2 == 0], final[np.arange(final.size) % 2 == 1]
        assert (own == reads[-1].clock).all()
        assert set(np.unique(dead)) <= {reads[-1].seen[0], reads[-1].seen[0] + 1}
    else:
        rows = [read.reshape(-1, 2) for read in [*reads, final]]
        assert all((row == row[0]).all() for row in rows), "a part of a round was seen without the rest"
        gained = np.diff([row[0] for row in rows], axis=0)
        # The first reads may be of a round that it joined in the middle of, and was not in.
        assert set(map(tuple, gained[2:-1])) <= {(0.5, 0.5), (0.0, 1.0), (0.0, 0.0)}
        assert tuple(gained[-2]) == (0.0, 1.0)


def alone(connect: Connect, name: str, overlap: str, number_of_steps: int = 6, **options: Any) -> list[float]:
    """One worker's losses."""
    model = Network(1)
    optimizer = adam(model)
    with smb.torch.join(model, optimizer, name, scheme="asp", client=connect(), overlap=overlap, **options):
        return [step(model, optimizer, 0, number) for number in range(number_of_steps)]


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize(("overlap", "scheme"), PAIRS if LONG else [("both", "bsp"), ("forward", "asp")])
def test_a_lossy_wire_keeps_what_it_rounds(connect: Connect, overlap: str, scheme: str) -> None:
    """With wire="int8" a worker alone comes as near to the exact run as without overlap: the rounding of one delta is
    in the next, and what it computes with are the exact sums.
    """
    ends = {}
    for name, how, wire in (("exact", "none", None), ("none", "none", "int8"), ("overlap", overlap, "int8")):
        model = Network(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with smb.torch.join(model, optimizer, name, scheme=scheme, client=connect(), overlap=how, wire=wire):
            for number in range(12):
                step(model, optimizer, 0, number)
        ends[name] = torch.cat([each.detach().flatten() for each in model.parameters()])
    off, without = ((ends[name] - ends["exact"]).norm() for name in ("overlap", "none"))
    assert off < 2 * without
    assert without > 0


class Failing:
    """Has some calls of all queues fail before they begin."""

    def __init__(self, patch: pytest.MonkeyPatch, which: tuple[int, ...]) -> None:
        self._which = which
        self._calls = 0
        for method in ("accumulate", "write", "read"):
            patch.setattr(smb.queue.Queue, method, self._around(getattr(smb.queue.Queue, method)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*given: Any, **options: Any) -> Any:
            self._calls += 1
            if self._calls not in self._which:
                return call(*given, **options)
            future = Future[Any]()
            future.set_exception(smb.UnavailableError("away, says the test"))
            return future

        return around


def insist(call: Callable[[], Any]) -> tuple[Any, int]:
    """Call again until it does not fail; return also how often it did."""
    for failures in range(5):
        try:
            return call(), failures
        except smb.UnavailableError:
            continue
    raise AssertionError("it fails for ever")


def insisting_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take ten steps, and look at what comes back of the last; return how often something failed."""
    failures = 0
    for number in range(10):
        optimizer.zero_grad()
        loss, failed = insist(partial(loss_of, model, 0, number))
        loss.backward()
        failures += failed + insist(optimizer.step)[1]
    return failures + insist(partial(loss_of, model, 0, 10))[1]


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize(
    ("overlap", "scheme", "anew"),
    [(*pair, False) for pair in PAIRS] + [("both", "bsp", True), ("forward", "asp", True)],
)
def test_an_exchange_that_fails_goes_on(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, overlap: str, scheme: str, anew: bool
) -> None:
    """Calls of single parts fail: the next call of a module, or of the optimizer, raises; called again it goes on, and
    every delta counts once. Also where each step ends with a new plan.
    """
    if anew:
        monkeypatch.setattr(planner, "COMPARED_STEPS", 1)
    ends, failures = [], 0

    def train(name: str) -> None:
        nonlocal failures
        model = Network(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with smb.torch.join(model, optimizer, name, scheme=scheme, client=connect(), overlap=overlap):
            failures += insisting_steps(model, optimizer)
        ends.append(torch.cat([each.detach().flatten() for each in model.parameters()]))

    train("whole")
    assert not failures
    with monkeypatch.context() as patch:
        Failing(patch, (35, 75, 76, 131))
        train("broken")
    assert failures
    assert torch.allclose(ends[0], ends[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scheme", ["asp", "bsp"])
def test_a_lease_that_cant_be_renewed_for_a_moment(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, overlap: str, scheme: str
) -> None:
    """The look at the lease fails in the middle of a contribution, of which parts were sent, or all: they count once,
    too.
    """
    ends = []
    for name in ("whole", "broken"):
        model = Network(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        looks = [0]
        with smb.torch.join(model, optimizer, name, scheme=scheme, client=connect(), overlap=overlap) as shared:
            member, failures = shared.worker.group.member, 0

            def look(check: Callable[[], None], looks: list[int] = looks, broken: bool = name == "broken") -> None:
                looks[0] += 1
                if broken and looks[0] in (6, 9, 14):
                    raise smb.UnavailableError("away, says the test")
                check()

            monkeypatch.setattr(member, "check", partial(look, member.check))
            failures += insisting_steps(model, optimizer)
            insist(shared.wait)
        assert (failures > 0) == (name == "broken")
        ends.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.allclose(ends[0], ends[1], rtol=0, atol=1e-6)


def test_a_refused_contribution(connect: Connect, overlap: str) -> None:
    """A loss that is not a number: the next forward pass raises, the values are the shared model's, and it goes on."""
    model = Network(1)
    optimizer = adam(model)
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=connect(), overlap=overlap) as shared:
        for number in range(4):
            step(model, optimizer, 0, number)
        optimizer.zero_grad()
        (loss_of(model, 0, 5) * float("nan")).backward()
        optimizer.step()
        with pytest.raises(smb.train.RefusedContributionError, match="NaN"):
            loss_of(model, 0, 6)
        assert shared.worker.status.refused == 1
        assert all(each.isfinite().all() for each in model.parameters())
        optimizer.state.clear()
        for number in range(4):
            assert np.isfinite(step(model, optimizer, 0, number))
        shared.wait()
        assert shared.worker.status.contributions == 8
        found = shared.state_dict()
        assert all(torch.equal(found[name], each) for name, each in model.named_parameters())


@pytest.mark.parametrize("asks", ["wait", "module", "step"])
def test_a_refusal_is_told_though_the_model_could_not_be_read(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, overlap: str, asks: str
) -> None:
    """The call that finds it fails with what kept it from reading; the next one says why the values are others."""
    model = Network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=connect(), overlap=overlap) as shared:
        for number in range(4):
            step(model, optimizer, 0, number)
        exchange: Any = shared.worker.exchange
        restart = exchange.restart

        def away() -> None:
            monkeypatch.setattr(exchange, "restart", restart)
            raise smb.UnavailableError("away, says the test")

        monkeypatch.setattr(exchange, "restart", away)
        optimizer.zero_grad()
        (loss_of(model, 0, 5) * float("nan")).backward()
        optimizer.step()
        with pytest.raises(smb.UnavailableError):
            shared.wait()
        call: Any = {"wait": shared.wait, "module": lambda: loss_of(model, 0, 6), "step": optimizer.step}[asks]
        with pytest.raises(smb.train.RefusedContributionError, match="NaN"):
            call()
        assert all(each.isfinite().all() for each in model.parameters())
        for number in range(4):
            assert np.isfinite(step(model, optimizer, 0, number))
        shared.wait()
        assert shared.worker.status.refused == 1


@pytest.mark.parametrize("asks", ["module", "step"])
def test_a_refusal_is_told_before_anything_is_computed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, overlap: str, asks: str
) -> None:
    """Values were refused, the shared model could not be read, and no part of it is awaited any more. The next call
    raises the refusal: a module before it computes with the refused values, the optimizer before it has stepped.
    """
    model = Network(1)
    optimizer = adam(model)
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=connect(), overlap=overlap) as shared:
        for number in range(4):
            step(model, optimizer, 0, number)
        exchange: Any = shared.worker.exchange
        restart = exchange.restart

        def away() -> None:
            raise smb.UnavailableError("away, says the test")

        monkeypatch.setattr(exchange, "restart", away)
        optimizer.zero_grad()
        (loss_of(model, 0, 5) * float("nan")).backward()
        optimizer.step()
        with pytest.raises(smb.UnavailableError):
            model.state_dict()
        model.state_dict()  # has this process's own values, and takes no more parts
        monkeypatch.setattr(exchange, "restart", restart)
        stepped = [int(each["step"]) for each in optimizer.state.values()]
        call: Any = {"module": lambda: model(torch.zeros(1, 1, dtype=torch.int64)), "step": optimizer.step}[asks]
        with pytest.raises(smb.train.RefusedContributionError, match="NaN"):
            call()
        assert [int(each["step"]) for each in optimizer.state.values()] == stepped
        assert all(each.isfinite().all() for each in model.parameters())


def test_a_second_optimizer_of_ones_own(connect: Connect, overlap: str) -> None:
    """Its parameters have gradients that the joined one's step leaves: no reason to refuse the next call."""
    model = Network(1)
    inner = [each for name, each in model.named_parameters() if name.startswith("middle.0")]
    optimizer = torch.optim.SGD([each for each in model.parameters() if all(each is not one for one in inner)], lr=0.1)
    other = torch.optim.SGD(inner, lr=0.1)
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=connect(), overlap=overlap):
        for number in range(6):
            other.zero_grad()
            step(model, optimizer, 0, number)
            other.step()


def lose(member: Any) -> None:
    raise member.lost()


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize(("overlap", "scheme"), PAIRS)
def test_who_lost_its_lease_joins_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, overlap: str, scheme: str
) -> None:
    """A membership that is lost in the middle of an exchange: what was not sent is dropped, no graph breaks, and the
    worker is back with the shared model at its next step.
    """
    model = Network(1)
    optimizer = adam(model)
    with smb.torch.join(model, optimizer, "run", scheme=scheme, client=connect(), overlap=overlap) as shared:
        for number in range(8):
            if number == 4:
                shared.wait()
                monkeypatch.setattr(shared.worker.group.member, "check", partial(lose, shared.worker.group.member))
            step(model, optimizer, 0, number)
        shared.wait()
        assert shared.worker.status.rejoins == 1
        found = shared.state_dict()
        assert all(torch.equal(found[name], each) for name, each in model.named_parameters())


def test_a_deleted_training(connect: Connect, overlap: str) -> None:
    """The next pass or step of its worker says so, and close() succeeds."""
    model = Network(1)
    optimizer = adam(model)
    shared = smb.torch.join(model, optimizer, "run", scheme="bsp", client=connect(), overlap=overlap)
    for number in range(4):
        step(model, optimizer, 0, number)
    smb.train.delete(connect(), "run")
    with pytest.raises(smb.NotFoundError, match="'run' was deleted"):
        together(lambda: [step(model, optimizer, 0, number) for number in range(3)])
    shared.close()
    step(model, optimizer, 0, 9)  # with nobody


def test_leaving_by_an_exception_waits_for_nobody(connect: Connect, overlap: str) -> None:
    """One whose script fails in the middle of a backward pass leaves at once, though others are not there yet; they go
    on without it.
    """
    models = [Network(1), Network(2)]
    optimizers = [adam(model) for model in models]

    def work(which: int, shared: Any) -> None:
        with shared:
            for number in range(8 if which else 5):
                step(models[which], optimizers[which], which, number)
            if which == 0:
                models[0].middle[0].out.weight.register_hook(lambda _: 1 / 0)  # type: ignore[union-attr,index]
                optimizers[0].zero_grad()
                loss_of(models[0], 0, 9).backward()

    members = [
        smb.torch.join(model, optimizer, "run", scheme="bsp", client=connect(), overlap=overlap)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]

    def failing() -> None:
        with pytest.raises(ZeroDivisionError):
            work(0, members[0])

    together(failing, lambda: work(1, members[1]))
    assert [worker.alive for worker in smb.train.status(connect(), "run").workers] in ([], [False, False])


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, 0, number).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, 0, number).backward()
    loss_of(model, 0, 100 + number).backward()
    optimizer.step()


def never_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, 0, number).backward()
    optimizer.step()


def scheduled_late(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, 0, number).backward()
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
    optimizer.step()


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0, number)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0, number)).backward()
    scaler.step(optimizer)
    scaler.update()


class Counting(torch.optim.SGD):
    """One that keeps something of all parameters together."""

    def step(self, closure: Any = None) -> Any:
        """Step, and count."""
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        return super().step(closure)


class Above(torch.optim.SGD):
    """One whose step is that of its class above, which runs hooks, too."""

    def step(self, closure: Any = None) -> Any:
        """Step."""
        return super().step(closure)


def looking(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, 0, number).backward()
    with torch.no_grad():
        loss_of(model, 0, number)
    optimizer.step()


def checkpointed(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    values = model.first(torch.arange(9) + number)  # type: ignore[operator]
    for part in model.middle:  # type: ignore[union-attr]
        values = torch.utils.checkpoint.checkpoint(part, values, use_reentrant=False)
    model.head(values).square().mean().backward()  # type: ignore[operator]
    optimizer.step()


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    step(model, optimizer, 0, number)


REFUSED: list[tuple[Callable[..., None], type[torch.optim.Optimizer], str]] = [
    (clipped, torch.optim.SGD, "was changed between backward"),
    (accumulated, torch.optim.SGD, "gradient accumulation"),
    (looking, torch.optim.SGD, "a module was called between backward"),
    (never_zeroed, torch.optim.SGD, "zero_grad"),
    (scheduled_late, torch.optim.SGD, "had its lr changed"),
    (with_closure, torch.optim.SGD, "closure"),
    (scaled, torch.optim.SGD, "GradScaler"),
    (plainly, Counting, "Counting changes steps"),
]


@pytest.mark.parametrize(("script", "kind", "reason"), REFUSED, ids=[each[0].__name__ for each in REFUSED])
def test_what_both_would_make_wrong_is_refused_by_name(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, script: Callable[..., None],
    kind: type[torch.optim.Optimizer], reason: str,
) -> None:  # fmt: skip
    """It raises before anything of it is sent; with "forward" the same script comes to the same as without."""
    force(monkeypatch, "slices")
    ends = []
    for name in ("none", "forward", "both"):
        model = Network(1)
        optimizer = kind(model.parameters(), lr=0.05)  # type: ignore[call-arg]
        shared = smb.torch.join(model, optimizer, name, scheme="bsp", client=connect(), overlap=name)
        if name == "both":
            sent = 1 if script is never_zeroed else 0
            with pytest.raises(smb.Error, match=reason):
                together(lambda: [script(model, optimizer, number) for number in range(2)])  # noqa: B023 - run here
            assert shared.worker.contributions == sent
            shared.abandon()
            continue
        for number in range(5):
            script(model, optimizer, number)
        shared.close()
        ends.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*ends)


def test_checkpointing(connect: Connect, overlap: str) -> None:
    """Modules that the backward pass calls once more wait for nothing, and compute with what they had."""
    ends = []
    for name in ("none", overlap):
        model = Network(1)
        optimizer = adam(model)
        with smb.torch.join(model, optimizer, name, scheme="bsp", client=connect(), overlap=name):
            for number in range(6):
                checkpointed(model, optimizer, number)
        ends.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*ends)


def test_what_begins_later_is_refused_then(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping that begins when "both" steps in the backward pass already, a look at the parameters before the step is
    over, and weights used before their module.
    """
    force(monkeypatch, "slices")
    for script, reason in (
        (clipped, "was changed between backward"),
        (looking, "a module was called between backward"),
    ):
        model = Network(1)
        optimizer = adam(model)
        shared = smb.torch.join(model, optimizer, script.__name__, scheme="asp", client=connect(), overlap="both")
        for number in range(4):
            step(model, optimizer, 0, number)
        with pytest.raises(smb.Error, match=reason):
            script(model, optimizer, 4)
        shared.abandon()
    model = Network(1)
    optimizer = adam(model)
    shared = smb.torch.join(model, optimizer, "uses", scheme="asp", client=connect(), overlap="forward")
    for number in range(4):
        step(model, optimizer, 0, number)
    loss = nn.functional.layer_norm(torch.ones(24), (24,), model.middle[0].norm.weight).square().sum()  # type: ignore[union-attr,index,arg-type]
    with pytest.raises(smb.Error, match=r"'middle.0.norm.weight' was used before its module was called"):
        loss.backward()
    shared.abandon()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"overlap": "backward", "scheme": "asp"}, "overlap must be one of none, forward, both"),
        ({"overlap": "both", "scheme": "diloco"}, "fragments="),
        ({"overlap": "both", "scheme": "diloco", "fragments": 2}, "in the background already"),
        ({"overlap": "forward", "scheme": "localsgd", "every": 2}, "exchanges seldom"),
        ({"overlap": "forward", "scheme": "easgd"}, "seasgd"),
        ({"overlap": "forward", "scheme": "seasgd"}, "in the background already"),
        ({"overlap": "both", "scheme": "asp", "mesh": object()}, "mesh="),
        ({"overlap": "both", "scheme": "r2sp", "batch_size": 8}, "batch_size="),
    ],
)
def test_what_is_not_there_is_refused(connect: Connect, options: dict[str, Any], reason: str) -> None:
    """And leaves nothing behind."""
    model = Network(1)
    optimizer = adam(model)
    client = connect()
    with pytest.raises(smb.InvalidArgumentError, match=reason):
        smb.torch.join(model, optimizer, "run", client=client, **options)
    assert not client.list()
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_step_that_gets_no_thread_counts_no_delta_twice(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for which there is no thread raises; what it was of is sent with the next one, and nothing once more."""
    ours, alone = Network(1), Network(1)
    alone.load_state_dict(ours.state_dict())
    optimizer, other = adam(ours), adam(alone)
    shared = smb.torch.join(ours, optimizer, "run", scheme="asp", client=connect(), overlap="forward")
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "smb-exchange":
            raise RuntimeError("can't start new thread")
        begin(thread)

    for number in range(8):
        with monkeypatch.context() as patched:
            if number == 6:
                patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="new thread") if number == 6 else nullcontext():
                step(ours, optimizer, 0, number)
        step(alone, other, 0, number)
    shared.close()
    for one, two in zip(ours.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-5)


def test_a_join_that_is_refused_deletes_no_training(connect: Connect) -> None:
    """With fresh=True: a former training of that name is there still, if the scheme can't be had."""
    client = connect()
    smb.train.join(client, "run", np.zeros(4, np.float32), smb.train.ASP()).close()
    model = Network(1)
    optimizer = adam(model)
    refused: list[dict[str, Any]] = [
        {"scheme": "diloco", "overlap": "forward"},
        {"scheme": "bps"},
        {"scheme": "asp", "every": 2},
    ]
    for options in refused:
        with pytest.raises(smb.InvalidArgumentError):
            smb.torch.join(model, optimizer, "run", client=client, fresh=True, **options)
    assert smb.train.status(client, "run").round == 0
    smb.torch.join(model, optimizer, "run", client=client, fresh=True, scheme="asp").close()


def test_a_model_whose_modules_are_hidden_is_refused(connect: Connect) -> None:
    """A compiled one calls no hooks of its modules."""
    model = Network(1)
    model._compiled_call_impl = lambda *_: None  # as model.compile() does
    with pytest.raises(smb.InvalidArgumentError, match="compiled"):
        smb.torch.join(model, adam(model), "run", scheme="asp", client=connect(), overlap="forward")


def test_hooks_leave_with_close(connect: Connect, overlap: str) -> None:
    """After close() the model and the optimizer are as before."""
    model = Network(1)
    optimizer = adam(model)
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=connect(), overlap=overlap):
        for number in range(4):
            step(model, optimizer, 0, number)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    clipped(model, optimizer, 5)


def test_an_optimizer_above_another(connect: Connect, overlap: str) -> None:
    """An optimizer whose step calls its base class's, which runs hooks, too: one exchange a step, the same model."""
    ends = []
    for name, kind in (("plain", torch.optim.SGD), ("above", Above)):
        model = Network(1)
        optimizer = kind(model.parameters(), lr=0.05)
        with smb.torch.join(model, optimizer, name, scheme="bsp", client=connect(), overlap=overlap) as shared:
            for number in range(5):
                step(model, optimizer, 0, number)
            shared.wait()
            assert shared.worker.contributions == 5
        ends.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*ends)


def test_the_planner_is_asked_with_what_was_measured(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """After a few steps a line says which schedule was picked, predicted of layers in the order of the forward pass."""
    model = Network(1)
    optimizer = adam(model)
    with (
        caplog.at_level("INFO", "smb.train"),
        smb.torch.join(model, optimizer, "run", scheme="bsp", client=connect(), overlap="both") as shared,
    ):
        for number in range(8):
            step(model, optimizer, 0, number)
        made = shared.plan
    assert made is not None
    assert [layer.nbytes for layer in made.layers] == [4 * 30, 4 * 40 * 24, *([4 * (24 * 24 + 24), 4 * 48] * 2)]
    assert all(layer.backward_s > 0 for layer in made.layers)
    assert sum(layer.forward_s for layer in made.layers) > 0
    assert f"{made}" in caplog.text


@pytest.mark.parametrize(("scheme", "how"), [(scheme, how) for scheme in SCHEMES[1:] for how in ("forward", "both")
                                             if LONG or (scheme, how) == ("asp", "both")])  # fmt: skip
def test_killed_servers_lose_nothing(monkeypatch: pytest.MonkeyPatch, scheme: str, how: str) -> None:
    """Memory servers are killed and started again under two workers: every update is in the model once."""
    force(monkeypatch, "slices")
    halt, told = threading.Event(), [queue.Queue[Any]() for _ in range(2)]
    with smb.LocalCluster(servers=2, capacity="64MiB") as own, smb.connect(own.address, timeout=30) as client:

        def kill(_: Any) -> None:
            for server in own.servers:
                before = min(each.qsize() for each in told)
                wait_for(lambda before=before: min(each.qsize() for each in told) > before + 3, "steps", 60)  # type: ignore[misc]
                server.kill()
                server.start()
            before = min(each.qsize() for each in told)
            wait_for(lambda: min(each.qsize() for each in told) > before + 2, "steps after the last kill", 60)
            halt.set()

        def work(number: int) -> None:
            made = smb.train.SCHEMES[scheme]()
            mark_behind_passes(told[number], own.address, made, number, 2, how, halt=halt)

        in_threads([lambda _: work(0), lambda _: work(1), kill])
        histories = [list(each.queue)[:-1] for each in told]
        for history in histories:
            check_own(history)
        found = smb.torch.shared_state_dict(client, "run")
        final = np.concatenate([found[f"layers.{layer}.weight"].numpy() for layer in range(len(SIZES))])
        for number in range(2):
            assert set(np.unique(final[np.arange(final.size) % 2 == number])) == {histories[number][-1].clock}
