"""smb.torch.vllm: vLLM's workers take published generations, called as vLLM calls its engines (a stand-in; see
tests/support/vllm_interface.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import smb
import smb.torch
from smb.torch import vllm
from tests.conftest import Connect
from tests.support.devices import DEVICE
from tests.support.states import filled
from tests.support.vllm_interface import EarlierEngine, Factory, Model, Worker, install


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Linear(8, 4, dtype=torch.bfloat16)).to(DEVICE)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Model]]:
    """Two models, of one engine with two workers."""
    install(monkeypatch)
    vllm.register()
    return [Model(network(0), rank, 2) for rank in range(2)]  # type: ignore[return-value]


@pytest.mark.parametrize("deltas", [0, 4])
def test_workers_take_the_generation_that_they_are_told(
    cluster: smb.LocalCluster, connect: Connect, workers: list[Model], deltas: int
) -> None:
    """Each takes its part of that generation, to the bit, between the two calls around a reload; a later generation
    does not change what a model was given; a worker that comes late, and one that goes, concern nobody."""
    trainer = smb.torch.Publisher(connect(), "policy", network(0), versions=4, deltas=deltas)
    info = {"name": "policy", "coordinator": cluster.address, "timeout": 30.0}
    first, late = (Worker(model) for model in workers)
    first.init(info)
    for generation in (1, 2, 3):
        states = {seed: network(seed).state_dict() for seed in (generation, generation - 1)}
        assert trainer.publish(states[generation]) == generation
        if generation == 2:
            late.init(info)
        for worker, model in zip((first, late)[:generation], workers, strict=False):
            worker.update({"generation": generation})
            assert worker.engine.generation == generation
            assert model.calls[-3:] == ["initialize", "load", "finalize config"]
            for name, tensor in states[generation].items():
                assert model.parts[name].equal(model.part(tensor))
    assert workers[0].given[0].equal(network(1).state_dict()["0.weight"])
    first.update({"generation": 2})  # behind, on purpose
    assert workers[0].parts["0.weight"].equal(workers[0].part(network(2).state_dict()["0.weight"]))
    first.engine.shutdown()
    first.engine.shutdown()
    trainer.publish(network(4))
    late.update({"generation": 4})
    assert workers[1].parts["0.bias"].equal(workers[1].part(network(4).state_dict()["0.bias"]))
    late.init(info | {"name": "policy"})  # again
    assert late.engine.generation == 0
    late.engine.shutdown()


def test_what_cannot_be_is_told(cluster: smb.LocalCluster, connect: Connect, workers: list[Model]) -> None:
    """Words that the engine does not take, an update before the first call, a name that nobody publishes, a generation
    that is over, and one that does not come: each is refused, and the model keeps its values."""
    worker = Worker(workers[0])
    for wrong in ({}, {"name": "policy", "port": 7}):
        with pytest.raises(ValueError, match="SmbInitInfo"):
            worker.init(wrong)
    with pytest.raises(smb.InvalidArgumentError, match="call init_weight_transfer_engine first"):
        worker.update({"generation": 1})
    assert workers[0].calls == []
    with pytest.raises(smb.NotFoundError, match="nobody"):
        worker.init({"name": "nobody", "coordinator": cluster.address, "timeout": 0.5})
    trainer = smb.torch.Publisher(connect(), "policy", network(0))
    worker.init({"name": "policy", "coordinator": cluster.address, "timeout": 1.0})
    for seed in range(1, 5):
        trainer.publish(network(seed))
    for wrong, error, told in (
        ({}, ValueError, "SmbUpdateInfo"),
        ({"generation": 1}, smb.NotFoundError, "overwritten"),
        ({"generation": 9}, smb.TimeoutError, "version 9"),
    ):
        with pytest.raises(error, match=told):  # type: ignore[arg-type]
            worker.engine.update_weights(wrong)
    assert "load" not in workers[0].calls
    worker.update({"generation": 4})
    assert workers[0].parts["0.weight"].equal(workers[0].part(network(4).state_dict()["0.weight"]))
    worker.engine.shutdown()


def test_registering(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By name, once and again; an earlier form of engines, or no vLLM, is told and leaves the registry as it was; what
    vLLM calls by the entry point never keeps vLLM from starting."""
    install(monkeypatch)
    vllm.register()
    vllm.plug_in()
    assert Factory.registry["smb"] == ("smb.torch.vllm_engine", "SmbWeightTransferEngine")
    install(monkeypatch, EarlierEngine)
    with pytest.raises(smb.InvalidArgumentError, match=r"take \(config, parallel_config\).*vLLM 0.25 or newer"):
        vllm.register()
    with caplog.at_level(logging.WARNING):
        vllm.plug_in()
    assert "vLLM 0.25 or newer" in caplog.text
    assert "smb" not in Factory.registry
    monkeypatch.undo()
    vllm.plug_in()
    project = Path(__file__).parents[2] / "pyproject.toml"
    entries = project.read_text().split('[project.entry-points."vllm.general_plugins"]\n')[1].splitlines()
    assert entries[0] == 'smb = "smb.torch.vllm:plug_in"'


def test_views_are_the_followers_memory(connect: Connect) -> None:
    """They are what was published, without a copy, and change with the next read; state_dict() does not."""
    trainer = smb.torch.Publisher(connect(), "w", filled(0))
    follower = smb.torch.follow(connect(), "w")
    trainer.publish(filled(1))
    assert follower.wait(generation=1, timeout=30) == 1
    views, copies = follower.views(), follower.state_dict()
    trainer.publish(filled(2))
    assert follower.views()["a"].data_ptr() == views["a"].data_ptr()
    assert (views["a"] == 2).all()
    assert (copies["a"] == 1).all()
    with pytest.raises(smb.TimeoutError):
        follower.wait(generation=3, timeout=0.1)
