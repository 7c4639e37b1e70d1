"""A stand-in for the part of vLLM that weight transfer engines meet, in the form of 0.33, for tests without vLLM.

It shows what our code does in which order, and nothing about vLLM: `make vllm` runs the engines in a real one, and
compares the methods here with those of each supported release (tests/support/vllm_wheel.py). The bodies are ours.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch

from tests.support.devices import DEVICE

Init = TypeVar("Init")
Update = TypeVar("Update")


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    """Of an engine's first call."""


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    """Of an update."""


@dataclass
class TrainerInitInfo:
    """Of a trainer engine's first call."""

    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(ABC, Generic[Init, Update]):
    """The base class of a worker's engine."""

    init_info_cls: type[Any]
    update_info_cls: type[Any]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """ValueError for what the class does not take."""
        return _parsed(self.init_info_cls, init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return _parsed(self.update_info_cls, update_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class TrainerWeightTransferEngine(ABC, Generic[Init]):
    """The base class of a trainer's engine."""

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class WeightSource(ABC):  # noqa: B024
    """A trainer's weights."""


class EarlierEngine(ABC, Generic[Init, Update]):
    """The base class of 0.16: no model, no steps around an update."""

    def __init__(self, config: Any, parallel_config: Any) -> None:
        self.config, self.parallel_config = config, parallel_config


class LaterEngine(WeightTransferEngine[Init, Update]):
    """One that asks for a method that we do not know."""

    @abstractmethod
    def levitate(self) -> None: ...


COMPARED = (WeightTransferEngine, TrainerWeightTransferEngine)  # with those of vLLM's releases


def _parsed(kind: type[Any], given: dict[str, Any]) -> Any:
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"Invalid {kind.__name__}: {error}") from error


class Registry:
    """Engines by names; loads a module when its engine is made."""

    def __init__(self) -> None:
        self.engines: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module_path: str, class_name: str) -> None:
        """ValueError if the name is taken."""
        if name in self.engines:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        self.engines[name] = module_path, class_name

    def load(self, name: str) -> Any:
        module, class_name = self.engines[name]
        return getattr(importlib.import_module(module), class_name)


@dataclass
class Source:
    """All weights of a state, with their names and shapes. `passed` counts the tensors that were asked for."""

    state: dict[str, torch.Tensor]
    passed: int = 0

    @property
    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=name, dtype=each.dtype, shape=each.shape) for name, each in self.state.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for each in self.state.items():
            self.passed += 1
            yield each


class Model(torch.nn.Module):
    """A model as vLLM's: it takes whole tensors by the checkpoint's names, here the rows that are its own, and says in
    `calls` what was asked of it. It fails after `breaks` tensors."""

    def __init__(self, like: torch.nn.Module, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.calls: list[str] = []
        self.parts = {name: torch.zeros_like(self.part(tensor)) for name, tensor in like.state_dict().items()}
        self.given: list[torch.Tensor] = []
        self.breaks = sys.maxsize

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of this rank."""
        return tensor.chunk(self.ranks)[self.rank] if tensor.dim() else tensor

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take them, and keep what was given: that is allowed."""
        self.calls.append("load")
        for number, (name, tensor) in enumerate(weights):
            if number >= self.breaks:
                raise RuntimeError("out of memory")
            self.parts[name].copy_(self.part(tensor))
            self.given.append(tensor)
        return set(self.parts)


class Worker:
    """One process of an engine, which calls it as vLLM's workers do. A client of a trainer engine, too."""

    def __init__(self, registry: Registry, model: Model) -> None:
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1), model_config=SimpleNamespace())
        kind = registry.load("smb")
        self.engine = kind(SimpleNamespace(backend="smb"), vllm_config, torch.device(DEVICE), model)
        self.weight_version: str | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()
        self.weight_version = weight_version

    def update(self, generation: int) -> None:
        """The three calls of an update."""
        self.start_weight_update()
        self.update_weights({"generation": generation})
        self.finish_weight_update()


def install(
    monkeypatch: pytest.MonkeyPatch, engine: type[Any] = WeightTransferEngine, trainers: bool = True
) -> tuple[Registry, Registry]:
    """Have `import vllm` find this. Returns the registries of workers' and trainers' engines; releases without
    `trainers` have none of the latter."""
    workers, of_trainers = Registry(), Registry()
    base = SimpleNamespace(
        WeightTransferEngine=engine,
        WeightTransferInitInfo=WeightTransferInitInfo,
        WeightTransferUpdateInfo=WeightTransferUpdateInfo,
        TrainerInitInfo=TrainerInitInfo,
        TrainerWeightTransferEngine=TrainerWeightTransferEngine,
        WeightSource=WeightSource,
    )
    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: model.calls.append("initialize"),
        finalize_layerwise_reload=lambda model, _config: model.calls.append("finalize"),
    )
    factory = SimpleNamespace(WeightTransferEngineFactory=workers)
    if trainers:
        factory.WeightTransferTrainerFactory = of_trainers
    for name, content in {
        "vllm": None,
        "vllm.distributed": None,
        "vllm.distributed.weight_transfer": None,
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.weight_transfer.factory": factory,
        "vllm.model_executor": None,
        "vllm.model_executor.model_loader": None,
        "vllm.model_executor.model_loader.reload": reload,
    }.items():
        module = ModuleType(name)
        module.__path__ = []
        for key, value in vars(content).items() if content is not None else ():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    for name in ("vllm.engine", "vllm.trainer", "vllm_trainer"):  # built on the stand-in, and forgotten with it
        name = f"smb.torch.{name}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]
    return workers, of_trainers
