"""smb.torch.vllm: in which order our code does things, called as vLLM calls its engines (a stand-in; see
tests/support/vllm_interface.py). test_vllm_engines.py and test_vllm_wheels.py have the real one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import smb
import smb.torch
from smb.torch import vllm
from tests.conftest import Connect
from tests.support.daemons import wait_for
from tests.support.devices import DEVICE
from tests.support.states import filled
from tests.support.vllm_interface import (
    EarlierEngine,
    LaterEngine,
    Model,
    Registry,
    Source,
    TrainerWeightTransferEngine,
    Worker,
    install,
)


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Linear(8, 4, dtype=torch.bfloat16)).to(DEVICE)


def has(model: Model, seed: int) -> bool:
    """Return True if the model has its part of the network of that seed, to the bit."""
    return all(model.parts[name].equal(model.part(each)) for name, each in network(seed).state_dict().items())


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> tuple[Registry, Registry]:
    made = install(monkeypatch)
    vllm.register()
    return made


@pytest.fixture
def workers(registries: tuple[Registry, Registry]) -> Iterator[list[Worker]]:
    """Two engines, each with a part of the model."""
    made = [Worker(registries[0], Model(network(0), rank, 2)) for rank in range(2)]  # type: ignore[arg-type]
    yield made
    for worker in made:
        worker.engine.shutdown()
        worker.engine.shutdown()


@pytest.mark.parametrize("deltas", [0, 4])
def test_workers_take_the_generation_that_they_are_told(
    cluster: smb.LocalCluster, connect: Connect, workers: list[Worker], deltas: int
) -> None:
    """Each takes its part of that generation, to the bit, between the two calls around a reload; a later generation
    does not change what a model was given; a worker that comes late, and one that goes, concern nobody."""
    trainer = smb.torch.Publisher(connect(), "policy", network(0), versions=4, deltas=deltas)
    info = {"name": "policy", "coordinator": cluster.address, "timeout": 30.0}
    first, late = workers
    first.init_weight_transfer_engine(info)
    for generation in (1, 2, 3):
        assert trainer.publish(network(generation).state_dict()) == generation
        if generation == 2:
            late.init_weight_transfer_engine(info)
        for worker in (first, late)[:generation]:
            worker.update(generation)
            assert worker.engine.generation == generation
            assert worker.engine.model.calls[-3:] == ["initialize", "load", "finalize"]
            assert has(worker.engine.model, generation)
    assert first.engine.model.given[0].equal(network(1).state_dict()["0.weight"])
    first.update(2)  # behind, on purpose
    assert has(first.engine.model, 2)
    first.engine.shutdown()
    trainer.publish(network(4))
    late.update(4)
    assert has(late.engine.model, 4)


def test_what_is_refused_leaves_the_model_untouched(
    cluster: smb.LocalCluster, connect: Connect, workers: list[Worker]
) -> None:
    """Words that the engine does not take, an update before the first call, a name that nobody publishes, a generation
    that is over, and one that does not come: each is refused, nothing was asked of the model, and a good update works
    afterwards. A model that fails half-way is finalized, and that is told."""
    worker, model = workers[0], workers[0].engine.model
    for wrong in ({}, {"name": "policy", "port": 7}):
        with pytest.raises(ValueError, match="SmbInitInfo"):
            worker.init_weight_transfer_engine(wrong)
    with pytest.raises(smb.InvalidArgumentError, match="call init_weight_transfer_engine first"):
        worker.update(1)
    with pytest.raises(smb.NotFoundError, match="nobody"):
        worker.init_weight_transfer_engine({"name": "nobody", "coordinator": cluster.address, "timeout": 0.5})
    trainer = smb.torch.Publisher(connect(), "policy", network(0))
    worker.init_weight_transfer_engine({"name": "policy", "coordinator": cluster.address, "timeout": 1.5})
    for seed in range(1, 5):
        trainer.publish(network(seed))
    for wrong, error, told in (
        ({}, ValueError, "SmbUpdateInfo"),
        ({"generation": 1}, smb.NotFoundError, "overwritten"),
        ({"generation": 9}, smb.TimeoutError, "version 9"),
    ):
        worker.start_weight_update()
        with pytest.raises(error, match=told):  # type: ignore[arg-type]
            worker.update_weights(wrong)
    worker.finish_weight_update()  # some clients do so after an error, too
    assert model.calls == []
    worker.update(4)
    assert has(model, 4)
    trainer.publish(network(5))
    model.breaks = 2
    with pytest.raises(smb.Error, match=r"generation 5 of 'policy' was not loaded to its end.*out of memory"):
        worker.update(5)
    assert model.calls[-3:] == ["initialize", "load", "finalize"]
    assert worker.engine.generation == 0
    model.breaks = 99
    worker.start_weight_update()
    worker.update_weights({"generation": 5})
    with pytest.raises(smb.TimeoutError, match="version 99"):  # a second one, before the first is finished
        worker.update_weights({"generation": 99})
    assert model.calls[-3:] == ["initialize", "load", "finalize"]
    assert worker.engine.generation == 5
    assert has(model, 5)


def test_a_generation_arrives_before_the_engine_is_told(
    cluster: smb.LocalCluster, connect: Connect, workers: list[Worker]
) -> None:
    """While the engine serves: the update needs nothing of the cluster then, which is gone."""
    with smb.LocalCluster(servers=1, capacity="64MiB") as own, smb.connect(own.address) as client:
        workers[0].init_weight_transfer_engine(
            {"name": smb.torch.Publisher(client, "p", network(0)).buffer.name, "coordinator": own.address}
        )
        smb.torch.publish(client, "p", network(1))
        wait_for(lambda: workers[0].engine._copy._held == 1, "generation in memory")
    workers[0].update(1)
    assert has(workers[0].engine.model, 1)


class Dead:
    """An engine that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("nobody answers")


def test_one_call_of_a_trainer_engine_updates_all_engines(
    cluster: smb.LocalCluster, connect: Connect, registries: tuple[Registry, Registry], workers: list[Worker]
) -> None:
    """A dead engine is left out and named; it joins again when another one answers in its place; a generation that one
    engine refuses is taken by the others; with no engine left the call fails. Other ranks only iterate."""
    kind = registries[1].load("smb")
    source = Source(network(0).state_dict())
    client = vllm.Engines({"one": workers[0], "two": Dead()})
    info = kind.init_info_cls(name="policy", coordinator=cluster.address, rank=0, publisher={"versions": 4})
    with pytest.raises(smb.InvalidArgumentError, match="a source of all weights"):
        kind.trainer_init(info, client=client)
    trainer = kind.trainer_init(init_info=info, client=client, source=source)
    other = kind.trainer_init(kind.init_info_cls(name="policy", rank=1), client=None, source=source)
    for seed in (1, 2, 3):
        if seed == 2:
            client.add("two", workers[1])
        source.state = network(seed).state_dict()
        other.send_weights()
        trainer.send_weights()
        assert trainer.generation == seed
        assert workers[0].weight_version == str(seed)
        assert has(workers[0].engine.model, seed)
        assert list(client.failed) == (["two"] if seed == 1 else [])
    assert has(workers[1].engine.model, 3)
    workers[1].engine.model.breaks = 1
    source.state = network(4).state_dict()
    trainer.send_weights()
    assert has(workers[0].engine.model, 4)
    assert "not loaded to its end" in str(client.failed["two"])
    workers[1].engine.model.breaks = 99
    trainer.send_weights()
    assert client.failed == {}
    assert has(workers[1].engine.model, 4)
    client.remove("two")
    client.add("one", Dead())
    with pytest.raises(smb.Error, match=r"none of 1 engines is left.*nobody answers"):
        trainer.send_weights()
    source.state["0.bias"] = None  # type: ignore[assignment]
    with pytest.raises(smb.InvalidArgumentError, match=r"no values of '0.bias' on rank 0"):
        trainer.send_weights()
    trainer.shutdown()
    source.passed = 0
    with pytest.raises(smb.Error):
        trainer.send_weights()
    assert source.passed == 4  # for the sake of the other ranks
    other.shutdown()


def test_registering(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By name, once and again; where vLLM has no trainer engines, those of workers alone. Another form of engines, or
    no vLLM, is told and leaves the registry as it was; what vLLM calls by the entry point never keeps vLLM from
    starting."""
    registries = install(monkeypatch)
    vllm.register()
    vllm.plug_in()
    assert [issubclass(each.load("smb"), object) for each in registries] == [True, True]
    assert issubclass(registries[1].load("smb"), TrainerWeightTransferEngine)
    for module in ("smb.torch.vllm.trainer", "smb.torch.vllm_trainer"):  # the latter is its former name
        named = import_module(module)
        assert named.SmbTrainerWeightTransferEngine is registries[1].load("smb")
        assert named.SmbTrainerInitInfo is registries[1].load("smb").init_info_cls
    registries = install(monkeypatch, trainers=False)
    vllm.register()
    assert [list(each.engines) for each in registries] == [["smb"], []]
    for engine, told in (
        (EarlierEngine, r"take \(config, parallel_config\).*vLLM 0.25 or newer"),
        (LaterEngine, "asks 'levitate' of its engines"),
    ):
        workers, _ = install(monkeypatch, engine)
        with pytest.raises(smb.InvalidArgumentError, match=told):
            vllm.register()
        with caplog.at_level(logging.WARNING):
            vllm.plug_in()
        assert workers.engines == {}
    assert "vLLM 0.25 or newer" in caplog.text
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
    assert follower.tensors["a"].data_ptr() == views["a"].data_ptr()
    assert (views["a"] == 2).all()
    assert (copies["a"] == 1).all()
    with pytest.raises(smb.TimeoutError):
        follower.wait(generation=3, timeout=0.1)
