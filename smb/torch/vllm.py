"""Published weights in vLLM's engines: the weight transfer backend "smb". Needs vLLM, 0.25 or newer.

>>> llm = vllm.LLM(model, weight_transfer_config=vllm.config.WeightTransferConfig(backend="smb")) >>>
llm.init_weight_transfer_engine({"init_info": {"name": "policy", "coordinator": "storage-1:7070"}}) >>>
llm.start_weight_update() >>> llm.update_weights({"update_info": {"generation": generation}}) # what Publisher.publish()
returned >>> llm.finish_weight_update()

vLLM finds `plug_in` by its entry point in each process that it starts; if plugins are switched off (VLLM_PLUGINS), call
`register`. The engine is in smb/torch/vllm_engine.py, which vLLM loads when it makes the engine.
"""

from __future__ import annotations

import inspect
import logging

from smb.errors import InvalidArgumentError

BACKEND = "smb"
_PARAMETERS = ("config", "vllm_config", "device", "model")
_STEPS = ("init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown")

_log = logging.getLogger("smb")


def register() -> None:
    """Register the backend with this process's vLLM. A second call does nothing. Raises InvalidArgumentError if this
    vLLM's engines have another interface than in 0.25 and later, ImportError if vLLM is not installed.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    parameters = list(inspect.signature(WeightTransferEngine.__init__).parameters)[1:]
    missing = [step for step in _STEPS if not hasattr(WeightTransferEngine, step)]
    if tuple(parameters) != _PARAMETERS or missing:
        raise InvalidArgumentError(
            f"weight transfer backend {BACKEND!r}: this vLLM's engines take ({', '.join(parameters)})"
            f"{' and have no ' + missing[0] if missing else ''}, but the backend needs engines that take "
            f"({', '.join(_PARAMETERS)}): use vLLM 0.25 or newer"
        )
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "smb.torch.vllm_engine", "SmbWeightTransferEngine")
    except ValueError as error:
        if "already registered" not in str(error):
            raise


def plug_in() -> None:
    """Register the backend when vLLM starts. vLLM starts in any case: an unknown interface is only logged."""
    try:
        register()
    except (ImportError, InvalidArgumentError) as error:
        _log.warning("%s", error)
