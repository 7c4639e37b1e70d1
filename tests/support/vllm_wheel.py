"""Our engines on the classes of one vLLM release, without the rest of it: `base.py`, `factory.py` and `reload` of its
wheel are loaded, and what they import of vLLM is empty.

    python -m tests.support.vllm_wheel DIRECTORY        where the wheel's files are; exit status 0 if all holds
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import smb
import smb.torch
import smb.torch.vllm
from tests.support.vllm_interface import COMPARED

FILES = (
    "vllm/distributed/weight_transfer/base.py",
    "vllm/distributed/weight_transfer/factory.py",
    "vllm/model_executor/model_loader/reload/*",
)
_REAL = tuple(each.removesuffix(".py").removesuffix("/*").replace("/", ".") for each in FILES)


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """As vLLM's, for parameters that have no loader of their own."""
    assert param.shape == loaded_weight.shape, f"{tuple(loaded_weight.shape)}, not {tuple(param.shape)}"
    param.data.copy_(loaded_weight)


class _Empty(ModuleType):
    """A module that has every name, as an empty class. What our tests need of it is given."""

    given: ClassVar[dict[str, Any]] = {
        "is_deferred_attention_layer": lambda layer: False,
        "default_weight_loader": default_weight_loader,
        "init_logger": lambda name: _logger,
    }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.given.get(name) or type(name, (), {})


_logger = logging.getLogger("vllm")
_logger.warning_once = _logger.warning  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of vLLM: those of FILES in the directory, all others empty."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        if name.startswith(_REAL):
            place = self._directory / name.replace(".", "/")
            if place.is_dir():
                return importlib.util.spec_from_file_location(
                    name, place / "__init__.py", submodule_search_locations=[str(place)]
                )
            return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class Model(torch.nn.Module):
    """One layer, loaded by its parameters' loaders as vLLM's models do."""

    def __init__(self, value: float = 0.0, rows: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, rows)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)
            loaded.add(name)
        return loaded

    def places(self) -> list[tuple[int, float]]:
        """Where each parameter is, and its mean."""
        return [(parameter.data_ptr(), parameter.mean().item()) for parameter in self.parameters()]


class Engine:
    """One worker's engine, and a trainer engine's client of it."""

    def __init__(self, factory: Any, model: Model) -> None:
        self.model = model
        self.engine = factory.WeightTransferEngineFactory.create_engine(
            SimpleNamespace(backend="smb"),
            SimpleNamespace(
                parallel_config=SimpleNamespace(world_size=1),
                model_config=SimpleNamespace(dtype=torch.float32, quantization=None),
            ),
            torch.device("cpu"),
            model,
        )

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        self.engine.receive_weights(self.engine.parse_update_info(info))  # update_weights waits for an accelerator

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()

    def update(self, generation: int) -> None:
        self.start_weight_update()
        self.update_weights({"generation": generation})
        self.finish_weight_update()


def check_engine(factory: Any, reload: Any, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """An update is taken; an overwritten generation, one that does not come, and other names and shapes leave the
    weights where and as they were; the next update is taken."""
    model = Model()
    reload.record_metadata_for_reloading(model)
    engine = Engine(factory, model)
    publisher = smb.torch.Publisher(client, "w", Model())
    engine.init_weight_transfer_engine({"name": "w", "coordinator": cluster.address, "timeout": 5.0})
    for value in range(1, 6):
        publisher.publish(Model(value))
    for value in (4.0, 5.0):
        engine.update(int(value))
        assert [mean for _, mean in model.places()] == [value, value], model.places()
    before = model.places()
    smb.torch.publish(client, "rows", Model(9, rows=5))
    smb.torch.publish(client, "names", torch.nn.Linear(4, 4))
    smb.torch.publish(client, "few", {"layer.bias": torch.ones(4)})
    for name, generation, error, told in (
        ("w", 1, smb.NotFoundError, "overwritten"),
        ("w", 99, smb.TimeoutError, "version 99"),
        ("rows", 1, smb.InvalidArgumentError, "(5, 4), not (4, 4)"),
        ("names", 1, smb.InvalidArgumentError, "KeyError"),
        ("few", 1, smb.InvalidArgumentError, "'layer.weight' among them"),
    ):
        engine.init_weight_transfer_engine({"name": name, "coordinator": cluster.address, "timeout": 0.5})
        engine.start_weight_update()
        with pytest.raises(error) as refused:
            engine.update_weights({"generation": generation})
        assert told in str(refused.value), refused.value
        assert model.places() == before, model.places()
    part = smb.torch.Publisher(client, "part", Model(7), names=["layer.bias"])
    engine.init_weight_transfer_engine({"name": "part", "coordinator": cluster.address, "timeout": 5.0})
    engine.update(part.publish())
    assert model.layer.bias.eq(7).all()
    engine.engine.shutdown()


class Source:
    """All weights of a model, in the form of each release."""

    def __init__(self, base: Any, model: Model) -> None:
        self.model = model
        metadata = [base.ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in model.named_parameters()]
        later = hasattr(base.WeightSource, "iter_full")
        self.metadata: Any = metadata if later else lambda: metadata
        if later:
            self.iter_full = lambda: iter(self.model.named_parameters())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.model.named_parameters())


def check_trainer(base: Any, factory: Any, reload: Any, cluster: smb.LocalCluster) -> None:
    """The trainer engine that the factory makes updates two engines by one call, from vLLM's own source, too."""
    models = [Model(), Model()]
    for model in models:
        reload.record_metadata_for_reloading(model)
    engines = smb.torch.vllm.Engines({str(number): Engine(factory, model) for number, model in enumerate(models)})
    from smb.torch.vllm.trainer import SmbTrainerInitInfo

    info = SmbTrainerInitInfo(name="t", coordinator=cluster.address, rank=0)
    trained = Model()
    takes = inspect.signature(factory.WeightTransferTrainerFactory.trainer_init).parameters
    for value, source in ((1.0, Source(base, trained)), (2.0, base.ModuleSource(trained))):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.fill_(value)
        earlier = {"backend": "smb", "config": None} if "backend" in takes else {}
        trainer = factory.WeightTransferTrainerFactory.trainer_init(
            **earlier, init_info=info, client=engines, source=source
        )
        trainer.send_weights()
        assert engines.failed == {}, engines.failed
        assert [[mean for _, mean in model.places()] for model in models] == [[value] * 2] * 2
        trainer.shutdown()
    for engine in engines._clients.values():
        engine.engine.shutdown()


def differences(base: Any) -> list[str]:
    """Return where the stand-in of tests/support/vllm_interface.py has another method than this release."""
    found = []
    for ours in COMPARED:
        theirs = getattr(base, ours.__name__, None)
        for name, method in vars(ours).items():
            if theirs is None or not inspect.isroutine(inspect.unwrap(getattr(method, "__func__", method))):
                continue
            here = inspect.signature(getattr(ours, name))
            there = inspect.signature(getattr(theirs, name))
            if list(here.parameters) != list(there.parameters):
                found.append(f"{ours.__name__}.{name}{there}, not {here}")
        if theirs is not None and ours.__abstractmethods__ != theirs.__abstractmethods__:
            found.append(f"{ours.__name__} is abstract in {sorted(theirs.__abstractmethods__)}")
    return found


def main(directory: str) -> int:
    sys.meta_path.insert(0, _Finder(Path(directory)))
    base, factory, reload = (importlib.import_module(name) for name in _REAL)
    smb.torch.vllm.register()
    assert "smb" in factory.WeightTransferEngineFactory._registry
    with smb.LocalCluster(servers=1, capacity="64MiB") as cluster, smb.connect(cluster.address) as client:
        check_engine(factory, reload, cluster, client)
        trainers = hasattr(factory, "WeightTransferTrainerFactory")
        if trainers:
            check_trainer(base, factory, reload, cluster)
    print(f"trainer engine: {'yes' if trainers else 'no'}; other than the stand-in: {differences(base) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
