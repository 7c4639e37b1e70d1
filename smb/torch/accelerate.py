"""Training with others in a script that has Hugging Face's Accelerate, which it needs (the extra `hf`). It uses
smb.torch.join, and reads which of the script's processes this one is.

>>> model, optimizer, data = accelerator.prepare(model, optimizer, data)
>>> with smb.torch.accelerate.join(accelerator, model, optimizer, "run", scheme="diloco", every=50):
...     ...
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch

import smb.train
from smb.errors import InvalidArgumentError
from smb.torch.exchange_log import ExchangeLog
from smb.torch.ranks import world
from smb.torch.training import joining
from smb.torch.training.shared_model import Shared


def join(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    name: str,
    scheme: str | smb.train.Scheme | None = None,
    **options: Any,
) -> Shared:
    """As smb.torch.join, for a model and an optimizer that accelerator.prepare returned. Wrappers are taken off the
    model. Only steps that the optimizer really takes count: one for each gradient_accumulation_steps, and none that the
    gradient scaler skips.

    What the script logs by accelerator.log() also has the values of the last exchange since the call before
    (ExchangeEvent.scalars), under the step that the script gives.

    If the accelerator has several processes (DDP, FSDP2), they are one member, as with mesh=: all of them make this
    call, step, and close together. Raises InvalidArgumentError for DeepSpeed and Megatron, which keep the parameters
    themselves.
    """
    kind = accelerator.distributed_type
    if kind in (accelerate.DistributedType.DEEPSPEED, accelerate.DistributedType.MEGATRON_LM):
        raise InvalidArgumentError(
            f"smb.torch.accelerate: {kind.value} keeps the parameters itself, so they can't be shared; use DDP or "
            f"FSDP2, or start each process on its own"
        )
    if accelerator.num_processes > 1:
        options.setdefault("mesh", world())
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    shared = joining.join(plain, optimizer, name, scheme=scheme, **options)
    _add_to_log(accelerator, ExchangeLog(shared))
    return shared


def _add_to_log(accelerator: accelerate.Accelerator, exchanges: ExchangeLog) -> None:
    """Add the values of exchanges to what the script logs. A call of our own would need a step, and trackers such as
    W&B drop all that comes after a call with a larger one.

    This lasts after the training, because a script may log once at its end.
    """
    log = accelerator.log

    def log_with_exchanges(values: dict[str, Any], *arguments: Any, **options: Any) -> None:
        log({**exchanges.take(), **values}, *arguments, **options)

    accelerator.log = log_with_exchanges
