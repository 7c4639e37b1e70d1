"""Published weights in vLLM's engines: the weight transfer backend "smb". Needs vLLM, 0.25 or newer (the extra
`vllm`). It uses smb.connect, smb.torch.Publisher, and publishing/host_copy.py: one copy of a published state for all
processes of a host.

>>> llm = vllm.LLM(model, weight_transfer_config=vllm.config.WeightTransferConfig(backend="smb"))
>>> llm.init_weight_transfer_engine({"init_info": {"name": "policy", "coordinator": "storage-1:7070"}})
>>> llm.start_weight_update()
>>> llm.update_weights({"update_info": {"generation": generation}})  # what Publisher.publish() returned
>>> llm.finish_weight_update()

vLLM finds `plug_in` by its entry point in each process that it starts; if plugins are switched off (VLLM_PLUGINS), call
`register`. `engine` has the workers' engine, with `check`; `trainer` has the trainer's, which makes these calls itself.
`clients` (several engines as one client) and `routes` (a server by HTTP) need no vLLM.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from smb.errors import InvalidArgumentError
from smb.torch.vllm.clients import BACKEND as BACKEND
from smb.torch.vllm.clients import Engines as Engines

_PARAMETERS = ("config", "vllm_config", "device", "model")

_log = logging.getLogger("smb")


def register() -> None:
    """Register the backend with this process's vLLM: for workers, and for trainers where vLLM has trainer engines (0.26
    and newer). A second call does nothing. Raises InvalidArgumentError if this vLLM's engines have another interface
    than in 0.25 and later, ImportError if vLLM is not installed.
    """
    import vllm.distributed.weight_transfer.factory as factory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    parameters = tuple(inspect.signature(WeightTransferEngine.__init__).parameters)[1:]
    if parameters != _PARAMETERS:
        raise InvalidArgumentError(
            f"weight transfer backend {BACKEND!r}: this vLLM's engines take ({', '.join(parameters)}), but the backend "
            f"needs engines that take ({', '.join(_PARAMETERS)}): use vLLM 0.25 or newer"
        )
    from smb.torch.vllm.engine import SmbWeightTransferEngine

    _register(factory.WeightTransferEngineFactory, SmbWeightTransferEngine)
    if hasattr(factory, "WeightTransferTrainerFactory"):
        from smb.torch.vllm.trainer import SmbTrainerWeightTransferEngine

        _register(factory.WeightTransferTrainerFactory, SmbTrainerWeightTransferEngine)


def _register(registry: Any, engine: type[Any]) -> None:
    if missing := sorted(getattr(engine, "__abstractmethods__", ())):
        raise InvalidArgumentError(
            f"weight transfer backend {BACKEND!r}: this vLLM asks {missing[0]!r} of its engines, which this release "
            f"does not have: use a newer release, or an older vLLM (0.25 or newer)"
        )
    try:
        registry.register_engine(BACKEND, engine.__module__, engine.__name__)
    except ValueError as error:
        if "already registered" not in str(error):
            raise


def plug_in() -> None:
    """Register the backend when vLLM starts. vLLM starts in any case: an unknown interface is only logged."""
    try:
        register()
    except (ImportError, InvalidArgumentError) as error:
        _log.warning("%s", error)
