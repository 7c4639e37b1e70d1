"""Training with others in a script that uses Hugging Face's Accelerate. Needs accelerate.

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
from smb.torch import joining
from smb.torch.ranks import world
from smb.torch.shared_model import Shared


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
    return joining.join(plain, optimizer, name, scheme=scheme, **options)
