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
from smb.torch import shared_model
from smb.torch.shared_model import Shared


def join(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    name: str,
    scheme: str | smb.train.Scheme | None = None,
    **options: Any,
) -> Shared:
    """As smb.torch.join, of what accelerator.prepare returned: what wraps the model is taken off, and steps count that
    the optimizer really does: one for each gradient_accumulation_steps, none that the gradient scaler skips.

    Raises InvalidArgumentError where the accelerator has several processes: each would be a member.
    """
    if accelerator.num_processes > 1:
        raise InvalidArgumentError(
            f"smb.torch.accelerate: this accelerator has {accelerator.num_processes} processes, and each would be a "
            f"member; start them without `accelerate launch`, each on its own"
        )
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    return shared_model.join(plain, optimizer, name, scheme=scheme, **options)
