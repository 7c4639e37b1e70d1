"""A stand-in for the part of vLLM that weight transfer engines meet, as published for 0.25 to 0.32: vLLM itself needs a
GPU's build, and is not installed here.

Taken from its documentation and source (docs.vllm.ai, training/weight_transfer; vllm/distributed/weight_transfer): the
names, parameters and order of calls. The bodies are ours. `Worker` calls an engine as vLLM's workers do.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

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


class WeightTransferEngine(ABC, Generic[Init, Update]):
    """The base class: 0.25 to 0.32."""

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
        """As above."""
        return _parsed(self.update_info_cls, update_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Parse, receive; vLLM synchronizes the device then."""
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None:
        """Once, before the rest."""

    @abstractmethod
    def start_weight_update(self) -> None:
        """Before an update."""

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None:
        """An update."""

    @abstractmethod
    def finish_weight_update(self) -> None:
        """After it."""

    @abstractmethod
    def shutdown(self) -> None:
        """At the end."""


class EarlierEngine(ABC, Generic[Init, Update]):
    """The base class of 0.16: no model, no steps around an update."""

    def __init__(self, config: Any, parallel_config: Any) -> None:
        self.config, self.parallel_config = config, parallel_config

    @abstractmethod
    def receive_weights(self, update_info: Any, load_weights: Any) -> None:
        """An update."""


def _parsed(kind: type[Any], given: dict[str, Any]) -> Any:
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"Invalid {kind.__name__}: {error}") from error


class Factory:
    """The registry by names; it loads a module when its engine is made."""

    registry: dict[str, tuple[str, str]]

    @classmethod
    def register_engine(cls, name: str, module_path: str, class_name: str) -> None:
        """ValueError if the name is taken."""
        if name in cls.registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.registry[name] = module_path, class_name

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> Any:
        """By the backend of the configuration."""
        import importlib

        module, name = cls.registry[config.backend]
        return getattr(importlib.import_module(module), name)(config, vllm_config, device, model)


class Model(torch.nn.Module):
    """A model as vLLM's: it takes whole tensors by the checkpoint's names, here the rows that are its own, and says in
    `calls` what was asked of it."""

    def __init__(self, like: torch.nn.Module, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.calls: list[str] = []
        self.parts = {name: torch.zeros_like(self.part(tensor)) for name, tensor in like.state_dict().items()}
        self.given: list[torch.Tensor] = []

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of this rank."""
        return tensor.chunk(self.ranks)[self.rank] if tensor.dim() else tensor

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take them, and keep what was given: that is allowed."""
        self.calls.append("load")
        seen = set()
        for name, tensor in weights:
            self.parts[name].copy_(self.part(tensor))
            self.given.append(tensor)
            seen.add(name)
        return seen


class Worker:
    """One process of an engine."""

    def __init__(self, model: Model) -> None:
        config = SimpleNamespace(backend="smb")
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=model.ranks), model_config="config")
        self.engine = Factory.create_engine(config, vllm_config, torch.device(DEVICE), model)

    def init(self, info: dict[str, Any]) -> None:
        """init_weight_transfer_engine."""
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def update(self, info: dict[str, Any]) -> None:
        """The three calls of an update."""
        self.engine.start_weight_update()
        self.engine.update_weights(info)
        self.engine.finish_weight_update()


def install(monkeypatch: pytest.MonkeyPatch, engine: type[Any] = WeightTransferEngine) -> None:
    """Have `import vllm` find this."""
    Factory.registry = {"nccl": ("nowhere", "Nothing")}
    base = SimpleNamespace(
        WeightTransferEngine=engine,
        WeightTransferInitInfo=WeightTransferInitInfo,
        WeightTransferUpdateInfo=WeightTransferUpdateInfo,
    )
    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: model.calls.append("initialize"),
        finalize_layerwise_reload=lambda model, config: model.calls.append(f"finalize {config}"),
    )
    for name, content in {
        "vllm": None,
        "vllm.distributed": None,
        "vllm.distributed.weight_transfer": None,
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.weight_transfer.factory": SimpleNamespace(WeightTransferEngineFactory=Factory),
        "vllm.model_executor": None,
        "vllm.model_executor.model_loader": None,
        "vllm.model_executor.model_loader.reload": reload,
    }.items():
        module = ModuleType(name)
        module.__path__ = []
        for key, value in vars(content).items() if content is not None else ():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "smb.torch.vllm_engine", raising=False)
