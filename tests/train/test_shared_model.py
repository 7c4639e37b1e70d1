from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.tools.demo.recipes import RECIPES
from smb.train.exchange.mover import mover_of
from smb.train.group import Group
from smb.train.parameters import Parameters
from smb.train.scheme import SCHEMES, Exchange, Scheme
from smb.train.traits import FUSED
from tests.conftest import Connect
from tests.support.daemons import wait_for


@dataclass(frozen=True)
class Adding(Scheme):
    """The least that is a scheme: every so many steps add what was done, and take what all have done."""

    NAME: ClassVar[str] = "test-adding"
    every: int = 1

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        return _Adding(self, group, parameters)


class _Adding(Exchange):
    def __init__(self, scheme: Adding, group: Group, parameters: Parameters) -> None:
        self._scheme, self._group = scheme, group
        self._deltas = mover_of(group, parameters, FUSED)
        self._steps = 0

    def restart(self) -> None:
        self._deltas.restart()

    def step(self, samples: int) -> None:
        self._steps += 1
        if self._steps % self._scheme.every:
            return
        self._group.check(self._deltas.take())
        self._deltas.send(fetch=True)
        self._group.count(samples, self._deltas.moved_bytes())


del SCHEMES[Adding.NAME]


@pytest.fixture(autouse=True)
def _known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while these tests run: others go through all schemes."""
    monkeypatch.setitem(SCHEMES, Adding.NAME, Adding)


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(16, 6, generator=generator).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, atol: float = 0.0) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[key], other[key], 0, atol) for key in one)


def test_alone_it_trains_as_without(client: smb.Client) -> None:
    """One worker whose every step is exchanged ends where the plain script does, and the hook leaves with close()."""
    plain, shared_model = network(), network()
    for model in (plain, shared_model):
        optimizer = sgd(model)
        shared = smb.torch.join(model, optimizer, "run", scheme=Adding(), client=client) if model is not plain else None
        for number in range(6):
            step(model, optimizer, number)
        if shared is not None:
            shared.close()
            shared.close()
            step(model, optimizer, 6)  # with nobody
            optimizer.zero_grad()
        else:
            step(model, optimizer, 6)
    # Sums of float32 differences, so not to the bit.
    assert same(dict(plain.named_parameters()), dict(shared_model.named_parameters()), atol=1e-6)


@pytest.mark.parametrize("scheme", RECIPES)
def test_every_scheme_trains_a_model(connect: Connect, scheme: str) -> None:
    """By each scheme of smb.train, two members exchange, and closing leaves the last one with what is shared."""
    models = [network(1), network(2, torch.bfloat16)]
    optimizers = [sgd(model) for model in models]
    settings = {} if scheme in ("bsp", "asp", "ssp", "r2sp") else {"every": 2}
    members = [
        smb.torch.join(model, optimizer, "run", scheme=scheme, client=connect(), **settings)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    start = members[0].state_dict()

    def train(which: int) -> None:
        with members[which]:
            for number in range(8):
                step(models[which], optimizers[which], number)

    threads = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    shared = smb.torch.shared_state_dict(connect(), "run")
    assert not torch.equal(shared["0.weight"], start["0.weight"])
    assert any(torch.equal(model[0].weight, shared["0.weight"].to(model[0].weight.dtype)) for model in models)
    status = smb.train.status(connect(), "run")
    assert status.scheme == scheme
    assert all(np.isfinite(value.numpy()).all() for value in shared.values())


def test_batches_divide_the_rows(connect: Connect) -> None:
    """Two members get every row once an epoch between them, also what a third had in hand when it left; a later run
    finds none left, and asks for more epochs; the same rows in another order each epoch."""
    models = [network() for _ in range(3)]
    optimizers = [sgd(model) for model in models]
    joined = [
        smb.torch.join(model, optimizer, "run", scheme="localsgd", every=3, client=connect())
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    leaver = joined.pop()
    next(leaver.batches(100, 8, epochs=3))
    leaver.close(load=False)
    rows: list[list[int]] = [[], []]

    def train(which: int) -> None:
        with joined[which] as shared:
            for batch in shared.batches(100, 8, epochs=3):
                assert shared.samples == len(batch)
                rows[which] += batch.tolist()
                step(models[which], optimizers[which], len(rows[which]))

    threads = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(rows[0] + rows[1]) == sorted(list(range(100)) * 3)
    assert all(rows)
    model = network()
    with smb.torch.join(model, sgd(model), "run", client=connect()) as later:
        assert list(later.batches(100, 8, epochs=3)) == []
        more = list(later.batches(100, 8, epochs=4))
        assert sorted(torch.cat(more).tolist()) == list(range(100)) != torch.cat(more).tolist()
        with pytest.raises(smb.InvalidArgumentError, match="seed"):
            later.batches(100, 8, epochs=4, seed=1)
    with pytest.raises(smb.InvalidArgumentError, match="left"):
        later.batches(100, 8)


def test_each_call_is_one_epoch(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Without epochs= a loop over epochs is written as for a DataLoader; a late joiner begins where others are, and is
    told how to end with them.
    """
    caplog.set_level("INFO", "smb.train")
    model = network()
    with smb.torch.join(model, sgd(model), "run", scheme=Adding(), client=connect()) as shared:
        for epoch in range(2):
            batches = shared.batches(100, 8)
            assert len(batches) == 13
            assert sorted(torch.cat(list(batches)).tolist()) == list(range(100))
            assert batches.epoch == epoch
        third = shared.batches(100, 8)
        rows = next(third).tolist()
        assert len(rows) == 8
        assert third.epoch == 2
        other = network()
        assert "batches() begins" not in caplog.text
        with smb.torch.join(other, sgd(other), "run", client=connect()) as later:
            rest = later.batches(100, 8)
            assert "batches() begins in epoch 2 of all processes" in caplog.text
            assert 12 <= len(rest) <= 13  # what is left for both; a batch in hand may count
            assert len(next(rest)) == 8  # handed back when it leaves
            assert rest.epoch == 2
        for batch in third:
            rows += batch.tolist()
        assert sorted(rows) == list(range(100))
        assert len(shared.batches(100, 8, epochs=9)) > 13


def test_each_pass_over_a_loader_is_one_epoch(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """As in a script that makes its loader once, before its loop over epochs. With epochs= later passes find nothing,
    and say so.
    """
    model, data = network(), torch.utils.data.TensorDataset(torch.arange(100))
    with smb.torch.join(model, sgd(model), "run", scheme=Adding(), client=connect()) as shared:
        batches = shared.batches(100, 8)
        loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
        for epoch in range(3):
            assert len(loader) == 13
            assert sorted(row for (rows,) in loader for row in rows.tolist()) == list(range(100))
            assert batches.epoch == epoch
        assert sorted(torch.cat(list(batches)).tolist()) == list(range(100))
        assert batches.epoch == 3
        bounded = torch.utils.data.DataLoader(data, batch_sampler=shared.batches(100, 8, epochs=5))
        assert "all batches of all 5 epochs are done" not in caplog.text
        assert [len(list(bounded)) for _ in range(2)] == [13, 0]
        assert "all batches of all 5 epochs are done" in caplog.text


def test_an_epoch_that_was_left_is_finished_first(connect: Connect) -> None:
    """After a break the next call yields the rest of the epoch, with the batch in hand, and the call after that one
    the next epoch; also if another process did the rest meanwhile.
    """
    model = network()
    with smb.torch.join(model, sgd(model), "run", scheme=Adding(), client=connect()) as shared:
        done: list[int] = []
        for number, batch in enumerate(shared.batches(100, 8)):
            if number == 3:
                break
            done += batch.tolist()
        rest = shared.batches(100, 8)
        assert len(rest) == 10
        assert sorted(done + torch.cat(list(rest)).tolist()) == list(range(100))
        assert sorted(torch.cat(list(shared.batches(100, 8))).tolist()) == list(range(100))
        left = next(shared.batches(100, 8)).tolist()
        other = network()
        shared.batches(100, 8)  # hands the batch in hand back
        with smb.torch.join(other, sgd(other), "run", client=connect()) as later:
            theirs = torch.cat(list(later.batches(100, 8))).tolist()
        assert sorted(theirs) == list(range(100))
        assert set(left) < set(theirs)
        assert sorted(torch.cat(list(shared.batches(100, 8))).tolist()) == list(range(100))


def test_what_is_there_after_close(connect: Connect) -> None:
    """Progress is as of then."""
    model = network()
    optimizer = sgd(model)
    shared = smb.torch.join(model, optimizer, "run", scheme=Adding(), client=connect(), samples=4)
    step(model, optimizer, 1)
    shared.close()
    assert (shared.progress.steps, shared.progress.samples) == (1, 4)


def test_a_second_worker_of_one_thread_is_refused_where_it_would_wait_for_the_first(connect: Connect) -> None:
    """As in a notebook's cell that is run again. Another thread, another training, or a closed first one are taken."""
    model, again = network(), network()
    client = connect()
    optimizer = sgd(model)
    shared = smb.torch.join(model, optimizer, "run", scheme="localsgd", every=2, client=client)
    step(model, optimizer)
    with pytest.raises(smb.InvalidArgumentError, match=r"this thread has joined 'run' before.*close\(\)"):
        smb.torch.join(again, sgd(again), "run", client=client)
    smb.torch.join(again, sgd(again), "other", scheme="localsgd", every=2, client=client).close()
    assert len(smb.train.status(client, "run").workers) == 1
    shared.close()
    smb.torch.join(again, sgd(again), "run", client=client).close()


def test_who_waits_longer_than_a_lease_says_for_whom(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each round, and that the other worker is in the same process."""
    values = [np.zeros(4, np.float32) for _ in range(2)]
    first, second = (smb.train.join(connect(), "run", each, smb.train.LocalSGD(every=1), lease=1.0) for each in values)
    waiting = threading.Thread(target=first.step, args=(1,))
    with caplog.at_level("WARNING", "smb.train"):
        waiting.start()
        wait_for(lambda: "has waited for" in caplog.text, "warning")
    second.step(1)
    waiting.join(60)
    assert not waiting.is_alive()
    (said,) = [record.getMessage() for record in caplog.records if "has waited for" in record.getMessage()]
    assert f":{os.getpid()}, alive and without a contribution to round 0; this process has joined twice" in said
    first.close()
    second.close()


def test_batches_are_not_for_schemes_that_choose_their_size(connect: Connect) -> None:
    """R2SP with batches by speed says how large a batch is."""
    model = network()
    with (
        smb.torch.join(model, sgd(model), "run", scheme="r2sp", batch_size=8, client=connect()) as shared,
        pytest.raises(smb.InvalidArgumentError, match="WorkUnits"),
    ):
        shared.batches(100, 8)


def test_two_models_become_one(connect: Connect) -> None:
    """Who joins later has the first one's values at once; then both hold the sum of what both did."""
    first, second = network(1), network(2)
    one, two = sgd(first), sgd(second)
    with (
        smb.torch.join(first, one, "run", scheme="test-adding", every=2, client=connect()) as shared,
        smb.torch.join(second, two, "run", client=connect()) as other,
    ):
        assert other.scheme == Adding(every=2)
        assert same(first.state_dict(), second.state_dict())
        for number in range(4):
            step(first, one, number)
            step(second, two, 10 + number)
        step(first, one, 4)
        step(first, one, 5)
        found = shared.state_dict()
        assert same({k: v for k, v in found.items() if k in dict(first.named_parameters())},
                    dict(first.named_parameters()))  # fmt: skip
        assert not torch.equal(second[0].weight, first[0].weight)
        assert smb.train.status(connect(), "run").workers[0].samples == 0  # nobody told
    # Closing loads what is shared.
    assert same(dict(first.named_parameters()), dict(second.named_parameters()))


def test_another_process_opens_tensors_by_name(connect: Connect) -> None:
    """The group's buffer has the model's names, tied ones in shared_state_dict; a model elsewhere loads what is
    shared."""
    model = network()
    model.append(nn.Linear(8, 4))
    model[4].weight = model[3].weight
    optimizer = sgd(model)
    reader = connect()
    with smb.torch.join(model, optimizer, "run", scheme=Adding(), client=connect()) as shared:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert np.array_equal(reader.open("run").tensor("0.weight").read(), model[0].weight.detach().numpy())
        found = smb.torch.shared_state_dict(reader, "run")
        assert torch.equal(found["4.weight"], model[3].weight)
        fresh = network(5)
        fresh.append(nn.Linear(8, 4))
        fresh.load_state_dict(found)  # PyTorch does without num_batches_tracked
        assert torch.equal(fresh[0].bias, model[0].bias)
        fresh = network(6)
        fresh.append(nn.Linear(8, 4))
        fresh.load_state_dict(shared.state_dict())
        assert torch.equal(fresh[0].bias, model[0].bias)


def test_running_statistics_are_averaged_by_the_rule(connect: Connect) -> None:
    """Each keeps its own while training; after each exchange the shared ones take 1/members of the difference."""
    models = [network(1), network(1)]
    optimizers = [sgd(model, 0.0) for model in models]
    first = smb.torch.join(models[0], optimizers[0], "run", scheme=Adding(every=2), client=connect())
    second = smb.torch.join(models[1], optimizers[1], "run", client=connect())
    expected = models[0][1].running_var.clone()
    for number in range(6):
        which = number // 2 % 2
        step(models[which], optimizers[which], number)
        own = models[which][1].running_var
        if number % 2:  # an exchange
            expected += (own - expected) / 2
            (first, second)[which]._mixed.wait()
        assert torch.allclose((first, second)[1 - which].state_dict()["1.running_var"], expected, atol=1e-6)
        assert not torch.allclose(own, expected, atol=1e-3)
    late = network(7)
    with smb.torch.join(late, sgd(late), "run", client=connect()):
        assert torch.allclose(late[1].running_var, expected, atol=1e-6)
    second.close(load=False)
    assert not torch.allclose(models[1][1].running_var, expected, atol=1e-3)
    first.close()
    assert torch.allclose(models[0][1].running_var, expected, atol=1e-6)
    assert models[0][1].num_batches_tracked == 4  # its own


def test_frozen_parameters_cost_nothing_and_must_be_the_same(connect: Connect) -> None:
    """They are in no buffer and in no memory of ours. A joiner with other values is refused, and left alone; one that
    has them in another type, as where a model is quantized, is not."""
    models = [network(1), network(2), network(1), network(1)]
    models[3][0].bfloat16()
    optimizers = []
    for model in models:
        model[0].requires_grad_(False)
        optimizers.append(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    models[2].load_state_dict(models[0].state_dict())
    client = connect()
    with smb.torch.join(models[0], optimizers[0], "run", scheme=Adding(), client=client):
        before = models[1][3].weight.detach().clone()
        with pytest.raises(smb.InvalidArgumentError, match="frozen parameters have other values"):
            smb.torch.join(models[1], optimizers[1], "run", client=client)
        assert torch.equal(models[1][3].weight, before)
        assert not optimizers[1]._optimizer_step_post_hooks
        with smb.torch.join(models[2], optimizers[2], "run", client=client):
            pass
        with smb.torch.join(models[3], optimizers[3], "run", client=client):
            pass
        names = {name for info in client.list() for name in client.open(info.name).tensors}
        assert names == {"1.weight", "1.bias", "3.weight", "3.bias", "1.running_mean", "1.running_var"}
        models[0][0].weight.requires_grad_(True)
        with pytest.raises(smb.Error, match=r"'0\.weight' was frozen at smb\.torch\.join and requires gradients now"):
            optimizers[0].step()
        models[0][0].weight.requires_grad_(False)


def test_what_the_optimizer_has_is_shared_though_it_does_not_train(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """It may train later. It is said, as it costs as much as what trains."""
    model = network(1)
    model[0].requires_grad_(False)
    frozen = sum(parameter.numel() for parameter in model[0].parameters())
    shared = sum(parameter.numel() for parameter in model.parameters())
    for optimizer, said in ((sgd(model), True), (sgd(model[3]), False)):
        caplog.clear()
        smb.torch.join(model, optimizer, f"run-{said}", scheme=Adding(), client=connect()).close()
        assert (f"shares {shared} values, and {frozen} of them require no gradients" in caplog.text) == said
        model[1].requires_grad_(False)


def test_a_new_group_has_nothing_of_a_former_one(connect: Connect) -> None:
    """Where only the weights of a group were deleted, the next one of that name begins with its own statistics."""
    client = connect()
    model = network(1)
    optimizer = sgd(model)
    with smb.torch.join(model, optimizer, "run", scheme=Adding(), client=client):
        step(model, optimizer)
    client.delete("run")
    other = network(2)
    with smb.torch.join(other, sgd(other), "run", scheme=Adding(), client=client):
        assert not other[1].running_mean.any()


def test_a_bfloat16_model_shares_with_a_float32_one(connect: Connect) -> None:
    """The group is float32: the bfloat16 member holds its rounding, sends what its optimizer did, and gets it back in
    its own type."""
    exact, low = network(1), network(2, torch.bfloat16)
    one, two = sgd(exact), sgd(low)
    shared = smb.torch.join(exact, one, "run", scheme=Adding(), client=connect())
    other = smb.torch.join(low, two, "run", client=connect())
    for number in range(5):
        step(exact, one, number)
        step(low, two, number)
        now = smb.torch.shared_state_dict(connect(), "run")
        for name, parameter in low.named_parameters():
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, now[name].bfloat16())
    assert other.state_dict()["0.weight"].dtype == torch.bfloat16
    assert shared.state_dict()["0.weight"].dtype == torch.float32
    other.close()
    shared.close()
    assert torch.equal(exact[0].weight.bfloat16(), low[0].weight)


def test_what_diverged_is_refused_and_the_model_is_the_shared_one(connect: Connect) -> None:
    """A step to NaN raises out of optimizer.step(), nothing of it is shared, and the model is as the others have it."""
    model = network()
    optimizer = sgd(model)
    with smb.torch.join(model, optimizer, "run", scheme=Adding(), client=connect()) as shared:
        step(model, optimizer)
        before = shared.state_dict()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan)
        with pytest.raises(smb.train.RefusedContributionError, match="NaN"):
            optimizer.step()
        assert torch.equal(model[0].weight, before["0.weight"])
        assert smb.train.status(connect(), "run").workers[0].refused == 1


def test_other_models_and_settings_are_refused(connect: Connect) -> None:
    """A joiner must bring the group's tensors and settings; one that is refused leaves no member behind, and has its
    values, also where its model has as many elements as the group's."""
    client = connect()
    model = network()
    with smb.torch.join(model, sgd(model), "run", scheme=Adding(), client=client):
        other = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        before = other[0].weight.detach().clone()
        with pytest.raises(smb.InvalidArgumentError, match=r"0\.weight is float32\[6, 8\] here, and float32\[8, 6\]"):
            smb.torch.join(other, sgd(other), "run", client=client)
        assert torch.equal(other[0].weight, before)
        other = network()
        with pytest.raises(smb.InvalidArgumentError, match=r"test-adding\.every is 1, not 3"):
            smb.torch.join(other, sgd(other), "run", scheme="test-adding", every=3, client=client)
        with pytest.raises(smb.InvalidArgumentError, match="there is no scheme 'nonsense'"):
            smb.torch.join(other, sgd(other), "run", scheme="nonsense", client=client)
        with pytest.raises(smb.InvalidArgumentError, match="every: settings of a scheme need its name"):
            smb.torch.join(other, sgd(other), "run", every=3, client=client)
        with pytest.raises(smb.InvalidArgumentError, match="coordinator= or client="):
            smb.torch.join(other, sgd(other), "run", client=client, coordinator=client.address)
        assert sum(worker.alive for worker in smb.train.status(client, "run").workers) == 1
    with pytest.raises(smb.NotFoundError, match="there is no such training; the first worker must pass a scheme"):
        smb.torch.join(model, sgd(model), "nobody", client=client)
    client.create("run2", 4)
    with pytest.raises(smb.NotFoundError):
        smb.torch.shared_state_dict(client, "nobody")
    values = np.zeros(4, np.float32)
    with (
        smb.train.join(client, "flat", values, Adding()),
        pytest.raises(smb.InvalidArgumentError, match=r"was not made by smb\.torch\.join"),
    ):
        smb.torch.shared_state_dict(client, "flat")


def test_a_model_of_other_sizes_is_refused_by_names_and_shapes(connect: Connect) -> None:
    """Other sizes, a layer more or less, or a frozen one: what is where, and nothing is joined."""
    client = connect()
    model = network()
    frozen, smaller = network(), nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 4))
    frozen[0].weight.requires_grad_(False)
    with smb.torch.join(model, sgd(model), "run", scheme=Adding(), client=client):
        with pytest.raises(
            smb.InvalidArgumentError,
            match=r"'run': it has another model: 0\.weight is float32\[7, 6\] here, and float32\[8, 6\].*fresh=True",
        ):
            smb.torch.join(smaller, sgd(smaller), "run", client=client)
        with pytest.raises(
            smb.InvalidArgumentError, match=r"0\.weight is missing .*frozen.* here, and float32\[8, 6\]"
        ):
            smb.torch.join(frozen, torch.optim.SGD([frozen[3].weight], lr=0.1), "run", client=client)
        assert sum(worker.alive for worker in smb.train.status(client, "run").workers) == 1


def test_settings_left_out_are_the_groups(connect: Connect) -> None:
    """A scheme by its name adopts what is not said of it; what is said must be the group's."""
    client = connect()
    model, other = network(), network(1)
    with smb.torch.join(model, sgd(model), "run", scheme="diloco", every=10, outer_lr=0.5, client=client):
        with smb.torch.join(other, sgd(other), "run", scheme="diloco", outer_lr=0.5, client=client) as shared:
            assert shared.scheme == smb.train.DiLoCo(every=10, outer_lr=0.5)
        with pytest.raises(smb.InvalidArgumentError, match=r"outer_lr is 0.5, not 0.7; leave these settings out"):
            smb.torch.join(other, sgd(other), "run", scheme="diloco", outer_lr=0.7, client=client)
        with pytest.raises(smb.InvalidArgumentError, match=r"scheme is 'diloco', not 'bsp'"):
            smb.torch.join(other, sgd(other), "run", scheme="bsp", client=client)


def test_a_second_join_of_a_model_is_refused(connect: Connect) -> None:
    """With the same optimizer or a new one, and the first join goes on; after its close() all is free."""
    client = connect()
    model = network()
    optimizer = sgd(model)
    with smb.torch.join(model, optimizer, "run", scheme=Adding(), client=client):
        for second in (optimizer, sgd(model)):
            with pytest.raises(smb.InvalidArgumentError, match=r"this model is already joined to 'run'; close\(\)"):
                smb.torch.join(model, second, "run", client=client)
        step(model, optimizer)
    with smb.torch.join(model, optimizer, "run", client=client):
        step(model, optimizer)


def test_model_and_optimizer_swapped(connect: Connect) -> None:
    """The order is told."""
    model = network()
    with pytest.raises(smb.InvalidArgumentError, match="the model first, then the optimizer, not SGD and Sequential"):
        smb.torch.join(sgd(model), model, "run", scheme=Adding(), client=connect())  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", ["cuda", 3, [0]])
def test_what_is_no_mesh(connect: Connect, mesh: Any) -> None:
    """It ended in AttributeError."""
    model = network()
    with pytest.raises(smb.InvalidArgumentError, match=r"of 'run': mesh must be a DeviceMesh, not .*; make one: torch"):
        smb.torch.join(model, sgd(model), "run", scheme=Adding(), mesh=mesh, client=connect())


def test_no_room_for_the_state(connect: Connect) -> None:
    """Where there is room for the group, and not for what is untrained, nothing of either stays; the model is as it
    was."""
    client = connect()
    model = network()
    model.register_buffer("large", torch.ones(1 << 20))
    client.create("ballast", (3 * 64 - 3) << 20, "uint8")
    before = model[0].weight.detach().clone()
    with pytest.raises(smb.OutOfMemoryError, match="no room for 4 MiB"):
        smb.torch.join(model, sgd(model), "run", scheme=Adding(), client=client)
    assert [info.name for info in client.list()] == ["ballast"]
    assert torch.equal(model[0].weight, before)


def test_replaced_parameters_are_refused(connect: Connect) -> None:
    """A model changed after joining is noticed at the next exchange, or where its state is asked for. Memory that is
    given to a Parameter, another type too, is no such change."""
    model = network()
    optimizer = sgd(model)
    shared = smb.torch.join(model, optimizer, "run", scheme=Adding(), client=connect())
    model[0].weight.data = model[0].weight.data.clone()
    model[0].bias.data = model[0].bias.data.bfloat16().float()
    step(model, optimizer)
    assert np.array_equal(connect().open("run").tensor("0.weight").read(), model[0].weight.detach().numpy())
    model[3] = nn.Linear(8, 4)
    for call in (shared.state_dict, optimizer.step):
        with pytest.raises(smb.Error, match=r"3\.weight, 3\.bias of the model were replaced after smb\.torch\.join"):
            call()
    shared.worker.close()
    with pytest.raises(smb.Error, match=r"has left"):
        shared.close()


def test_parameters_given_to_the_optimizer_later_are_refused_unless_shared(connect: Connect) -> None:
    """Gradual unfreezing of what is shared goes on; a layer made after joining does not."""
    model = network()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", scheme=Adding(), client=connect()):
        step(model, optimizer)
        optimizer.add_param_group({"params": model[0].parameters()})
        step(model, optimizer)
        optimizer.add_param_group({"params": nn.Linear(4, 4).parameters()})
        for _ in range(2):
            with pytest.raises(smb.Error, match="given 2 further parameters after"):
                step(model, optimizer)


def test_its_own_client_closes_with_it(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Without client= it connects by itself, and nothing of it is left afterwards, by an exception either."""
    model = network()
    optimizer = sgd(model)
    watcher = connect()
    before = set(threading.enumerate())
    lasting = ("smb-calls", "smb-train")  # pools of the process, and no client's

    def left() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - before]
        return [name for name in names if name.startswith("smb") and not name.startswith(lasting)]

    for fails in (False, True):
        try:
            with smb.torch.join(model, optimizer, "run", scheme=Adding(), coordinator=cluster.address) as shared:
                step(model, optimizer)
                assert left()
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert fails
        wait_for(lambda: not left(), "thread of the client ended")
        assert not any(worker.alive for worker in smb.train.status(watcher, "run").workers)
        assert not optimizer._optimizer_step_post_hooks
    with pytest.raises(smb.InvalidArgumentError, match=r"has left training 'run'; call smb\.torch\.join"):
        shared.state_dict()
